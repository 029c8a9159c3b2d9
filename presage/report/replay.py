"""The report of a replay, from its `metrics.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from presage.report.blocks import Document, Facts, Metrics, Panel, Picture, Section, Table, Text, signed
from presage.report.plot import PlotPoint, interval_plot, line_plot, round_axis

_FIGURES: Final = {
    "hit rate": ("hit_rate", 3),
    "completion s": ("completion_mean_s", 1),
    "its p95": ("completion_p95_s", 1),
    "first token s": ("ttft_mean_s", 2),
    "queueing s": ("queueing_mean_s", 2),
    "worst": ("longest_wait_s", 1),
    "makespan s": ("makespan_s", 0),
    "output tokens/s": ("throughput_tokens_per_s", 0),
    "preempted": ("preemptions", 0),
    "recomputed tokens": ("recomputed_tokens", 0),
    "their share of the time": ("recomputing_share", 3),
}

_TAILS: Final = {
    "completion s, p99": ("completion_p99_s", 1),
    "start delay s": ("start_delay_mean_s", 2),
    "p99 of starts": ("start_delay_p99_s", 2),
    "first token of later steps s": ("later_ttft_mean_s", 2),
    "p99 of later steps": ("later_ttft_p99_s", 2),
    "p99 of all first tokens": ("ttft_p99_s", 2),
}

_DRAWN: Final = {
    "Mean completion, s": ("completion_mean_s", 1),
    "Hit rate": ("hit_rate", 3),
}

_TIERS: Final = {
    "gpu": ("hit_tokens_gpu", 0),
    "host": ("hit_tokens_host", 0),
    "loaded, prefetched or again included": ("loaded_tokens", 0),
}

_ROUTED: Final = {
    "held by the router, s": ("held_mean_s", 2),
    "moves": ("moves", 0),
    "imbalance of prefill": ("imbalance", 2),
    "running": ("running_share", 2),
    "of it recomputed": ("recomputed_share", 3),
    "idle": ("idle_share", 2),
    "unused": ("unused_share", 2),
}

_BY_AGENT: Final = "ttft_mean_s of "


def document(metrics: Metrics) -> Document:
    """The report of one replay."""
    policies = metrics["policies"]
    agents = sorted({name for figures in policies.values() for name in figures if name.startswith(_BY_AGENT)})
    by_agent = [
        [name.removeprefix(_BY_AGENT), *(_figure(figures.get(name), 2) for figures in policies.values())]
        for name in agents
    ]
    parts = [
        _pictures(metrics),
        Section(f"Policies side by side, {_pauses(metrics)}", [_side_by_side(metrics), *_notes(policies)], True),
        Section("Tails", [_table(policies, _TAILS)], True),
        _shares(policies),
        _routing(policies),
        _placed(policies),
        _over_time(policies),
        _queueing(policies),
        _tiers(policies),
        _evictions(policies),
        Section("First token by agent, s", [Table(["", *policies], by_agent)]),
        Section("What was replayed", [Facts(_facts(metrics))]),
    ]
    verdict = metrics.get("verdict")  # not of a promotion's replay, which its gates judge
    text = f"{verdict['text']} {verdict['regime']['text']}" if verdict else ""
    return Document("What would the policies have done?", _lead(metrics), parts, verdict=text)


def _pauses(metrics: Metrics) -> str:
    return "times with pauses" if metrics["workload"].get("with_pauses") else "times without pauses"


def _pictures(metrics: Metrics) -> Section:
    """Completion time, hit rate and time saved, a row for each policy."""
    policies, verdict = metrics["policies"], metrics.get("verdict")
    panels = []
    for title, (key, digits) in _DRAWN.items():
        rows = {name: _point(figures[key]) for name, figures in policies.items()}
        panels.append(Panel(title, interval_plot(rows, f"{{:.{digits}f}}".format)))
    caption = f"Means over {metrics['seeds']} seeds, {_pauses(metrics)}; bars are 95 % intervals."
    if verdict and verdict["sooner"]:
        rows = {name: _point(saved, 100.0) for name, saved in verdict["sooner"].items()}
        drawn = interval_plot(rows, "{:+.1f}".format, mark=0.0)
        panels.append(Panel(f"Sooner than {verdict['against']}, %", drawn))
        caption += (
            " The order of arrivals moves all policies alike, so their bars overlap; the time saved compares each run "
            f"with that of {verdict['against']} in the same order."
        )
    return Section("Completion time and hit rate", [Picture("policies", caption, panels)])


def _point(estimate: Mapping[str, Any], times: float = 1.0) -> PlotPoint:
    low, high = [end * times for end in estimate["ci95"]] if estimate["ci95"] else (None, None)
    return PlotPoint(0.0, estimate["mean"] * times, low, high)


def _side_by_side(metrics: Metrics) -> Table:
    """A row for each policy, with the time it saves beside its completion time."""
    table = _table(metrics["policies"], _FIGURES)
    verdict = metrics.get("verdict")
    if not verdict or not verdict["sooner"]:
        return table
    saved = [_saved(verdict["sooner"].get(name)) for name in metrics["policies"]]
    rows = [[*row[:3], cell, *row[3:]] for row, cell in zip(table.rows, saved, strict=True)]
    return Table([*table.head[:3], "% sooner", *table.head[3:]], rows)


def _saved(saved: Mapping[str, Any] | None) -> str:
    if saved is None:
        return "–"
    if saved["ci95"] is None:
        return signed(saved["mean"] * 100, 1)
    low, high = (signed(end * 100, 1) for end in saved["ci95"])
    return f"{signed(saved['mean'] * 100, 1)} ({low} to {high})"


def _lead(metrics: Metrics) -> str:
    load, engine = metrics["workload"], metrics["engine"]
    several = f"{metrics['engines']} engines, the first with a cache" if "engines" in metrics else "a cache"
    host = f" and {engine['host_cache_tokens']} in the host" if engine["host_cache_tokens"] else ""
    if load.get("as_recorded"):
        came = "as recorded"
    elif load["concurrency"] is not None:
        came = f"{load['concurrency']} at once"
    else:
        came = f"{load['rate']:g} a second with cv {load.get('cv', 1.0):g}"
    lead = (
        f"{load['workflows']} workflows, {load['requests']} requests, {came}; {load['prompts']} prompts; {several} "
        f"of {engine['cache_tokens']} tokens{host}; costs: {engine['cost']['source']}. Decisions are those of vLLM's "
        f"own scheduler, in virtual time. Mean over {metrics['seeds']} seeds, ± half the width of the 95 % interval "
        "(Student's t), or its ends where it is cut at 0, since nothing here can be negative. "
    )
    if load.get("with_pauses"):
        lead += "Completion is from arrival to end, pauses between steps included."
    else:
        lead += "Completion leaves out pauses: it is the time in which a workflow has a request waiting or running."
    verdict = metrics.get("verdict") or {}
    if verdict.get("nothing_to_gain"):
        lead = f"Nothing can be gained from the cache here: {verdict['nothing_to_gain']}. {lead}"
    if load["left_out"]:
        lead += f" {load['left_out']} workflows left out: their request sizes were not recorded."
    if load.get("estimated_sizes"):
        lead += f" Request sizes of {load['estimated_sizes']} workflows were not all recorded, and are estimated."
    return f"{lead} Interrupted: only the runs that were done are counted." if metrics["interrupted"] else lead


def _notes(policies: Mapping[str, Any]) -> list[Text]:
    notes = []
    for name, figures in policies.items():
        if "at_once" in figures:
            notes.append(Text(f"{name}: {figures['at_once']} workflows at once"))
        if "switched_off" in figures:
            notes.append(Text(f"{name}: {', '.join(figures['switched_off'])} failed and was switched off"))
    return notes


def _shares(policies: Mapping[str, Any]) -> Section | None:
    rows = [
        [name, *(_share(figures, figure) for figure, _ in _FIGURES.values())]
        for name, figures in policies.items()
        if "share_of_oracle" in figures
    ]
    crossed = any("+" in name for name in policies)
    gain = "stjf-oracle gains over fcfs, with the same policy" if crossed else "the oracle gains over stock"
    text = Text("A dash: what the oracle gains is within the noise of the seeds, so no share of it means anything.")
    table = Table(["policy", *_FIGURES], rows)
    return Section(f"Share of what {gain}", [text, table], in_terminal=True) if rows else None


def _queueing(policies: Mapping[str, Any]) -> Section | None:
    """Queueing time of each scheduler: mean, share of the oracle's saving, and the longest wait relative to FCFS."""
    rows = []
    for name, figures in policies.items():
        first_come = policies.get(f"{name.partition('+')[0]}+fcfs")
        if first_come is not None:
            worst = figures["longest_wait_s"]["mean"] / max(first_come["longest_wait_s"]["mean"], 1e-9)
            rows.append(
                [
                    name,
                    _figure(figures["queueing_mean_s"], 2),
                    "100%" if name.endswith("+stjf-oracle") else _share(figures, "queueing_mean_s"),
                    _figure(figures["longest_wait_s"], 1),
                    f"{worst:.2f}",
                    _figure(figures.get("promotions"), 0),
                ]
            )
    head = ["policy", "queueing s", "of the oracle's saving", "worst s", "of the worst of fcfs", "promoted by ageing"]
    return Section("Queueing, from arrival to the first selection", [Table(head, rows)], True) if rows else None


