"""Fine-tune the router's transformer on outcomes with Hugging Face's Trainer.

As in "Chimera", appendix B.1: 5 epochs, learning rate 1e-5, batches of 16, binary cross-entropy. Presage adds a mask
for missing labels, a warm-up, and a choice of the best epoch on a validation part.

The Trainer writes checkpoints to a working folder: weights as safetensors, and optimizer and random states with
torch.save, that is, pickle. Only the Trainer reads this folder, and it is deleted at the end of the training; it is
not an artefact. Batches depend on seed and epoch only, so an interrupted training resumes from the last complete
checkpoint, also in the middle of an epoch, and reaches the same weights up to rounding.

Supports `accelerate launch`: every process calls `finetune`, and `Finetuned.main_process` marks the one that saves the
artefact. Imports torch and transformers, so import this module lazily.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from scipy.special import expit
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from presage.errors import ConfigurationError, OutputError, TraceError
from presage.features.text_encoder import padded
from presage.predictors.router.transformer import (
    PromptTokens,
    TransformerScorer,
    checkpoint_activations,
    quiet,
)
from presage.training.metrics import json_values
from presage.training.router.metrics import measure
from presage.training.training import Progress

_TRAINING_FILE: Final = "training.json"
_CHECKPOINT: Final = "checkpoint-"
_LAST_WRITTEN: Final = "trainer_state.json"  # of a checkpoint; without it the process was killed while writing
_NO_MEMORY: Final = ("can't allocate memory", "CUDA out of memory", "not enough memory")
_NOT_WRITTEN: Final = ("inline_container.cc", "PytorchStreamWriter")  # torch.save on a full disk

_EVALUATION_TIMES: Final = 4
"""Factor on the batch size for validation, which needs no memory for a backward pass."""

_LOSS: Final = "known_loss"
"""Mean over known labels; the Trainer's "eval_loss" weights batches equally, regardless of their number of labels."""
_MACRO_AP: Final = "macro_ap"
_EVAL: Final = "eval_"
"""The Trainer's prefix of both."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning.

    Attributes:
        learning_rate: of AdamW, at the end of the warm-up; falls linearly to 0 from there.
        batch_size: prompts a step, on each device.
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
    """Prompts and their outcomes, float32 [n, M], 0..1, NaN if missing."""

    prompts: Sequence[str]
    correct: NDArray[np.float32]


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
        checkpoints: the Trainer's working folder, outside any artefact; deleted at the end.
        resume: resume from the last checkpoint in the folder, if there is one.

    Raises:
        ConfigurationError: a field is out of range, memory ran out, the loss diverged, or the checkpoints belong to
            another training.
        TraceError: no training prompt has a label.
        OutputError: the folder of checkpoints cannot be written.
    """
    config, checkpoints = config or FinetuneConfig(), checkpoints.resolve()
    config.check()
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
        explained = _known_failure(error, scorer, config, checkpoints)
        if explained is None:
            raise
        raise explained from error
    if config.gradient_checkpointing:
        checkpoint_activations(scorer.network, False)
    scorer.network.to("cpu").eval()
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        for path in checkpoints.glob(f"{_CHECKPOINT}*"):
            shutil.rmtree(path, ignore_errors=True)
        (checkpoints / _TRAINING_FILE).unlink(missing_ok=True)
        if not any(checkpoints.iterdir()):
            checkpoints.rmdir()
    if not all(bool(weight.isfinite().all()) for weight in scorer.network.parameters()):
        raise ConfigurationError(
            f"the training diverged at a learning rate of {config.learning_rate}; a smaller --learning-rate is wanted"
        )
    state = trainer.state
    history = tuple(
        json_values(
            {"epoch": round(entry["epoch"]), "loss": entry[_EVAL + _LOSS], "macro_ap": entry[_EVAL + _MACRO_AP]}
        )
        for entry in state.log_history
        if _EVAL + _LOSS in entry
    )
    best_step = state.best_global_step if history and state.best_global_step else state.max_steps
    best_epoch = round(best_step / state.max_steps * config.epochs)
    return Finetuned(scorer, history, best_epoch, trainer.is_world_process_zero())


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
    checkpoints = sorted(folder.glob(f"{_CHECKPOINT}*"), key=lambda path: int(path.name.removeprefix(_CHECKPOINT)))
    if not checkpoints:
        return None
    if not resume:
        raise ConfigurationError(
            f"{folder}: holds checkpoints of an interrupted training; resume it with --resume, or delete "
            "the folder to start anew"
        )
    if _read(folder / _TRAINING_FILE) != {"training": print_of_training}:
        raise ConfigurationError(
            f"{folder}: holds checkpoints of a training on other outcomes, another encoder or other settings; give "
            "what it was started with, or delete the folder to start anew"
        )
    return next((path for path in reversed(checkpoints) if _read(path / _LAST_WRITTEN) is not None), None)


