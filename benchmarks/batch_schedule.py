"""How close do schedules of a batch come to the optimum, and how long does planning take?

Random plans of a few calls on two workers, in Helium's cost model (section 5: token steps, shared prefixes between
consecutive calls of a worker, delays before answers are read). The optimum is that of a mixed-integer program (HiGHS).
Beside `presage`: operator by operator, query by query, and the ready call with the longest shared prefix first
(SGLang), each list-scheduled on the same workers. Then what `presage batch run` does with small batches (`soft_order`):
random plans of 2 to 4 calls over 2 to 4 rows, on one worker or two, over the best that any of these orders reaches. At
last plans of up to 10,000 operators are compiled and scheduled.

    python benchmarks/batch_schedule.py [--plans 100] [--calls 7] [--seed 0]

Prints tables and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from presage.batch.operators import Operator, call, given, join, template
from presage.batch.plan import Plan
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.schedule import Costs, PlannedCall, callers, paths, planned_calls, schedule, soft_order

WORKERS, CACHE = 2, 4000.0
SMALL_CACHE = 8192.0
RUNS = "presage batch run"
OURS = "presage"


def drawn(draw: random.Random, calls: int) -> tuple[list[PlannedCall], list[int]]:
    """Some queries, each with a text of its own, through a random graph of operators; and each call's operator."""
    operators = draw.choice(range(2, calls + 1))
    edges = [tuple(other for other in range(number) if draw.random() < 0.4) for number in range(operators)]
    system = [draw.choice((0, draw.randrange(operators))) for _ in range(operators)]
    words = [float(draw.randrange(50, 800)) for _ in range(operators + 1)]
    output = [float(draw.randrange(20, 400)) for _ in range(operators)]
    question_first = draw.random() < 0.5
    found: list[PlannedCall] = []
    of: list[int] = []
    for query in range(calls // operators + (calls % operators > 0)):
        for number in range(operators):
            if len(found) == calls:
                break
            static, question = (1000 + system[number], words[system[number]]), (2000 + query, words[-1])
            own = [(3000 + query * 100 + other, output[other]) for other in edges[number]]
            path = ((question, static) if question_first else (static, question)) + tuple(own)
            after = tuple(query * operators + other for other in edges[number])
            found.append(PlannedCall(path, output[number], after))
            of.append(number)
    return found, of


def optimum(costs: Costs, workers: int, above: float) -> float:
    """Least makespan, by arcs (who follows whom on a worker) and begins; `above` is more than it."""
    count = len(costs.calls)
    arcs = [(before, after) for before in range(-1, count) for after in range(count) if before != after]
    begin, last = len(arcs), len(arcs) + count
    usage = [costs.usage(after, None if before < 0 else before) for before, after in arcs]
    rows, low, high = [], [], []

    def limit(terms: dict[int, float], least: float, most: float = np.inf) -> None:
        rows.append(terms)
        low.append(least)
        high.append(most)

    for index in range(count):
        into = {number: 1.0 for number, arc in enumerate(arcs) if arc[1] == index}
        limit(into, 1, 1)
        limit({number: 1.0 for number, arc in enumerate(arcs) if arc[0] == index}, 0, 1)
        used = {number: usage[number] for number in into}
        limit({last: 1.0, begin + index: -1.0} | {number: -value for number, value in used.items()}, 0)
        for reader in costs.readers[index]:
            terms = {begin + reader: 1.0, begin + index: -1.0} | {number: -value for number, value in used.items()}
            limit(terms, costs.delay(index))
        for number, (before, after) in enumerate(arcs):
            if before == index:
                terms = {begin + after: 1.0, begin + index: -1.0} | {other: -value for other, value in used.items()}
                terms[number] = terms.get(number, 0.0) - above
                limit(terms, -above)
    limit({number: 1.0 for number, arc in enumerate(arcs) if arc[0] < 0}, 0, workers)
    matrix = lil_array((len(rows), last + 1))
    for row, terms in enumerate(rows):
        for column, value in terms.items():
            matrix[row, column] = value
    goal = np.zeros(last + 1)
    goal[last] = 1.0
    kinds = np.zeros(last + 1)
    kinds[:begin] = 1
    upper = np.full(last + 1, above)
    upper[:begin] = 1.0
    limits = LinearConstraint(matrix.tocsr(), np.array(low), np.array(high))
    for presolve in (True, False):  # presolving fails now and then
        options = {"mip_rel_gap": 1e-4, "time_limit": 60, "presolve": presolve}
        solved = milp(
            goal, constraints=limits, bounds=Bounds(np.zeros(last + 1), upper), integrality=kinds, options=options
        )
        if solved.status == 0:
            return float(solved.fun)
    raise RuntimeError(f"HiGHS did not prove an optimum: {solved.message}")


def listed(costs: Costs, workers: int, first: Callable[[int, int | None], object]) -> float:
    """Makespan if whoever is free takes the ready call that comes first by a rule; waits if none is ready."""
    ends: dict[int, float] = {}
    free, orders = [0.0] * workers, [[] for _ in range(workers)]
    left = set(range(len(costs.calls)))
    while left:
        worker = min(range(workers), key=free.__getitem__)
        last = orders[worker][-1] if orders[worker] else None
        release = {
            index: max((ends[other] + costs.delay(other) for other in costs.calls[index].after), default=0.0)
            for index in left
            if all(other in ends for other in costs.calls[index].after)
        }
        now = max(free[worker], min(release.values()))
        index = min(
            (index for index in release if release[index] <= now), key=lambda index: (first(index, last), index)
        )
        ends[index] = free[worker] = now + costs.usage(index, last)
        orders[worker].append(index)
        left.remove(index)
    return max(ends.values())


def compared(plans: int, calls: int, seed: int) -> dict[str, list[float]]:
    """Makespans over the optimum's, by way."""
    draw = random.Random(seed)
    ratios: dict[str, list[float]] = {}
    for number in range(plans):
        of, operators = drawn(draw, calls)
        costs = Costs(of, CACHE)
        rules: dict[str, Callable[[int, int | None], object]] = {
            "operator by operator": lambda index, _, operators=operators: (operators[index], index),
            "query by query": lambda index, _: index,
            "longest shared prefix": lambda index, last, costs=costs: (
                0.0 if last is None else -costs.shared(index, last)
            ),
        }
        ends = {name: listed(costs, WORKERS, rule) for name, rule in rules.items()}
        ends[f"{OURS}, listed alone"] = schedule(of, WORKERS, CACHE, moves=0).makespan
        ends[OURS] = schedule(of, WORKERS, CACHE, seed=number).makespan
        best = optimum(costs, WORKERS, 1.01 * min(ends.values()))
        for name, end in ends.items():
            ratios.setdefault(name, []).append(end / best)
    return ratios


def small_batches(plans: int, seed: int) -> dict[str, list[float]]:
    """Makespans over the best of all, by the way in which the calls of random small batches are ordered."""
    draw = random.Random(seed)
    ratios: dict[str, list[float]] = {}
    for number in range(plans):
        agents = draw.choice((2, 3, 4))
        rows = [{"q": f"row {row} " * draw.randrange(10, 80)} for row in range({2: 4, 3: 3, 4: 2}[agents])]
        workers = number % 2 + 1
        shared = ["".join(f"rule {kind} {word} " for word in range(draw.randrange(2, 300))) for kind in range(2)]
        made: list[Operator] = []
        for agent in range(agents):
            read = [other for other in made if draw.random() < 0.45]
            prompt = template("{q}\n{d}role {a}", q=given("q"), d=join(read) if read else "", a=str(agent))
            system = draw.choice([*shared, f"you are {agent} " * draw.randrange(2, 100), ""])
            made.append(call(f"agent {agent}", prompt, system=system, output_tokens=float(draw.randrange(40, 400))))
        plan = Plan("small", **{f"o{number}": operator for number, operator in enumerate(made)})
        tree = tree_of(plan, field_tokens(plan, rows))
        calls, labels = planned_calls(plan, tree, len(rows))
        costs = Costs(calls, SMALL_CACHE)
        soft = soft_order(plan, tree, rows, workers=workers)
        at = {node.key: place for place, node in enumerate(plan.calls)}
        places = {
            RUNS: [soft.place(soft.rows[row], row, key) for row, key in labels],
            "operator by operator": [(at[key], row) for row, key in labels],
            "row by row": [(row, at[key]) for row, key in labels],
        }
        found = {
            name: costs.listed(sorted(range(len(calls)), key=place.__getitem__), workers)
            for name, place in places.items()
        }
        best = min(schedule(calls, workers, SMALL_CACHE, seed=number).makespan, *found.values())
        for name, makespan in found.items():
            ratios.setdefault(name, []).append(makespan / best)
    return ratios


def large(operators: int) -> tuple[float, float]:
    """Seconds to compile a plan of so many calls, and to schedule it."""
    text = given("text")
    made: list[Operator] = []
    for number in range(operators):
        read = [made[number // 2]] if number > 2 else []
        system = f"You are reviewer {number % 97} of aspect {number % 13}. " + "Be brief and exact. " * 20
        made.append(call(f"agent {number}", template("{t} {r}", t=text, r=join(read) if read else ""), system=system))
    begun = time.perf_counter()
    plan = Plan("large", out=join(made))
    tree = tree_of(plan, {})
    compiled = time.perf_counter()
    path = paths(tree)
    index = {node.key: number for number, node in enumerate(plan.calls)}
    after = callers(plan)
    planned = [PlannedCall(path[key], 128.0, tuple(index[other] for other in after[key])) for key in index]
    schedule(planned, 4, 200_000.0)
    return compiled - begun, time.perf_counter() - compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ratios = compared(args.plans, args.calls, args.seed)
    print(f"{args.plans} plans of {args.calls} calls, makespan over the optimum")
    print(f"{'':24}{'median':>8}{'worst':>8}")
    report: dict[str, object] = {"benchmark": "batch_schedule", "plans": args.plans, "calls": args.calls}
    for name, found in ratios.items():
        print(f"{name:24}{statistics.median(found):8.3f}{max(found):8.3f}")
        report[name] = {"median": round(statistics.median(found), 4), "worst": round(max(found), 4)}
    print(f"\n{2 * args.plans} small batches, makespan over the best of all orders and `schedule`")
    print(f"{'':24}{'mean':>8}{'worst':>8}")
    for name, found in small_batches(2 * args.plans, args.seed).items():
        print(f"{name:24}{statistics.mean(found):8.3f}{max(found):8.3f}")
        report[f"small: {name}"] = {"mean": round(statistics.mean(found), 4), "worst": round(max(found), 4)}
    print()
    report["seconds"] = {}
    print(f"{'operators':>12}{'compile, s':>12}{'schedule, s':>12}")
    for operators in (100, 1000, 10_000):
        compiling, scheduling = large(operators)
        print(f"{operators:12}{compiling:12.2f}{scheduling:12.2f}")
        report["seconds"] |= {operators: [round(compiling, 3), round(scheduling, 3)]}  # type: ignore[operator]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
