"""What do the policies cost: the order of free blocks beside a plain list, admission, priority?

50,000 blocks of 16 tokens: 250 active workflows of 200 blocks each, five agents, eight steps, and a prompt of 20
blocks that all workflows of a type share; half of the blocks are free. "linked" is a doubly linked list of block
objects, like vLLM's; "ordered" a collections.OrderedDict of ids. Admission decides over workflows of which a third
wait for a tool, with measured losses; the queue ages 1,000 waiting requests beside a batch of 64. One thread, warm,
medians.

    python benchmarks/policies.py [--workflows 250]

Prints a table of microseconds and ratios to the linked list, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from presage.serving_hooks.policies.admission import Admission
from presage.serving_hooks.policies.eviction import FreeOrder
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst
from presage.serving_hooks.policies.score import ScoreConfig, lookahead
from presage.serving_hooks.policies.steady_state import Rates

AGENTS = tuple(f"agent {i}" for i in range(30))
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
STEPS, SHARED, OWN = 8, 20, 180


class Block:
    """A block like vLLM's: an object with its neighbours in the list."""

    __slots__ = ("after", "before", "id")

    def __init__(self, number: int) -> None:
        self.id = number
        self.before: Block | None = None
        self.after: Block | None = None


class Linked:
    """A doubly linked list between two sentinels."""

    def __init__(self, blocks: int) -> None:
        self.all = [Block(i) for i in range(blocks)]
        self.head, self.tail = Block(-1), Block(-1)
        self.head.after, self.tail.before = self.tail, self.head

    def append(self, blocks: Iterable[int]) -> None:
        """Adds free blocks."""
        last = self.tail.before
        for number in blocks:
            block = self.all[number]
            block.before, last.after = last, block
            last = block
        last.after, self.tail.before = self.tail, last

    def remove(self, number: int) -> None:
        """Removes a block that is used again."""
        block = self.all[number]
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = None

    def pop(self, n: int) -> list[int]:
        """Takes the first n blocks."""
        given, block = [], self.head.after
        for _ in range(n):
            given.append(block.id)
            following = block.after
            block.before = block.after = None
            block = following
        self.head.after, block.before = block, self.head
        return given


class Ordered:
    """An OrderedDict of ids."""

    def __init__(self, blocks: int) -> None:
        self.ids: OrderedDict[int, None] = OrderedDict()

    def append(self, blocks: Iterable[int]) -> None:
        """Adds free blocks."""
        for number in blocks:
            self.ids[number] = None

    def remove(self, number: int) -> None:
        """Removes a block that is used again."""
        del self.ids[number]

    def pop(self, n: int) -> list[int]:
        """Takes the first n blocks."""
        return [self.ids.popitem(last=False)[0] for _ in range(n)]


def forecasts(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).dirichlet(np.full(len(AGENTS) + 1, 0.2), size=(n, 3)).astype(np.float32))


