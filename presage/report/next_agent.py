"""The report of a next-agent predictor, from its `metrics.json`.

Keys that a cheaper run leaves out ("traces", "learning_curve", "ablation", "data") leave out their section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from presage.features.input_profiles import TARGETS, as_served
from presage.report import curves
from presage.report.blocks import (
    Block,
    Card,
    Document,
    Facts,
    Folded,
    Metrics,
    Section,
    Table,
    Text,
    accuracy_cells,
    ahead,
    count,
    gain,
    judged_on,
    number,
    signed,
    signed_interval,
    version_of,
)
from presage.report.data_warnings import training_warnings
from presage.report.traces import call_graphs, types_table
from presage.wording import counted


@dataclass(frozen=True)
class Against:
    """Ours against the best baseline at one moment, one number of steps ahead."""

    moment: str
    k: int
    best: str
    ours: float
    theirs: float
    difference: float
    ci95: Sequence[float]

    @property
    def leads(self) -> bool:
        """Ahead, significantly or not."""
        return self.difference > 0

    @property
    def verdict(self) -> str:
        """In words; "not shown" means that the interval contains 0."""
        low, high = self.ci95
        if self.difference == 0:
            return "level"
        if self.difference > 0:
            return "leads" if low > 0 else "ahead, not shown: the interval holds 0"
        return "BEHIND" if high < 0 else "BEHIND, not shown: the interval holds 0"


def ours(metrics: Metrics) -> str:
    """What the report calls the predictor it judges."""
    return f"{metrics['model'] or 'next-agent predictor'} (ours)"


def against_best(metrics: Metrics) -> list[Against]:
    """At each moment and horizon the baseline that is most often right; none where there are no baselines.

    Reads "moments" {moment: figures} of ours, "baselines" {name: {moment: figures}} and "differences" {name: {moment:
    {"difference", "ci95"}}}.
    """
    baselines, differences = metrics["baselines"], metrics["differences"]
    compared = []
    for moment, figures in metrics["moments"].items():
        for k, accuracy in enumerate(figures["accuracy"]):
            rivals = {name: by_moment[moment]["accuracy"][k] for name, by_moment in baselines.items()}
            if accuracy is None or not rivals:
                continue
            best = max(rivals, key=lambda name: rivals[name])
            by = differences[best][moment]
            compared.append(Against(moment, k, best, accuracy, rivals[best], by["difference"][k], by["ci95"][k]))
    return compared


def lead(metrics: Metrics) -> str:
    """The report in three sentences; the first is what an engine gets."""
    cells = against_best(metrics)
    judged = f"{in_engine(metrics)} Judged on {judged_on(metrics)}, all held out."
    bare = [moment for moment, figures in metrics["moments"].items() if not figures["states"]]
    if bare:
        judged += f" Without states at {' and '.join(bare)}: ids and token counts only."
    if not cells:
        return f"{judged} It was compared with no baseline."
    not_ahead = [cell for cell in cells if not cell.leads]
    shown = sum(cell.verdict == "leads" for cell in cells)
    text = f"{judged} Of {counted(len(cells), 'comparison')} with the best baseline it is ahead in "
    text += str(len(cells) - len(not_ahead))
    text += f"; in {shown} the 95 % interval of the paired difference lies above 0."
    if not_ahead:
        text += " It does not lead " + "; ".join(
            f"at {cell.moment}, {ahead(cell.k + 1)[-1]} ahead: {signed_interval(cell.difference, cell.ci95)} "
            f"to {cell.best}"
            for cell in not_ahead
        )
        text += "."
    return text


def in_engine(metrics: Metrics) -> str:
    """How often forecasts of the next step are right in an engine, and what a gateway would bring, in a sentence."""

    def right(of: Metrics) -> str:
        return " and ".join(f"{number(figures['accuracy'][0])} at {name}" for name, figures in of["moments"].items())

    served, gateway = right(as_served(metrics)), right(as_served(metrics, TARGETS["gateway"]))
    text = f"In an engine, of next steps forecast right: {served}"
    return f"{text}; with texts, in a gateway: {gateway}." if gateway != served else f"{text}."


def cards(metrics: Metrics) -> list[Card]:
    """Accuracy of the next step in an engine at each moment, beside the best baseline if both read the same inputs."""
    best = {cell.moment: cell for cell in against_best(metrics) if cell.k == 0}
    shown = []
    for moment, figures in as_served(metrics)["moments"].items():
        low, high = figures["ci95"][0]
        beside = f"95 % interval {number(low)} to {number(high)}"
        every = metrics["moments"][moment]["accuracy"][0]
        if figures["accuracy"][0] != every:
            beside += f"; with all inputs of these traces {number(every)}"
        elif moment in best:
            cell = best[moment]
            beside += f"; best baseline {cell.best} {number(cell.theirs)}, difference {signed(cell.difference)}"
        label = f"of next steps forecast right at {moment}, in an engine"
        shown.append(Card(number(figures["accuracy"][0]), label, beside))
    return shown


def accuracies(metrics: Metrics) -> Section:
    """Every model at every horizon and moment, with intervals."""
    judged = {ours(metrics): metrics["moments"], **metrics["baselines"]}
    blocks: list[Block] = [
        Text(
            "Share of positions whose likeliest outcome was right, with its 95 % interval (bootstrap over workflows). "
            "A position is a step with a known outcome so far ahead; END, the end of the workflow, is an outcome."
        )
    ]
    blocks += [moment_table(judged, moment) for moment in metrics["moments"]]
    cells = against_best(metrics)
    if cells:
        blocks.append(against_table(cells))
    blocks.append(_further(metrics, judged))
    if unseen := _unseen(metrics):
        blocks.append(Text(unseen))
    return Section("Accuracy by steps ahead", blocks, in_terminal=True)


def on_old_traces(metrics: Metrics) -> Section | None:
    """A training that started from an older model, on that one's test traces; None without any."""
    old_test = (metrics.get("started_from") or {}).get("old_test")
    if old_test is None:
        return None
    judged = {ours(metrics): old_test["moments"], **old_test["baselines"]}
    rows = [
        [moment, *(signed_interval(x, ci) for x, ci in zip(gap["difference"], gap["ci95"], strict=True))]
        for moment, gap in old_test["forgotten"].items()
    ]
    return Section(
        "Accuracy on the old traces",
        [
            Text(
                f"{counted(old_test['workflows'], 'workflow')} of --old-test; the baselines but the old model saw none."
            ),
            *(moment_table(judged, moment) for moment in old_test["moments"]),
            Table(["forgotten: old model minus ours, at", *ahead(max(map(len, rows)) - 1)], rows),
        ],
        in_terminal=True,
    )


