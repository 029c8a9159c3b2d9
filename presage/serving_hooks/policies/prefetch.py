"""What to bring into the cache before it is asked for.

Source: PBKV, §4.3. A prefetch pays for certain and gains perhaps, so it takes only what lies idle:

- only on a step that prefills nothing;
- only into blank and retired blocks, S_a of them: nothing an active workflow uses is given up for a guess;
- at most what the idle channel moves while the step lasts: S = min(S_a, rate × step time). The channel is the bus to an
  offload tier, or, while the engine is idle, its own prefill: never beside steps that decode, which it would lengthen;
- by the one-step value (eq. 1), the highest first, until S is used up. What is needed two steps from now can be fetched
  at the next.

Where we depart: the last candidate that does not fit is fetched in part, from its front, since the beginning of a
prompt is of use without its end; and a candidate below `least_value` is not fetched at all.
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
        least_value: a candidate less likely than this to be touched at the next step stays where it is; several
            workflows add up, so it may exceed 1.
        most_blocks: at most so many blocks a step, whatever the channel moves.
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
    """Blocks that are not in the cache and belong together, such as the prompt of an agent in a workflow.

    Attributes:
        name: the caller's.
        uses: the agents of each workflow that touch them.
        blocks: how many are missing.
    """

    name: str
    uses: Mapping[str, frozenset[str]]
    blocks: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """The step that is about to run.

    Attributes:
        pure_decode: nothing is prefilled in it and no request waits for a prefill.
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
    """What to fetch during this step, best first; without any, `reason` says why."""

    fetches: tuple[Fetch, ...] = ()
    reason: str | None = None

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return sum(fetch.blocks for fetch in self.fetches)


@dataclass(frozen=True)
class Prefetch:
    """Plans one step at a time; keeps nothing between them."""

    config: PrefetchConfig = field(default_factory=PrefetchConfig)

    def plan(
        self, engine: EngineState, candidates: Iterable[Candidate], forecasts: Mapping[str, Lookahead]
    ) -> PrefetchPlan:
        """What to fetch, given the forecasts of active workflows; one without a forecast adds nothing to a value.

        Equal values go in the order of the candidates.
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
