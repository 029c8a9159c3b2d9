"""How soon does the drift alarm detect a change, how often is it false, and what does an event cost?

Traces of synthetic processes. The model is the predictor's n-gram, trained on 1,000 workflows, with quantiles of the
remaining tokens by agent; other workflows promote it. Then workflows of the same process arrive, and from workflow 500
on one thing changes:

    swapped     two agents have exchanged their successors
    reweighted  every agent keeps its successors, but the likeliest becomes the least likely and vice versa
    new agent   in three of ten workflows an agent has a name that no trace has
    traffic     the most frequent intents become the rarest and vice versa
    longer      every step produces half as many output tokens again

"Promoted figures" compares with the figures of the promotion, on `--held-out` workflows; "own first workflows" learns
from the first 300 workflows. 50 runs of 1,000 workflows have no change. Costs are medians of single events, warm, one
thread, beside those of a forecaster with online counts alone.

    python benchmarks/drift.py [--seeds 20] [--runs 50] [--held-out 600]

Prints tables and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from presage.datasets.synthetic.processes import PROCESSES, SyntheticProcess
from presage.datasets.synthetic.workflows import generate
from presage.features.moment import COMPLETION, MOMENTS, PREFILL
from presage.features.prefixes import prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import Followed
from presage.serving_hooks.monitoring.promoted import Promoted, promoted_by_type
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.training.training import median_us

TRAINING, HELD_OUT, BEFORE, AFTER, WITHOUT = 1000, 600, 500, 400, 1000
QUANTILES = (0.5, 0.9, 0.99)
SWAPPED = {"retry": ("tester", "reviewer"), "research": ("verifier", "critic"), "triage": ("lookup", "router")}
EVENTS = 4000


@dataclass(frozen=True)
class Model:
    """An n-gram of the next agents, and quantiles of the remaining tokens by agent."""

    ngram: BackoffNgram
    tokens: np.ndarray

    def said(self, table: pa.Table) -> TraceForecasts:
        """The model's forecasts at every row."""
        vocabulary = self.ngram.vocabulary
        prefixes = prefixes_of(table, vocabulary, 3)
        probabilities = self.ngram.predict(prefixes, PREFILL)
        return TraceForecasts(
            vocabulary.agents,
            dict.fromkeys(MOMENTS, probabilities),
            version=1,
            quantiles=QUANTILES,
            tokens=self.tokens[prefixes.agent],
            lengths_version=1,
        )


def trained(law: SyntheticProcess, seed: int) -> Model:
    table = drawn(law, TRAINING, seed)
    vocabulary = Vocabulary.from_table(table)
    prefixes = prefixes_of(table, vocabulary, 3)
    outputs = table["output_tokens"].to_numpy().astype(np.float64)
    left = np.concatenate([outputs[low:high][::-1].cumsum()[::-1] for low, high in pairwise(prefixes.offsets)])
    unknown = np.quantile(left, QUANTILES)
    of_agent = [np.quantile(left[prefixes.agent == a], QUANTILES) for a in range(len(vocabulary.agents))]
    return Model(BackoffNgram(3).fit(prefixes, prefixes), np.stack([*of_agent, unknown]).astype(np.float32))


def drawn(law: SyntheticProcess, workflows: int, seed: int) -> pa.Table:
    return generate(law, workflows, seed, state_size=16).table


def swapped(law: SyntheticProcess, seed: int) -> pa.Table:
    one, other = SWAPPED[law.name]
    graph = {**law.graph, one: law.graph[other], other: law.graph[one]}
    return drawn(replace(law, graph=graph), AFTER, seed)


def reweighted(law: SyntheticProcess, seed: int) -> pa.Table:
    graph = {}
    for agent, branches in law.graph.items():
        ranked = sorted(branches, key=lambda branch: branch.weight)
        weights = [branch.weight for branch in reversed(ranked)]
        graph[agent] = tuple(replace(branch, weight=weight) for branch, weight in zip(ranked, weights, strict=True))
    return drawn(replace(law, graph=graph), AFTER, seed)


