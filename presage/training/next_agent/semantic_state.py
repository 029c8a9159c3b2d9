"""Choose the semantic states of a next-agent predictor on held-out tasks: hidden states, texts, or none.

By the rule of `training/selection.py`, with the predictor's trees, which take seconds. The loss is the negative
log-likelihood of the outcomes at both moments and all horizons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from presage.datasets.tasks import task_folds
from presage.errors import InputError
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes
from presage.features.states import (
    SKETCH,
    Candidate,
    States,
    StateSource,
    StepTexts,
    candidates,
    captured_source,
    encoder_source,
)
from presage.predictors.common.probabilities import FLOOR, label_probability, softmax
from presage.predictors.next_agent.boosting import TreeEnsemble
from presage.predictors.next_agent.learning import Projected, grow, project, tree_logits
from presage.predictors.next_agent.parts import TREES, NextAgentConfig
from presage.training.selection import Choice, simplest
from presage.training.sets import tasks_apart

VALIDATION_FRACTION: Final = 0.15
"""Of the training tasks."""


class TrainingTraces:
    """Training traces and the data derived from them.

    Args:
        table: a conforming trace; prefixes: its own, without states.
        seed: of the validation part and of the sketches.
        text_encoder: "sketch", or a folder or hub name of a transformer.
        progress: called with the number of texts that an encoder has embedded since the last call.
    """

    def __init__(
        self,
        table: pa.Table,
        prefixes: Prefixes,
        seed: int,
        text_encoder: str = SKETCH,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.table, self.prefixes, self.seed = table, prefixes, seed
        self.text_encoder, self._progress = text_encoder, progress
        apart = tasks_apart(prefixes.task, prefixes.workflow_type, VALIDATION_FRACTION, seed)
        self.parts = np.flatnonzero(~apart), np.flatnonzero(apart)
        self._inner = ~apart[prefixes.workflow]
        self._fold = task_folds(prefixes.task[prefixes.workflow], seed)
        self._whole: dict[Candidate, tuple[StateSource, dict[Moment, NDArray[np.float32]]]] = {}

    @cached_property
    def _texts(self) -> StepTexts:
        return StepTexts.of(self.table, self.prefixes)

    def seen(self, candidate: Candidate, *, inner: bool) -> tuple[StateSource, Prefixes]:
        """A source of states, fitted on the inner part or on everything, and all training prefixes with its states.

        Raises InputError if the texts are insufficient for a sketch.
        """
        if self.text_encoder == SKETCH and candidate in ("text", "relevant text"):
            steps = self._inner if inner else np.ones(self.prefixes.steps, bool)
            relevant = candidate == "relevant text"
            source, states = self._texts.fit(steps, self._fold, relevant=relevant, seed=self.seed)
            return source, self.prefixes.with_states(states)
        if candidate not in self._whole:  # the other sources are not fitted: the parts have the same
            if candidate == "none":
                source = StateSource("none")
            elif candidate == "captured":
                source = captured_source(self.table)
            else:
                source = encoder_source(self.table, self.text_encoder, progress=self._progress)
            self._whole[candidate] = source, source.states(self.table)
        source, states = self._whole[candidate]
        return source, self.prefixes.with_states(states)


@dataclass(frozen=True)
class StateChoice(Choice):
    """The chosen source of states, fitted on the inner part, and the training prefixes with its states; losses are in
    nats per step and horizon. `of` and `trees` are intermediate results fitted on `prefixes`, for reuse.
    """

    keys: ClassVar = ("validation_nll", "nll")

    source: StateSource
    prefixes: Prefixes
    of: Projected
    trees: Mapping[str, TreeEnsemble] | None

    def __str__(self) -> str:
        """One-line description of the choice and its losses."""
        if not self.losses:
            return f"{self.name}: nothing to choose from"
        best = min(nll for nll, _ in self.losses.values())
        rest = ", ".join(
            f"{name} {nll:.4f}" + (f" (+{nll - best:.4f}, standard error {error:.4f})" if nll > best else "")
            for name, (nll, error) in self.losses.items()
        )
        return f"{self.name}, by the loss on validation tasks in nats a label: {rest}"


def choose_states(
    traces: TrainingTraces, states: States, config: NextAgentConfig, seed: int, report: Callable[[str], None]
) -> StateChoice:
    """Choose the source of semantic states on the validation tasks.

    `states` is a source, or "auto" to choose among those in the traces; `report` is called with each candidate.

    Raises:
        ConfigurationError: the traces lack the requested source.
        InputError: texts are requested, but insufficient for a sketch.
    """
    names = candidates(traces.table, states, traces.text_encoder)
    tried: dict[Candidate, tuple[StateSource, Prefixes, Projected, dict[str, TreeEnsemble] | None]] = {}
    losses: dict[Candidate, NDArray[np.float64]] = {}
    refused: dict[str, str] = {}
    grown: dict[str, TreeEnsemble] | None = None
    task = np.zeros(0, np.int32)
    for name in names:
        if len(names) > 1:
            report(f"trying states: {name}")
        try:
            source, prefixes = traces.seen(name, inner=True)
        except InputError as error:
            refused[name] = str(error)
            continue
        inner, validation = (prefixes.take(part) for part in traces.parts)
        with threadpool_limits(limits=1):
            projected = project(inner, validation, config, seed)
            trees = grow(projected, config, seed, grown=grown) if len(names) > 1 else None
        tried[name] = source, prefixes, projected, trees
        if trees is not None:
            grown = {kept: trees[kept] for kept in TREES if not kept.startswith("states")}
            task = validation.task[validation.workflow]
            losses[name] = _losses(projected, trees)
    if not tried:
        raise InputError(next(iter(refused.values())))
    chosen, table = simplest(losses, task) if len(tried) > 1 else (next(iter(tried)), {})
    return StateChoice(chosen, table, refused, *tried[chosen])


def _losses(projected: Projected, trees: Mapping[str, TreeEnsemble]) -> NDArray[np.float64]:
    """Negative log-likelihood and number of labels of each held-out step, in total, float64 [2, n]."""
    total = np.zeros((2, len(projected.held_out.outcomes)))
    for moment in range(len(MOMENTS)):
        logits = tree_logits(projected.held_out, trees, projected.widths, moment)
        p = softmax(logits.reshape(len(logits), projected.train.horizon, -1))
        given, counts = label_probability(p, projected.held_out.outcomes)
        total[0] -= (np.log(np.maximum(given, FLOOR)) * counts).sum(axis=1)
        total[1] += counts.sum(axis=1)
    return total
