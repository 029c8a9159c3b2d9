"""Placement among upstreams that serve one model, by the routing policies that the fleet replay measures.

Where a router stands behind the gateway it places requests, and there is nothing to choose here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from presage.gateway.request_forecasts import GatewayDecision
from presage.serving_hooks.policies.fair_shares import Weights
from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import LeastLoaded, RoundRobin, RoutingPolicy

_Id = tuple[int, int]


class Placements:
    """Places requests on the engines of one fleet; a held request waits for its engine.

    Args:
        engines: rows that the fleet monitor keeps; `open` is False for those that take no requests.
        make_policy: a routing policy.
        clock: monotonic seconds.
        on_hold: called when a request begins to wait (True) and when it does so no longer.
        weights: shares of tenants and workflow types.
    """

    def __init__(
        self,
        engines: Sequence[FleetEngine],
        make_policy: Callable[[], RoutingPolicy],
        clock: Callable[[], float],
        on_hold: Callable[[GatewayDecision, bool], object],
        weights: Weights | None = None,
    ) -> None:
        self.fleet = Fleet(engines, weights)
        self._policy, self._clock, self._on_hold = make_policy(), clock, on_hold
        self._held: dict[_Id, asyncio.Future[Placement]] = {}
        self._placed: dict[str, tuple[_Id, str]] = {}
        self._ended: set[str] = set()
        self._next = 0

    @property
    def tick_s(self) -> float | None:
        """Seconds between two calls of `tick`; None for none."""
        return self._policy.tick_s

    async def place(self, decision: GatewayDecision, model: str) -> Placement:
        """The engine of a request, by its number; waits while the policy holds the request."""
        now, step, annotation = self._clock(), decision.identity.step, decision.annotation
        self._next += 1
        request_id = self._next, 0
        program = f"{step.workflow}\0{model}"
        earlier = self.fleet.programs.get(program)
        system_prompt = decision.request.texts[0] or ""
        whole = sum(len(text) for text in decision.request.texts if text) or 1
        request = RoutingRequest(
            request_id,
            program,
            now,
            decision.prompt_tokens,
            shared_tokens=round(decision.prompt_tokens * len(system_prompt) / whole),
            remaining_tokens=None if annotation is None else annotation.rank,
            cached_tokens=lambda engine: (
                earlier.prompt_tokens if earlier is not None and earlier.engine == engine else 0
            ),
            agent=step.agent,
            model=model,
            group=step.stats_key,
            deadline_at=decision.deadline_at,
        )
        self.fleet.arrived(request)
        placement = self._policy.decide(request, self.fleet, now)
        self._placed[decision.id] = request_id, program
        if placement.engine is not None:
            self.fleet.place(request, placement.engine)
            self._release(now)
            return placement
        waits: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._held[request_id] = waits
        self._release(now)
        if waits.done():
            return waits.result()
        self._on_hold(decision, True)
        try:
            return await waits
        finally:
            self._on_hold(decision, False)

    def answered(
        self, decision: GatewayDecision, output_tokens: int, return_s: float = math.nan, end: float = 0.0
    ) -> None:
        """A request was answered, or failed, was aborted or never sent; ignored if it was not placed here."""
        request_id, program = self._placed.pop(decision.id, ((0, 0), ""))
        waits = self._held.get(request_id)
        if waits is not None:
            waits.cancel()  # its client has left: it is dropped once the policy releases it
            return
        if program:
            self._answered(request_id, program, output_tokens, return_s, end)
            self._release(self._clock())

    def ended(self, workflow: str) -> None:
        """A workflow has ended."""
        for program in [name for name in self.fleet.programs if name.rpartition("\0")[0] == workflow]:
            if not self.fleet.programs[program].contexts:
                self.fleet.ended(program)
            else:
                self._ended.add(program)  # once its last request, of whose answer we are told next, has left
        self._release(self._clock())

    def home(self, workflow: str, model: str) -> int | None:
        """The engine that a workflow's next request most probably goes to; None if nothing speaks for one."""
        program = self.fleet.programs.get(f"{workflow}\0{model}")
        if program is None or program.engine is None or isinstance(self._policy, LeastLoaded | RoundRobin):
            return None
        return program.engine if self.fleet.engines[program.engine].open else None

    def tick(self) -> None:
        """Looks at all programs again."""
        now = self._clock()
        self._policy.tick(self.fleet, now)
        self._release(now)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"programs": len(self.fleet.programs), "held requests": len(self._held), "placed": len(self._placed)}

    def _answered(self, request_id: _Id, name: str, output_tokens: int, return_s: float, end: float) -> None:
        program = self.fleet.answered(request_id, name, output_tokens, self._clock())
        program.return_s, program.end = return_s, end
        self._policy.answered(request_id, program, self.fleet, self._clock())
        if name in self._ended and not program.contexts:
            self._ended.remove(name)
            self.fleet.ended(name)

    def _release(self, now: float) -> None:
        for request, placement in self._policy.release(self.fleet, now):
            assert placement.engine is not None
            self.fleet.place(request, placement.engine)
            waits = self._held.pop(request.id)
            if waits.done():
                self._answered(request.id, request.program, 0, math.nan, 0.0)
            else:
                waits.set_result(placement)
