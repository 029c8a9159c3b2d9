"""Splits by whole prompts and groups of prompts, models with enough labels, and benchmark families.

The part of a prompt depends only on the prompt, or its group, and the seed, not on the other prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, prompt_keys
from presage.errors import ConfigurationError, TraceError

MIN_LABELS: Final = 20
"""Labels a model needs to be learnt at all."""


def split_outcomes(outcomes: Outcomes, fraction: float, seed: int) -> tuple[Outcomes, Outcomes]:
    """Two parts of outcomes; the second has a fraction of the prompts, between 0 and 1, and each has at least one.

    Raises ConfigurationError for another fraction, and TraceError for a single prompt.
    """
    if not 0 < fraction < 1:
        raise ConfigurationError(f"fraction {fraction}: expected a number between 0 and 1, such as 0.2")
    keys = prompt_keys(outcomes)
    if (prompts := len(np.unique(keys))) < 2:
        raise TraceError(
            f"{prompts} prompt or group of prompts; expected at least 2, so that one can be set apart: add outcomes"
        )
    rank = _draw(keys, seed)
    apart: NDArray[np.bool_] = rank < fraction
    if apart.all() or not apart.any():
        apart = np.asarray(rank == rank.min())
    return outcomes.take(~apart), outcomes.take(apart)


def _draw(keys: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each key, the same for the same key and seed (SplitMix64)."""
    with np.errstate(over="ignore"):
        x = keys + np.random.default_rng([seed, 0x0C7]).integers(2**63, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.asarray((x >> np.uint64(11)).astype(np.float64) / 2.0**53)


class Chosen(NamedTuple):
    """Outcomes of the models with enough labels, and the number of labels of each other model."""

    outcomes: Outcomes
    left_out: dict[str, int]


def choose_models(outcomes: Outcomes, minimum: int = MIN_LABELS) -> Chosen:
    """Drop models with fewer labels than `minimum`, and prompts that only they answered.

    Raises TraceError if fewer than two models are left, or all their labels are equal.
    """
    labels = dict(zip(outcomes.models, outcomes.labels.tolist(), strict=True))
    left_out = {name: count for name, count in labels.items() if count < minimum}
    if len(labels) < 2:
        raise TraceError(
            f"outcomes of one model only ({outcomes.models[0]}); a router chooses between models: give outcomes of at "
            "least 2"
        )
    if len(labels) - len(left_out) < 2:
        counts = ", ".join(f"{name}: {count}" for name, count in labels.items())
        raise TraceError(
            f"{len(labels) - len(left_out)} of {len(labels)} models with {minimum} labels or more ({counts}); expected "
            "at least 2: give more outcomes"
        )
    chosen = outcomes.of_models([name for name in labels if name not in left_out])
    chosen = chosen.take(np.asarray(~np.isnan(chosen.correct).all(axis=1), np.bool_))
    seen = np.unique(chosen.correct[~np.isnan(chosen.correct)])
    if len(seen) < 2:
        raise TraceError(
            f"correct is {seen[0]:g} in every row; expected both solved and unsolved prompts: nothing can be learnt "
            "from one class"
        )
    return Chosen(chosen, left_out)


_PART_OF_BENCHMARK: Final = re.compile(r"[-_/](train|test|dev|val|validation)$")


def families(tasks: Sequence[str | None], pattern: str | None = None) -> list[str | None]:
    """The family of each task; None without a task, or if the pattern does not match it.

    Tasks of one benchmark are written `benchmark/subject`, and its parts `benchmark_train` and `benchmark_test`. The
    first group of the regular expression (else raises ConfigurationError), or its whole match, names the family.
    Without a pattern, the family is the name up to the first "/" without `_train` or `_test`, or the whole name if
    there were only one family otherwise.
    """
    if pattern is not None:
        try:
            rule = re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"the family pattern {pattern!r} is no regular expression ({error}); such as '^[^/]+'"
            ) from error
        matches = [rule.search(task) if task is not None else None for task in tasks]
        return [(match[1] if rule.groups else match[0]) or None if match else None for match in matches]
    whole = [_PART_OF_BENCHMARK.sub("", task) if task is not None else None for task in tasks]
    first = [name.split("/", 1)[0] if name is not None else None for name in whole]
    return first if len(set(first) - {None}) > 1 else whole