def against_table(cells: Sequence[Against]) -> Table:
    """Ours against the best baseline, a row a moment and number of steps ahead."""
    rows = [
        [
            f"{cell.moment}, {ahead(cell.k + 1)[-1]}",
            cell.best,
            number(cell.ours),
            number(cell.theirs),
            signed_interval(cell.difference, cell.ci95),
            cell.verdict,
        ]
        for cell in cells
    ]
    head = ["against the best baseline", "which", "ours", "its", "difference [95 %, paired]", ""]
    return Table(head, rows, frozenset({0, 1, 5}))


def by_type(metrics: Metrics) -> Section:
    """The same within each workflow type."""
    types = metrics["by_workflow_type"]
    title = "By workflow type"
    if len(types) == 1:
        text = f"There is one workflow type, {next(iter(types))}: the figures above are its own."
        return Section(title, [Text(text)])
    blocks: list[Block] = []
    for moment in metrics["moments"]:
        rows = []
        for name, of_type in sorted(types.items()):
            figures, against = of_type[moment], _within(of_type, metrics["rivals"].get(name, {}))
            first = next((cell for cell in against if cell.moment == moment and cell.k == 0), None)
            best = [first.best, signed_interval(first.difference, first.ci95)] if first else ["–", "–"]
            cells = [*accuracy_cells(figures), number(figures["ece"][0]), *best]
            rows.append([name, count(figures["workflows"]), *cells])
        steps = ahead(len(next(iter(types.values()))[moment]["accuracy"]))
        head = [f"at {moment}", "workflows", *steps, "ECE, 1 step", "best, 1 step", "difference"]
        blocks.append(Table(head, rows, frozenset({0, len(head) - 2})))
    behind = []
    for name, rivals in sorted(metrics["rivals"].items()):
        against = _within(types[name], rivals)
        for moment in metrics["moments"]:
            steps = [str(cell.k + 1) for cell in against if cell.moment == moment and not cell.leads]
            behind += [f"{name} at {moment} ({', '.join(steps)})"] if steps else []
        judged = {ours(metrics): types[name], **rivals}
        tables = [moment_table(judged, moment) for moment in metrics["moments"]]
        if against:
            tables.append(against_table(against))
        blocks.append(Folded(f"Every baseline on {name}", tables))
    if behind:
        text = f"Within a workflow type it does not lead the best baseline of that type: {'; '.join(behind)}."
        blocks.insert(0, Text(text))
    return Section(title, blocks)


