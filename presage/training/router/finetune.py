"""Fine-tune the router's transformer on outcomes with Hugging Face's Trainer.

As in "Chimera", appendix B.1: 5 epochs, learning rate 1e-5, batches of 16, binary cross-entropy. Presage adds a mask
for missing labels, a warm-up, and a choice of the best epoch on a validation part.

The Trainer writes checkpoints to a working folder: weights as safetensors, and optimizer and random states with
torch.save, that is, pickle. Only the Trainer reads this folder, and it is deleted at the end of the training; it is
not an artefact. An interrupted training resumes from the last complete checkpoint and reaches the same weights up to
rounding.

Supports `accelerate launch`: every process calls `finetune`, and `Finetuned.main_process` marks the one that saves the
artefact.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError

from presage.datasets.outcomes import Outcomes
from presage.errors import ConfigurationError, OutputError, TraceError
from presage.predictors.router.transformer import DEFAULT_ENCODER, TransformerScorer
from presage.predictors.router.transformer_model import checkpoint_activations, quiet
from presage.training.router.finetune_trainer import FinetuneConfig, Labelled, make_trainer
from presage.training.training import Progress

_TRAINING_FILE: Final = "training.json"
_CHECKPOINT: Final = "checkpoint-"
_LAST_WRITTEN: Final = "trainer_state.json"  # of a checkpoint; without it the process was killed while writing
_NO_MEMORY: Final = ("can't allocate memory", "CUDA out of memory", "not enough memory")
_NOT_WRITTEN: Final = ("inline_container.cc", "PytorchStreamWriter")  # torch.save on a full disk


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned transformer and its training history.

    Attributes:
        scorer: of the best epoch.
        history: for each epoch "epoch", and on the validation part "loss" (nats a known outcome) and "macro_ap"
            (None if no model has both outcomes; both None if the epoch diverged); empty without a validation part.
        best_epoch: from 1; the last one without a validation part.
        main_process: whether this process saves the artefact.
    """

    scorer: TransformerScorer
    history: tuple[dict[str, Any], ...]
    best_epoch: int
    main_process: bool


