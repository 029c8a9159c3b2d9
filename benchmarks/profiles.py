"""Does a profile find the plan of an application, and does it cover workflows that it was not made of?

1. Size: seconds and MiB for 100,000 steps of several kinds, good and bad.
2. Known applications: from 500 workflows, is the expression the one that made them? `covered` is the share of 2,000
   further workflows that the expression covers, `sound` the share of 2,000 random walks over the learnt automaton that
   the application could have made.
3. Public traces: five folds by task, so that every workflow is judged once, by a profile of the other folds. Coverage
   of whole workflows and of calls, the former also with every edge below 5 % pruned (min_coverage 0); the next step
   beside an n-gram. Intervals are bootstrapped over workflows.
4. Served: the same folds, forecast step by step where no model of next agents has evidence, by the profile with online
   counts behind it and by online counts alone. The counts begin empty (`new`), or have followed the workflows that the
   profile learnt from (`warm`). With warm counts the profile has also been compared with them, on the workflows of the
   other folds, each by a profile and counts of the rest; `stands back` says in how many folds it begins so. A step
   without a forecast counts as wrong; END is an outcome. The last columns are the share of steps that the profile
   forecast with new and with warm counts, and µs of the start of a step: median of all, with circuit breaker, counts
   and monitor.
5. Lengths: the same folds. Remaining output tokens as each step begins, by the profile, by a remaining-length model of
   the same workflows (with an engine's inputs: agents and token counts), and by online counts, new and warm. Judged are
   the steps where the profile is sure, the counts have enough, and all later counts are recorded. Tau distance is the
   share of pairs of steps of one fold that the median puts in the wrong order, pinball its loss in tokens.
6. Versions: of two workflow types of one file, each in turn is taken for a new version of the other. Accuracy of the
   next step of up to 600 workflows: the other's profile as a prior before online counts, the same as if it were the
   type's own, and counts alone, all beginning without counts.

7. Sets: the same folds. The next steps that together have a probability of .9, before the output, by the profile, by an
   n-gram, and by a next-agent model of the same workflows with an engine's inputs (agents and token counts).

    python benchmarks/profiles.py [FOLDER] [--parts size,known,traces,served,lengths,versions,sets]
                                  [--sets autocoderover,hyperagent]

FOLDER has the public traces as .jsonl.gz; without it the first two parts run. Prints tables and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.read import read_traces
from presage.datasets.schema import conform
from presage.datasets.synthetic.processes import END as PROCESS_END
from presage.datasets.synthetic.processes import PROCESSES
from presage.datasets.synthetic.workflows import generate
from presage.datasets.tasks import task_of
from presage.features.moment import PREFILL
from presage.features.prefixes import prefixes_of
from presage.features.sequences import NUMBERS, WorkflowSteps, sequences_of
from presage.features.served_steps import served_steps
from presage.predictors.common.bootstrap import pair_ratio_cis, ratio_ci, share_ci
from presage.predictors.profile.automaton import END
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import ProfileConfig, TypeProfile, profile_of
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import AgainstCounts, Followed, likeliest
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveLengths
from presage.training.length.train import fit_lengths
from presage.training.next_agent.train import fit_predictor
from presage.training.profile.evaluate import NGRAM, ProfileCounts, count_sets, evaluate, fit_profile_baseline
from presage.training.quantiles import QuantileFigures, measure

FOLDS = 5
LEARNT, JUDGED, TRUTH = 500, 2000, 3000
STEPS = 100_000
SETS = (
    "ag2_gsm",
    "autocoderover",
    "chatdev",
    "claude_code",
    "hyperagent",
    "magentic_whowhen",
    "swe_agent_glm",
    "taubench",
)

PATIENT = Budget(deadline_s=float("inf"), hang_s=None)
"""Compilation at the first calls switches nothing off."""

Steps = tuple[list[str], list[list[int]] | None]
"""Agents, and the parents of each; None: one after the other."""


def counted_loops(rng: random.Random) -> Steps:
    agents = ["planner", *["explorer"] * rng.randint(3, 12), *["coder", "tester"] * rng.randint(1, 4)]
    return agents + ["reviewer"] * (rng.random() < 0.5), None


def retries(rng: random.Random) -> Steps:
    agents = ["planner", "coder", "tester"]
    while rng.random() < 0.4 and len(agents) < 9:
        agents += ["coder", "tester"]
    return [*agents, "writer"], None


def memory(rng: random.Random) -> Steps:
    """What follows the search depends on who asked for it."""
    first, last = rng.choice([("planner", "writer"), ("critic", "judge")])
    return [first, "search", last], None


def fan_out(rng: random.Random) -> Steps:
    wide = [rng.choice(["searcher", "reader"]) for _ in range(rng.randint(2, 5))]
    parents = [[], *([0] for _ in wide), list(range(1, len(wide) + 1))]
    return ["planner", *wide, "writer"], parents


KNOWN: dict[str, tuple[Callable[[random.Random], Steps], str]] = {
    "counted loops": (counted_loops, "planner explorer{3,12} (coder tester){1,4} reviewer?"),
    "retries": (retries, "planner (coder tester){1,4} writer"),
    "memory": (memory, "critic search judge | planner search writer"),
    "fan-out": (fan_out, "planner [reader ‖ searcher]{2,5} writer"),
}


def table_of(workflows: Sequence[Steps]) -> pa.Table:
    rows = [
        {"workflow_type": "app", "workflow_id": f"w{at:06d}", "step": step, "agent": agent}
        | ({} if parents is None else {"parent_steps": parents[step]})
        for at, (agents, parents) in enumerate(workflows)
        for step, agent in enumerate(agents)
    ]
    return conform(pa.Table.from_pylist(rows), "benchmark")


def profile(table: pa.Table, config: ProfileConfig | None = None) -> TypeProfile:
    (of,) = sequences_of(table).values()
    return profile_of(of, config or ProfileConfig())


def walk(of: TypeProfile, rng: random.Random) -> Steps:
    """A random walk over the kept edges."""
    at, agents, parents, before = 0, [], [], []
    while True:
        state = of.automaton.states[at]
        edges = {to: times for to, times in state.counts.items() if to in state.kept}
        at = rng.choices(list(edges), list(edges.values()))[0]
        if at == END:
            return agents, parents
        symbol, sizes = of.automaton.states[at].symbol, of.automaton.states[at].sizes
        size = rng.choices(list(sizes), list(sizes.values()))[0] if sizes else 1
        names = [rng.choice(symbol) if isinstance(symbol, tuple) else symbol for _ in range(size)]
        parents += [before] * size
        before = list(range(len(agents), len(agents) + size))
        agents += names


def known_applications(seeds: int) -> dict[str, object]:
    print(f"\n| application | found from {LEARNT} | covered | sound | states |\n|---|---|---|---|---|")
    result: dict[str, object] = {}
    for name, (draw, wanted) in KNOWN.items():
        same, covered, sound, states = 0, [], [], []
        for seed in range(seeds):
            rng = random.Random(seed)
            of = profile(table_of([draw(rng) for _ in range(LEARNT)]))
            truth = profile(table_of([draw(rng) for _ in range(TRUTH)]))
            fresh = sequences_of(table_of([draw(rng) for _ in range(JUDGED)]))["app"].workflows
            walked = sequences_of(table_of([walk(of, rng) for _ in range(JUDGED)]))["app"].workflows
            same += of.text == wanted
            covered.append(np.mean([of.covers(one) for one in fresh]))
            sound.append(np.mean([truth.covers(one) for one in walked]))
            states.append(len(of.automaton.states))
        shown = [float(np.mean(of)) for of in (covered, sound, states)]
        result[name] = {"same": same, "seeds": seeds, "covered": shown[0], "sound": shown[1], "states": shown[2]}
        print(f"| `{wanted}` | {same} of {seeds} | {shown[0]:.4f} | {shown[1]:.4f} | {shown[2]:.0f} |", flush=True)
    for name, process in PROCESSES.items():
        covered, sound, states = [], [], []
        for seed in range(seeds):
            of = profile(generate(name, LEARNT, seed, state_size=16).table)
            fresh = next(
                iter(sequences_of(generate(name, JUDGED, 10_000 + seed, state_size=16).table).values())
            ).workflows
            covered.append(np.mean([of.covers(one) for one in fresh]))
            rng = random.Random(seed)
            sound.append(np.mean([allowed(walk(of, rng)[0], process) for _ in range(JUDGED)]))
            states.append(len(of.automaton.states))
        shown = [float(np.mean(of)) for of in (covered, sound, states)]
        result[name] = {"covered": shown[0], "sound": shown[1], "states": shown[2]}
        print(
            f"| synthetic process {name} | {of.level} | {shown[0]:.4f} | {shown[1]:.4f} | {shown[2]:.0f} |", flush=True
        )
    return result


def allowed(agents: list[str], process: object) -> bool:
    """Whether every call is one of the call graph."""
    graph = process.graph  # type: ignore[attr-defined]
    path = [*agents, PROCESS_END]
    return agents[0] == process.start and all(  # type: ignore[attr-defined]
        any(branch.next == b for branch in graph[a]) for a, b in pairwise(path)
    )


def folds_of(table: pa.Table) -> np.ndarray:
    """A fold for each row, the same for all rows of a task."""
    code = pc.dictionary_encode(task_of(table).combine_chunks()).indices.to_numpy()
    return (np.random.default_rng(0).permutation(code.max() + 1) % FOLDS)[code]


def public_traces(folder: Path, sets: Sequence[str]) -> dict[str, object]:
    head = ["traces", "workflows", "covered", "covered, all below 5 % pruned", "calls covered", "level"]
    head += ["accuracy: profile / n-gram", "recall of two", "set: recall, precision", "n-gram's set"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    result: dict[str, object] = {}
    for name in sets:
        whole = read_traces(folder / f"{name}.jsonl.gz").table
        for kind in sorted(pc.unique(whole["workflow_type"]).to_pylist()):
            table = whole.filter(pc.equal(whole["workflow_type"], kind))
            fold = folds_of(table)
            found: list[list[ProfileCounts]] = []
            levels = []
            for number in range(FOLDS):
                train, test = (table.filter(pa.array(rows)) for rows in (fold != number, fold == number))
                sequences = sequences_of(train)
                fitted = ProfilePredictor().fit(sequences)
                plain = ProfilePredictor(ProfileConfig(min_coverage=0.0)).fit(sequences)
                levels.append(fitted.profiles[kind].level)
                counts = [evaluate(one, test, 0).counts for one in (fitted, plain)]
                found.append([*counts, fit_profile_baseline(NGRAM, train, test)])
            ours, plain_counts, ngram = map(joined, zip(*found, strict=True))
            result[kind] = shown = {
                "workflows": len(ours.whole),
                "levels": levels,
                **{
                    of: counts.figures(0) for of, counts in (("profile", ours), ("plain", plain_counts), (NGRAM, ngram))
                },
            }
            mine, its = shown["profile"], shown[NGRAM]
            gap = ratio_ci(ours.correct - ngram.correct, ours.positions, np.random.default_rng(0))
            low, high = share_ci(ours.covered, ours.whole, np.random.default_rng(0))
            cells = [kind, str(int(ours.whole.sum())), f"{mine['coverage']:.3f} [{low:.3f}, {high:.3f}]"]
            cells += [f"{shown['plain']['coverage']:.3f}", f"{mine['call_coverage']:.4f}"]
            cells += [", ".join(sorted(set(levels)))]
            cells += [f"{mine['accuracy']:.3f} / {its['accuracy']:.3f} [{gap[0]:+.3f}, {gap[1]:+.3f}]"]
            cells += [
                f"{mine['top2']:.3f} / {its['top2']:.3f}",
                f"{mine['set_recall']:.3f}, {mine['set_precision']:.3f}",
            ]
            cells += [f"{its['set_recall']:.3f}, {its['set_precision']:.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return result


def followed(forecaster: Forecaster, kind: str, name: str, workflow: WorkflowSteps) -> tuple[int, int, list[float]]:
    """Next steps forecast rightly and forecasts by the profile, of a workflow served step by step; µs of each event."""
    right, profiled, took, record = 0, 0, [], Workflow(Step(kind, name, ""))
    for agent, following in pairwise([*workflow.agents, ""]):
        begun = time.perf_counter()
        live = forecaster.on_prefill(record, agent)
        took.append(1e6 * (time.perf_counter() - begun))
        forecaster.on_completion(record, output_tokens=1)
        right += len(live.probabilities) > 0 and likeliest(live) == following
        profiled += live.source == "profile"
    forecaster.close(record)
    return right, profiled, took


def lengths(
    forecaster: Forecaster, kind: str, name: str, workflow: WorkflowSteps, numbers: np.ndarray
) -> list[LiveLengths]:
    """The remaining tokens forecast as each step begins; the steps of a block begin before any of them completes."""
    rows, found, record = numbers[workflow.rows], [], Workflow(Step(kind, name, ""))
    for block in workflow.blocks:
        for at in block:
            tokens = _count(rows[at, NUMBERS.index("input_tokens")])
            live = forecaster.on_prefill(record, workflow.agents[at], step=at, input_tokens=tokens)
            found.append(live.remaining)
        for at in block:
            tokens = _count(rows[at, NUMBERS.index("output_tokens")])
            forecaster.on_completion(record, step=at, agent=workflow.agents[at], output_tokens=tokens)
    forecaster.close(record)
    return found


def _count(number: float) -> int | None:
    return None if np.isnan(number) else int(number)


class Comparing(ForecastMonitor):
    """Keeps how profile and counts did in each workflow."""

    def __init__(self) -> None:
        self.compared: list[AgainstCounts] = []
        super().__init__()

    def followed(self, workflow: Followed) -> None:
        self.compared.append(workflow.profile_against_counts)
        super().followed(workflow)


@dataclass
class ServedFold:
    """A profile and warm counts of the other folds, and the workflows of this one in the order in which they come."""

    profiles: ProfilePredictor
    warm: OnlineCounts
    test: list[WorkflowSteps]
    numbers: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, kind: str, fold: np.ndarray, number: int) -> ServedFold:
        train, test = (sequences_of(table.filter(pa.array(of)))[kind] for of in (fold != number, fold == number))
        warm = OnlineCounts()
        teacher = Forecaster(None, back_off=warm)
        for at, workflow in enumerate(train.workflows):
            lengths(teacher, kind, f"t{at}", workflow, train.numbers)
        order = np.random.default_rng(number).permutation(len(test.workflows))
        ordered = [test.workflows[at] for at in order if test.workflows[at].complete]
        return cls(ProfilePredictor().fit({kind: train}), warm, ordered, test.numbers)

    def forecaster(self, monitor: ForecastMonitor, *, profile: bool, warm: bool) -> Forecaster:
        counts = copy.deepcopy(self.warm) if warm else OnlineCounts()
        return Forecaster(None, profile=self.profiles if profile else None, back_off=counts, monitor=monitor)


def served_traces(folder: Path, sets: Sequence[str]) -> dict[str, object]:
    head = ["traces", "workflows", "confident folds", "profile", "counts, new", "difference", "counts, warm"]
    head += ["difference", "profile, warm", "difference", "stands back", "by the profile", "µs: profile, counts"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    result: dict[str, object] = {}
    for name in sets:
        whole = read_traces(folder / f"{name}.jsonl.gz").table
        for kind in sorted(pc.unique(whole["workflow_type"]).to_pylist()):
            table = whole.filter(pc.equal(whole["workflow_type"], kind))
            fold, rows, confident, stands_back = folds_of(table), [], 0, 0
            took: tuple[list[float], ...] = ([], [])
            folds = [ServedFold.of(table, kind, fold, number) for number in range(FOLDS)]
            compared = []
            for of in folds:
                monitor = Comparing()
                before = of.forecaster(monitor, profile=True, warm=True)
                for at, workflow in enumerate(of.test):
                    followed(before, kind, f"w{at}", workflow)
                compared.append(monitor.compared)
            for number, of in enumerate(folds):
                confident += of.profiles.profiles[kind].confident
                monitors = [ForecastMonitor() for _ in range(4)]
                for one in (one for other, many in enumerate(compared) if other != number for one in many):
                    monitors[3].profile_stand_back.followed(kind, one)
                stands_back += kind in monitors[3].profile_stand_back
                forecasters = [
                    of.forecaster(monitor, profile=profile, warm=warm)
                    for monitor, (profile, warm) in zip(
                        monitors, ((True, False), (False, False), (False, True), (True, True)), strict=True
                    )
                ]
                for at, workflow in enumerate(of.test):
                    found = [followed(forecaster, kind, f"w{at}", workflow) for forecaster in forecasters]
                    by = (found[0][1], found[3][1])
                    rows.append([len(workflow.agents), *(right for right, _, _ in found), *by])
                    for times, (_, _, more) in zip(took, found[:2], strict=True):
                        times += more
            steps, mine, fresh, warmed, ours, by, by_warm = np.array(rows).T
            shown = {"workflows": len(rows), "confident": confident, "stands_back": stands_back}
            shown |= {
                of: n.sum() / steps.sum()
                for of, n in (
                    *(("profile", mine), ("new", fresh), ("warm", warmed), ("profile_warm", ours)),
                    *(("by_profile", by), ("by_profile_warm", by_warm)),
                )
            }
            pairs = ((mine, fresh), (mine, warmed), (ours, warmed))
            gaps = [ratio_ci(one - of, steps, np.random.default_rng(0)) for one, of in pairs]
            us = [float(np.median(times)) for times in took]
            result[kind] = {**shown, "gaps": gaps, "us": us}
            between = [f"[{low:+.3f}, {high:+.3f}]" for low, high in gaps]
            cells = [kind, str(len(rows)), f"{confident} of {FOLDS}", f"{shown['profile']:.3f}"]
            cells += [f"{shown['new']:.3f}", between[0], f"{shown['warm']:.3f}", between[1]]
            cells += [f"{shown['profile_warm']:.3f}", between[2], f"{stands_back} of {FOLDS}"]
            cells += [f"{shown['by_profile']:.2f}, {shown['by_profile_warm']:.2f}", f"{us[0]:.0f}, {us[1]:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return result


def served_lengths(folder: Path, sets: Sequence[str]) -> dict[str, object]:
    head = ["traces", "workflows", "steps judged", "share", "tau: profile", "model", "counts, warm", "counts, new"]
    head += ["pinball .5: profile", "model", "counts, warm", "counts, new", "within .9, .99: profile", "model"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    result: dict[str, object] = {}
    for name in sets:
        whole = read_traces(folder / f"{name}.jsonl.gz").table
        for kind in sorted(pc.unique(whole["workflow_type"]).to_pylist()):
            table = whole.filter(pc.equal(whole["workflow_type"], kind))
            if table["output_tokens"].null_count == len(table):
                continue
            fold, steps = folds_of(table), 0
            medians: list[list[QuantileFigures]] = [[], [], [], []]
            bounds: list[list[QuantileFigures]] = [[], []]
            for number in range(FOLDS):
                of = ServedFold.of(table, kind, fold, number)
                model = fit_lengths(table.filter(pa.array(fold != number)), texts="none").predictor
                sources = (
                    Forecaster(None, profile=of.profiles, budget=PATIENT),
                    Forecaster(None, lengths=model, budget=PATIENT),
                    Forecaster(None, back_off=copy.deepcopy(of.warm)),
                    Forecaster(None, back_off=OnlineCounts()),
                )
                truth: list[float] = []
                owner: list[int] = []
                found: list[list[tuple[float, ...]]] = [[] for _ in sources]
                for name_of, workflow in enumerate(of.test):
                    made = [lengths(one, kind, f"w{name_of}", workflow, of.numbers) for one in sources]
                    output = of.numbers[workflow.rows, NUMBERS.index("output_tokens")]
                    left = np.cumsum(output[::-1])[::-1]
                    known = np.isfinite(left)
                    judged = [at for at in np.flatnonzero(known) if all(one[at].tokens for one in made)]
                    steps += int(known.sum())
                    truth += left[judged].tolist()
                    owner += [owner[-1] + 1 if owner else 0] * len(judged)
                    for forecasts, one in zip(found, made, strict=True):
                        forecasts += [one[at].tokens for at in judged]
                if truth:
                    of_fold = (np.array(truth), np.array(owner), np.zeros(len(truth), bool))
                    for into, levels in ((medians, (0.5,)), (bounds, (0.5, 0.9, 0.99))):
                        for figures, forecasts in zip(into, found, strict=False):
                            rows = np.array(forecasts)[:, : len(levels)]
                            figures.append(measure(rows, *of_fold, levels, np.random.default_rng(0)))
            if not medians[0]:
                print(f"| {kind} | no step is judged: the profile is not sure, or counts are missing |", flush=True)
                continue
            tau, pinball = compared(medians)
            of_all = sum(int(of.positions.sum()) for of in medians[0])
            within = [
                ", ".join(f"{sum(of.covered[:, q].sum() for of in one) / of_all:.3f}" for q in (1, 2)) for one in bounds
            ]
            workflows = sum(int((of.positions > 0).sum()) for of in medians[0])
            result[kind] = {"workflows": workflows, "steps": of_all, "share": of_all / steps, "tau": tau}
            result[kind] |= {"pinball": pinball, "within": within}  # type: ignore[operator]
            cells = [kind, str(workflows), str(of_all), f"{of_all / steps:.2f}", *tau, *pinball, *within]
            print(f"| {' | '.join(cells)} |", flush=True)
    return result


def compared(medians: Sequence[Sequence[QuantileFigures]]) -> tuple[list[str], list[str]]:
    """Tau distance and pinball loss of each source over its folds; with the interval of the first less each other."""
    joined = []
    for of in medians:
        wrong, pairs = (np.concatenate([getattr(one, name)["all"] for one in of]) for name in ("wrong", "pairs"))
        joined.append((wrong, pairs, np.concatenate([one.loss for one in of])[:, 0]))
    positions = np.concatenate([one.positions for one in medians[0]])
    tau, pinball = [], []
    for at, (wrong, pairs, loss) in enumerate(joined):
        tau.append(f"{wrong.sum() / pairs.sum():.3f}")
        pinball.append(f"{loss.sum() / positions.sum():,.0f}")
        if at:
            gap = (joined[0][0] - wrong)[:, None]
            ((low, high),) = pair_ratio_cis(gap, pairs[:, None], np.random.default_rng(0))
            tau[-1] += f" [{low:+.3f}, {high:+.3f}]"
            low, high = ratio_ci(joined[0][2] - loss, positions, np.random.default_rng(0))
            pinball[-1] += f" [{low:+,.0f}, {high:+,.0f}]"
    return tau, pinball


def versions(folder: Path, sets: Sequence[str]) -> dict[str, object]:
    head = ["new version", "known version", "profile as a prior", "as its own", "counts", "prior less counts"]
    head += ["by the profile: prior, own"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    result: dict[str, object] = {}
    for name in sets:
        sequences = sequences_of(read_traces(folder / f"{name}.jsonl.gz").table)
        for known, new in itertools.permutations(sequences, 2):
            forecasters = []
            for served in ("app@1", "app@2", "other"):
                profiles = ProfilePredictor().fit({served: sequences[known]})
                monitor = ForecastMonitor()
                forecasters.append(Forecaster(None, profile=profiles, back_off=OnlineCounts(), monitor=monitor))
            whole = [workflow for workflow in sequences[new].workflows if workflow.complete]
            rows = []
            for at in np.random.default_rng(0).permutation(len(whole))[:600]:
                found = [followed(one, "app@2", f"w{at}", whole[at])[:2] for one in forecasters]
                rows.append([len(whole[at].agents), *(right for right, _ in found), found[0][1], found[1][1]])
            steps, prior, own, counts, by, by_own = np.array(rows).T
            low, high = ratio_ci(prior - counts, steps, np.random.default_rng(0))
            shares = [float(of.sum() / steps.sum()) for of in (prior, own, counts, by, by_own)]
            result[new] = {"known": known, "accuracy": shares[:3], "by_profile": shares[3:], "gap": (low, high)}
            cells = [new, known, *(f"{of:.3f}" for of in shares[:3]), f"[{low:+.3f}, {high:+.3f}]"]
            print(f"| {' | '.join(cells)} | {shares[3]:.2f}, {shares[4]:.2f} |", flush=True)
    return result


def next_sets(folder: Path, sets: Sequence[str]) -> dict[str, object]:
    head = ["traces", "workflows", "forecast by", "next step right", "recall", "precision", "steps in the set"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    result: dict[str, object] = {}
    for name in sets:
        whole = served_steps(read_traces(folder / f"{name}.jsonl.gz").table)
        for kind in sorted(pc.unique(whole["workflow_type"]).to_pylist()):
            table = whole.filter(pc.equal(whole["workflow_type"], kind))
            fold = folds_of(table)
            found: dict[str, list[ProfileCounts]] = {"profile": [], NGRAM: [], "next-agent model": []}
            for number in range(FOLDS):
                train, test = (table.filter(pa.array(rows)) for rows in (fold != number, fold == number))
                found["profile"].append(evaluate(ProfilePredictor().fit(sequences_of(train)), test, 0).counts)
                found[NGRAM].append(fit_profile_baseline(NGRAM, train, test))
                predictor = fit_predictor(train, horizon=1, states="none").predictor
                held = prefixes_of(test, predictor.vocabulary, 1)
                found["next-agent model"].append(count_sets(predictor.predict(held, PREFILL)[:, 0], held))
            counts = {by: joined(of) for by, of in found.items()}
            result[kind] = {by: of.figures(0) for by, of in counts.items()}
            for by, of in counts.items():
                shown = of.figures(0)
                cells = [kind, str(len(of.whole)), by]
                cells += [f"{shown[at]:.3f}" for at in ("accuracy", "set_recall", "set_precision")]
                print(f"| {' | '.join(cells)} | {shown['set_size']:.2f} |", flush=True)
    return result


def joined(folds: Sequence[ProfileCounts]) -> ProfileCounts:
    """The counts of all folds."""
    names = ProfileCounts.__dataclass_fields__
    return ProfileCounts(*(np.concatenate([getattr(one, field) for one in folds]) for field in names))


def many(draw: Callable[[random.Random], Steps]) -> list[Steps]:
    rng, found, steps = random.Random(0), [], 0
    while steps < STEPS:
        found.append(draw(rng))
        steps += len(found[-1][0])
    return found


LARGE: dict[str, Callable[[random.Random], Steps]] = {
    "counted loops": counted_loops,
    "fan-out": fan_out,
    "any order of 7 agents": lambda rng: (rng.choices("abcdefg", k=rng.randint(5, 60)), None),
    "10,000 names": lambda rng: ([f"agent{rng.randrange(10_000)}" for _ in range(rng.randint(5, 60))], None),
    "loops of 10,000 steps": lambda rng: (["coder", "tester"] * rng.randint(2_000, 5_000), None),
    "one workflow": lambda rng: (["planner", *["coder", "tester"] * (STEPS // 2)], None),
    "one parallel block": lambda rng: (["planner", *["searcher"] * 2_000], [[], *([0] for _ in range(2_000))]),
}


def large() -> dict[str, object]:
    print(f"\n| {STEPS:,} steps | s | peak MiB of the process so far | states | level |\n|---|---|---|---|---|")
    result: dict[str, object] = {}
    for name, draw in LARGE.items():
        table = table_of(many(draw))
        begun = time.perf_counter()
        of = profile(table)
        seconds = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        result[name] = {"seconds": round(seconds, 2), "peak_mib": round(peak), "level": of.level}
        print(f"| {name} | {seconds:.1f} | {peak:,.0f} | {len(of.automaton.states)} | {of.level} |", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", default="size,known,traces,served,lengths,versions,sets")
    chosen = parser.parse_args()
    result: dict[str, object] = {"benchmark": "profiles"}
    parts = chosen.parts.split(",")
    if "size" in parts:
        result["size"] = large()
    if "known" in parts:
        result["known"] = known_applications(chosen.seeds)
    if "traces" in parts and chosen.folder is not None:
        result["traces"] = public_traces(chosen.folder, chosen.sets.split(","))
    if "served" in parts and chosen.folder is not None:
        result["served"] = served_traces(chosen.folder, chosen.sets.split(","))
    if "lengths" in parts and chosen.folder is not None:
        result["lengths"] = served_lengths(chosen.folder, chosen.sets.split(","))
    if "versions" in parts and chosen.folder is not None:
        result["versions"] = versions(chosen.folder, chosen.sets.split(","))
    if "sets" in parts and chosen.folder is not None:
        result["sets"] = next_sets(chosen.folder, chosen.sets.split(","))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
