"""Learning a probabilistic automaton: the prefix tree of all workflows, merged by ALERGIA.

Carrasco and Oncina (1994), "Learning stochastic regular grammars by means of a state merging method", in the red-blue
order: red nodes are states, blue nodes their children; a blue node is merged with a compatible red one, else it becomes
red. A node is labelled with the symbol that leads to it, so only nodes of one symbol are merged.

Two nodes differ if any outcome, END included, does: a two-sided test of two proportions, pooled, with Yates' continuity
correction (chi-square with one degree of freedom), at level `alpha` for each outcome, and so on along common
successors. ALERGIA's own Hoeffding bound holds for any sample size, but at these counts it finds a difference of .05
only from some 3,000 visits, this test from some 250. Nodes with fewer than `min_evidence` known outcomes are not
tested: they have too few to differ. Of several compatible states the one that makes the outcomes of the blue node
likeliest is taken.

AALpy (MIT) has ALERGIA, too. It keeps the whole prefix of every node, recurses once a step and tests all pairs again
after
every merge: workflows of 10,000 steps or 10,000 agent names do not fit into a minute or a gigabyte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from presage.features.sequences import Symbol


@dataclass(eq=False)
class TreeNode:
    """A node of the prefix tree, later a state: workflow visits, how many ended here, and what followed the others."""

    symbol: Symbol | None
    number: int
    visits: int = 0
    ends: int = 0
    next: dict[Symbol, TreeNode] = field(default_factory=dict)
    taken: dict[Symbol, int] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Visits whose outcome is known: not where a trace was cut."""
        return self.ends + sum(self.taken.values())


def prefix_tree(workflows: Iterable[tuple[Sequence[Symbol], bool]]) -> TreeNode:
    """The tree of all prefixes, from the symbols of each workflow and whether it reached its end."""
    root = TreeNode(None, 0)
    nodes = 1
    for symbols, complete in workflows:
        node = root
        node.visits += 1
        for symbol in symbols:
            child = node.next.get(symbol)
            if child is None:
                child = node.next[symbol] = TreeNode(symbol, nodes)
                nodes += 1
            node.taken[symbol] = node.taken.get(symbol, 0) + 1
            node = child
            node.visits += 1
        node.ends += complete
    return root


@dataclass(frozen=True)
class Merging:
    """The level of the test of one outcome, the fewest known outcomes to test, and the most states."""

    alpha: float
    min_evidence: int
    max_states: int


def merge_tree(root: TreeNode, merging: Merging) -> list[TreeNode]:
    """Merge a prefix tree in place; returns the states, the start first. Frequent prefixes are merged first."""
    bound = NormalDist().inv_cdf(1 - merging.alpha / 2)
    red, by_symbol = [root], dict[Symbol | None, list[TreeNode]]()
    blue: list[tuple[int, int, TreeNode, Symbol]] = []

    def watch(parent: TreeNode) -> None:
        for symbol, child in parent.next.items():
            if child not in states:
                heapq.heappush(blue, (-child.visits, child.number, parent, symbol))

    states = {root}
    watch(root)
    while blue:
        _, number, parent, symbol = heapq.heappop(blue)
        child = parent.next[symbol]
        if child in states or child.number != number:
            continue  # decided by way of an earlier entry
        same = by_symbol.get(symbol, [])
        if len(red) >= merging.max_states or child.known < merging.min_evidence:
            fitting = same
        else:
            fitting = [state for state in same if _compatible(state, child, bound, merging.min_evidence)]
        if fitting:
            into = max(fitting, key=lambda state: (_fit(state, child), state.known, -state.number))
            parent.next[symbol] = into
            for changed in _fold(into, child, states):
                watch(changed)
        else:
            states.add(child)
            red.append(child)
            by_symbol.setdefault(symbol, []).append(child)
            watch(child)
    return red


def _compatible(state: TreeNode, child: TreeNode, bound: float, least: int) -> bool:
    """Whether no outcome differs, here and along common successors; `child` is the root of a tree."""
    pairs = [(state, child)]
    while pairs:
        a, b = pairs.pop()
        n, m = a.known, b.known
        if min(n, m) < least:
            continue
        if _differ(a.ends, n, b.ends, m, bound):
            return False
        for symbol in a.taken.keys() | b.taken.keys():
            if _differ(a.taken.get(symbol, 0), n, b.taken.get(symbol, 0), m, bound):
                return False
        pairs += [(a.next[symbol], b.next[symbol]) for symbol in a.next.keys() & b.next.keys()]
    return True


def _differ(x: int, n: int, y: int, m: int, bound: float) -> bool:
    pooled = (x + y) / (n + m)
    if pooled in (0.0, 1.0):
        return False
    each = 1 / n + 1 / m
    apart = max(abs(x / n - y / m) - each / 2, 0.0)
    return apart > bound * math.sqrt(pooled * (1 - pooled) * each)


def _fit(state: TreeNode, child: TreeNode) -> float:
    """Log-likelihood of the outcomes of `child` in `state`, every outcome counted half once more."""
    total = state.known + 0.5 * (len(state.taken) + 1)
    score = child.ends * math.log((state.ends + 0.5) / total)
    return score + sum(
        times * math.log((state.taken.get(symbol, 0) + 0.5) / total) for symbol, times in child.taken.items()
    )


def _fold(into: TreeNode, tree: TreeNode, states: set[TreeNode]) -> list[TreeNode]:
    """Add a tree to a state; returns the states that it reached."""
    pairs, reached = [(into, tree)], []
    while pairs:
        a, b = pairs.pop()
        a.visits += b.visits
        a.ends += b.ends
        for symbol, times in b.taken.items():
            a.taken[symbol] = a.taken.get(symbol, 0) + times
            if symbol in a.next:
                pairs.append((a.next[symbol], b.next[symbol]))
            else:
                a.next[symbol] = b.next[symbol]
        if a in states:
            reached.append(a)
    return reached