def finetune(
    scorer: TransformerScorer,
    train: Labelled,
    validation: Labelled | None,
    config: FinetuneConfig | None = None,
    *,
    checkpoints: Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> Finetuned:
    """Train a scorer in place.

    Args:
        scorer: new, or from an artefact through `with_models`, which keeps the heads of known models.
        train: prompts and labels, one column per model of the scorer.
        validation: other prompts for the choice of the epoch; None keeps the last epoch.
        config: training settings.
        checkpoints: the Trainer's working folder, outside any artefact; deleted at the end.
        resume: resume from the last checkpoint in the folder, if there is one.
        progress: progress callback.

    Raises:
        ConfigurationError: a field is out of range, memory ran out, the loss diverged, or the checkpoints belong to
            another training.
        TraceError: no training prompt has a label.
        OutputError: the folder of checkpoints cannot be written.
    """
    config, checkpoints = config or FinetuneConfig(), checkpoints.resolve()
    config.check()
    for part in (train, validation):
        _check_labels(part, scorer)
    if not np.isfinite(train.correct).any():
        raise TraceError(f"none of {len(train.prompts)} training prompts has a known outcome; at least one is wanted")
    print_of_training = _fingerprint(scorer, train, validation, config)
    last = _last_checkpoint(checkpoints, print_of_training, resume)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        trainer = make_trainer(scorer, train, validation, config, checkpoints, progress)
        if trainer.is_world_process_zero():
            (checkpoints / _TRAINING_FILE).write_text(json.dumps({"training": print_of_training}))
        with quiet():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except (RuntimeError, MemoryError, OSError, SafetensorError) as error:
        known = _known_failure(error, scorer, config, checkpoints)
        if known is None:
            raise
        raise known from error
    if config.gradient_checkpointing:
        checkpoint_activations(scorer.network, False)
    scorer.network.to("cpu").eval()
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        _clear(checkpoints)
    if not all(bool(weight.isfinite().all()) for weight in scorer.network.parameters()):
        raise ConfigurationError(
            f"the training diverged at a learning rate of {config.learning_rate}; a smaller --learning-rate is wanted"
        )
    history = tuple(trainer.history())
    best = trainer.best_epoch() if history else config.epochs
    return Finetuned(scorer, history, best, trainer.is_world_process_zero())


def _known_failure(
    error: Exception, scorer: TransformerScorer, config: FinetuneConfig, checkpoints: Path
) -> ConfigurationError | OutputError | None:
    """Turn errors that a user can fix into Presage's: out of memory, checkpoint not writable."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
        longest = scorer.tokens.head + scorer.tokens.tail
        return ConfigurationError(
            f"memory ran out at {config.batch_size} prompts of up to {longest} tokens a step; a smaller --batch-size, "
            "--gradient-checkpointing, or fewer --head-tokens and --tail-tokens are wanted"
        )
    if isinstance(error, (OSError, SafetensorError)) or any(text in str(error) for text in _NOT_WRITTEN):
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        return OutputError(
            f"{checkpoints}: a checkpoint could not be written ({reason}); free the disk or choose another folder, "
            "then run again with --resume"
        )
    return None


def _check_labels(part: Labelled | None, scorer: TransformerScorer) -> None:
    if part is not None and part.correct.shape != (len(part.prompts), len(scorer.models)):
        raise ValueError(f"labels {part.correct.shape} of {len(part.prompts)} prompts and {len(scorer.models)} models")


def _fingerprint(
    scorer: TransformerScorer, train: Labelled, validation: Labelled | None, config: FinetuneConfig
) -> str:
    """Digest of everything that determines the result, including the initial weights."""
    digest = hashlib.sha256(json.dumps([asdict(config), scorer.to_config()], sort_keys=True).encode())
    for name, content in scorer.to_files().items():
        digest.update(name.encode() + content)
    for name, tensor in sorted(scorer.to_tensors().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor).data)
    for part in (train, validation):
        if part is not None:
            digest.update(json.dumps(list(part.prompts)).encode())
            digest.update(np.ascontiguousarray(part.correct).data)
    return f"sha256:{digest.hexdigest()}"


def _last_checkpoint(folder: Path, print_of_training: str, resume: bool) -> Path | None:
    """The last complete checkpoint of this training; refuses checkpoints of another training."""
    found = sorted(folder.glob(f"{_CHECKPOINT}*"), key=lambda path: int(path.name.removeprefix(_CHECKPOINT)))
    if not found:
        return None
    if not resume:
        raise ConfigurationError(
            f"{folder}: holds checkpoints of an interrupted training; resume it with --resume, or delete "
            "the folder to start anew"
        )
    try:
        known = json.loads((folder / _TRAINING_FILE).read_bytes()).get("training")
    except (OSError, ValueError, AttributeError):
        known = None
    if known != print_of_training:
        raise ConfigurationError(
            f"{folder}: holds checkpoints of a training on other outcomes, another encoder or other settings; give "
            "what it was started with, or delete the folder to start anew"
        )
    return next((path for path in reversed(found) if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / _LAST_WRITTEN).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _clear(folder: Path) -> None:
    """Delete the training's files, and the folder if it is then empty."""
    for path in folder.glob(f"{_CHECKPOINT}*"):
        shutil.rmtree(path, ignore_errors=True)
    (folder / _TRAINING_FILE).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


@dataclass(frozen=True)
class Start:
    """The transformer to fine-tune.

    Attributes:
        encoder: hub name or folder; None for ModernBERT-large, or with `trained`.
        trained: a scorer to train further.
        head_tokens, tail_tokens: tokens kept of a long prompt, for a new scorer.
        seed: of new weights.
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
        """Fine-tune on `train`; `validation` chooses the epoch.

        Raises:
            ConfigurationError: no such encoder, or see `finetune`.
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