def ablation(metrics: Metrics) -> Section | None:
    """What each part of the predictor adds; nothing where it was not measured."""
    if "ablation" not in metrics:
        return None
    tables = []
    for moment, figures in metrics["moments"].items():
        steps = ahead(len(figures["accuracy"]))
        rows = [["everything", *accuracy_cells(figures)]]
        for part, added in metrics["ablation"].items():
            rows.append([f"what {part} adds", *(gain(added["differences"][moment], k) for k in range(len(steps)))])
        tables.append(Table([f"at {moment}", *steps], rows, marked=frozenset({"everything"})))
    text = (
        "The same predictor, trained and judged once more without one part: accuracy with it minus accuracy without, "
        f"paired, with the 95 % interval. Its states: {metrics['data']['states']}. Where what they add lies above 0 "
        "throughout, recording them is worth it."
    )
    return Section("What each part adds", [Text(text), *tables])


def moment_table(judged: Mapping[str, Any], moment: str) -> Table:
    """Accuracy at one moment, a row a model; the first, ours, is marked."""
    rows = [[name, *accuracy_cells(by_moment[moment])] for name, by_moment in judged.items()]
    return Table([f"at {moment}", *ahead(max(map(len, rows)) - 1)], rows, marked=frozenset({rows[0][0]}))


def _within(moments: Mapping[str, Any], rivals: Mapping[str, Any]) -> list[Against]:
    """Ours against the best baseline within one workflow type."""
    gains = {
        name: {m: {"difference": gap["difference"], "ci95": gap["difference_ci95"]} for m, gap in by_moment.items()}
        for name, by_moment in rivals.items()
    }
    return against_best({"moments": moments, "baselines": rivals, "differences": gains})


def _further(metrics: Metrics, judged: Mapping[str, Any]) -> Folded:
    keys = {"mean over workflows": "accuracy_by_workflow", "top 2": "top2", "NLL": "nll", "ECE": "ece"}
    tables = []
    for moment in metrics["moments"]:
        rows = [
            [name, *(" / ".join(map(number, by_moment[moment][key])) for key in keys.values())]
            for name, by_moment in judged.items()
        ]
        head = [f"at {moment}, 1 / 2 / … steps ahead", *keys]
        tables.append(Table(head, rows, marked=frozenset({ours(metrics)})))
    text = (
        "Accuracy as a mean over workflows; an outcome among the two likeliest (top 2); negative log-likelihood (NLL), "
        "nats a position; expected calibration error (ECE)."
    )
    return Folded("Further figures", [Text(text), *tables])


def _unseen(metrics: Metrics) -> str:
    shares = metrics["moments"]["prefill"]["unseen"]
    if not any(shares):
        return ""
    return (
        f"Outcomes that are agents training never saw: {' / '.join(map(number, shares))} of the positions. They count "
        "as wrong in every accuracy above and are left out of the NLL."
    )


