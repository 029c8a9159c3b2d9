"""Hugging Face's Trainer for the router: a loss that masks missing labels, and a resumable batch order.

Imports torch and transformers, so import this module lazily. Batches depend on seed and epoch only, so a training that
resumes in the middle of an epoch, or runs on several devices, has the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from presage.errors import ConfigurationError
from presage.predictors.router import transformer_model
from presage.predictors.router.transformer import PromptTokens, TransformerScorer
from presage.training.router.metrics import measure
from presage.training.training import Progress

_EVALUATION_TIMES: Final = 4
"""Factor on the batch size for validation, which needs no memory for a backward pass."""

_LOSS: Final = (
    "eval_known_loss"  # the Trainer's "eval_loss" weights batches equally, regardless of their number of labels
)
_MACRO_AP: Final = "eval_macro_ap"


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning.

    Attributes:
        epochs: passes over the training prompts.
        learning_rate: of AdamW, at the end of the warm-up; falls linearly to 0 from there.
        batch_size: prompts a step, on each device.
        weight_decay: of AdamW.
        warmup: share of all steps over which the rate rises, 0..1.
        best_by: validation figure that selects the best epoch; loss if no model has both outcomes there.
        gradient_checkpointing: recompute activations to save memory.
        checkpoint_steps: steps between checkpoints, in addition to one after each epoch.
        seed: of the order of prompts and of dropout.
    """

    epochs: int = 5
    learning_rate: float = 1e-5
    batch_size: int = 16
    weight_decay: float = 0.01
    warmup: float = 0.06
    best_by: Literal["macro_ap", "loss"] = "macro_ap"
    gradient_checkpointing: bool = False
    checkpoint_steps: int = 500
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigurationError if a field is out of range."""
        for name, least in (("epochs", 1), ("batch_size", 1), ("checkpoint_steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; {least} or more is wanted")
        if not 0.0 < self.learning_rate < 1.0:
            raise ConfigurationError(f"learning_rate is {self.learning_rate}; a number such as 1e-5 is wanted")
        if not 0.0 <= self.warmup < 1.0 or not 0.0 <= self.weight_decay < 1.0:
            raise ConfigurationError(
                f"warmup is {self.warmup} and weight_decay {self.weight_decay}; shares from 0 to below 1 are wanted"
            )
        if self.best_by not in ("macro_ap", "loss"):
            raise ConfigurationError(f"best_by is {self.best_by!r}; macro_ap or loss is wanted")


@dataclass(frozen=True, eq=False)
class Labelled:
    """Prompts and their outcomes.

    Attributes:
        prompts: n texts.
        correct: float32 [n, M], 0..1, NaN if missing.
    """

    prompts: Sequence[str]
    correct: NDArray[np.float32]


def make_trainer(
    scorer: TransformerScorer,
    train: Labelled,
    validation: Labelled | None,
    config: FinetuneConfig,
    folder: Path,
    progress: Progress | None,
) -> RouterTrainer:
    """A Trainer of the scorer's network, ready to train."""
    rows = _Rows(scorer.tokens, train)
    by_ap = config.best_by == "macro_ap" and validation is not None and _ranks(validation.correct)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=config.epochs,
        learning_rate=config.learning_rate,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size * _EVALUATION_TIMES,
        weight_decay=config.weight_decay,
        seed=config.seed,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        eval_strategy="no" if validation is None else "epoch",
        save_strategy="epoch",
        save_total_limit=2,  # the best one and the last one
        load_best_model_at_end=validation is not None,
        metric_for_best_model=_MACRO_AP if by_ap else _LOSS,
        greater_is_better=by_ap,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if config.gradient_checkpointing:
        transformer_model.checkpoint_activations(scorer.network, True)
    steps = config.epochs * math.ceil(len(rows) / (config.batch_size * arguments.world_size))
    arguments.warmup_steps = round(config.warmup * steps)
    trainer = RouterTrainer(
        model=scorer.network,
        args=arguments,
        train_dataset=rows,
        eval_dataset=None if validation is None else _Rows(scorer.tokens, validation),
        data_collator=_Collator(scorer.tokens),
        compute_metrics=judge,
        callbacks=[_EverySteps(config.checkpoint_steps), *([] if progress is None else [_Teller(progress)])],
    )
    trainer.remove_callback(PrinterCallback)  # standard output is the command's
    return trainer


