"""Traces that continue others by a link, as work does that was handed over through a queue.

The first span of a trace may link to spans of others. A trace that links to one continues its workflow: it gets the id
and the type of that one. Where it links to several, as the consumer of a batch does, or names another session or
workflow, it stays a workflow of its own; whether any of them reached its end is unknown then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from presage.datasets.adapters.spans.conventions import CONTINUED, LINKS_DOUBTED, LINKS_MISSING
from presage.datasets.adapters.spans.tree import TraceFacts


def followed(
    traces: Mapping[str, TraceFacts], empty: Set[str], notices: Counter[str]
) -> dict[str, tuple[str, TraceFacts]]:
    """The workflow id of each trace, and its facts, where `links` is now the trace that it continues.

    `traces` are all with links to or from others, `empty` those of them without a step.
    """
    found: dict[str, tuple[str, TraceFacts]] = {}
    before: dict[str, str] = {}
    doubted: set[str] = set()
    for trace, facts in traces.items():
        links = (facts.links or "").split()
        here = [one for one in links if one in traces and (one not in empty or traces[one].links)]
        if len(links) == 1 and here:
            before[trace] = links[0]
        elif links and trace not in empty:
            notices[LINKS_DOUBTED if here else LINKS_MISSING] += 1
            doubted.update([trace, *here] if here else ())
    for trace in sorted(traces):
        path = {trace: None}  # back to the first, or around a circle
        while trace not in found and (trace := before.get(trace, "")) and trace not in path:
            path[trace] = None
        for one in reversed(path):
            facts, last = traces[one], before.get(one, "")
            name, first = found.get(last, (facts.workflow_id, facts))
            if one in found:
                continue
            if facts.session not in (None, name) or None is not facts.workflow != first.workflow is not None:
                notices[LINKS_DOUBTED] += 1
                doubted |= {one, last}
            elif first is not facts:
                notices[CONTINUED] += one not in empty
                last = (first.links or "") if last in empty else last
                of_first = {field: getattr(first, field) for field in ("workflow", "service", "top", "rooted")}
                found[one] = name, facts._replace(links=last, opened=0, **of_first)
                continue
            found[one] = facts.workflow_id, facts._replace(links=None)
    return {
        trace: (name, facts._replace(whole=facts.whole and trace not in doubted))
        for trace, (name, facts) in found.items()
    }
