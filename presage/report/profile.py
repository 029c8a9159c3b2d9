"""The report of a profile, from its `metrics.json`: what the application does, how surely, how well it is covered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from presage.predictors.profile.templates import MOST_EARLIER, MOST_REPEATS
from presage.report.blocks import (
    Block,
    Card,
    Document,
    Folded,
    Metrics,
    Picture,
    Section,
    Table,
    Text,
    count,
    interval,
    judged_on,
    number,
    version_of,
)
from presage.report.next_agent import data, made
from presage.report.traces import AGENTS, END, draw_call_graph
from presage.wording import counted

_NOTATION: Final = (
    "`a b`: one after the other; `x{3,12}`: 3 to 12 times; `x?`: once or not at all; `(a | b)`: one of them; "
    "`[a ‖ b]{2,5}`: 2 to 5 parallel steps of these agents."
)
_FIGURES: Final = {
    "coverage": "whole workflows covered",
    "call_coverage": "calls covered",
    "accuracy": "accuracy",
    "top2": "recall of two",
    "set_recall": "recall of the set",
    "set_precision": "precision of the set",
}
_NUMBERS: Final = {"output_tokens": "output tokens", "return_s": "return, s", "input_tokens": "input tokens"}
_STATES: Final = 60
_TEMPLATES: Final = 40
_EXCERPT: Final = 40
Described = Mapping[str, Any]


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    types = metrics["by_workflow_type"]
    described = [_type(name, described_type) for name, described_type in types.items()]
    sections = [*described, _figures(metrics), _all_states(types), data(metrics), made(metrics)]
    return Document(
        f"Profile: {metrics['model'] or 'an application'}{version_of(metrics)}",
        _lead(metrics),
        sections,
        _cards(metrics),
    )


def type_sections(called: str, types: Mapping[str, Described]) -> Document:
    """The profiles alone, without figures."""
    return Document(f"Profile: {called}", _NOTATION, [_type(name, described) for name, described in types.items()])


def _lead(metrics: Metrics) -> str:
    doubtful = [name for name, described in metrics["by_workflow_type"].items() if not described["confident"]]
    text = (
        f"What the application does, as its traces show it. Judged on {judged_on(metrics)}, all held out. {_NOTATION}"
    )
    if doubtful:
        text += f" NOT CONFIDENT, too little evidence to act on: {', '.join(doubtful)}."
    return text


def _cards(metrics: Metrics) -> list[Card]:
    cards = []
    for name, label in (("coverage", "of whole workflows covered"), ("accuracy", "accuracy of the next step")):
        if metrics.get(name) is not None:
            low, high = metrics[f"{name}_ci95"]
            cards.append(Card(number(metrics[name]), label, f"95 % {number(low)} to {number(high)}"))
    return cards


def _type(name: str, of: Described) -> Section:
    covered = f"{of['covered_in_training']:.1%} of the training workflows"
    if of.get("coverage") is not None:
        covered += (
            f", {interval(of['coverage'], of['coverage_ci95'])} of {counted(of['workflows'], 'held-out workflow')}"
        )
    path, likelihood = of["dominant_path"]
    facts = {
        "covers": covered,
        "made of": f"{counted(of['trained_on'], 'workflow')}; level of detail: {of['level']}",
        "likeliest path": f"{' → '.join(_run_lengths(path)) or 'none'} (probability {likelihood:.3f})",
        "rare calls left out": f"{of['pruned']:.1%} of all calls",
        "calls not seen yet": f"{of['unseen']:.1%} of the calls of a further workflow, expected",
        "confident": "yes" if of["confident"] else f"NO: {'; '.join(of['doubts'])}",
    }
    blocks: list[Block] = [Text(of["expression"] or "no whole workflow: no expression")]
    blocks += [Text(f"{label}: {value}") for label, value in (facts | _prompt_facts(of["templates"])).items()]
    blocks += [Text(f"Warning: {warning}.") for warning in of["warnings"]]
    blocks += [Picture(f"graph-{_file_name(name)}", _CAPTION, [_graph(name, of)], wide=True), _agents(of)]
    blocks += [Folded("How the prompts of each agent begin", [Text(_SEGMENTS), _templates(of["templates"])])] * bool(
        of["templates"]["of_agents"]
    )
    return Section(name, blocks, in_terminal=True)


_CAPTION: Final = (
    "The automaton without pruned calls: an agent that stands several times has several states, in order of first use; "
    f"beyond {AGENTS} states, one an agent. The number is the probability; blue leads down, orange back up; ▸ marks "
    "where workflows begin."
)


def _run_lengths(path: list[str]) -> list[str]:
    """Equal neighbours as one."""
    runs: list[tuple[str, int]] = []
    for agent in path:
        times = runs.pop()[1] if runs and runs[-1][0] == agent else 0
        runs.append((agent, times + 1))
    return [agent if times == 1 else f"{agent} × {times}" for agent, times in runs]


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:40]


def _graph(name: str, described: Described) -> Any:
    states = described["states"]
    seen: dict[str, int] = {}
    labels = ["START"]
    for state in states[1:]:
        seen[state["agent"]] = seen.get(state["agent"], 0) + 1
        again = seen[state["agent"]]
        labels.append(state["agent"] if again == 1 or len(states) - 1 > AGENTS else f"{state['agent']} ({again})")
    counts: dict[str, dict[str, int]] = {}
    visits: dict[str, int] = {}
    for label, state in zip(labels[1:], states[1:], strict=True):
        visits[label] = visits.get(label, 0) + state["visits"]
        after = counts.setdefault(label, {})
        for to, times, _, _, _, kept in state["next"]:
            if kept:
                called = END if to is None else labels[to]
                after[called] = after.get(called, 0) + times
    graph = {
        a: {b: {"count": times, "probability": times / sum(after.values())} for b, times in after.items()}
        for a, after in counts.items()
    }
    return draw_call_graph(name, graph, visits)


def _agents(described: Described) -> Table:
    shown = {
        name: label for name, label in _NUMBERS.items() if any(name in about for about in described["agents"].values())
    }
    rows = []
    for agent, about in sorted(
        described["agents"].items(), key=lambda agent_about: -agent_about[1]["steps_a_workflow"]
    ):
        cells = [agent, f"{about['steps_a_workflow']:.2f}", f"{about['share_of_workflows']:.0%}"]
        for name in shown:
            numbers = about.get(name)
            cells.append("–" if numbers is None else _percentiles(numbers))
        rows.append(cells)
    labels = [f"{label}: median [95 %], 90 %, 99 %" for label in shown.values()]
    return Table(["agent", "steps a workflow", "of the workflows", *labels], rows)


_SEGMENTS: Final = (
    "One row a part of the prompt, in order: a stem is static, a gap unknown, all others are copies of earlier texts "
    "of the workflow; lengths in characters. Support: tasks whose prompts match up to here. Precision: prompts held "
    f"out in training that do. The narrowest condition counts. Up to {_TEMPLATES} templates, those of most prompts."
)


def _prompt_facts(judged: Described) -> dict[str, str]:
    facts = {"prompts": judged["statement"]}
    if judged["of_agents"] and "prompts" in judged:
        facts["prompts, held out"] = (
            f"{counted(judged['prompts'], 'prompt')}, {judged['predicted']:,} with a predicted beginning: precision "
            f"{number(judged['precision'])}, recall {number(judged['recall'])} of all characters, "
            f"{number(judged['recall_beyond_cache'])} of those that no cache holds"
            if judged["prompts"]
            else "no prompt in the test traces"
        )
    return facts


def _templates(templates: Described) -> Table:
    most = sorted(templates["of_agents"], key=lambda template: -template["trained_on"])[:_TEMPLATES]
    rows = []
    for template in sorted(most, key=lambda template: (template["agent"], -template["trained_on"])):
        where = _where(template)
        for index, part in enumerate(template["segments"]):
            text = part.get("text")
            quoted = "" if text is None else f": {text[:_EXCERPT]!r}{'…' * (len(text) > _EXCERPT)}"
            rows.append(
                [
                    where,
                    f"{part['segment']}{quoted}",
                    f"{part['support']:.0%}",
                    "–" if part["precision"] is None else f"{part['precision']:.3f}",
                    "yes" if index < template["exact_segments"] else "no",
                ]
            )
    return Table(["agent", "part of the prompt", "support", "precision", "predicted"], rows, words=frozenset({0, 1}))


def _where(template: Described) -> str:
    """The agent and the context of a template."""
    before, times = template["previous"], template["repeats"]
    words: str = template["agent"]
    if template["earlier"] is not None:
        words += (", first run", ", second run", ", later run")[min(template["earlier"], MOST_EARLIER)]
    if before:
        words += f", after {before}"
        words += "" if times is None else f" × {times}{'+' * (times == MOST_REPEATS)}"
    return f"{words}, at the start" if before == "" else words


def _percentiles(numbers: Mapping[str, Any]) -> str:
    (low, high), (median, upper, most) = numbers["intervals"][0], numbers["values"]
    return f"{median:,.4g} [{low:,.4g}, {high:,.4g}], {upper:,.4g}, {most:,.4g}"


def _all_states(types: Mapping[str, Described]) -> Section:
    blocks = [Folded(name, [_states(described)]) for name, described in types.items()]
    return Section("Every state: steps left, and what follows with 95 % intervals", blocks)


def _states(described: Described) -> Table:
    rows = []
    names = [state["agent"] or "START" for state in described["states"]]
    for position, state in list(enumerate(described["states"]))[:_STATES]:
        after = [
            f"{'END' if to is None else f'{names[to]} #{to}'} {p:.2f} [{low:.2f}, {high:.2f}]"
            f"{'' if kept else ' pruned'}"
            for to, _, p, low, high, kept in state["next"]
        ]
        left = state["left"]
        rows.append(
            [
                f"{names[position]} #{position}",
                count(state["visits"]),
                "–" if left is None else f"{left['mean']:.1f}; 90 % {left['quantiles'][1]:.0f}",
                "–" if state["distance"] is None else str(state["distance"]),
                ", ".join(after[:8]),
            ]
        )
    return Table(["state", "visits", "steps left: mean", "at least", "what follows"], rows, frozenset({0, 4}))


def _figures(metrics: Metrics) -> Section:
    rows = [["ours", *(_cell(metrics, name) for name in _FIGURES)]]
    rows += [
        [baseline, *(_cell(figures, name) for name in _FIGURES)] for baseline, figures in metrics["baselines"].items()
    ]
    text = (
        "Figures on held-out workflows with 95 % intervals. The set has the likeliest next steps that together have a "
        "probability of .9. `variants` covers a workflow if the training set has one with the same agents in the same "
        "order."
    )
    table = Table(["", *_FIGURES.values()], rows, marked=frozenset({"ours"}))
    return Section("How well it describes new workflows", [Text(text), table], in_terminal=True)


def _cell(figures: Mapping[str, Any], name: str) -> str:
    return "–" if figures.get(name) is None else interval(figures[name], figures[f"{name}_ci95"])
