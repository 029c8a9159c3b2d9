"""Which texts a predictor of lengths reads, decided on held-out tasks: none, terms that tell of what is left, or all.

As for next agents (`training/semantic_state.py`): of each candidate a quick trial, a few boosted trees on the logarithm
of what is left, learns from the learning part of the training tasks and is judged on their calibration part; the
simplest within one standard error of the best is kept. Sketches are fitted on the learning part, so the calibration
part is judged as fresh texts are. Without a sketch, the sizes of prompts are still read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.errors import ConfigurationError, InputError
from presage.features.length_texts import LengthTexts
from presage.features.lengths import LengthEncoder, LengthRows
from presage.features.states import Candidate
from presage.predictors.lengths.linear import trial
from presage.training.simplest import simplest

Texts = Literal["auto", "text", "none"]
TEXTS: Final[tuple[Texts, ...]] = ("auto", "text", "none")

_RELEVANT: Final = "relevant text"
_CANDIDATES: Final[Mapping[Texts, tuple[Candidate, ...]]] = {
    "auto": ("none", "relevant text", "text"),
    "text": ("relevant text", "text"),
    "none": ("none",),
}


@dataclass(frozen=True)
class TextChoice:
    """A candidate, and why.

    Attributes:
        name: the candidate.
        encoder: with its sketch.
        rows: the training rows as it sees them.
        losses: mean absolute error of each candidate on calibration steps, on the logarithm, with the standard error
            (over tasks) of its difference to the best; empty where there was nothing to compare.
        refused: candidates that could not be fitted, and why.
    """

    name: Candidate
    encoder: LengthEncoder
    rows: LengthRows
    losses: Mapping[str, tuple[float, float]]
    refused: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As the metrics have it."""
        return {
            "chosen": self.name,
            "validation_log_error": {name: {"error": of, "se": se} for name, (of, se) in self.losses.items()},
            "refused": dict(self.refused),
        }


def choose_texts(
    table: pa.Table,
    encoder: LengthEncoder,
    rows: LengthRows,
    apart: NDArray[np.bool_],
    texts: Texts,
    seed: int,
    tell: Callable[[str], None],
) -> TextChoice:
    """The sketch that forecasts best on the calibration tasks.

    Args:
        table: the training trace.
        encoder: without a sketch.
        rows: of the trace, by that encoder.
        apart: bool [n], the rows of calibration tasks.
        texts: "auto" for the best there is, or what is wanted.
        seed: of everything drawn.
        tell: told which candidate is tried.

    Raises:
        ConfigurationError: texts are wanted, but the traces have none.
        InputError: texts are wanted, but there is nothing to learn from them.
    """
    read = LengthTexts.of(table, rows, seed) if texts != "none" else None
    if texts == "text" and read is None:
        raise ConfigurationError(
            "--states text, but no LLM step of the training traces has an input_text, and none follows an output_text: "
            "record texts, or use --states none"
        )
    judged = apart & rows.labelled
    compared = texts != "none" and judged.any() and bool((~apart & rows.labelled).any())
    tried: dict[Candidate, LengthRows] = {}
    refused: dict[str, str] = {}
    for name in _CANDIDATES[texts] if read is not None else _CANDIDATES["none"]:
        if name == "none" or read is None:
            tried[name] = rows
            continue
        tell(f"trying texts: {name}")
        try:
            tried[name] = read.fit(encoder, relevant=name == _RELEVANT, seed=seed, learning=~apart)[1]
        except InputError as error:
            refused[name] = str(error)
    if not tried:
        raise InputError(next(iter(refused.values())))
    chosen: Candidate = next(iter(tried))
    losses: dict[str, tuple[float, float]] = {}
    if len(tried) > 1 and compared:
        errors: dict[Candidate, NDArray[np.float64]] = {}
        labels = np.log1p(rows.remaining.astype(np.float64))
        for name, seen in tried.items():
            own_error = trial(_inputs(seen), labels, ~apart & rows.labelled, judged, seed)
            errors[name] = np.stack([own_error, np.ones(len(own_error))])
        chosen, losses = simplest(errors, rows.task[judged])
    if chosen == "none" or read is None:
        return TextChoice(chosen, encoder, rows, losses, refused)
    tell("reading texts")
    return TextChoice(chosen, *read.fit(encoder, relevant=chosen == _RELEVANT, seed=seed), losses, refused)


def _inputs(rows: LengthRows) -> NDArray[np.float32]:
    """What the trial reads, float32 [n, D]; LightGBM knows gaps."""
    named = np.stack([rows.workflow_type, rows.agent, rows.model], axis=1)
    return np.concatenate([named, rows.numbers], axis=1, dtype=np.float32)
