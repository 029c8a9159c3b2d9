"""Plans prefetches: which blocks to load into the cache before a request needs them.

Source: PBKV, §4.3. A prefetch has a certain cost and an uncertain gain, so it uses idle resources only:

- only during a step that prefills nothing;
- only into blank and retired blocks, S_a of them, so that it evicts no block of an active workflow;
- at most what the idle channel moves during the step: S = min(S_a, rate × step time). The channel is the bus to an
  offload tier or, while the engine is idle, its own prefill, which would lengthen steps that decode;
- by the one-step value (eq. 1), the highest first, until S is used up. The next step can fetch what is needed later.

Departures from the paper: the last candidate that does not fit is fetched in part, from its front, since the beginning
of a prompt is useful without its end; and a candidate below `least_value` is not fetched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from presage.errors import ConfigurationError
from presage.serving_hooks.policies.score import UNIT, Lookahead

PREFILL_RUNS: Final = "a prefill runs or waits"
NO_SPACE: Final = "no blank or retired blocks"
NO_TIME: Final = "the channel moves no whole block within the step"
NOTHING_WORTH: Final = "no candidate is worth it"


@dataclass(frozen=True)
class PrefetchConfig:
    """Settings of the planning.

    Attributes:
        least_value: least one-step value of a candidate to be fetched. The value is the probability of a touch at the
            next step, summed over workflows, so it may exceed 1.
        most_blocks: blocks fetched per step at most.
    """

    least_value: float = 0.2
    most_blocks: int = 4096

    def __post_init__(self) -> None:
        if not self.least_value > 0:
            raise ConfigurationError(f"least_value is {self.least_value}; give a number above 0")
        if self.most_blocks < 1:
            raise ConfigurationError(f"most_blocks is {self.most_blocks}; give 1 or more")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Missing blocks that belong together, such as the prompt of an agent in a workflow.

    Attributes:
        name: chosen by the caller.
        uses: by workflow, the agents that touch them.
        blocks: number of missing blocks.
    """

    name: str
    uses: Mapping[str, frozenset[str]]
    blocks: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """The step that is about to run.

    Attributes:
        pure_decode: it prefills nothing, and no request waits for a prefill.
        spare_blocks: S_a, blank and retired free blocks.
        blocks_per_s: of the channel, a running mean.
        step_s: seconds a decode step takes, a running mean.
    """

    pure_decode: bool
    spare_blocks: int
    blocks_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """The first `blocks` missing blocks of a candidate; `value` is its one-step value."""

    name: str
    blocks: int
    value: float


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What to fetch during this step, best first; if nothing, `reason` says why."""

    fetches: tuple[Fetch, ...] = ()
    reason: str | None = None

    @property
    def blocks(self) -> int:
        """Blocks fetched in all."""
        return sum(fetch.blocks for fetch in self.fetches)


@dataclass(frozen=True)
class Prefetch:
    """Plans one step at a time, without state."""

    config: PrefetchConfig = field(default_factory=PrefetchConfig)

    def plan(
        self, engine: EngineState, candidates: Iterable[Candidate], forecasts: Mapping[str, Lookahead]
    ) -> PrefetchPlan:
        """What to fetch, given the forecasts of active workflows; a workflow without one adds no value.

        Candidates of equal value keep their order.
        """
        if not engine.pure_decode:
            return PrefetchPlan(reason=PREFILL_RUNS)
        if engine.spare_blocks <= 0:
            return PrefetchPlan(reason=NO_SPACE)
        moved = engine.blocks_per_s * engine.step_s
        left = min(engine.spare_blocks, self.config.most_blocks, int(moved) if math.isfinite(moved) else 0)
        if left <= 0:
            return PrefetchPlan(reason=NO_TIME)
        valued = [(self._value(candidate, forecasts), candidate) for candidate in candidates if candidate.blocks > 0]
        worth = [pair for pair in valued if pair[0] >= self.config.least_value]
        fetches = []
        for value, candidate in sorted(worth, key=lambda pair: -pair[0]):
            blocks = min(candidate.blocks, left)
            fetches.append(Fetch(candidate.name, blocks, value))
            left -= blocks
            if not left:
                break
        return PrefetchPlan(tuple(fetches), None if fetches else NOTHING_WORTH)

    @staticmethod
    def _value(candidate: Candidate, forecasts: Mapping[str, Lookahead]) -> float:
        return sum(forecasts[w].one_step(agents) for w, agents in candidate.uses.items() if w in forecasts) / UNIT
