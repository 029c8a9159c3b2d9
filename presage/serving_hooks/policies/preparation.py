"""When to prepare a tool that a workflow may need: the cost of idle against the cost of waiting.

Preparing takes S seconds. The tool will be needed with probability p, after N seconds, of which samples are known. If
it is begun after d seconds, a step that needs it waits min(S, max(0, d + S - N)) seconds, or it is ready for max(0, N -
d - S) seconds before. Where it is not needed, which shows after N seconds too, it was prepared for nothing from d on.
ThunderAgent (§4.4) prepares at the start of a program and pays the idle time.
"""

from __future__ import annotations

from collections.abc import Sequence


def start_in(
    needed_s: Sequence[float], probability: float, setup_s: float, *, idle_cost: float, wait_cost: float
) -> float | None:
    """Seconds from now at which preparing should begin, at the least expected cost; None: only once it is asked for.

    The cost is piecewise linear in the beginning, so that only its corners are compared; of equal ones the earliest is
    taken.

    Args:
        needed_s: equally likely seconds from now until the tool is needed, or shows to be unneeded; at least one.
        probability: that it is needed.
        setup_s: how long preparing takes.
        idle_cost, wait_cost: of a second in which a prepared tool is not used, and in which a step waits for one.
    """

    def cost(begin: float) -> float:
        total = 0.0
        for needed in needed_s:
            late = begin + setup_s - needed
            used = wait_cost * min(late, setup_s) if late > 0 else -idle_cost * late
            total += probability * used + (1 - probability) * idle_cost * max(0.0, needed - begin)
        return total / len(needed_s)

    corners = sorted({0.0, *(max(0.0, needed - setup_s) for needed in needed_s), *(max(0.0, n) for n in needed_s)})
    best = min(corners, key=cost)
    return best if cost(best) < probability * wait_cost * setup_s else None


def spare_s(setup_s: float, *, idle_cost: float, wait_cost: float) -> float:
    """Seconds for which a prepared tool that nobody needs is kept for others: until its idle time has cost as much as
    the wait that it could save, which is never more than twice the best choice in hindsight (the ski-rental rule)."""
    return setup_s * wait_cost / idle_cost
