"""When to prepare a tool that a workflow may need: idle time against waiting.

A second in which a step waits costs as much as w seconds in which a prepared tool is idle. The tool will be needed with
probability p, at a time of which samples are known; where it is not needed, it is idle until that shows. Being ready a
moment later costs w moments with the probability p F that it is needed before, F the share of samples before, and else
saves one. So it should be ready at the share F = 1 / (p (1 + w)) of samples, and is not worth preparing where that is
more than all of them. ThunderAgent (§4.4) prepares at the start of a program and pays the idle time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def start_in(needed_s: Sequence[float], probability: float, setup_s: float, wait_cost: float) -> float | None:
    """Seconds from now at which preparing should begin; None: only once it is asked for.

    Args:
        needed_s: equally likely seconds from now until the tool is needed; at least one.
        probability: that it is needed.
        setup_s: how long preparing takes.
        wait_cost: of a second in which a step waits for it, in seconds in which it is idle.
    """
    worth = probability * (1 + wait_cost)
    if worth < 1:
        return None
    before = math.ceil(len(needed_s) / worth)
    return max(0.0, sorted(needed_s)[before - 1] - setup_s)


def spare_s(setup_s: float, wait_cost: float) -> float:
    """Seconds for which a prepared tool that nobody needs is kept for others: until its idle time has cost as much as
    the wait that it could save, which is never more than twice the best choice in hindsight (the ski-rental rule)."""
    return setup_s * wait_cost
