"""How much sooner does a batch of workflows end in an engine if its calls are sent in the order of its plan?

Plans (map-reduce, debate, reflection, iterative refinement, trading, labels) over rows of random words, through vLLM's
own scheduler and prefix cache in virtual time, with the cost model of an engine file. The same calls in other orders:

- as they come: every call is sent once what it reads is there, and all rows at once: vLLM, with its prefix cache;
- so many rows at once: the same, with a limit on rows (a client with a semaphore), the best of several limits;
- operator by operator: the plan's calls in order, each over all rows before the next (Spark, Dask);
- longest shared prefix: the ready calls in the order of their prompts (SGLang);
- presage: in the soft order of the plan, as many rows at a time as the cache holds, equal prompts asked once; and the
  order and the number of rows alone; and all of it in an engine with our hooks, which evicts the blocks of rows that
  have ended first (policy `lifecycle`, without forecasts).

    .venv-vllm/bin/python benchmarks/batch_replay.py [--rows 400] [--seeds 3] [--engine h100-8b-datasheet]

Rows come in random order. Makespans are ratios to "as they come" with the same seed: the median, and all of them lie
within the range given. Prints tables and a JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from presage.batch import Plan, call, given, join, template
from presage.batch.operators import Call, Given
from presage.batch.plan import Node
from presage.batch.prefix_tree import field_tokens, pieces_of, tree_of
from presage.batch.rows_under_way import RowsUnderWay
from presage.batch.schedule import callers, depths, soft_order
from presage.replay.engine import Arrival, EngineLoop, ReplayEngine
from presage.replay.metrics import RequestOutcome, VirtualClock
from presage.replay.policies import POLICIES
from presage.replay.runs import check_vllm
from presage.replay.vllm_scheduler import make_scheduler, scheduler_class
from presage.replay.workload import JobStep, ReplayJob, Schedule
from presage.serving_hooks.engine_file import read_engine

Rows = list[dict[str, str]]
COMES, OURS = "as they come", "presage"
ORDER, ENDS = f"{OURS}, order alone", f"{OURS} with hooks"
LIMITS = (32, 64, 128)


def words(draw: random.Random, count: int) -> str:
    return "".join(f"w{draw.randrange(20_000)} " for _ in range(count))


def map_reduce(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """Seven experts read a context and a question; a writer reads their answers. Each context has six questions."""
    text, question = given("context"), given("question")
    experts = [
        call(f"expert {n}", template("{c}{q}", c=text, q=question), system=words(draw, 150), output_tokens=150)
        for n in range(7)
    ]
    answer = call("writer", template("{q}{all}", q=question, all=join(experts, "next ")), output_tokens=200)
    contexts = [words(draw, 1500) for _ in range(rows // 6 + 1)]
    return Plan("map-reduce", out=answer), [
        {"context": contexts[row // 6], "question": words(draw, 40)} for row in range(rows)
    ]


def debate(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """Three agents with roles of their own, three rounds; each goes on in its own conversation."""
    text = given("context")
    systems = [words(draw, 200) for _ in range(3)]
    talks: list[list[tuple[str, Any]]] = [[] for _ in range(3)]
    prompts: list[Any] = [template("{c}", c=text)] * 3
    said: list[Any] = []
    for _ in range(3):
        said = [
            call(f"agent {n}", prompts[n], system=systems[n], history=talks[n], output_tokens=200) for n in range(3)
        ]
        for n in range(3):
            talks[n] += [("user", prompts[n]), ("assistant", said[n])]
            prompts[n] = template("others said {o}", o=join([said[other] for other in range(3) if other != n], "and "))
    return Plan("debate", out=join(said)), [{"context": words(draw, 2000)} for _ in range(rows)]


def reflection(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """An expert drafts, two critics who read the same text judge, the expert goes on; twice."""
    text, system = given("context"), words(draw, 300)
    talk: list[tuple[str, Any]] = []
    prompt: Any = template("{c}", c=text)
    answer: Any = ""
    for _ in range(3):
        answer = call("expert", prompt, system=system, history=talk, output_tokens=250)
        critics = [
            call(f"critic {n}", template("{c}criticise {a} as {n}", c=text, a=answer, n=str(n)), system=system)
            for n in range(2)
        ]
        talk = [*talk, ("user", prompt), ("assistant", answer)]
        prompt = template("revise {k}", k=join(critics, "and "))
    return Plan("reflection", out=answer), [{"context": words(draw, 3000)} for _ in range(rows)]


def refinement(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """A summary is refined with one chunk after another; nothing but the system prompt is shared."""
    system, summary = words(draw, 300), None
    for n in range(6):
        read = template("{s}and {c}", s=summary, c=given(f"chunk{n}")) if summary else given("chunk0")
        summary = call("summariser", read, system=system, output_tokens=200)
    assert summary is not None
    return Plan("refinement", out=summary), [{f"chunk{n}": words(draw, 700) for n in range(6)} for _ in range(rows)]


def trading(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """Analysts of one company's news, each in turn asked three things; bull and bear debate; a trader decides.

    Ten strategies for each company, so that reports of a company are the same prompts: asked for by ten rows.
    """
    news, strategy = given("news"), given("strategy")
    rules = words(draw, 400)
    reports = []
    for n in range(4):
        seen: list[tuple[str, Any]] = []
        ask: Any = template("{n}report on aspect {a}", n=news, a=str(n))
        for turn in range(2):
            report = call(f"analyst {n}", ask, system=rules, history=seen, output_tokens=200)
            seen = [*seen, ("user", ask), ("assistant", report)]
            ask = f"more on {turn}"
        reports.append(report)
    read = template("{n}{r}", n=news, r=join(reports, "next "))
    sides: list[Any] = []
    for _ in range(2):
        sides = [
            call(side, template("{r}{s}{o}argue as {w}", r=read, s=strategy, o=join(sides), w=side), system=rules)
            for side in ("bull", "bear")
        ]
        assert turn < 2
    trader = call("trader", template("{r}{s}{d}decide", r=read, s=strategy, d=join(sides)), system=rules)
    companies = [words(draw, 3000) for _ in range(rows // 10 + 1)]
    return Plan("trading", out=trader), [
        {"news": companies[row // 10], "strategy": words(draw, 60)} for row in range(rows)
    ]


def labels(draw: random.Random, rows: int) -> tuple[Plan, Rows]:
    """One call behind a long system prompt: is it computed once if all calls are sent at the same time?"""
    asked = call("judge", template("{c}", c=given("context")), system=words(draw, 1600), output_tokens=20)
    return Plan("labels", out=asked), [{"context": words(draw, 64)} for _ in range(rows)]


WORKLOADS = (map_reduce, debate, reflection, refinement, trading, labels)


class Instances:
    """The calls of a batch. Those of two rows are the same if the rows' fields that decide their prompts are.

    Attributes:
        same: for each row and call, the first row with the same call.
        outputs: tokens of each row's and call's answer, around what is expected (log-normal, sigma .4).
    """

    def __init__(self, plan: Plan, rows: Rows, draw: random.Random) -> None:
        self.plan, self.rows = plan, rows
        self.calls = {node.key: number for number, node in enumerate(plan.calls)}
        read: dict[str, frozenset[str]] = {}
        for node in plan.nodes:
            read[node.key] = frozenset[str]().union(*(read[part.key] for part in node.parts))
            if isinstance(node.operator, Given):
                read[node.key] |= {node.operator.field}
        fields = [sorted(read[key]) for key in self.calls]
        expected = [node.operator.output_tokens for node in plan.calls if isinstance(node.operator, Call)]
        first: dict[Any, int] = {}
        self.same: list[list[int]] = []
        self.outputs: list[list[int]] = []
        for number, row in enumerate(rows):
            self.same.append(
                [first.setdefault((at, *(row[name] for name in names)), number) for at, names in enumerate(fields)]
            )
            drawn = [max(1, round(mean * draw.lognormvariate(-0.08, 0.4))) for mean in expected]
            self.outputs.append([])
            for at, mine in enumerate(drawn):
                like = self.same[number][at]
                self.outputs[number].append(mine if like == number else self.outputs[like][at])


class Prompts:
    """Token ids of jobs' prompts: a token a word, and each answer of an id of its own.

    Args:
        steps: for each job, its steps as row and call.
    """

    def __init__(self, of: Instances, steps: list[list[tuple[int, int]]]) -> None:
        self._of, self._steps = of, steps
        plan = of.plan
        self._fields = {node.key: node.operator.field for node in plan.nodes if isinstance(node.operator, Given)}
        self._pieces = [pieces_of(node, {}) for node in plan.calls]
        self._ids: dict[str, int] = {}
        self._texts: dict[str, list[int]] = {}

    def prompt(self, number: int, index: int) -> list[int]:
        return self.tokens(*self._steps[number][index])

    def says(self, number: int, index: int) -> int:
        return self._says(*self._steps[number][index])

    def known(self, number: int, index: int) -> list[bytes]:
        return []

    def tokens(self, row: int, call: int) -> list[int]:
        found: list[int] = []
        for piece in self._pieces[call]:
            if piece.text is not None:
                found += self._words(piece.text)
            elif piece.filled_by in self._fields:
                found += self._words(self._of.rows[row][self._fields[piece.filled_by]])
            else:
                before = self._of.calls[piece.filled_by]
                found += [self._says(row, before)] * self._of.outputs[row][before]
        return found

    def _says(self, row: int, call: int) -> int:
        return 1_000_000 + self._of.same[row][call] * len(self._pieces) + call

    def _words(self, text: str) -> list[int]:
        if text not in self._texts:
            self._texts[text] = [self._ids.setdefault(word, 1 + len(self._ids)) for word in text.split()]
        return self._texts[text]


class Dispatcher:
    """Sends the ready calls in an order: so many calls, and calls of so many rows, at a time."""

    def __init__(
        self,
        loop: EngineLoop,
        jobs: Sequence[ReplayJob],
        prompts: Prompts,
        steps: list[list[tuple[int, int]]],
        place: Callable[[int, int], Any],
        calls: int | None,
        rows: Sequence[int],
        open_rows: int | None,
    ) -> None:
        self.tick_s = None
        self._loop, self._jobs, self._prompts, self._steps, self._place = loop, jobs, prompts, steps, place
        self._free = calls
        self._ready: list[tuple[Any, Arrival]] = []
        self._left = Counter(row for job in steps for row, _ in job)
        self._closed = deque(row for row in rows if row in self._left)
        self._open: set[int] = set()
        self._most = open_rows or len(self._closed)
        self._held: dict[int, list[Arrival]] = {}

    def arrived(self, arrival: Arrival) -> Iterable[tuple[Arrival, EngineLoop]]:
        self._held.setdefault(self._steps[arrival.job][arrival.step][0], []).append(arrival)
        return self._next()

    def answered(self, outcome: RequestOutcome, ended: bool) -> Iterable[tuple[Arrival, EngineLoop]]:
        row, _ = self._steps[outcome.job][outcome.step]
        self._left[row] -= 1
        if not self._left[row]:
            self._open.discard(row)
        if self._free is not None:
            self._free += 1
        return self._next()

    def tick(self, now: float) -> Iterable[tuple[Arrival, EngineLoop]]:
        return ()

    def job(self, number: int) -> tuple[ReplayJob, Any]:
        return self._jobs[number], self._prompts

    def _next(self) -> list[tuple[Arrival, EngineLoop]]:
        while self._closed and len(self._open) < self._most:
            self._open.add(self._closed.popleft())
        for row in self._held.keys() & self._open:
            for arrival in self._held.pop(row):
                heapq.heappush(self._ready, (self._place(*self._steps[arrival.job][arrival.step]), arrival))
        sent = []
        while self._ready and self._free != 0:
            sent.append((heapq.heappop(self._ready)[1], self._loop))
            if self._free is not None:
                self._free -= 1
        return sent


def jobs_of(of: Instances, shared: bool) -> list[list[tuple[int, int]]]:
    """The steps of each job, as row and call: a row a job, or rows that have a call in common, which is there once."""
    calls = len(of.calls)
    if not shared:
        return [[(row, number) for number in range(calls)] for row in range(len(of.rows))]
    job = list(range(len(of.rows)))
    for row, likes in enumerate(of.same):
        job[row] = job[min(likes)]
    steps: dict[int, list[tuple[int, int]]] = {}
    for number in range(calls):
        for row, likes in enumerate(of.same):
            if likes[number] == row:
                steps.setdefault(job[row], []).append((row, number))
    return list(steps.values())


def replay_jobs(of: Instances, steps: list[list[tuple[int, int]]], prompts: Prompts) -> list[ReplayJob]:
    read = callers(of.plan)
    nodes = of.plan.calls
    before = [[of.calls[key] for key in read[node.key]] for node in nodes]
    shared = any(len(job) != len(nodes) for job in steps)
    jobs = []
    for number, job in enumerate(steps):
        at = {step: index for index, step in enumerate(job)}
        made = []
        for row, index in job:
            parents = [(of.same[row][parent] if shared else row, parent) for parent in before[index]]
            tokens = len(prompts.tokens(row, index))
            made.append(step_of(nodes[index], tokens, of.outputs[row][index], tuple(at[parent] for parent in parents)))
        jobs.append(ReplayJob(of.plan.name, str(number), tuple(made)))
    return jobs


def step_of(node: Node, prompt_tokens: int, output_tokens: int, parents: tuple[int, ...]) -> JobStep:
    assert isinstance(node.operator, Call)
    return JobStep(node.operator.agent, None, 0, 0, prompt_tokens, 0, output_tokens, parents, 0.0, prompt_tokens)


def played(of: Instances, engine: Any, way: str, folder: Path) -> tuple[float, float, float]:
    """Makespan in seconds, prompt tokens computed in millions, and preemptions."""
    ours = way.startswith(OURS)
    steps = jobs_of(of, way in (OURS, ENDS))
    prompts = Prompts(of, steps)
    jobs = replay_jobs(of, steps, prompts)
    longest = max(step.prompt_tokens + step.output_tokens for job in jobs for step in job.steps)
    clock = VirtualClock()
    policy = POLICIES["lifecycle" if way == ENDS else "stock"]
    kind = scheduler_class(policy, None, clock)
    made = make_scheduler(kind, engine, longest, policy.presage(), folder)
    loop = EngineLoop(made, engine.cost, engine.block_tokens, clock)
    fields = {key: WORD * tokens for key, tokens in field_tokens(of.plan, of.rows).items()}
    order = soft_order(of.plan, tree_of(of.plan, fields, counted), of.rows)
    rank = {number: at for at, number in enumerate(order.rows)}
    keys = [node.key for node in of.plan.calls]
    depth = depths(of.plan)

    def place(row: int, call: int) -> Any:
        if way == "operator by operator":
            return depth[keys[call]], call, row
        if way == "longest shared prefix":
            return prompts.tokens(row, call)
        if ours:
            sequence, at = order.places[keys[call]]
            return sequence, rank[row], at
        return 0

    limit = int(way.split()[0]) if way.endswith("rows at once") else None
    if ours:
        under_way = RowsUnderWay(of.plan, fields)
        limit = under_way.that_fit(engine.cache_tokens, len(of.rows), ended_go_first=way == ENDS)
    router = Dispatcher(
        *(loop, jobs, prompts, steps, place),
        calls=None if way == COMES or (limit and not ours) else engine.most_requests,
        rows=order.rows if ours else range(len(of.rows)),
        open_rows=limit,
    )
    schedule = Schedule(tuple((0.0, number) for number in range(len(jobs))))
    run = ReplayEngine(jobs, prompts, schedule, [loop], None, (), router).play()  # type: ignore[arg-type]
    return run.end_s, run.prefilled_tokens / 1e6, float(run.preemptions)


WORD = 4.0 / len("w10000 ")
"""Tokens that a word has, over those that its characters stand for."""


def counted(text: str) -> float:
    return float(len(text.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engine", default="h100-8b-datasheet", help="an engine file, or a shipped one")
    parser.add_argument("--workloads", default=",".join(make.__name__ for make in WORKLOADS))
    parser.add_argument("--ways", help="beside as they come, separated by commas; default: all")
    args = parser.parse_args()
    check_vllm()
    engine = read_engine(args.engine)
    limits = [f"{limit} rows at once" for limit in LIMITS]
    ways = [COMES, *limits, "operator by operator", "longest shared prefix", ORDER, OURS, ENDS]
    if args.ways is not None:
        ways = [COMES, *args.ways.split(",")]
    report: dict[str, Any] = {"benchmark": "batch_replay", "rows": args.rows, "engine": args.engine, "workloads": {}}
    for make in WORKLOADS:
        if make.__name__ not in args.workloads.split(","):
            continue
        seen: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for seed in range(args.seeds):
            draw = random.Random(seed)
            plan, rows = make(draw, args.rows)
            draw.shuffle(rows)
            of = Instances(plan, rows, draw)
            for way in ways:
                with tempfile.TemporaryDirectory() as folder:
                    seen[way].append(played(of, engine, way, Path(folder)))
        table: dict[str, Any] = {}
        print(f"\n{make.__name__}: {args.rows} rows, {len(plan.calls)} calls each, {args.seeds} seeds")
        print(f"{'':24}{'makespan, s':>12}{'ratio':>8}{'range':>16}{'prompt, M':>12}{'preempted':>11}")
        for way, runs in seen.items():
            ratios = [mine[0] / base[0] for mine, base in zip(runs, seen[COMES], strict=True)]
            seconds, computed, preempted = (statistics.median(one[at] for one in runs) for at in range(3))
            ratio = statistics.median(ratios)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{way:24}{seconds:12.1f}{ratio:8.2f}{spread:>16}{computed:12.2f}{preempted:11.0f}")
            table[way] = {"seconds": round(seconds, 2), "ratio": round(ratio, 3), "computed_m": round(computed, 3)}
            table[way] |= {"range": [round(min(ratios), 3), round(max(ratios), 3)]}
        report["workloads"][make.__name__] = table
    print(json.dumps(report))


if __name__ == "__main__":
    main()