def new_agent(law: SyntheticProcess, seed: int) -> pa.Table:
    table = drawn(law, AFTER, seed)
    rng, old = np.random.default_rng(seed), SWAPPED[law.name][0]
    chosen = dict(zip(table["workflow_id"].unique().to_pylist(), rng.random(AFTER) < 0.3, strict=True))
    pairs = zip(table["workflow_id"].to_pylist(), table["agent"].to_pylist(), strict=True)
    names = ["a new agent" if agent == old and chosen[workflow] else agent for workflow, agent in pairs]
    return table.set_column(table.schema.get_field_index("agent"), table.schema.field("agent"), pa.array(names))


def traffic(law: SyntheticProcess, seed: int) -> pa.Table:
    order = sorted(range(len(law.intents)), key=law.intents.__getitem__)
    intents = [0.0] * len(order)
    for place, rank in zip(order, reversed(order), strict=True):
        intents[place] = law.intents[rank]
    return drawn(replace(law, intents=tuple(intents)), AFTER, seed)


def longer(law: SyntheticProcess, seed: int) -> pa.Table:
    tokens = {agent: (own, round(1.5 * out)) for agent, (own, out) in law.tokens.items()}
    return drawn(replace(law, tokens=tokens), AFTER, seed)


CHANGES: dict[str, Callable[[SyntheticProcess, int], pa.Table]] = {
    "swapped": swapped,
    "reweighted": reweighted,
    "new agent": new_agent,
    "traffic": traffic,
    "longer": longer,
}


def judged(model: Model, table: pa.Table) -> Iterator[Followed]:
    return followed_of(table, model.said(table))


def first_alarm(drift: Drift, workflows: list[Followed]) -> tuple[int | None, Alarm | None]:
    for number, workflow in enumerate(workflows, start=1):
        said = drift.followed(workflow)
        if isinstance(said, Alarm):
            return number, said
    return None, None


def watchers(promoted: dict[str, Promoted]) -> dict[str, Drift]:
    return {"promoted figures": Drift(promoted), "own first workflows": Drift()}


def noticed(law: SyntheticProcess, seed: int, held_out: int) -> Iterator[tuple[str, str, int | None, str]]:
    """Workflows until the alarm by change and kind of figures (below 1: before the change), and the reason."""
    model = trained(law, 10_000 + seed)
    promoted = promoted_by_type(judged(model, drawn(law, held_out, 20_000 + seed)))
    before = list(judged(model, drawn(law, BEFORE, 30_000 + seed)))
    for change, plant in CHANGES.items():
        after = list(judged(model, plant(law, 40_000 + seed)))
        for name, drift in watchers(promoted).items():
            at, alarm = first_alarm(drift, before + after)
            yield change, name, None if at is None else at - BEFORE, alarm.reasons[0].figure if alarm else "–"


def false_alarms(runs: int, held_out: int) -> dict[str, int]:
    found = {"promoted figures": 0, "own first workflows": 0}
    laws = list(PROCESSES.values())
    for run in range(runs):
        law = laws[run % len(laws)]
        model = trained(law, 50_000 + run)
        promoted = promoted_by_type(judged(model, drawn(law, held_out, 60_000 + run)))
        workflows = list(judged(model, drawn(law, WITHOUT, 70_000 + run)))
        for name, drift in watchers(promoted).items():
            found[name] += first_alarm(drift, workflows)[0] is not None
    return found