def serve(order: FreeOrder, workflows: int) -> dict[str, list[int]]:
    """Runs every workflow's steps, each reading and extending the whole history; half of them then wait for a tool."""
    shared = order.pop(SHARED)
    blocks = {}
    for i in range(workflows):
        name, own, drawn = f"w{i}", [], lookahead(forecasts(1)[0], AGENTS, ScoreConfig())
        for step in range(STEPS):
            agent = AGENTS[step % 5]
            order.found("t", name, agent, shared + own)
            written = order.pop(OWN // STEPS if step else OWN - OWN // STEPS * (STEPS - 1))
            order.filled(name, agent, written)
            own += written
            order.forecast(
                "t", name, drawn, ReturnCurve(LEVELS, [2.0 ** (i % 7 + k) for k in range(8)], 0.05), 0.0, 2.0
            )
        blocks[name] = own
        if i % 2:
            order.append(reversed(own))
    return blocks


def median_us(call: Callable[[int], object], undo: Callable[[object], object], rounds: int) -> float:
    """Median of `call`; `undo` restores what it changed and is not timed."""
    taken = []
    for i in range(rounds):
        begun = time.perf_counter_ns()
        changed = call(i)
        taken.append(time.perf_counter_ns() - begun)
        undo(changed)
    return statistics.median(taken[rounds // 10 :]) / 1000


def admission_over(n: int) -> tuple[Admission, Rates]:
    """Admission over n workflows, of which a third is in a tool call, half of these nameless; twice what the cache
    holds."""
    pauses_s = np.sort(np.random.default_rng(0).exponential(2.0, 600))
    admission = Admission(10_000.0 * n)
    for i in range(n):
        row = admission.workflows.place(f"w{i}")
        admission.workflows.facts[row] = (
            i % 3,
            0.0,
            True,
            9_000.0,
            15_000.0 + i % 50 * 200,
            math.nan,
            math.inf,
            0.0,
            i % 2,
        )
    return admission, Rates(0.01, 1e-4, 1e-4, 100.0, 400.0, 64, pauses_s, end=1 / 30, miss_share=0.5)


def decide_us(n: int) -> float:
    admission, rates = admission_over(n)
    admission.choose(rates, 0.2, 0.0, 0.0)
    return median_us(lambda i: admission.decide(i * 0.01), lambda _: None, 100)


def choose_us(n: int) -> float:
    admission, rates = admission_over(n)
    return median_us(lambda i: admission.choose(rates, 0.2, 0.0, i * 2.0), lambda _: None, 100)


def queue_us() -> float:
    queue = ShortestTotalJobFirst()
    names = [f"r{i}" for i in range(1000)]
    for i, name in enumerate(names):
        queue.add(name, i % 200, float(i), "t", float(i))

    def iteration(i: int) -> None:
        queue.age(200 + i)
        queue.selected(names[:64], 200 + i)

    return median_us(iteration, lambda _: None, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=250)
    workflows = parser.parse_args().workflows
    blocks = workflows * (SHARED + OWN)

    ids = list(range(blocks))  # the engine's own, whatever queue it has
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    order = FreeOrder(blocks, time.monotonic)
    order.append(ids)
    own = serve(order, workflows)
    bytes_a_block = (tracemalloc.get_traced_memory()[0] - before) / blocks
    tracemalloc.stop()
    groups = len({id(group) for group in order._index.group_of if group is not None})

    queues: dict[str, Linked | Ordered] = {"linked": Linked(blocks), "ordered": Ordered(blocks)}
    for queue in queues.values():
        queue.append(list(order))

    us: dict[str, dict[str, float]] = {}
    for n in (1, 40, 256):
        us[f"give up {n}"] = {
            name: median_us(lambda _, q=queue, n=n: q.pop(n), queue.append, 400) for name, queue in queues.items()
        }
    # Given up for real: what the blocks held is forgotten, so every round gives up the next blocks in order.
    for n in (1, 40, 256):
        fresh = FreeOrder(blocks, time.monotonic)
        fresh.append(range(blocks))
        serve(fresh, workflows)
        fresh.pop(fresh.spare())  # the blank ones first, which are no task
        rounds = min(400, len(fresh) // n)
        us[f"give up {n}"]["forecasts"] = median_us(lambda _, q=fresh, n=n: q.pop(n), lambda _: None, rounds)

    waiting = [name for i, name in enumerate(own) if i % 2]

    def tail_of(i: int) -> list[int]:
        return own[waiting[i % len(waiting)]][-40:]

    everyone = {**queues, "forecasts": order}
    us["free 40"] = {}
    us["take 40 back"] = {}
    for name, queue in everyone.items():

        def take(i: int, queue: Linked | Ordered | FreeOrder = queue) -> int:
            if isinstance(queue, FreeOrder):
                queue.remove(tail_of(i))
            else:
                for block in tail_of(i):
                    queue.remove(block)
            return i

        us["take 40 back"][name] = median_us(take, lambda i, queue=queue: queue.append(reversed(tail_of(i))), 400)
        taken = [take(i) for i in range(len(waiting))]
        us["free 40"][name] = median_us(
            lambda i, queue=queue: queue.append(reversed(tail_of(i))), lambda _: None, len(taken)
        )

    drawn = forecasts(64)

    def forecast(i: int) -> None:
        looked = lookahead(drawn[i % 64], AGENTS, ScoreConfig())
        order.forecast(
            "t",
            waiting[i % len(waiting)],
            looked,
            ReturnCurve(LEVELS, [2.0 ** (i % 9 + k) for k in range(8)], 0.05),
            0.0,
            2.0,
        )

    us["forecast of a workflow"] = {"forecasts": median_us(forecast, lambda _: None, 2000)}
    us["end of a workflow"] = {"forecasts": median_us(lambda i: order.end(waiting[i]), lambda _: None, len(waiting))}

    for n in (72, 1000):
        us[f"admission over {n}"] = {"forecasts": decide_us(n)}
        us[f"admission, a choice every 2 s, over {n}"] = {"forecasts": choose_us(n)}
    us["one iteration of the queue"] = {"forecasts": queue_us()}

    print(f"{blocks:,} blocks, {workflows} workflows, {groups} groups, {bytes_a_block:.0f} bytes a block\n")
    print("| operation | linked µs | ordered µs | forecasts µs | forecasts / linked |")
    print("|---|---|---|---|---|")
    for what, of in us.items():
        cells = [f"{of[name]:.2f}" if name in of else "–" for name in ("linked", "ordered", "forecasts")]
        ratio = f"{of['forecasts'] / of['linked']:.1f}" if "linked" in of else "–"
        print(f"| {what} | {' | '.join(cells)} | {ratio} |")
    print(json.dumps({"benchmark": "policies", "us": us, "bytes_a_block": bytes_a_block, "groups": groups}))


if __name__ == "__main__":
    main()
