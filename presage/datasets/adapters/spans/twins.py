"""Requests that two instrumentations recorded: a framework's, and below it that of the client which it calls.

Where the client runs in the framework's context, its span is a child of the framework's, and `tree` reads both as one
request. MLflow's callbacks of LangChain do not enter the context of asynchronous code: there the client's span is a
trace of its own, or the child of a span further out. It is found by what both recorded and put where it belongs.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.spans.conventions import Role
from presage.datasets.adapters.spans.steps import codes, with_values

_NEEDED: Final = ("instrumentation", "input_text", "end")
_SAME: Final = ("model", "system_prompt", "input_text")
_CLIENTS: Final = frozenset({"openai", "anthropic", "bedrock", "gemini", "groq", "mistral"})
"""What MLflow calls the instrumentations of clients; those of frameworks are others."""
_COLUMNS: Final = ("start", "end", "trace", "span", "parent", "instrumentation", "input_tokens", "output_tokens")


def may_have_twin(spans: pa.Table) -> pa.ChunkedArray:
    """Which rows of `SPAN_SCHEMA` are requests of which it is known what recorded them, what was asked, and the end."""
    known = (spans.column(name).is_valid() for name in _NEEDED)
    return functools.reduce(pc.and_, known, pc.equal(spans.column("role"), int(Role.LLM)))


def nested(requests: pa.Table) -> tuple[pa.Table, int]:
    """Those rows with each client's span under its twin of a framework, and how many were moved there.

    Twins have one model, equal messages, and token counts that do not contradict each other; the client's began after
    the framework's and ended within it. A span has at most one twin, and those that are nested already have each other,
    so no two requests become one. Of several calls of one prompt at a time, a client's span goes to the one that ends
    first of those that can hold it, which leaves the fewest alone.
    """
    content = np.stack([codes(requests.column(name)) for name in _SAME])
    _, alike = np.unique(content, axis=1, return_inverse=True)
    start, end, trace, span, parent, recorder, *counts = (requests.column(name).to_pylist() for name in _COLUMNS)
    rows = range(len(span))
    frameworks = {(trace[row], span[row]): row for row in rows if recorder[row] not in _CLIENTS}
    around = {row: frameworks.get((trace[row], parent[row])) for row in rows if recorder[row] in _CLIENTS}
    taken = {*around.values()}
    running: list[int] = []
    moved = 0
    for row in sorted(rows, key=lambda row: (alike[row], start[row], trace[row], span[row])):
        if row not in around:
            running.append(row)
        elif around[row] is None:
            running = [
                outer
                for outer in running
                if alike[outer] == alike[row] and end[outer] > start[row] and outer not in taken
            ]
            fits = [
                outer
                for outer in running
                if start[outer] < start[row]
                and end[outer] >= end[row]
                and all(count[outer] == count[row] or None in (count[outer], count[row]) for count in counts)
            ]
            if fits:
                outer = min(fits, key=end.__getitem__)
                trace[row], parent[row] = trace[outer], span[outer]
                taken.add(outer)
                moved += 1
    return with_values(requests, (("trace", trace), ("parent", parent))) if moved else requests, moved