def _read(file: Path) -> Any:
    """A JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def make_trainer(
    scorer: TransformerScorer,
    train: Labelled,
    validation: Labelled | None,
    config: FinetuneConfig,
    folder: Path,
    progress: Progress | None,
) -> RouterTrainer:
    """Set up the Trainer of the scorer's network."""
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
        metric_for_best_model=_EVAL + (_MACRO_AP if by_ap else _LOSS),
        greater_is_better=by_ap,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if config.gradient_checkpointing:
        checkpoint_activations(scorer.network, True)
    steps = config.epochs * math.ceil(len(rows) / (config.batch_size * arguments.world_size))
    arguments.warmup_steps = round(config.warmup * steps)
    trainer = RouterTrainer(
        model=scorer.network,
        args=arguments,
        train_dataset=rows,
        eval_dataset=None if validation is None else _Rows(scorer.tokens, validation),
        data_collator=rows.collate,
        compute_metrics=judge,
        callbacks=[_AfterSteps(config.checkpoint_steps, progress)],
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
        collate, pin_memory = self.data_collator, self.args.dataloader_pin_memory
        loader: DataLoader[Any] = DataLoader(rows, batch_size, sampler=order, collate_fn=collate, pin_memory=pin_memory)
        return cast(DataLoader[Any], self.accelerator.prepare(loader))


class LikeLengths(Sampler[int]):
    """An order that batches rows of similar length; it changes each epoch, and the longest batch comes first.

    `lengths` are tokens of each row, `batch` is rows per step on all devices together.
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
    def __init__(self, tokens: PromptTokens, labelled: Labelled) -> None:
        self._tokens, self._ids, self._labels = tokens, tokens.ids(labelled.prompts), labelled.correct
        self.lengths = [len(ids) for ids in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"ids": self._ids[place], "labels": self._labels[place]}

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors of these rows, padded to the longest."""
        ids, mask = padded([row["ids"] for row in rows], self._tokens.padding)
        labels = np.stack([row["labels"] for row in rows]).astype(np.float32)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }


class _AfterSteps(TrainerCallback):
    """Requests a checkpoint every `steps` steps, beside the Trainer's own after each epoch, and reports progress."""

    def __init__(self, steps: int, progress: Progress | None) -> None:
        self._steps, self._progress = steps, progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            control.should_save = True
        if self._progress is not None and state.is_world_process_zero:
            epoch = min(math.floor(state.epoch) + 1, args.num_train_epochs)
            self._progress(f"learning, epoch {epoch} of {args.num_train_epochs}", state.global_step / state.max_steps)


def known_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of logits and labels [n, M], mean over known labels ("Chimera", §3.3); 0 without any."""
    labelled = ~labels.isnan()
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.nan_to_num(0.0), reduction="none")
    return (each * labelled).sum() / labelled.sum().clamp(min=1)


def judge(prediction: EvalPrediction) -> dict[str, float]:
    """Loss over all known labels of a validation part, and average precision, mean over models."""
    logits, labels = np.asarray(prediction.predictions, np.float32), np.asarray(prediction.label_ids, np.float32)
    if not np.isfinite(logits).all():  # the training diverged: no epoch from here on is the best
        return {_LOSS: math.nan, _MACRO_AP: math.nan}
    loss = known_loss(torch.from_numpy(logits), torch.from_numpy(labels))
    return {_LOSS: float(loss), _MACRO_AP: _macro_ap(logits, labels)}


def _macro_ap(logits: NDArray[np.float32], correct: NDArray[np.float32]) -> float:
    """Macro average precision of float32 [n, M] each; NaN if no model has both outcomes."""
    models = [str(model) for model in range(correct.shape[1])]
    return measure(expit(logits), correct, models, seed=0, resamples=0).macro_map


def _ranks(correct: NDArray[np.float32]) -> bool:
    """Whether some model has both outcomes among its known labels, float32 [n, M]."""
    return not math.isnan(_macro_ap(np.zeros_like(correct), correct))
