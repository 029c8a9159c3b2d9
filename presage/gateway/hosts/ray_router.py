"""A request router of Ray Serve that places requests by the gateway's decisions.

    RequestRouterConfig(
        request_router_class="presage.gateway.hosts.ray_router:GatewayRouter",
        request_router_kwargs={"config": "gateway.toml"},
    )

Written to ray 2.60, whose routers are alpha. A handle's router recognises workflow and agent in the arguments of a
call, as a front of the gateway does in a request, and names the replica that the gateway's placement chooses; after it
come those of Ray's own choice, the less loaded of two. So a replica that is full, or has died, costs nothing. Where no
request is recognised, the model is multiplexed, placement is off, or something fails, Ray's choice is all there is.

Ray shows a router no answers: output tokens stay unknown, and conversations are recognised by their prompts alone. Each
handle has a router with a state of its own, and one that Ray's HTTP proxy holds sees the session id, and no body.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from presage.errors import ConfigurationError
from presage.gateway.client_keys import ClientKeys
from presage.gateway.config import GatewayConfig, gateway_config, read_gateway_given
from presage.gateway.decisions import Decisions
from presage.gateway.placement import Placements
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.serve import build_decisions
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.identity.request import ApiRequest, Endpoint
from presage.serving_hooks.identity.sent_names import SESSION_HEADERS
from presage.serving_hooks.modes import Mode
from presage.serving_hooks.policies.routing import ROUTERS
from presage.serving_hooks.policies.routing.fleet import FleetEngine
from presage.serving_hooks.policies.routing.placement import Immediate

_INPUTS: Final = ("messages", "prompt")
_CACHE_TOKENS, _STEP_S, _PREFILL_S = 10**9, 0.02, 1e-4  # all replicas are alike
_TICK_S: Final = 1.0

_log = logging.getLogger(__name__)


def read_request(arguments: Sequence[Any], session_id: str, keys: ClientKeys, at_s: float) -> ApiRequest | None:
    """The request in the arguments of a call; None without a body and a session.

    A body is the object of a chat or completions API: a mapping, its JSON, or a pydantic model. Headers are a mapping
    named by strings in an argument's attribute `headers`, as Ray Serve LLM passes them on.
    """
    body = next((body for argument in arguments for body in _bodies(argument)), None)
    if body is None and not session_id:
        return None
    given: Mapping[Any, Any] = next(
        (argument.headers for argument in arguments if isinstance(getattr(argument, "headers", None), Mapping)), {}
    )
    headers = {str(name).lower(): str(value) for name, value in given.items()}
    if session_id:
        headers.setdefault(SESSION_HEADERS[0], session_id)
    endpoint: Endpoint = "completions" if body and "prompt" in body else "chat"
    return ApiRequest(endpoint, body or {}, headers, keys.of(headers), at_s)


def _bodies(argument: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(argument, bytes | str) and argument[:1] in (b"{", "{"):
        argument = msgspec.json.decode(argument)
    elif hasattr(argument, "model_dump") and any(hasattr(argument, key) for key in _INPUTS):
        argument = argument.model_dump(exclude_unset=True)
    if isinstance(argument, Mapping) and any(key in argument for key in _INPUTS):
        yield argument


@dataclass(slots=True)
class _Placed:
    """A request whose replica was chosen; "" for Ray's choice."""

    pending: weakref.ref[Any]
    decision: GatewayDecision
    replica: str
    routed: bool = False


class ReplicaPlacements:
    """Decisions and placements for the replicas of one deployment; it knows nothing of Ray.

    Args:
        clock: monotonic seconds.

    Raises:
        ConfigurationError: the routing policy holds requests, which would block Ray's queue.
        PresageError: as `build_decisions`.
    """

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        policy = ROUTERS[config.routing]
        if not (isinstance(policy, type) and issubclass(policy, Immediate)):
            raise ConfigurationError(f"routing is {config.routing!r}, which holds requests; give session-affinity")
        self.decisions: Decisions = build_decisions(config, clock)
        self.placements = Placements([], policy, clock, self.decisions.held)
        self._clock, self._keys = clock, ClientKeys(config.keys())
        self._numbers: dict[str, int] = {}
        self._ticked_s = clock()
        self.decisions.table.subscribe(lambda workflow, _: self.placements.ended(workflow.step.workflow))

    async def place(
        self, arguments: Sequence[Any], session_id: str, replicas: Mapping[str, int]
    ) -> tuple[GatewayDecision, str] | None:
        """The decision on a request, and its replica; None for a request that is not placed here.

        Args:
            replicas: that take requests, and how many each takes at once.
        """
        now = self._clock()
        if now - self._ticked_s >= _TICK_S:
            self._ticked_s = now
            self.decisions.tick()
        request = read_request(arguments, session_id, self._keys, now)
        if request is None or not replicas:
            return None
        decision = self.decisions.arrived(request)
        step = decision.identity.step
        running = self.decisions.table.get(step.workflow) is not None
        if not running or self.decisions.modes.of("placement", step.stats_key) is not Mode.ON:
            return decision, ""
        self._describe(replicas)
        placement = await self.placements.place(decision, "")
        assert placement.engine is not None
        decision.upstream = self.placements.fleet.engines[placement.engine].name
        decision.placement_reason = placement.reason
        return decision, decision.upstream

    def taken(self, decision: GatewayDecision, replica: str) -> None:
        """A replica has taken a request. If it is not the chosen one, the workflow stays there from now on."""
        decision.upstream = replica
        program = self.placements.fleet.programs.get(f"{decision.identity.step.workflow}\0")
        if program is not None and replica in self._numbers:
            self.placements.fleet.move(program, self._numbers[replica])

    def ended(self, decision: GatewayDecision, failed: bool) -> None:
        """A request was answered or has failed. The load keeps the mean output that was assumed of it."""
        answer = AnswerReader(decision.request.endpoint, decision.request.streams)
        answer.failed = True  # it is not read
        if failed:
            self.decisions.failed(decision)
        else:
            self.decisions.answered(decision, answer)
        self.placements.answered(decision, round(self.placements.fleet.mean_output))

    def _describe(self, replicas: Mapping[str, int]) -> None:
        """A row for each replica; those of replicas that are gone are closed, and taken again once nothing is there."""
        engines = self.placements.fleet.engines
        for engine in engines:
            engine.open = engine.name in replicas
        for name, most in replicas.items():
            if name in self._numbers:
                continue
            row = FleetEngine(name, _CACHE_TOKENS, most, _STEP_S, _PREFILL_S)
            number = next(
                (n for n, engine in enumerate(engines) if not (engine.open or engine.requests or engine.programs)), None
            )
            if number is None:
                self._numbers[name] = len(engines)
                engines.append(row)
            else:
                del self._numbers[engines[number].name]
                self._numbers[name], engines[number] = number, row


class GatewayRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]  # ray has no types
    """Ray Serve's request router. Its arguments (`request_router_kwargs`) are those of `initialize_state`."""

    def initialize_state(self, config: str = "", **settings: Any) -> None:
        """Loads what decisions need.

        Args:
            config: gateway file; its upstreams do not count.
            settings: of a gateway file, over those of the file.
        """
        self._gateway: ReplicaPlacements | None = None
        self._placed: dict[int, _Placed] = {}  # by id: Ray's requests cannot be keys
        try:
            given = {"upstreams": [{"url": "http://ray-serve"}], **(read_gateway_given(Path(config)) if config else {})}
            self._gateway = ReplicaPlacements(gateway_config({**given, **settings}, config or "request_router_kwargs"))
        except ConfigurationError as error:
            _log.error("Ray's own choice of replicas stays: %s", error)
        except Exception as error:
            self._failed(error)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replica that the gateway chooses, then Ray's own choice."""
        others: list[list[Any]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas, pending_request
        )
        if self._gateway is None or pending_request is None or pending_request.metadata.multiplexed_model_id:
            return others
        try:
            home = self._replicas_by_name().get(await self._home(self._gateway, candidate_replicas, pending_request))
        except Exception as error:
            self._failed(error)
            return others
        return others if home is None else [[home], *others]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica has taken a request."""
        placed = self._known(pending_request)
        if placed is None or placed.routed or self._gateway is None:
            return
        placed.routed = True
        try:
            self._gateway.taken(placed.decision, replica_id.unique_id)
        except Exception as error:
            self._failed(error)
        loop = asyncio.get_running_loop()  # callbacks come from a thread of Ray's
        result.add_done_callback(lambda outcome: _soon(loop, self._ended, placed, outcome))

    async def _home(self, gateway: ReplicaPlacements, candidates: list[Any], pending: Any) -> str:
        """Name of the replica for a request, which Ray asks for again as long as none takes it; "" for any."""
        placed = self._known(pending)
        if placed is None:
            replicas = {candidate.replica_id.unique_id: candidate.max_ongoing_requests for candidate in candidates}
            arguments = [*pending.args, *pending.kwargs.values()]
            placement = await gateway.place(arguments, pending.metadata.session_id, replicas)
            if placement is None:
                return ""
            placed = self._placed[id(pending)] = _Placed(weakref.ref(pending), *placement)
            loop = asyncio.get_running_loop()
            weakref.finalize(pending, _soon, loop, self._dropped, id(pending), placed).atexit = False
        return placed.replica

    def _replicas_by_name(self) -> dict[str, Any]:
        return {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}

    def _known(self, pending: Any) -> _Placed | None:
        placed = self._placed.get(id(pending))
        return placed if placed is not None and placed.pending() is pending else None

    def _dropped(self, key: int, placed: _Placed) -> None:
        """Ray no longer has a request: it was sent, or failed or was cancelled before that."""
        if self._placed.get(key) is placed:
            del self._placed[key]
        if not placed.routed:
            self._ended(placed, None)

    def _ended(self, placed: _Placed, outcome: Any) -> None:
        """A request was answered or has failed."""
        if self._gateway is None:
            return
        try:
            self._gateway.ended(placed.decision, not placed.routed or isinstance(outcome, BaseException))
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """An error of ours: Ray's own choice from now on."""
        self._gateway = None
        self._placed.clear()
        _log.error("the gateway's router is switched off: %s; Ray chooses replicas", type(error).__name__)


def _soon(loop: asyncio.AbstractEventLoop, do: Callable[..., None], *args: Any) -> None:
    """Calls in an event loop, unless that is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(do, *args)