def costs() -> dict[str, float]:
    """Median µs by kind of event, over many concurrent workflows in turn."""
    law = PROCESSES["triage"]
    model = trained(law, 1)
    table = drawn(law, 400, 2)
    said = model.said(table)
    steps = table["step"].to_pylist()
    workflows = [Workflow(Step("triage", f"workflow-{number}", "")) for number in range(EVENTS)]
    agents = table["agent"].to_pylist()
    # These workflows are all cut short, and would raise an alarm: what is measured is the watching.
    never = DriftConfig(false_alarms=1e-300)
    truth = ForecastMonitor(Drift(promoted_by_type(followed_of(table, said)), never))
    outcomes = [truth.opened("triage") for _ in workflows]
    plain = Forecaster(None, back_off=OnlineCounts())
    # Every workflow has three steps behind it: the one measured has forecasts to judge at every horizon.
    starts = [row for row, step in enumerate(steps) if step == 3 and row + 1 < len(steps) and steps[row + 1] == 4]
    place = [starts[number % len(starts)] for number in range(EVENTS)]
    for number, row in enumerate(place):
        for at in range(row - 3, row):
            truth.begun(outcomes[number], agents[at], said.at(at, PREFILL), steps[at])
            truth.completed(outcomes[number], said.at(at, COMPLETION), 100)
            plain.on_prefill(workflows[number], agents[at], step=steps[at])
            plain.on_completion(workflows[number], output_tokens=100)
    prefills = [said.at(row, PREFILL) for row in place]
    completions = [said.at(row, COMPLETION) for row in place]
    return {
        "a step begins": median_us(lambda i: truth.begun(outcomes[i], agents[place[i]], prefills[i], 3), EVENTS),
        "a step completes": median_us(lambda i: truth.completed(outcomes[i], completions[i], 100), EVENTS),
        "a workflow ends": median_us(lambda i: truth.ended(outcomes[i]), EVENTS),
        "forecaster, counts alone: a step begins": median_us(
            lambda i: plain.on_prefill(workflows[i], agents[place[i]], step=3), EVENTS
        ),
    }


def _known(delay: float) -> float | None:
    return None if math.isinf(delay) else delay


def _told(delay: object) -> str:
    return f"over {AFTER}" if delay is None else f"{delay:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    chosen = parser.parse_args()
    delays: dict[tuple[str, str], list[int | None]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for law in PROCESSES.values():
        for seed in range(chosen.seeds):
            for change, name, delay, why in noticed(law, seed, chosen.held_out):
                delays.setdefault((change, name), []).append(delay)
                reasons.setdefault((change, name), []).append(why)
    print(f"{len(PROCESSES)} laws × {chosen.seeds} seeds, a change after {BEFORE} workflows, {AFTER} after it\n")
    print("| change | held against | median | worst | within 200 | not noticed | too early | first reason, mostly |")
    print("|---|---|---|---|---|---|---|---|")
    told: dict[str, dict[str, object]] = {}
    for (change, name), of in delays.items():
        # Never noticed is later than all others.
        later = sorted(math.inf if delay is None else delay for delay in of)
        early = sum(delay <= 0 for delay in later)
        why = statistics.mode(reasons[change, name])
        row = {
            "median": _known(statistics.median(later)),
            "worst": _known(later[-1]),
            "within_200": sum(0 < delay <= 200 for delay in later) / len(of),
            "not_noticed": of.count(None),
            "too_early": early,
            "runs": len(of),
        }
        told[f"{change}, {name}"] = row
        noticed_in = f"{_told(row['median'])} | {_told(row['worst'])} | {row['within_200']:.0%}"
        print(f"| {change} | {name} | {noticed_in} | {row['not_noticed']} of {len(of)} | {early} | {why} |")
    found = false_alarms(chosen.runs, chosen.held_out)
    print(f"\nfalse alarms in {chosen.runs} runs of {WITHOUT} workflows without change: {found}")
    print(f"the bound: {DriftConfig().false_alarms * WITHOUT / DriftConfig().workflows:.0%} a run\n")
    us = costs()
    print("| event | µs |\n|---|---|")
    for event, cost in us.items():
        print(f"| {event} | {cost:.1f} |")
    asked = {"runs": chosen.runs, "held_out": chosen.held_out}
    print(json.dumps({"benchmark": "drift", "changes": told, "false_alarms": found, **asked, "us": us}))


if __name__ == "__main__":
    main()
