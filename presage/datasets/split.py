"""Training and test sets of whole tasks: split by time if the traces permit it, else at random.

A group is all workflows with one `task`, across workflow types, or a workflow without a task. Groups are never divided.
Workflow types that share no task with others are split separately, so both sets contain every type with at least two
groups where possible. In a split by time each test workflow starts after each training workflow; types whose tasks are
run repeatedly over weeks fall back to a random split, which `Split.rule` reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.errors import ConfigurationError, TraceError

# How far the test share may lie from the requested share to find a moment that separates the groups.
_SLACK = 0.25
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Split:
    """Two parts of a trace, rows in the order given; `rule` describes how they were divided."""

    train: pa.Table
    test: pa.Table
    rule: str


@dataclass(frozen=True)
class _Groups:
    """The groups of a trace, in the order of their keys."""

    keys: list[str]  # a name for each group, for hashing
    rows: NDArray[np.int64]  # [rows], the group of each row
    types: list[str]  # workflow types, sorted
    has: NDArray[np.bool_]  # [groups, types], whether a group contains a type
    earliest: NDArray[np.int64]  # [groups], first start of its workflows in µs
    latest: NDArray[np.int64]  # [groups], last start of its workflows in µs
    timed: NDArray[np.bool_]  # [groups], whether all its workflows have a start; else the two above are undefined


def split(table: pa.Table, fraction: float, seed: int, by: Literal["auto", "task", "time"] = "auto") -> Split:
    """Split a trace into a training and a test set, which do not depend on the order of its rows.

    Args:
        table: a valid trace.
        fraction: share of the groups in the test set, between 0 and 1.
        seed: of the random part.
        by: "task": at random by task (else workflow); "time": the latest groups are the test set; "auto": by time if
            that keeps tasks whole, else at random.

    Raises ConfigurationError for another fraction, and TraceError if there are fewer than two groups, or `by` is "time"
    and times cannot separate the groups.
    """
    if not 0 < fraction < 1:
        raise ConfigurationError(f"test fraction {fraction}: expected a number between 0 and 1, such as 0.2")
    groups = _groups(table)
    if len(groups.keys) < 2:
        what = "workflow" if pc.all(pc.is_null(table["task"])).as_py() else "task"
        raise TraceError(
            f"a single {what} cannot be split into a training and a test set: give traces of at least two {what}s, "
            "or a separate test set"
        )
    in_test = np.zeros(len(groups.keys), bool)
    ways: dict[str, list[str]] = {}
    for members, types in _components(groups):
        chosen, way = _divide(groups, members, fraction, seed, by)
        in_test[members] = chosen
        ways.setdefault(way, []).extend(groups.types[t] for t in types)
    if not in_test.any():  # every component is a single group
        in_test[_shuffled(groups, np.arange(len(in_test)), seed)[0]] = True
    mask = in_test[groups.rows]
    rule = "; ".join(f"{way} ({', '.join(sorted(types))})" for way, types in sorted(ways.items()))
    return Split(table.filter(pa.array(~mask)), table.filter(pa.array(mask)), rule)


def _groups(table: pa.Table) -> _Groups:
    codes = workflow_codes(table)
    first = np.unique(codes, return_index=True)[1]
    heads = table.select(["workflow_type", "workflow_id", "task"]).take(pa.array(first))
    names = [
        f"task {task}" if task is not None else f"workflow {workflow_type}\0{workflow_id}"
        for workflow_type, workflow_id, task in zip(*(heads[c].to_pylist() for c in heads.column_names), strict=True)
    ]
    keys, group = np.unique(np.asarray(names, object), return_inverse=True)
    types, kind = np.unique(np.asarray(heads["workflow_type"].to_pylist(), object), return_inverse=True)
    has = np.zeros((len(keys), len(types)), bool)
    has[group, kind] = True
    valid = table["started_at"].is_valid().to_numpy()
    # The start of a workflow is that of its first step with one; starts never decrease, so it is the least.
    starts = np.full(len(first), _NEVER)
    np.minimum.at(starts, codes[valid], pc.drop_null(table["started_at"]).cast(pa.int64()).to_numpy())
    earliest, latest = np.full(len(keys), _NEVER), np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(earliest, group, starts)
    np.maximum.at(latest, group, starts)
    rows = group[codes].astype(np.int64)
    return _Groups(keys.tolist(), rows, types.tolist(), has, earliest, latest, latest < _NEVER)


def _components(groups: _Groups) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Workflow types connected by shared tasks, with the groups of each component."""
    from scipy.sparse.csgraph import connected_components

    count, component = connected_components(groups.has.T @ groups.has)
    for number in range(count):
        types = np.flatnonzero(component == number)
        yield np.flatnonzero(groups.has[:, types].any(axis=1)), types.tolist()


