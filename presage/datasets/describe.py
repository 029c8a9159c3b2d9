"""Statistics of a trace as plain data: counts, lengths, tokens and the call graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import STATE_COLUMNS
from presage.datasets.schema.names import NameMapping
from presage.wording import counted

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_END = "END"
_NEEDED: Final = ("input_tokens", "output_tokens")

MISSING_SHARE: Final = 0.02
"""From this share of LLM steps without a count, `missing_counts_warning` warns."""

_AGENTS_NAMED: Final = 5
_MANY_NAMES: Final = 10
FEW: Final = 3
"""Workflows of an agent below which its absence from half of them says nothing."""


def describe(table: pa.Table) -> dict[str, Any]:
    """Describe a valid trace in canonical order, as plain data: `workflows`, `steps`, `names` (the patterns that folded
    names, `NameMapping.to_dict`), `missing_counts` (below), and `workflow_types`, for each

    - `workflows`, `steps`, `tasks` (distinct, 0 without tasks), `agents` {name: steps};
    - `length` quantiles of steps a workflow {"min", "p25", "p50", "p75", "p90", "p99", "max", "mean"}, and
      `one_step_share`, the share of workflows with one step;
    - the same of `input_tokens`, `output_tokens`, `cached_input_tokens` a step, None if no step has them;
    - `finish_reasons` {reason: share} of the steps that have one, the most frequent first;
    - `censored_share` and `success_share` of workflows (None if not recorded), `text_share` of steps with a text,
      `fan_out_share` of steps with several parents or a sibling of the same parent;
    - `states` {column: {"size", "share"}} for state columns with at least one state;
    - `agents_once`, the number of agents that only one workflow has;
    - `appeared` and `vanished`: agents of at least FEW workflows that the earlier half of the workflows, by start, does
      not have, and that the later half does not have;
    - `started_at`: [first, last] in ISO 8601, or None;
    - `call_graph` {agent: {next: {"count", "probability"}}}; END only from workflows that reached it.

    `missing_counts` is {column: {"steps", "of", "share", "agents": {agent: share of its steps}}}: LLM steps without
    `input_tokens` or `output_tokens`, the agent that lacks most first.
    """
    kinds = table["workflow_type"]
    return {
        "workflows": int(_starts(table).sum()),
        "steps": table.num_rows,
        "names": NameMapping.of(table).to_dict(),
        "missing_counts": _missing_counts(table),
        "workflow_types": {
            name: _describe_type(table.filter(pc.equal(kinds, name))) for name in sorted(pc.unique(kinds).to_pylist())
        },
    }


def agents_of(table: pa.Table) -> list[dict[str, Any]]:
    """The agents of the LLM steps of a valid trace, those with most steps first: `agent`, `workflow_type`, `steps`, and
    the most frequent `model` and `system_prompt` (None where none is recorded).
    """
    llm = table.filter(pc.equal(table["kind"], "llm")) if "kind" in table.column_names else table
    keys = ["workflow_type", "agent"]
    counted_steps = llm.group_by(keys).aggregate([([], "count_all")])
    agents = {(row["workflow_type"], row["agent"]): row["count_all"] for row in counted_steps.to_pylist()}
    latest: dict[str, dict[tuple[str, str], Any]] = {"model": {}, "system_prompt": {}}
    for column, most_frequent in latest.items():
        if column in llm.column_names:
            values = llm.filter(llm[column].is_valid()).group_by([*keys, column]).aggregate([([], "count_all")])
            for row in values.sort_by([("count_all", "ascending"), (column, "descending")]).to_pylist():
                most_frequent[row["workflow_type"], row["agent"]] = row[column]
    return [
        {
            "agent": agent,
            "workflow_type": workflow_type,
            "steps": steps,
            **{column: most_frequent.get((workflow_type, agent)) for column, most_frequent in latest.items()},
        }
        for (workflow_type, agent), steps in sorted(agents.items(), key=lambda counted: (-counted[1], counted[0]))
    ]


def missing_counts_warning(description: Mapping[str, Any]) -> str | None:
    """What a reader of `describe` should know of missing token counts, and do; None below MISSING_SHARE."""
    lines = [
        f"{column} are missing on {gaps['steps']:,} of {counted(gaps['of'], 'LLM step')} ({gaps['share']:.1%}): "
        f"{_named(gaps['agents'])} of their steps."
        for column, gaps in description.get("missing_counts", {}).items()  # the metrics of earlier versions have none
        if gaps["share"] >= MISSING_SHARE
    ]
    if not lines:
        return None
    return (
        f"{' '.join(lines)} Training and replay estimate them. Record them: a client that streams answers gets counts "
        'with stream_options: {"include_usage": true}.'
    )


def generated_names_warning(description: Mapping[str, Any]) -> str | None:
    """What a reader of `describe` should know of names that look generated, and do; None if they do not."""
    types = description.get("workflow_types", {})
    lines, ways = [], []
    if len(types) >= _MANY_NAMES and 2 * len(types) >= description["workflows"]:
        pattern, name = _pattern(types) or ("REGEX", "NAME")
        ways.append(f"--names with the file \"[workflow_types]\\n'{pattern}' = '{name}'\"")
        lines.append(f"{counted(len(types), 'workflow type')} for {counted(description['workflows'], 'workflow')}")
    for name, of_type in types.items():
        once = of_type.get("agents_once", 0)  # the metrics of earlier versions have none
        if once >= _MANY_NAMES and 2 * once >= len(of_type["agents"]):
            lines.append(f"{once} of {counted(len(of_type['agents']), 'agent')} of {name} seen in one workflow only")
            ways.append(f"--agent-pattern '{'='.join(_pattern(of_type['agents']) or ('REGEX', 'NAME'))}'")
    if not lines:
        return None
    return (
        f"names look generated: {'; '.join(lines)}. Nothing is learnt about a name that never comes again: keep ids "
        "and topics out of the names of agents and workflows (gen_ai.agent.name, gen_ai.workflow.name), or fold them "
        f"(docs/traces.md): presage traces ingest with {' and '.join(dict.fromkeys(ways))}"
    )


def _pattern(names: Iterable[str]) -> tuple[str, str] | None:
    """A pattern of most of the names, which begin or end alike, and what to fold them to; None if that is not plain."""
    words = [re.findall(r"\w+|\W+", name) or [""] for name in names]
    best = 0, "", 0
    for turn in (1, -1):
        groups: dict[str, list[list[str]]] = {}
        for parts in words:
            groups.setdefault(parts[::turn][0], []).append(parts[::turn])
        alike = max(groups.values(), key=len)
        common = [
            parts_alike[0]
            for parts_alike in takewhile(lambda parts_alike: len(set(parts_alike)) == 1, zip(*alike, strict=False))
        ]
        best = max(
            best,
            (len(alike), "".join(common[::turn]), turn),
            key=lambda shared_start: (shared_start[0], len(shared_start[1])),
        )
    count, shared, turn = best
    name = shared.strip(" -_:/.#")
    if count < max(FEW, len(words) / 2) or not name or set("='") & set(name):
        return None
    pattern = re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", shared)
    return (f"{pattern}.*" if turn == 1 else f".*{pattern}"), name


def _named(shares: Mapping[str, float]) -> str:
    named = ", ".join(f"{agent} {share:.0%}" for agent, share in list(shares.items())[:_AGENTS_NAMED])
    return f"{named}, and {len(shares) - _AGENTS_NAMED} more" if len(shares) > _AGENTS_NAMED else named


def _missing_counts(table: pa.Table) -> dict[str, Any]:
    llm = table.select(["agent", "kind", *_NEEDED]).filter(pc.equal(table["kind"], "llm"))
    steps, gaps_of = _counts(llm["agent"]), {}
    for column in _NEEDED:
        missing = _counts(llm["agent"].filter(pc.is_null(llm[column])))
        if missing:
            gaps_of[column] = {
                "steps": (total := sum(missing.values())),
                "of": len(llm),
                "share": total / len(llm),
                "agents": {agent: count / steps[agent] for agent, count in missing.items()},
            }
    return gaps_of


def _describe_type(table: pa.Table) -> dict[str, Any]:
    starts = _starts(table)
    lengths = np.diff(np.r_[np.flatnonzero(starts), table.num_rows])
    heads = table.filter(pa.array(starts))
    times = pc.min_max(table["started_at"]).as_py()
    reasons = _counts(pc.drop_null(table["finish_reason"]))
    return {
        "workflows": int(starts.sum()),
        "steps": table.num_rows,
        "tasks": pc.count_distinct(heads["task"], mode="only_valid").as_py(),
        "agents": _counts(table["agent"]),
        "length": _quantiles(lengths),
        "one_step_share": float((lengths == 1).mean()),
        **{
            name: _quantiles(pc.drop_null(table[name]).to_numpy())
            for name in ("input_tokens", "output_tokens", "cached_input_tokens")
        },
        "finish_reasons": {reason: count / sum(reasons.values()) for reason, count in reasons.items()},
        "censored_share": 1.0 - _mean(heads["complete"]) if len(heads) else None,
        "success_share": _mean(heads["success"]) if heads["success"].null_count < len(heads) else None,
        "text_share": _mean(pc.or_(pc.is_valid(table["input_text"]), pc.is_valid(table["output_text"]))),
        "fan_out_share": _fan_out_share(table, np.cumsum(starts) - 1),
        "states": {
            name: {"size": table.schema.field(name).type.list_size, "share": _mean(pc.is_valid(table[name]))}
            for name in STATE_COLUMNS
            if name in table.column_names and table[name].null_count < table.num_rows
        },
        **_over_time(table, np.cumsum(starts) - 1, heads["started_at"]),
        "started_at": [times["min"].isoformat(), times["max"].isoformat()] if times["min"] is not None else None,
        "call_graph": _call_graph(table, starts),
    }


def _over_time(table: pa.Table, workflow: NDArray[np.int64], started: pa.ChunkedArray) -> dict[str, Any]:
    """Agents that one workflow has, that appeared and that vanished; `workflow` numbers that of each row, int64 [n]."""
    agents = table["agent"].combine_chunks().dictionary_encode()
    names, agent = agents.dictionary.to_pylist(), agents.indices.to_numpy()
    order = np.argsort(np.argsort(pc.fill_null(started.cast(pa.int64()), 0).to_numpy(), kind="stable"))
    pairs = np.unique(np.stack([agent, order[workflow]]), axis=1)
    counts = np.bincount(pairs[0], minlength=len(names))
    later = np.bincount(pairs[0], pairs[1] >= len(order) // 2, minlength=len(names))
    frequent = (counts >= FEW) & (started.null_count == 0)
    return {
        "agents_once": int((counts == 1).sum()) if len(order) > 1 else 0,
        "appeared": sorted(names[i] for i in np.flatnonzero(frequent & (later == counts))),
        "vanished": sorted(names[i] for i in np.flatnonzero(frequent & (later == 0))),
    }


def _starts(table: pa.Table) -> NDArray[np.bool_]:
    """Whether each row is the first of its workflow; in canonical order that is where step is 0."""
    starts: NDArray[np.bool_] = table["step"].to_numpy() == 0
    return starts


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    counts = {str(entry["values"]): int(entry["counts"]) for entry in pc.value_counts(column).to_pylist()}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _mean(flags: pa.ChunkedArray) -> float:
    return float(pc.mean(flags).as_py())


def _quantiles(values: NDArray[np.int64]) -> dict[str, float] | None:
    if not len(values):
        return None
    names = ["min", *(f"p{round(q * 100)}" for q in _QUANTILES[1:-1]), "max"]
    figures = np.quantile(values, _QUANTILES)
    return {**{name: float(v) for name, v in zip(names, figures, strict=True)}, "mean": float(values.mean())}


def _fan_out_share(table: pa.Table, workflow: NDArray[np.int64]) -> float:
    """Share of steps that waited for several parents, or share a parent with another step."""
    parents = table["parent_steps"].combine_chunks()
    wide = pc.fill_null(pc.greater(pc.list_value_length(parents), 1), False).to_numpy(zero_copy_only=False).copy()
    rows = pc.list_parent_indices(parents).to_numpy()
    if len(rows):
        # Parents are numbered within a workflow, so the pair tells them apart across workflows.
        named = np.stack([workflow[rows], pc.list_flatten(parents).to_numpy()], axis=1)
        _, which, often = np.unique(named, axis=0, return_inverse=True, return_counts=True)
        wide[rows[often[which.reshape(-1)] > 1]] = True
    return float(wide.mean())


def _call_graph(table: pa.Table, starts: NDArray[np.bool_]) -> dict[str, dict[str, dict[str, float]]]:
    agents = table["agent"].combine_chunks().dictionary_encode()
    names = [*agents.dictionary.to_pylist(), _END]
    now = agents.indices.to_numpy()
    last = np.r_[starts[1:], True]
    following = np.where(last, len(names) - 1, np.r_[now[1:], 0])
    counts_here = ~last | table["complete"].to_numpy()  # what follows a cut is unknown, not END
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (now[counts_here], following[counts_here]), 1)
    graph: dict[str, dict[str, dict[str, float]]] = {}
    for agent in sorted(range(len(names) - 1), key=names.__getitem__):
        total = int(counts[agent].sum())
        graph[names[agent]] = {
            names[to]: {"count": int(counts[agent, to]), "probability": float(counts[agent, to] / total)}
            for to in np.argsort(-counts[agent], kind="stable")
            if counts[agent, to]
        }
    return graph
