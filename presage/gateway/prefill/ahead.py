"""Prefills the known beginning of a workflow's next prompt while its tool runs, and sees what became of it.

When a step has been answered, no other step of the workflow runs and the next agent is sure enough, the beginning of
its prompt is sent to the server that the next request will go to, for one token that is thrown away. The request then
finds its beginning in the server's prefix cache; neither it nor its answer is touched. Plans wait until the server has
nothing else to begin with. If the workflow's next request comes first, the plan is dropped, or its prefill aborted:
what has been computed is in the cache, and what has not would only compete with the request itself.

Tokens of a prefill are wasted if the next request is of another agent, has another prompt, goes elsewhere, does not
find it in the cache, or never comes, or if the server refuses it. Above a share of wasted tokens the workflow type
pauses. No failure here reaches a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import aiohttp
import msgspec
import numpy as np

from presage.gateway.config import PREFILL_AHEAD, PrefillAheadSettings
from presage.gateway.decisions import Decisions
from presage.gateway.forward import Forwarder, Upstream
from presage.gateway.metrics import GatewayMetrics
from presage.gateway.prefill.budget import PrefillBudget, PrefillBudgets
from presage.gateway.prefill.planning import NotPlanned, PrefillPlan, PrefillPlanner
from presage.gateway.refusal import Refusal
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.upstreams import Upstreams
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.modes import Mode, Switch
from presage.serving_hooks.workflows import EndReason, PartState, Workflow
from presage.serving_hooks.workflows.live import LiveForecast

PATH: Final = "/v1/chat/completions"
DIALECT: Final = "vllm"
"""Engines with our hooks would take a prefill for a step, and prefetch by themselves; routers place by themselves."""
MOST_WAITING: Final = 256
"""Plans that wait for an idle server."""
_LOOK_S: Final = 0.02
_FOUND: Final = 0.9
_MARGIN: Final = 128
"""Share of a prefilled beginning that must be cached, less a block, to count as found."""

PrefillOutcome = Literal[
    "used", "late", "not sent", "refused", "another agent", "another prompt", "another server", "not in the cache",
    "never came",
]  # fmt: skip
_OF_USE: Final = ("used", "late")

Unplanned = Literal[
    "other steps run", "no forecast", "next agent unsure", "end is likelier", "paused", "too many wait",
    NotPlanned,
]  # fmt: skip


@dataclass(slots=True, eq=False)
class _Prefill(PartState):
    """One prefill, sent or, in shadow, not.

    Attributes:
        tokens: that the server computes for it; estimated until it has answered.
        prompt_tokens: of the whole beginning; None until then.
    """

    plan: PrefillPlan
    mode: Mode
    tokens: int
    task: asyncio.Task[None] | None = None
    sent: bool = False
    done: bool = False
    prompt_tokens: int | None = None


class PrefillAhead:
    """Prefill ahead in a gateway, in its event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: PrefillAheadSettings,
        decisions: Decisions,
        upstreams: Upstreams,
        forwarder: Forwarder,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._decisions, self._upstreams = settings, decisions, upstreams
        self._forwarder, self._metrics, self._clock = forwarder, metrics, clock
        self._planner = PrefillPlanner(self._profile, settings.memory_mb * 2**20)
        self._budgets = PrefillBudgets(partial(PrefillBudget, settings.most_wasted, settings.window, settings.pause_s))
        self._judged: dict[str, tuple[_Prefill, PrefillOutcome]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Counter[str] = Counter()
        self._switch = Switch("prefill ahead", decisions.counts)
        decisions.table.subscribe(self._ended)

    def arrived(self, decision: GatewayDecision) -> None:
        """A request was decided on and not forwarded yet."""
        self._switch.attempt(self._arrived, decision)

    def answered(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        """A request was answered, and its workflow has not ended by that yet; None if it was not."""
        self._switch.attempt(self._answered, decision, answer)

    def left(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        """All else knows now that it was answered: what comes next may be prefilled."""
        self._switch.attempt(self._left, decision, answer)

    def tick(self) -> None:
        """Once a second: says how many workflow types are in a pause."""
        self._metrics.prefill_paused(self._budgets.paused(self._clock()))

    async def close(self) -> None:
        """Aborts what runs."""
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(asyncio.CancelledError):
                await task

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        tables = {"prefills judged": len(self._judged), "tasks": len(self._tasks)}
        return {**self._planner.debug_state(), **tables}

    def _profile(self) -> ProfilePredictor | None:
        loaded = getattr(self._decisions.next_agents, "loaded", ())
        return next((predictor for predictor in loaded if isinstance(predictor, ProfilePredictor)), None)

    def _arrived(self, decision: GatewayDecision) -> None:
        step = decision.identity.step
        running = self._decisions.table.get(step.workflow)
        if running is None or decision.id not in running.requests:
            return
        if self._decisions.modes.of(PREFILL_AHEAD, step.stats_key) is Mode.OFF:
            self._forget(running)
            return
        prefill, running.prefill = running.prefill, None
        if isinstance(prefill, _Prefill):
            self._stop(prefill)
            outcome = self._outcome(prefill, decision)
            self._judged[decision.id] = prefill, outcome
            if prefill.mode is Mode.ON:
                decision.prefilled_ahead = outcome
        self._planner.arrived(decision.id, step, decision.request, first=running.steps == 1)

    def _answered(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        judged = self._judged.pop(decision.id, None)
        if judged is not None:
            self._judge(judged[0], self._final(*judged, decision, answer))
        text = None if answer is None else answer.text
        self._planner.answered(decision.id, decision.identity.step, text, decision.upstream)

    def _left(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        step, request = decision.identity.step, decision.request
        mode = self._decisions.modes.of(PREFILL_AHEAD, step.stats_key)
        running = self._decisions.table.get(step.workflow)
        if answer is None or mode is Mode.OFF or running is None or request.endpoint != "chat":
            return
        planned = "other steps run" if running.requests else self._plan(decision, running.forecasts.next_agents, mode)
        self._metrics.prefill_planned(planned if isinstance(planned, str) else "planned")
        if isinstance(planned, str):
            return
        running.prefill = planned
        if mode is Mode.ON:
            sending = self._send(running, planned, request.headers.get("authorization"))
            planned.task = asyncio.get_running_loop().create_task(sending)
            self._tasks.add(planned.task)
            planned.task.add_done_callback(self._tasks.discard)

    def _plan(self, decision: GatewayDecision, live: LiveForecast | None, mode: Mode) -> _Prefill | Unplanned:
        step = decision.identity.step
        likeliest = _likeliest(live) if live is not None else None
        if likeliest is None:
            return "no forecast"
        agent, probability = likeliest
        if agent is None:
            return "end is likelier"
        if probability < self._settings.probability:
            return "next agent unsure"
        if not self._budgets.of(step.stats_key).may_send(self._clock()):
            return "paused"
        if len(self._tasks) >= MOST_WAITING:
            return "too many wait"
        plan = self._planner.plan(step, decision.request, agent, partial(self._home, step.workflow))
        if isinstance(plan, str):
            return plan
        tokens = self._decisions.request_forecasts.tokens(plan.new_characters, str(plan.inputs.get("model", "")))
        return _Prefill(plan, mode, tokens) if tokens >= self._settings.least_new_tokens else "little is new"

    def _home(self, workflow: str, model: str) -> str | None:
        upstream = self._upstreams.home(workflow, model)
        return upstream.name if upstream is not None and upstream.settings.dialect == DIALECT else None

    async def _send(self, running: Workflow, prefill: _Prefill, authorization: str | None) -> None:
        """Sends a prefill once its server is idle; cancelled by the workflow's next request."""
        try:
            upstream = next(candidate for candidate in self._upstreams.all if candidate.name == prefill.plan.upstream)
            began = self._clock()
            while not self._idle(upstream):
                if self._clock() - began > self._settings.patience_s:
                    return
                await asyncio.sleep(_LOOK_S)
            await self._sent(running, prefill, upstream, authorization)
        except (Refusal, aiohttp.ClientError, TimeoutError):
            self._refused(running, prefill)
        except Exception as error:
            self._switch.off(error)

    async def _sent(self, running: Workflow, prefill: _Prefill, upstream: Upstream, authorization: str | None) -> None:
        plan, monitor, key = prefill.plan, self._upstreams.monitor, ("prefill", id(prefill))
        headers = {"content-type": "application/json"}
        if authorization is not None:
            headers["authorization"] = authorization
        body = msgspec.json.encode(plan.body())
        prefill.sent = True
        self._budgets.of(plan.stats_key).sent()
        self._running[upstream.name] += 1
        monitor.sent(upstream.name, key, prefill.tokens, 1.0, streams=False)
        try:
            response = await self._forwarder.open(upstream, "POST", PATH, headers, body, {})
            try:
                answer = await response.read()
            finally:
                response.close()
        finally:
            self._running[upstream.name] -= 1
            monitor.failed(upstream.name, key)  # no answer of which lengths or times are learnt
        if response.status != 200:
            self._refused(running, prefill)
            return
        prefill.done = True
        reader = AnswerReader("chat", streamed=False)
        reader.add(answer)
        reader.end()
        if reader.input_tokens is not None:
            prefill.prompt_tokens = reader.input_tokens
            prefill.tokens = min(prefill.tokens, reader.input_tokens)
            if reader.cached_tokens is not None:
                prefill.tokens = reader.input_tokens - reader.cached_tokens

    def _idle(self, upstream: Upstream) -> bool:
        """Whether a server has nothing else to begin with."""
        monitor, name = self._upstreams.monitor, upstream.name
        load = monitor.load(name)
        return (
            monitor.outage(name) is None
            and not (load is not None and load.waiting)
            and not monitor.prefill_tokens(name)
            and self._running[name] < self._settings.most_in_flight
            and monitor.requests(name) < self._settings.most_running
        )

    def _refused(self, running: Workflow, prefill: _Prefill) -> None:
        if running.prefill is prefill:
            running.prefill = None
            self._judge(prefill, "refused")

    def _outcome(self, prefill: _Prefill, decision: GatewayDecision) -> PrefillOutcome:
        """What a prefill was for the workflow's next request, as far as that is known when it arrives."""
        if prefill.mode is Mode.ON and not prefill.sent:
            return "not sent"
        if self._planner.agent(decision.identity.step.agent) != prefill.plan.agent:
            return "another agent"
        if not prefill.plan.begins(decision.request):
            return "another prompt"
        return "used" if prefill.done or prefill.mode is Mode.SHADOW else "late"

    def _final(
        self, prefill: _Prefill, outcome: PrefillOutcome, decision: GatewayDecision, answer: AnswerReader | None
    ) -> PrefillOutcome:
        """The outcome once the request was answered."""
        if outcome in _OF_USE and decision.upstream and decision.upstream != prefill.plan.upstream:
            return "another server"
        cached = None if answer is None else answer.cached_tokens
        if outcome == "used" and cached is not None and prefill.prompt_tokens is not None:
            return outcome if cached >= _FOUND * prefill.prompt_tokens - _MARGIN else "not in the cache"
        return outcome

    def _judge(self, prefill: _Prefill, outcome: PrefillOutcome) -> None:
        right = outcome in _OF_USE
        tokens = 0 if outcome == "not sent" else prefill.tokens
        self._metrics.prefill_judged(prefill.mode.word, outcome, tokens, right)
        if prefill.sent:
            self._budgets.of(prefill.plan.stats_key).judged(tokens, right, self._clock())

    def _ended(self, workflow: Workflow, _: EndReason) -> None:
        self._switch.attempt(self._forget, workflow)

    def _forget(self, workflow: Workflow) -> None:
        """A workflow has ended, or the policy is off for it."""
        self._planner.ended(workflow.key)
        prefill, workflow.prefill = workflow.prefill, None
        if isinstance(prefill, _Prefill):
            self._stop(prefill)
            self._judge(prefill, "never came" if prefill.sent or prefill.mode is Mode.SHADOW else "not sent")

    def _stop(self, prefill: _Prefill) -> None:
        if prefill.task is not None and not prefill.task.done():
            prefill.task.cancel()


def _likeliest(live: LiveForecast) -> tuple[str | None, float] | None:
    """The likeliest next agent, None for END, and its probability; None without a forecast."""
    if not len(live.probabilities):
        return None
    row = live.probabilities[0]
    place = int(np.argmax(row))
    return (None if place == len(row) - 1 else live.agents[place]), float(row[place])