def _divide(
    groups: _Groups, members: NDArray[np.int64], fraction: float, seed: int, by: str
) -> tuple[NDArray[np.bool_], str]:
    """Mask of the groups in the test set, bool [members], and the rule that was used."""
    if len(members) == 1:
        return np.zeros(1, bool), "all in training, a single task or workflow"
    if by == "task":
        return _by_task(groups, members, fraction, seed), f"by task, at random with seed {seed}"
    chosen, reason = _by_time(groups, members, fraction)
    if chosen is not None:
        return chosen, "by time, every test workflow starts after every training workflow"
    if by == "time":
        types = ", ".join(groups.types[t] for t in np.flatnonzero(groups.has[members].any(axis=0)))
        raise TraceError(f"no split by time of {types}: {reason}; split by task instead, or give a separate test set")
    return _by_task(groups, members, fraction, seed), f"by task, at random with seed {seed}, since {reason}"


def _by_time(groups: _Groups, members: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.bool_] | None, str]:
    """The latest groups, cut as near to the fraction as times separate groups; None and the reason if none does."""
    if not groups.timed[members].all():
        return None, "not every workflow has a start time"
    order = np.lexsort((groups.earliest[members], groups.latest[members]))
    earliest, latest, has = (a[members][order] for a in (groups.earliest, groups.latest, groups.has))
    count = len(members)
    wanted = _test_count(count, fraction)
    cuts = np.arange(1, count)  # groups before the cut are for training
    separates = latest[:-1] < np.minimum.accumulate(earliest[::-1])[::-1][1:]
    seen: NDArray[np.int64] = np.cumsum(has, axis=0, dtype=np.int64)
    total = seen[-1]
    covers = ((seen[:-1] > 0) & (seen[:-1] < total) | (total < 2)).all(axis=1)
    near = np.abs(count - cuts - wanted) <= max(1.0, _SLACK * wanted)
    usable = cuts[separates & covers & near]
    if not len(usable):
        if not (separates & near).any():
            return None, "runs of one task are spread over the time of others"
        return None, "a cut by time leaves a workflow type on one side only"
    cut = usable[np.argmin(np.abs(count - usable - wanted))]
    chosen = np.zeros(count, bool)
    chosen[order[cut:]] = True
    return chosen, ""


def _by_task(groups: _Groups, members: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """A random choice, stratified by the groups' sets of types, then repaired if a type is on one side only."""
    order = _shuffled(groups, members, seed)
    has = groups.has[order]
    _, stratum = np.unique(has, axis=0, return_inverse=True)
    stratum = stratum.reshape(-1)
    sizes = np.bincount(stratum)
    # Of each stratum its share, whole groups first and the largest remainders after, so that the sum is as requested.
    share = _test_count(len(order), fraction) * sizes / len(order)
    take = np.floor(share).astype(np.int64)
    for s in np.argsort(-(share - take), kind="stable")[: _test_count(len(order), fraction) - int(take.sum())]:
        take[s] += 1
    place = np.empty(len(order), np.int64)  # of each group within its stratum
    for s, size in enumerate(sizes):
        place[stratum == s] = np.arange(size)
    chosen = place < take[stratum]
    for side in (True, False):
        for t in np.flatnonzero(has.sum(axis=0) >= 2):
            if (chosen[has[:, t]] == side).any():
                continue
            # Move the first group of this type that leaves none of its own types without a group on the other side.
            for g in np.flatnonzero(has[:, t]):
                others = (chosen != side) & (np.arange(len(chosen)) != g)
                if has[others][:, has[g]].any(axis=0).all():
                    chosen[g] = side
                    break
    result = np.zeros(len(members), bool)
    result[np.searchsorted(members, order)] = chosen
    return result


def _shuffled(groups: _Groups, members: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Members in a random order that depends on the seed and each key alone: a new task does not move others."""
    marks = [hashlib.sha256(f"{seed}\0{groups.keys[m]}".encode()).digest() for m in members]
    return members[sorted(range(len(members)), key=marks.__getitem__)]


def _test_count(count: int, fraction: float) -> int:
    return min(max(1, round(count * fraction)), count - 1)