def _routing(policies: Mapping[str, Any]) -> Section | None:
    routed = {name: figures for name, figures in policies.items() if "moves" in figures}
    if not routed:
        return None
    text = Text(
        "The last four columns are shares of tokens times seconds of all caches: contexts being computed, prompt "
        "tokens computed again, contexts that wait for a tool and are found again, and the rest."
    )
    return Section("The fleet", [text, _table(routed, _ROUTED)], in_terminal=True)


def _placed(policies: Mapping[str, Any]) -> Section | None:
    """Requests by policy, reason and engine."""
    placed = {name: figures["placed"] for name, figures in policies.items() if "placed" in figures}
    if not placed:
        return None
    engines = sorted({engine for reasons in placed.values() for counts in reasons.values() for engine in counts})
    rows = [
        [name, reason, *(f"{counts.get(engine, 0):.0f}" for engine in engines)]
        for name, reasons in placed.items()
        for reason, counts in reasons.items()
    ]
    return Section("Where requests went, and why", [Table(["policy", "reason", *engines], rows)])


def _over_time(policies: Mapping[str, Any]) -> Section | None:
    """Load and cache of each engine, a drawing for each policy; all drawings of a picture have the same axes."""
    courses = {name: figures["course"] for name, figures in policies.items() if figures.get("course")}
    if not courses:
        return None
    held = {name: {"held by the router": course["held"], **course["under_way"]} for name, course in courses.items()}
    used = {name: course["cache_in_use"] for name, course in courses.items()}
    windows = {name: course["window_s"] for name, course in courses.items()}
    first = "with the first seed, by windows of a sixtieth of the run"
    load = f"Requests held by the router, and requests of each engine, waiting or running, {first}."
    cache = (
        f"Share of each engine's cache that its requests use, {first}. The rest may hold prefixes to be found again."
    )
    pictures = [
        _courses("fleet-load", load, held, windows, "requests"),
        _courses("fleet-cache", cache, used, windows, "share of the cache"),
    ]
    return Section("The fleet over time", pictures)


