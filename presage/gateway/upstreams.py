"""The servers behind the gateway as one fleet: which of them a request may go to, and which it goes to.

The model of a pool is chosen first (`model_choice.py`), then a server of that model (`placement.py`). A server that the
monitor leaves out gets no requests while another serves the model; a single server always gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from presage.gateway.config import GatewayConfig
from presage.gateway.decisions import Decisions
from presage.gateway.exporters.demand import DemandGauges, ModelDemand
from presage.gateway.exporters.demand_watch import DemandWatch
from presage.gateway.forward import Forwarder, Upstream
from presage.gateway.metrics import GatewayMetrics
from presage.gateway.models.model_choice import ModelChooser
from presage.gateway.models.router_client import RouterClient
from presage.gateway.models.router_versions import RouterVersions
from presage.gateway.monitor.fleet_monitor import FleetMonitor, FleetUpstream
from presage.gateway.monitor.polling import watch
from presage.gateway.placement import Placements
from presage.gateway.refusal import Refusal
from presage.gateway.request_forecasts import GatewayDecision
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.forecasting.champions import resolve_registry_uri
from presage.serving_hooks.forecasting.reload import RegistryClient
from presage.serving_hooks.modes import Mode, Switch
from presage.serving_hooks.policies.routing import ROUTERS
from presage.serving_hooks.policies.routing.fleet import FleetEngine
from presage.serving_hooks.workflows import EndReason, Workflow

MOST_FLEETS: Final = 1000
"""Models with a placement of their own."""


class Upstreams:
    """The servers behind a gateway.

    Args:
        clock: monotonic seconds.

    Raises:
        ConfigurationError: an engine file is broken.
    """

    def __init__(
        self, config: GatewayConfig, decisions: Decisions, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self.all = [Upstream.of(settings) for settings in config.upstreams]
        self.monitor = FleetMonitor([_watched(upstream) for upstream in self.all], clock)
        self.pools = {pool.name: pool.pool() for pool in config.pools}
        self._config, self._decisions, self._metrics, self._clock = config, decisions, metrics, clock
        self._client = RouterClient(clock)
        self._chooser = ModelChooser(self.monitor, self._client)
        self._router: RouterVersions | None = None
        self._fleets: dict[str, tuple[Placements, list[Upstream]]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._demand = DemandWatch(config.demand_ahead_s, clock)
        self._demand_switch = Switch("demand of models", decisions.counts)
        metrics.export(DemandGauges(self.demands))
        decisions.table.subscribe(self._ended)

    async def start(self) -> None:
        """Begins to watch the servers, and to load the router if there is a pool."""
        self._watching = asyncio.create_task(self._watch())
        if self.pools:
            given = self._config.forecasts
            uri = partial(resolve_registry_uri, given.registry)
            registry = RegistryClient(uri, most_mb=given.registry_memory_mb)
            self._router = RouterVersions(self._config.router, self._client, registry, given.reload_s)
            self._router.start()

    async def close(self) -> None:
        """Stops watching."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        if self._router is not None:
            await self._router.close()

    async def ask_models(self, forwarder: Forwarder) -> None:
        """Asks the servers that have not listed their models yet."""
        for upstream in self.all:
            if not upstream.models:
                with suppress(Refusal):
                    await forwarder.models(upstream, {})

    async def choose(self, decision: GatewayDecision, without: Upstream | None = None) -> Upstream:
        """Where a request goes; waits while the routing policy holds it.

        Args:
            without: a server that could not be reached.

        Raises:
            Refusal: nobody serves its model.
        """
        if decision.request.model in self.pools and without is None:
            await self._choose_model(decision)
        able = [upstream for upstream in self.all if upstream.serves(decision.model)] or self.all[: len(self.all) == 1]
        if not able:
            raise Refusal(404, f"The model {decision.model[:200]!r} does not exist here.", "model_not_found")
        taking = [
            upstream for upstream in able if upstream is not without and self.monitor.outage(upstream.name) is None
        ]
        candidates = taking or [upstream for upstream in able if upstream is not without] or able
        if len(taking) > 1 and without is None:
            return await self._place(decision, able)
        decision.upstream = candidates[0].name
        return candidates[0]

    def home(self, workflow: str, model: str) -> Upstream | None:
        """Where the next request of a workflow to a model most probably goes; None if nothing speaks for a server."""
        if model in self.pools:
            return None
        able = [upstream for upstream in self.all if upstream.serves(model)] or self.all[: len(self.all) == 1]
        if len(able) < 2:
            return able[0] if able else None
        placements, among = self._fleets.get(model, (None, []))
        number = None if placements is None else placements.home(workflow, "")
        return None if number is None else among[number]

    def sent(self, decision: GatewayDecision, upstream: Upstream) -> None:
        """A request goes to a server."""
        annotation = decision.annotation
        predicted = None if annotation is None or annotation.output_tokens is None else annotation.output_tokens[0]
        self.monitor.sent(
            upstream.name, decision.id, decision.prompt_tokens, predicted, streams=decision.request.streams
        )
        if decision.model in upstream.models:  # names that clients invent have no demand
            step = decision.identity.step
            chances, end = ({}, 0.0) if annotation is None else (dict(annotation.next_agents), annotation.end or 0.0)
            self._demand_switch.attempt(
                self._demand.arrived,
                step.workflow,
                step.stats_key,
                step.agent,
                decision.model,
                decision.id,
                chances,
                end,
            )

    def ended(self, decision: GatewayDecision, answer: AnswerReader | None, unreachable: bool = False) -> None:
        """A request has its answer, or none."""
        if decision.upstream and answer is not None:
            self.monitor.answered(decision.upstream, decision.id, answer.output_tokens)
        elif decision.upstream:
            self.monitor.failed(decision.upstream, decision.id, connect=unreachable)
        if not unreachable:
            self._demand_switch.attempt(self._demand.left, decision.identity.step.workflow, decision.id)
            output = (answer.output_tokens or 0) if answer is not None else 0
            returns = self._decisions.forecast_return(decision.identity.step.workflow)
            for placements, _ in self._fleets.values():
                placements.answered(decision, output, *returns)

    def of_model(self, model: object) -> Upstream:
        """A server that lists a model, else the first."""
        return next((upstream for upstream in self.all if model in upstream.models), self.all[0])

    def any_serves(self) -> bool:
        """Whether any server answers."""
        return any(self.monitor.ready(upstream.name) for upstream in self.all)

    def demands(self) -> list[ModelDemand]:
        """The demand of each model, now and ahead."""
        return self._demand.demands()

    def tick(self) -> None:
        """Looks at all programs again."""
        for placements, _ in self._fleets.values():
            self.monitor.describe(placements.fleet.engines)
            placements.tick()
        for upstream in self.all:
            self._metrics.upstream_open(upstream.name, self.monitor.outage(upstream.name) is None)

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        reported = self.monitor.status()
        listed = {upstream.name: {"models": list(upstream.models), **reported[upstream.name]} for upstream in self.all}
        return {"upstreams": listed, "router": None if self._router is None else self._router.status()}

    async def _choose_model(self, decision: GatewayDecision) -> None:
        step, pool = decision.identity.step, self.pools[decision.request.model]
        mode = self._decisions.modes.of("model-choice", step.stats_key)
        decision.model, decision.model_reason = pool.default, "model choice is off"
        if mode is Mode.OFF:
            return
        annotation = decision.annotation
        chosen = await self._chooser.choose(
            decision.request,
            pool,
            self._decisions.table.get(step.workflow),
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=None
            if annotation is None or annotation.output_tokens is None
            else annotation.output_tokens[0],
        )
        self._metrics.model_chosen(chosen.model, chosen.reason, chosen.fallback)
        reason = chosen.reason + " (linear head: the transformer was late)" * chosen.fallback
        if mode is Mode.ON:
            decision.model, decision.model_reason = chosen.model, reason
        else:
            decision.model_reason = f"model choice is in shadow; it would choose {chosen.model}: {reason}"

    async def _place(self, decision: GatewayDecision, able: list[Upstream]) -> Upstream:
        placements, among = self._fleets.get(decision.model) or self._fleet(decision.model, able)
        self.monitor.describe(placements.fleet.engines)
        placement = await placements.place(decision, "")
        assert placement.engine is not None
        decision.placement_reason = placement.reason
        decision.upstream = among[placement.engine].name
        self._metrics.placed(decision.upstream, placement.reason)
        return among[placement.engine]

    def _fleet(self, model: str, among: list[Upstream]) -> tuple[Placements, list[Upstream]]:
        if len(self._fleets) >= MOST_FLEETS:
            raise Refusal(503, "Too many models are named here.", "overloaded")
        step_s, prefill_s = 0.02, 1e-4  # until the monitor describes the rows
        rows = [FleetEngine(upstream.name, 10**9, 256, step_s, prefill_s) for upstream in among]
        acts = self._decisions.modes.whole["placement"] is Mode.ON
        policy = self._config.routing if acts else "session-affinity"
        weights = self._config.weights.settings()
        placements = Placements(rows, ROUTERS[policy], self._clock, self._decisions.held, weights)
        made = self._fleets[model] = placements, among
        return made

    def _ended(self, workflow: Workflow, _: EndReason) -> None:
        self._demand_switch.attempt(self._demand.ended, workflow.step.workflow)
        for placements, _among in self._fleets.values():
            placements.ended(workflow.step.workflow)

    async def _watch(self) -> None:
        """Polls with connections of its own, so that polls need not wait for requests."""
        async with httpx.AsyncClient(trust_env=False) as client:
            await watch(self.monitor, client)


def _watched(upstream: Upstream) -> FleetUpstream:
    settings = upstream.settings
    return FleetUpstream(
        settings.label,
        settings.url,
        settings.models,
        read_engine(str(Path(settings.engine))) if settings.engine else None,
    )
