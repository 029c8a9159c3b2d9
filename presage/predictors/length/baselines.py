"""Baselines of the length predictors: first come first served, input length, group medians, and a ridge.

Context growth has two more: the context stays as it is, or grows on as it has.

Each is a function that fits on training rows and returns a function from rows to quantiles, float32 [n, Q].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.rows import LabelledRows
from presage.predictors.quantiles.estimator import labels_of, rising
from presage.predictors.quantiles.groups import quantiles_of_groups
from presage.predictors.quantiles.linear import InputEncoding, LogLine

_PROMPT_TOKENS: Final = 2
"""Column of `numbers`: tokens of the full prompt."""

Predict = Callable[[LabelledRows], NDArray[np.float32]]


def constant(train: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """The same quantiles for every step. Ranking by them is first come, first served."""
    usual = np.quantile(labels_of(train)[0].label, quantiles).astype(np.float32)
    return lambda rows: np.tile(usual, (len(rows), 1))


def input_length(train: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """Output in proportion to the prompt: ranks by input length."""

    def tokens(rows: LabelledRows) -> NDArray[np.float32]:
        prompt_tokens = rows.numbers[:, _PROMPT_TOKENS]
        return np.asarray(1.0 + np.where(np.isnan(prompt_tokens), usual, prompt_tokens), np.float32)

    labelled, _ = labels_of(train)
    usual = float(np.nan_to_num(np.nanmean(np.append(labelled.numbers[:, _PROMPT_TOKENS], 1.0)), nan=1.0))
    each = np.quantile(labelled.label / tokens(labelled), quantiles).astype(np.float32)
    return lambda rows: rising(tokens(rows)[:, None] * each)


def median_per_step(train: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """Quantiles by workflow type, agent and step; by coarser groups where a group has fewer than 5 training rows."""
    labelled, _ = labels_of(train)
    return quantiles_of_groups(_groups, labelled, labelled.label, lambda part: np.quantile(part, quantiles))


def ridge(train: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """Ridge regression of log tokens, with quantiles from its training errors."""
    labelled, labels = labels_of(train)
    encoding = InputEncoding.fit(labelled, labels, int(max(train.model.max(), 0)) + 1)
    line = LogLine.fit(encoding.inputs(labelled), labels)
    errors = np.quantile(labels - line(encoding.inputs(labelled)), quantiles).astype(np.float32)
    return lambda rows: rising(np.expm1(line(encoding.inputs(rows))[:, None] + errors))


def unchanged(_: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """The context stays as large as the prompt."""
    return lambda rows: np.zeros((len(rows), len(quantiles)), np.float32)


def extrapolated(train: LabelledRows, quantiles: Sequence[float]) -> Predict:
    """As many tokens a step as the workflow has grown by so far, over the steps that its type has left in the mean.

    At a workflow's first step, as many as others have grown by in the median. Quantiles are of the ratios in training.
    """
    labelled, _ = labels_of(train)
    ends = np.diff(train.workflow, append=-1) != 0
    types, steps = train.workflow_type[ends], train.step[ends]
    kinds = range(len(train.vocabulary.workflow_types) + 1)
    usual = np.array([steps[types == kind].mean() if (types == kind).any() else steps.mean() for kind in kinds])
    rates = _rates(labelled)
    others = float(np.median(rates[~np.isnan(rates)])) if not np.isnan(rates).all() else 1.0

    def tokens(rows: LabelledRows) -> NDArray[np.float32]:
        rate = _rates(rows)
        left = 1.0 if rows.target == "next-context" else np.maximum(usual[rows.workflow_type] - rows.step, 1.0)
        return np.asarray(1.0 + np.where(np.isnan(rate), others, rate) * left, np.float32)

    each = np.quantile(labelled.label / tokens(labelled), quantiles).astype(np.float32)
    return lambda rows: rising(tokens(rows)[:, None] * each)


def _rates(rows: LabelledRows) -> NDArray[np.float64]:
    """Tokens a step by which the prompt of each row's workflow has grown, [n], NaN where unknown."""
    prompts = rows.numbers[:, _PROMPT_TOKENS].astype(np.float64)
    _, first, workflow = np.unique(rows.workflow, return_index=True, return_inverse=True)
    rate = np.maximum(prompts - prompts[first[workflow]], 0.0) / np.maximum(rows.step, 1)
    return np.where(rows.step > 0, rate, np.nan)


LENGTH_BASELINES: Final[Mapping[str, Callable[[LabelledRows, Sequence[float]], Predict]]] = MappingProxyType(
    {"constant": constant, "input-length": input_length, "median-per-step": median_per_step, "ridge": ridge}
)
CONTEXT_BASELINES: Final[Mapping[str, Callable[[LabelledRows, Sequence[float]], Predict]]] = MappingProxyType(
    {**LENGTH_BASELINES, "unchanged": unchanged, "extrapolated": extrapolated}
)


def _groups(rows: LabelledRows) -> list[NDArray[np.integer]]:
    """The groups of each row, the narrowest first: int32 [n, 3], [n, 2], [n, 1], [n, 0]."""
    keys = np.stack([rows.workflow_type, rows.agent, rows.step], axis=1)
    return [keys[:, :width] for width in (3, 2, 1, 0)]