def _courses(
    name: str, caption: str, courses: Mapping[str, Mapping[str, list[float]]], windows: Mapping[str, float], label: str
) -> Picture:
    """A drawing for each policy, a line for each series."""
    series = next(iter(courses.values()))
    count = len(next(iter(series.values())))
    x = round_axis([0.0, count * max(windows.values())], "seconds")
    y = round_axis([0.0, *(value for course in courses.values() for line in course.values() for value in line)], label)
    panels = []
    for policy, course in courses.items():
        lines = [
            [PlotPoint((window + 0.5) * windows[policy], value) for window, value in enumerate(line)]
            for line in course.values()
        ]
        panels.append(Panel(policy, line_plot(lines, x, y, dots=False)))
    return Picture(name, caption, panels, tuple(series))


def _tiers(policies: Mapping[str, Any]) -> Section | None:
    with_host = {name: figures for name, figures in policies.items() if "loaded_tokens" in figures}
    return Section("Hit tokens by tier", [_table(with_host, _TIERS)], in_terminal=True) if with_host else None


def _evictions(policies: Mapping[str, Any]) -> Section | None:
    rows = []
    for name, figures in policies.items():
        counts = [figures[f"evicted_{kind}"] for kind in ("blank", "retired", "active")]
        held = counts[1]["mean"] + counts[2]["mean"]
        rows.append(
            [name, *(_figure(evicted, 0) for evicted in counts), f"{counts[2]['mean'] / held:.1%}" if held else "–"]
        )
    head = ["policy", "blank", "retired", "active", "active, share of non-blank"]
    return Section("Evicted blocks by state", [Table(head, rows)], in_terminal=True) if rows else None


def _table(policies: Mapping[str, Any], figures: Mapping[str, tuple[str, int]]) -> Table:
    """A row for each policy, a column for each figure."""
    rows = [
        [name, *(_figure(by_key.get(key), digits) for key, digits in figures.values())]
        for name, by_key in policies.items()
    ]
    return Table(["policy", *figures], rows)


def _figure(estimate: Mapping[str, Any] | None, digits: int) -> str:
    if estimate is None:
        return "–"
    mean, limits = estimate["mean"], estimate["ci95"]
    if limits is None:
        return f"{mean:.{digits}f}"
    low, high = limits
    if math.isclose(high - mean, mean - low, rel_tol=1e-6, abs_tol=1e-9):
        return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _share(figures: Mapping[str, Any], figure: str) -> str:
    """The share of the oracle's gain; a dash if that gain is not significant."""
    gained = figures.get("share_of_oracle", {}).get(figure)
    return "–" if gained is None else f"{gained:.0%}"


def _facts(metrics: Metrics) -> dict[str, str]:
    held = {name: str(value) for name, value in metrics["workload"].items() if value not in (None, False)}
    engine = {name: str(value) for name, value in metrics["engine"].items() if name != "cost"}
    cost = {name: str(value) for name, value in metrics["engine"]["cost"].items() if value is not None}
    everything = held | engine | cost | {"forecasts": metrics["forecasts"] or "none"}
    if metrics.get("replayed"):
        everything["learnt from"] = metrics["replayed"]
    return {name.replace("_", " "): value for name, value in everything.items()}