def errors(metrics: Metrics) -> Section:
    """Confusions one step ahead at each moment, and the agents after which they happen."""
    blocks: list[Block] = [
        Text(
            "One step ahead: the forecast, the outcome, how often, the mean confidence of the forecast, and after "
            "which agents it happened most. A step at which a trace was cut is no error."
        )
    ]
    for moment, confused in metrics["confusions"].items():
        blocks.append(
            Text(
                f"At {moment}: {counted(confused['errors'], 'error')} in {counted(confused['positions'], 'position')}."
            )
        )
        if not confused["pairs"]:
            continue
        rows = [
            [
                _name(pair["forecast"]),
                _name(pair["came"]),
                count(pair["positions"]),
                number(pair["confidence"]),
                "; ".join(map(_example, pair["examples"])),
            ]
            for pair in confused["pairs"]
        ]
        head = ["forecast", "outcome", "how often", "confidence", f"at {moment}, most often after"]
        blocks.append(Table(head, rows, frozenset({0, 1, 4})))
        rows = [
            [_name(after["agent"]), count(after["errors"]), count(after["positions"])] for after in confused["by_agent"]
        ]
        by_agent = Table(["after", "errors", "of positions"], rows)
        blocks.append(Folded(f"After which agents it errs most, at {moment}", [by_agent]))
    return Section("Where it errs most", blocks)


def _example(example: Mapping[str, Any]) -> str:
    prefix = " → ".join(map(_name, example["prefix"]))
    return f"{'… → ' if example['earlier'] else ''}{prefix} ({count(example['positions'])}×)"


def _name(name: str | None) -> str:
    return "(an agent training never saw)" if name is None else name


def profiles(metrics: Metrics) -> Section | None:
    """Accuracy and calibration of a next-agent predictor under each input profile; nothing for older metrics."""
    if not metrics.get("profiles"):
        return None
    rows = []
    for name, profile in metrics["profiles"].items():
        for moment, figures in profile["moments"].items():
            lost = str(len(profile["behind"])) if profile["behind"] is not None else "–"
            eces = " / ".join(map(number, figures["ece"]))
            rows.append([name, moment, *accuracy_cells(figures), eces, lost])
    head = ["inputs", "moment", *(f"{k + 1} ahead" for k in range(len(rows[0]) - 4)), "ECE", "LOST"]
    text = f"{SERVING} LOST counts the comparisons under the same profile that a baseline won."
    table = Table(head, rows, frozenset({0, 1}), frozenset({"engine"}))
    return Section("What serving can see", [Text(text), table], in_terminal=True)


SERVING: Final = (
    "The same artefact, fewer inputs. ids: workflow type, agents and order; ids+tokens: and token counts; +text: and "
    "the tools that answers call and texts, as a gateway supplies them; +states: and hidden states, everything; "
    "engine: token counts, tools and hidden states, what vLLM's scheduler supplies."
)


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    sections = [
        data(metrics),
        accuracies(metrics),
        on_old_traces(metrics),
        profiles(metrics),
        ablation(metrics),
        by_type(metrics),
        curves.learning_curve(metrics) if "learning_curve" in metrics else None,
        curves.reliability(metrics),
        call_graphs(metrics["traces"]) if "traces" in metrics else None,
        errors(metrics),
        made(metrics),
    ]
    title = f"Next agent: {metrics['model'] or 'next-agent predictor'}{version_of(metrics)}"
    return Document(title, lead(metrics), sections, cards(metrics))


def data(metrics: Metrics) -> Section | None:
    """The traces and how they were split; above them, warnings about them."""
    blocks: list[Block] = [Text(f"Warning: {warning}.") for warning in training_warnings(metrics).values()]
    if "data" in metrics:
        blocks.append(Facts({label: str(value) for label, value in metrics["data"].items() if "digest" not in label}))
    if "traces" in metrics:
        blocks.append(types_table(metrics["traces"]))
    return Section("What it learnt from", blocks) if blocks else None


def made(metrics: Metrics) -> Section | None:
    """What it takes to repeat the training."""
    if "config" not in metrics:
        return None
    facts = {
        "fitted in, s": f"{metrics['fit_seconds']:.2f}",
        "one forecast, µs": f"{metrics['latency_us']:.1f}",
        "size, bytes": f"{metrics['size_bytes']:,}" if metrics["size_bytes"] is not None else "not kept",
        **{label: str(value) for label, value in metrics["data"].items() if "digest" in label},
        **{f"version of {library}": version for library, version in metrics["versions"].items()},
        **{key: str(value) for key, value in flat(metrics["config"]).items()},
    }
    return Section("How it was made", [Folded("Time, size, digests, versions and settings", [Facts(facts)])])


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under names with dots."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return settings
