"""What each group of features is worth to a predictor of lengths: trained again with one of them withheld.

Withheld is withheld from training, calibration and judging alike: its numbers are unknown, as where a trace does not
record them. All trainings learn from the same rows and are judged on the same steps, so differences are paired. What
two groups both tell is missed in neither row: a group without effect alone may still matter where the other is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa

from presage.errors import TraceError
from presage.features.history import PROGRESS
from presage.features.lengths import PROMPT, LengthEncoder, LengthRows, length_rows
from presage.predictors.remaining_length import RemainingLengthConfig, RemainingLengthPredictor
from presage.training.lengths.evaluate import LengthDifference, LengthEvaluation, difference, evaluate
from presage.training.lengths.texts import choose_texts
from presage.training.lengths.train import CALIBRATION_FRACTION
from presage.training.sets import tasks_apart
from presage.training.training import Progress

AGENTS: Final = "agents, this one and before"
MODEL: Final = "model"

GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sizes of the prompt": PROMPT,
        "words of the prompt": ("prompt_",),
        "words of the last answer": ("answer_",),
        "progress and tokens so far": PROGRESS,
        AGENTS: ("agent_", "calls_", "since_"),
        MODEL: (),
    }
)
"""What each group holds: names of columns of `LengthEncoder.names`, or, ending in "_", how they begin. The agent of the
step and the model are no numbers; they are withheld as names that training never saw. The workflow type is in no group:
quantiles are calibrated by it."""


@dataclass(frozen=True)
class Ablation:
    """Figures with everything, and what withholding each group adds to the error.

    Attributes:
        whole: with every feature.
        withheld: by group, figures without it minus those with everything; above 0 the group helps.
    """

    whole: LengthEvaluation
    withheld: Mapping[str, LengthDifference]


def ablate(
    table: pa.Table,
    test: pa.Table,
    config: RemainingLengthConfig | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Ablation:
    """Trains once with everything and once without each group that the traces have, and judges on `test`.

    Args:
        table: a valid trace to learn from.
        test: a valid trace with other tasks.
        config: of the predictor; with one estimator named, it is the same in every row.
        seed: of the split, of every fit and of the bootstrap.
        progress: told what is being done.

    Raises:
        TraceError: the traces are too few to split, or no output tokens are known.
    """
    config, tell = config or RemainingLengthConfig(), progress or (lambda _, __: None)
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    if not rows.labelled.any():
        raise TraceError("no training step has a known length: give traces with output_tokens and complete workflows")
    apart = tasks_apart(rows.task, rows.workflow_type, CALIBRATION_FRACTION, seed)
    choice = choose_texts(table, encoder, rows, apart, "auto", seed, lambda doing: tell(doing, 0.0))
    encoder, learning = choice.encoder, choice.rows
    held = length_rows(test, encoder)
    found: dict[str | None, LengthEvaluation] = {}
    there: list[str | None] = [None, *(group for group in GROUPS if _tells(learning, encoder, group))]
    for index, group in enumerate(there):
        tell(f"without {group}" if group else "with everything", index / len(there))
        rows, judged = (without(of, encoder, group) if group else of for of in (learning, held))
        predictor = RemainingLengthPredictor(config, seed).fit(rows.take(~apart), rows.take(apart), encoder=encoder)
        found[group] = evaluate(predictor.predict, judged, config.quantiles, seed)
    whole = found.pop(None)
    withheld = {str(group): difference(of.figures, whole.figures, seed) for group, of in found.items()}
    return Ablation(whole, withheld)


def without(rows: LengthRows, encoder: LengthEncoder, group: str) -> LengthRows:
    """The same rows with a group of `GROUPS` unknown."""
    numbers = rows.numbers.copy()
    numbers[:, _columns(encoder, group)] = np.nan
    agent, model = len(encoder.vocabulary.agents), len(encoder.models)
    return replace(
        rows,
        numbers=numbers,
        agent=np.full_like(rows.agent, agent) if group == AGENTS else rows.agent,
        model=np.full_like(rows.model, model) if group == MODEL else rows.model,
    )


def _tells(rows: LengthRows, encoder: LengthEncoder, group: str) -> bool:
    """Whether the group differs between rows at all: what never does need not be withheld."""
    if group in (AGENTS, MODEL):
        values = rows.agent if group == AGENTS else rows.model
        return bool((values != values[0]).any())
    numbers = rows.numbers[:, _columns(encoder, group)]
    return bool(not np.isnan(numbers).all() and (numbers != numbers[:1]).any())


def _columns(encoder: LengthEncoder, group: str) -> list[int]:
    wanted, named = GROUPS[group], PROMPT + PROGRESS
    begin = tuple(name for name in wanted if name not in named)
    # "prompt_tokens" is a size, not a word of the prompt: a whole name goes before a beginning.
    return [
        i for i, name in enumerate(encoder.names) if name in wanted or (name not in named and name.startswith(begin))
    ]
