"""Where a fine-tuning begins: a fresh encoder, or a router whose models are to be joined by others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.datasets.outcomes.schema import Outcomes
from presage.predictors.routing.transformer import DEFAULT_ENCODER, TransformerScorer
from presage.training.record import Progress
from presage.training.router.finetune import FinetuneConfig, Finetuned, Labelled, finetune


@dataclass(frozen=True)
class Start:
    """What is fine-tuned.

    Attributes:
        encoder: hub name or folder; None for ModernBERT-large, or with `trained`.
        trained: a scorer to train further instead.
        head_tokens, tail_tokens: what a fresh one reads of a long prompt.
        seed: of fresh weights.
    """

    encoder: str | None
    trained: TransformerScorer | None
    head_tokens: int
    tail_tokens: int
    seed: int

    def finetune(
        self,
        train: Outcomes,
        validation: Outcomes,
        config: FinetuneConfig,
        checkpoints: Path,
        resume: bool,
        progress: Progress | None = None,
    ) -> Finetuned:
        """Learns the models of `train`; `validation` chooses the epoch.

        Raises:
            ConfigurationError: there is no such encoder, or see `finetune`.
        """
        learnt, held = (Labelled(part.prompts, part.correct) for part in (train, validation))
        return finetune(
            self._scorer(train.models), learnt, held, config, checkpoints=checkpoints, resume=resume, progress=progress
        )

    def _scorer(self, models: tuple[str, ...]) -> TransformerScorer:
        if self.trained is not None:
            return self.trained.with_models(models, self.seed)
        return TransformerScorer.from_encoder(
            self.encoder or DEFAULT_ENCODER,
            models=models,
            head_tokens=self.head_tokens,
            tail_tokens=self.tail_tokens,
            seed=self.seed,
        )
