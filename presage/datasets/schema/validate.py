"""Rules across the rows of a workflow, identified by (workflow type, workflow id).

Every check runs over whole columns and yields the rows that break one rule. `validate` raises for the first;
`drop_invalid` drops their workflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import PREFIX_BLOCK_TOKENS, canonical_order, take_rows, workflow_codes
from presage.datasets.schema.source import Origin, Workflow, origin_of
from presage.errors import TraceError

_PER_WORKFLOW = ("task", "success", "complete")
_END = "END"
_TOKENS = ("input_tokens", "output_tokens", "cached_input_tokens")
_CONTROL = r"[\p{Cc}\p{Zl}\p{Zp}]"
"""Control characters and line breaks; serving ignores a name with one."""


class _Problem(NamedTuple):
    """Rows, int64 [n] in table order, that break one rule; `reason` is a short phrase for counting."""

    rows: NDArray[np.int64]
    column: str
    reason: str
    message: Callable[[int], str]


def validate(table: pa.Table, source: str | Origin) -> pa.Table:
    """Check the workflows of a conforming table and sort its rows: by workflow type, workflow id and step.

    `source` is the name for errors, or the origin of the rows.

    Raises:
        TraceError: there are no rows; steps of a workflow are not 0..n-1, each once; times run backwards; a parent is
            not an earlier step; `task`, `success` or `complete` differ inside a workflow; a token count is negative; a
            name is empty or holds control characters, or an agent is called END; two sources contain the same workflow.
    """
    origin = origin_of(source, table.num_rows)
    refuse_all_skipped(table.num_rows, {}, origin.name)
    codes = workflow_codes(table)
    order = canonical_order(table, codes)
    problem = next(_problems(table, origin, codes, order), None)
    if problem is not None:
        row = origin.first(problem.rows)
        raise origin.bad(row, problem.column, problem.message(row), problem.reason)
    return take_rows(table, order)


def drop_invalid(table: pa.Table, source: str | Origin) -> tuple[pa.Table, dict[str, int]]:
    """Drop every workflow that breaks a rule of `validate`; nothing may be left, or given.

    Returns the remaining rows in canonical order, and how many workflows broke each rule first, by reason.
    """
    if not table.num_rows:
        return table, {}
    codes = workflow_codes(table)
    order = canonical_order(table, codes)
    bad = np.zeros(int(codes.max()) + 1, bool)
    skipped: dict[str, int] = {}
    for problem in _problems(table, origin_of(source, table.num_rows), codes, order):
        broken = np.unique(codes[problem.rows])
        fresh = broken[~bad[broken]]
        bad[fresh] = True
        if len(fresh):
            skipped[problem.reason] = skipped.get(problem.reason, 0) + len(fresh)
    return take_rows(table, order[~bad[codes[order]]]), skipped


def refuse_all_skipped(kept: int, skipped: Mapping[str, int], names: str) -> None:
    """Raise if no row of a trace is left."""
    if not kept and not skipped:
        raise TraceError(f"{names}: an empty trace, not one step in it; give at least one workflow")
    if not kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
        raise TraceError(f"{names}: every workflow breaks a rule of the schema ({reasons}): repair the source")


def refuse_notices(notices: Mapping[str, int]) -> None:
    """Raise if there are notices, of what was not read or is doubtful in spans."""
    if notices:
        told = "; ".join(f"{count} × {what}" for what, count in notices.items())
        raise TraceError(
            f"not all of the spans was read, or for certain, and --strict was given: {told}. See docs/traces.md"
        )


def _problems(
    table: pa.Table, origin: Origin, codes: NDArray[np.int64], order: NDArray[np.int64]
) -> Iterator[_Problem]:
    """Every broken rule; `codes` numbers the workflow of each row, `order` puts the rows in canonical order."""
    rules = itertools.chain(
        _bad_names(table),
        _two_sources(table, origin, codes),
        _broken_numbering(table, codes, order),
        _negative_tokens(table),
        _wrong_shares(table),
        _backward_times(table, codes, order),
        _wrong_parents(table),
        _wrong_prefixes(table, codes),
        _inconsistent(table, codes),
    )
    return (problem for problem in rules if len(problem.rows))


def _bad_names(table: pa.Table) -> Iterator[_Problem]:
    for column in ("workflow_type", "workflow_id", "agent"):
        rows = _where(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(table.column(column))), 0))
        yield _Problem(rows, column, f"empty {column}", lambda _: "an empty name; give one")
        yield _Problem(
            _where(pc.match_substring_regex(table.column(column), _CONTROL)),
            column,
            f"control character in {column}",
            lambda row, column=column: (  # type: ignore[misc]
                f"{table[column][row].as_py()[:80]!r} holds a line break or control character; expected a name of "
                "printable characters: rename it"
            ),
        )
    yield _Problem(
        _where(pc.equal(table.column("agent"), _END)),
        "agent",
        "agent named END",
        lambda _: f"{_END!r} is no agent but the outcome that a workflow finishes: drop the row or rename the agent",
    )


def _two_sources(table: pa.Table, origin: Origin, codes: NDArray[np.int64]) -> Iterator[_Problem]:
    if len(origin.names) < 2:
        return
    sources = origin.sources
    first = np.full(int(codes.max()) + 1, len(origin.names), sources.dtype)
    np.minimum.at(first, codes, sources)

    def message(row: int) -> str:
        return (
            f"{_workflow(table, row)} also stands in {origin.names[first[codes[row]]]}; expected one source a "
            "workflow: give each source once, or join the files first"
        )

    yield _Problem(np.flatnonzero(sources != first[codes]), "workflow_id", "workflow in two sources", message)


def _broken_numbering(table: pa.Table, codes: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[_Problem]:
    steps = table.column("step").to_numpy()
    codes_in_order, steps_in_order = codes[order], steps[order]
    starts = np.flatnonzero(np.r_[True, codes_in_order[1:] != codes_in_order[:-1]])
    wanted = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    same = np.r_[False, (codes_in_order[1:] == codes_in_order[:-1]) & (steps_in_order[1:] == steps_in_order[:-1])]
    yield _Problem(
        np.sort(order[same]),
        "step",
        "duplicate step number",
        lambda row: f"step {steps[row]} of {_workflow(table, row)} came before; expected each step once: renumber",
    )
    expected = np.empty(len(order), np.int64)
    expected[order] = wanted
    # Only the first break of a workflow is named: every later step is off by the same gap.
    off = np.flatnonzero(steps_in_order != wanted)
    first_off = off[np.r_[True, codes_in_order[off][1:] != codes_in_order[off][:-1]]] if len(off) else off
    yield _Problem(
        np.sort(order[first_off]),
        "step",
        "missing step number",
        lambda row: (
            f"step {steps[row]} of {_workflow(table, row)} where step {expected[row]} was expected; steps count from 0 "
            "without a gap: add the missing step or renumber"
        ),
    )


def _negative_tokens(table: pa.Table) -> Iterator[_Problem]:
    for column in _TOKENS:
        rows = _where(pc.less(table.column(column), 0))
        yield _Problem(rows, column, f"negative {column}", lambda _: "a negative count; expected 0 or more: correct it")


def _wrong_shares(table: pa.Table) -> Iterator[_Problem]:
    for column in ("identity_confidence", "step_score"):
        rows = _where(pc.or_(pc.less(table[column], 0), pc.greater(table[column], 1)))
        yield _Problem(rows, column, f"{column} out of range", lambda _: "no share; expected 0 to 1: correct it")


def _backward_times(table: pa.Table, codes: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[_Problem]:
    started, ended = table.column("started_at"), table.column("ended_at")
    yield _Problem(
        _where(pc.less(ended, started)),
        "ended_at",
        "step that ends before it starts",
        lambda row: f"the step of {_workflow(table, row)} ends before it starts; check the clock or leave times out",
    )
    # Steps without a start are passed over: each start is compared with the one before it in its workflow.
    order = order[started.is_valid().to_numpy()[order]]
    times = pc.fill_null(started.cast(pa.int64()), 0).to_numpy()[order]
    same = codes[order][1:] == codes[order][:-1]
    backward = np.r_[False, (times[1:] < times[:-1]) & same][: len(order)]
    yield _Problem(
        np.sort(order[backward]),
        "started_at",
        "start times that run backwards",
        lambda row: (
            f"the step of {_workflow(table, row)} starts before the step in front of it; steps are numbered in start "
            "order: renumber them, or check the clock"
        ),
    )


def _wrong_parents(table: pa.Table) -> Iterator[_Problem]:
    parents = table.column("parent_steps").combine_chunks()
    if parents.null_count == len(parents):
        return
    rows = pc.list_parent_indices(parents).to_numpy()
    values = pc.fill_null(pc.list_flatten(parents).cast(pa.int64()), -1).to_numpy()
    wrong = (values < 0) | (values >= table.column("step").to_numpy()[rows])
    yield _Problem(
        np.unique(rows[wrong]),
        "parent_steps",
        "parent that is no earlier step",
        lambda row: f"a parent of the step of {_workflow(table, row)} is no earlier step: name earlier steps",
    )


def _wrong_prefixes(table: pa.Table, codes: NDArray[np.int64]) -> Iterator[_Problem]:
    """Rules of `prefix_blocks`: runs [first, last] of ids, each at one place in all prompts of a workflow."""
    column = "prefix_blocks"
    runs_of = table.column(column).combine_chunks()
    if runs_of.null_count == len(runs_of):
        return
    rows = pc.list_parent_indices(runs_of).to_numpy()
    runs = pc.list_flatten(runs_of)
    pairs = pc.equal(pc.fill_null(pc.list_value_length(runs), 0), 2).to_numpy(zero_copy_only=False)
    bounds = np.full((len(runs), 2), -1, np.int64)
    bounds[pairs] = pc.fill_null(pc.list_flatten(runs.filter(pa.array(pairs))), -1).to_numpy().reshape(-1, 2)
    first, last = bounds.T
    wrong = (first < 0) | (last < first)
    yield _Problem(
        np.unique(rows[wrong]),
        column,
        f"{column} that are no runs",
        lambda _: "expected runs [first, last] of ids, 0 or more, the first not above the last: correct them",
    )
    blocks = np.where(wrong, 0, last - first + 1)
    held = np.bincount(rows, blocks, table.num_rows) * PREFIX_BLOCK_TOKENS
    tokens = pc.fill_null(table.column("input_tokens").cast(pa.float64()), np.inf).to_numpy()
    yield _Problem(
        np.flatnonzero(held > tokens),
        column,
        f"more {column} than the prompt holds",
        lambda row: (
            f"ids of {held[row]:.0f} tokens in a prompt of {tokens[row]:.0f}; one id stands for a full block of "
            f"{PREFIX_BLOCK_TOKENS} tokens: name full blocks only"
        ),
    )
    # Runs that overlap, directly or through others, must all have their ids at the same places.
    before = np.cumsum(blocks) - blocks
    start = np.r_[True, rows[1:] != rows[:-1]][: len(rows)]
    place = before - np.maximum.accumulate(np.where(start, before, 0))
    keys = codes[rows] << 32 | first
    order = np.argsort(keys, kind="stable")
    order = order[~wrong[order]]
    ends = np.maximum.accumulate((keys + blocks)[order])
    apart = np.r_[True, keys[order][1:] >= ends[:-1]][: len(order)]
    shift = (first - place)[order]
    moved = shift != shift[np.flatnonzero(apart)][np.cumsum(apart) - 1]
    yield _Problem(
        np.unique(rows[order[moved]]),
        column,
        f"{column} with an id at two places",
        lambda row: (
            f"an id of the step of {_workflow(table, row)} has another place in another prompt, or occurs twice; equal "
            "ids stand for equal prompts up to there: number blocks anew"
        ),
    )


def _inconsistent(table: pa.Table, codes: NDArray[np.int64]) -> Iterator[_Problem]:
    _, first = np.unique(codes, return_index=True)
    for column in _PER_WORKFLOW:
        values = table.column(column).combine_chunks().dictionary_encode()
        marks = pc.fill_null(values.indices, -1).to_numpy(zero_copy_only=False)
        yield _Problem(
            np.flatnonzero(marks != marks[first][codes]),
            column,
            f"{column} that differs inside a workflow",
            lambda row, column=column: (  # type: ignore[misc]
                f"differs from the first row of {_workflow(table, row)}; {column} belongs to the workflow: write the "
                "same value on each of its rows"
            ),
        )


def _where(mask: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.flatnonzero(pc.fill_null(mask, False).to_numpy())


def _workflow(table: pa.Table, row: int) -> str:
    return f"workflow {table['workflow_id'][row].as_py()!r} ({table['workflow_type'][row].as_py()})"


def without(table: pa.Table, origin: Origin, workflows: set[Workflow]) -> tuple[pa.Table, Origin]:
    """The rows of all other workflows, and their origin."""
    if not workflows:
        return table, origin
    suspects = np.flatnonzero(
        pc.is_in(table["workflow_id"], pa.array([workflow_id for _, workflow_id in workflows], pa.string())).to_numpy()
    )
    pairs = zip(
        table["workflow_type"].take(suspects).to_pylist(), table["workflow_id"].take(suspects).to_pylist(), strict=True
    )
    keep = np.ones(table.num_rows, bool)
    keep[[row for row, pair in zip(suspects, pairs, strict=True) if pair in workflows]] = False
    return table.filter(pa.array(keep)), origin.part(keep)