class RouterTrainer(Trainer):
    """Binary cross-entropy over known labels, with batches of prompts of similar length."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean over the known labels of a batch; 0 without any."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = known_loss(outputs.logits.float(), labels)
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of the training part, in the order of `LikeLengths`."""
        rows: Any = self.train_dataset
        order = LikeLengths(rows.lengths, self.args.train_batch_size * self.args.world_size, self.args.seed)
        return self._loader(rows, self.args.train_batch_size, order)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Batches of the validation part, in its order."""
        return self._loader(
            self.eval_dataset if eval_dataset is None else eval_dataset, self.args.eval_batch_size, None
        )

    def _loader(self, rows: Any, batch_size: int, order: Sampler[int] | None) -> DataLoader[Any]:
        """Replaces the Trainer's method, which imports `datasets` and can pick up any folder of that name."""
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_size=batch_size,
            sampler=order,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return cast(DataLoader[Any], self.accelerator.prepare(loader))

    def history(self) -> Iterator[dict[str, Any]]:
        """Validation figures of each epoch."""
        for entry in self.state.log_history:
            if _LOSS in entry:
                loss, ap = (None if math.isnan(entry[name]) else entry[name] for name in (_LOSS, _MACRO_AP))
                yield {"epoch": round(entry["epoch"]), "loss": loss, "macro_ap": ap}

    def best_epoch(self) -> int:
        """Epoch of the weights kept, counted from 1."""
        best = self.state.best_global_step or self.state.max_steps
        return round(best / self.state.max_steps * self.args.num_train_epochs)


class LikeLengths(Sampler[int]):
    """An order that batches rows of similar length; it changes each epoch, and the longest batch comes first.

    Args:
        lengths: tokens of each row.
        batch: rows per step on all devices together.
        seed: determines the order together with the epoch.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed, self._epoch = list(lengths), batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(
            int(np.random.SeedSequence([self._seed, self._epoch]).generate_state(1)[0])
        )
        return iter(get_length_grouped_indices(self._lengths, self._batch, generator=generator))


class _Rows(Dataset[dict[str, Any]]):
    """Token ids and labels by prompt."""

    def __init__(self, tokens: PromptTokens, labelled: Labelled) -> None:
        self._ids, self._labels = tokens.ids(labelled.prompts), labelled.correct
        self.lengths = [len(ids) for ids in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"ids": self._ids[place], "labels": self._labels[place]}


class _Collator:
    """Collate rows into tensors, padded to the longest row."""

    def __init__(self, tokens: PromptTokens) -> None:
        self._tokens = tokens

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids, mask = self._tokens.batch([row["ids"] for row in rows])
        labels = np.stack([row["labels"] for row in rows]).astype(np.float32)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }


class _EverySteps(TrainerCallback):
    """Requests a checkpoint every `checkpoint_steps` steps, in addition to the Trainer's own after each epoch."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request a checkpoint if it is due."""
        if state.global_step % self._steps == 0:
            control.should_save = True


class _Teller(TrainerCallback):
    """Reports progress from the main process only."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tells."""
        if state.is_world_process_zero:
            epoch = min(math.floor(state.epoch) + 1, args.num_train_epochs)
            self._progress(f"learning, epoch {epoch} of {args.num_train_epochs}", state.global_step / state.max_steps)


def known_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy, mean over known labels ("Chimera", §3.3); 0 without any.

    Args:
        logits: [n, M].
        labels: [n, M], 0..1, NaN where unknown.
    """
    known = ~labels.isnan()
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.nan_to_num(0.0), reduction="none")
    return (each * known).sum() / known.sum().clamp(min=1)


def judge(prediction: EvalPrediction) -> dict[str, float]:
    """Loss over all known labels of a validation part, and average precision, mean over models."""
    logits, labels = np.asarray(prediction.predictions, np.float32), np.asarray(prediction.label_ids, np.float32)
    if not np.isfinite(logits).all():  # the training diverged: no epoch from here on is the best
        return {_LOSS.removeprefix("eval_"): math.nan, _MACRO_AP.removeprefix("eval_"): math.nan}
    loss = known_loss(torch.from_numpy(logits), torch.from_numpy(labels))
    return {_LOSS.removeprefix("eval_"): float(loss), _MACRO_AP.removeprefix("eval_"): _macro_ap(logits, labels)}


def _macro_ap(logits: NDArray[np.float32], correct: NDArray[np.float32]) -> float:
    """Macro average precision of float32 [n, M] each; NaN if no model has both outcomes."""
    models = [str(model) for model in range(correct.shape[1])]
    return measure(expit(logits), correct, models, seed=0, resamples=0).macro_map


def _ranks(correct: NDArray[np.float32]) -> bool:
    """Whether some model has both outcomes among its known labels, float32 [n, M]."""
    return not math.isnan(_macro_ap(np.zeros_like(correct), correct))
