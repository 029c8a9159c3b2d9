"""Routes the requests of a replay over the engines of a fleet, by the policies of `policies.routing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from presage.replay.engine import Arrival, EngineLoop
from presage.replay.fleet_file import FleetMember
from presage.replay.metrics import Figures, PolicyRun, RequestOutcome, VirtualClock
from presage.replay.prompts import PromptIds
from presage.replay.workload import ReplayJob
from presage.serving_hooks.policies.routing import ROUTERS
from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import RoutingPolicy
from presage.serving_hooks.policies.scaling import END, Autoscaler, ScalingConfig
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step, scoped, tenant_of
from presage.serving_hooks.workflows.live import LiveForecast

_LOOK_S: Final = 1.0
"""Seconds between two looks at which engines are open, if engines are added or drained."""

Placed = Iterable[tuple[Arrival, EngineLoop]]


class FleetRouter:
    """Reports the events of a replay to a routing policy, and its placements to the replay.

    Args:
        loops: the engines of `members`.
        policy: a name of `ROUTERS`, or what makes your own.
        clock: of the sources of forecasts.
        agents: source of next agents and remaining tokens; None without.
        returns: source of return times; None without.
        models: model by agent; others use that of the first engine.
        scaling: how engines are added and drained; None keeps them as the fleet file says.

    Attributes:
        placed: requests by engine and reason; the engine of held ones is "held".
        scaler: adds and drains engines; None without `scaling`.
    """

    def __init__(
        self,
        members: Sequence[FleetMember],
        loops: Sequence[EngineLoop],
        policy: str | Callable[[], RoutingPolicy],
        jobs: Sequence[ReplayJob],
        prompts: PromptIds,
        clock: VirtualClock,
        agents: Any = None,
        returns: Any = None,
        models: Mapping[str, str] | None = None,
        scaling: ScalingConfig | None = None,
    ) -> None:
        self._members, self._loops, self._jobs, self._prompts = members, loops, jobs, prompts
        self._policy = (ROUTERS[policy] if isinstance(policy, str) else policy)()
        self._clock, self._agents, self._returns = clock, agents, returns
        self._models = dict(models or {})
        self._planned = any(member.opens_s > 0 or member.closes_s < math.inf for member in members)
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._held_s: list[float] = []
        self._workflows: dict[int, Workflow] = {}
        self.placed: dict[str, dict[str, int]] = {}
        self.fleet = Fleet([_engine(member) for member in members])
        self.scaler = None if scaling is None else Autoscaler(scaling, self.fleet)
        self._open(0.0)

    @property
    def tick_s(self) -> float | None:
        """Seconds between two ticks; None for none."""
        mine, planned = self._policy.tick_s, _LOOK_S if self._planned else None
        scaling = None if self.scaler is None else self.scaler.config.tick_s
        return min((interval_s for interval_s in (mine, planned, scaling) if interval_s is not None), default=None)

    def job(self, number: int) -> tuple[ReplayJob, PromptIds]:
        """A job."""
        return self._jobs[number], self._prompts

    def arrived(self, arrival: Arrival) -> Placed:
        """A step has arrived."""
        now = self._clock.now = arrival.at_s
        self._open(now)
        job = self._jobs[arrival.job]
        step = job.steps[arrival.step]
        model = self._model(step.agent)
        if self.scaler is not None:
            self.scaler.demand.arrived(f"{arrival.job}", job.workflow_type, step.agent, model, arrival.step, now)
        request = RoutingRequest(
            (arrival.job, arrival.step),
            _program(arrival.job, model),
            now,
            step.prompt_tokens,
            job.steps[0].opening_tokens,
            self._remaining(arrival.job, arrival.step, now),
            partial(self._cached_tokens, arrival),
            step.agent,
            model,
            scoped(tenant_of(job.workflow_id), job.workflow_type),
        )
        self._arrivals[request.id] = arrival
        self.fleet.arrived(request)
        decided = [(request, self._policy.decide(request, self.fleet, now))]
        return self._placed(decided, now)

    def answered(self, outcome: RequestOutcome, ended: bool) -> Placed:
        """A request has its last token."""
        now = self._clock.now = outcome.ended_s or 0.0
        self._open(now)
        job = self._jobs[outcome.job]
        step = job.steps[outcome.step]
        name = _program(outcome.job, self._model(step.agent))
        program = self.fleet.answered((outcome.job, outcome.step), name, step.output_tokens, now)
        if self.scaler is not None:
            self.scaler.demand.answered(f"{outcome.job}", outcome.step, now)
        program.return_s, program.end = self._return(outcome.job, outcome.step, now, ended)
        self._policy.answered((outcome.job, outcome.step), program, self.fleet, now)
        if ended and self.scaler is not None:
            self.scaler.demand.ended(f"{outcome.job}", now)
        if ended:
            for name in {_program(outcome.job, self._model(step.agent)): None for step in job.steps}:
                self.fleet.ended(name)
        return self._placed([], now)

    def tick(self, now: float) -> Placed:
        """Time has passed."""
        self._clock.now = now
        self._open(now)
        if self.scaler is not None:
            for number in self.scaler.tick(self.fleet, now):
                self._loops[number].scheduler.reset_prefix_cache()
        self._policy.tick(self.fleet, now)
        return self._placed([], now)

    def figures(self, run: PolicyRun) -> Figures:
        """The figures of a fleet beside those of every replay.

        Returns:
            moves: workflows that went to another engine, each time.
            held_mean_s: seconds in which the router held a request.
            imbalance: standard deviation of the engines' prefilled tokens, divided by their mean.
            running_share, recomputed_share, idle_share, unused_share: of the space-time product of all caches, tokens
                times seconds (ThunderAgent, eq. 3): contexts of requests being computed; of these, prompt tokens being
                computed again; contexts in the cache during a tool call that were found again; the rest.

        With an autoscaler also engine_hours, from asking for an engine until it is empty; engine_starts; and, with
        forecasts of demand, demand_error and last_window_error, the mean absolute errors in requests of the forecast
        and of the mean of the last window, and outside_share, the share of demands outside the forecast's interval.
        """
        work = np.array([loop.run.prefilled_tokens for loop in self._loops], np.float64)
        measured = {
            "moves": float(self.fleet.moves),
            "held_mean_s": float(np.mean(self._held_s)) if self._held_s else 0.0,
            "imbalance": float(work.std() / max(1.0, work.mean())),
        }
        open_s = [max(0.0, min(run.end_s, member.closes_s) - member.opens_s) for member in self._members]
        if self.scaler is not None:
            open_s = self.scaler.finish(run.end_s)
            run.scaling = self.scaler.ticks
            measured |= {"engine_hours": sum(open_s) / 3600, "engine_starts": float(self.scaler.starts)}
            names = ("demand_error", "last_window_error", "outside_share")
            if self.scaler.errors:
                measured |= dict(zip(names, np.mean(self.scaler.errors, axis=0).tolist(), strict=True))
        return measured | _space_time(run, self._members, open_s, self._jobs)

    def _placed(self, decided: list[tuple[RoutingRequest, Placement]], now: float) -> Placed:
        """Tells the table of the decisions, and of what the policy releases after them."""
        return self._put(decided, now) + self._put(self._policy.release(self.fleet, now), now)

    def _put(self, decided: list[tuple[RoutingRequest, Placement]], now: float) -> list[tuple[Arrival, EngineLoop]]:
        placed = []
        for request, placement in decided:
            if placement.engine is None:
                self._count("held", placement.reason)
                continue
            self.fleet.place(request, placement.engine)
            self._count(self._members[placement.engine].name, placement.reason)
            self._held_s.append(now - request.arrives_s)
            placed.append((self._arrivals.pop(request.id), self._loops[placement.engine]))
        return placed

    def _count(self, engine: str, reason: str) -> None:
        reasons = self.placed.setdefault(engine, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def _open(self, now: float) -> None:
        if self._planned:
            for member, engine in zip(self._members, self.fleet.engines, strict=True):
                engine.open = member.opens_s <= now < member.closes_s

    def _model(self, agent: str) -> str:
        return self._models.get(agent, self._members[0].model)

    def _cached_tokens(self, arrival: Arrival, engine: int) -> int:
        token_ids = self._prompts.known(arrival.job, arrival.step)
        most = self._jobs[arrival.job].steps[arrival.step].prompt_tokens - 1
        manager = self._loops[engine].scheduler.kv_cache_manager
        return int(manager.coordinator.find_longest_cache_hit(token_ids, most)[1])

    def _remaining(self, number: int, index: int, now: float) -> float | None:
        """Reports an arrival to the sources; returns the forecast remaining tokens."""
        job = self._jobs[number]
        if not job.workflow_type:
            return None
        call = job.steps[index]
        step = Step(job.workflow_type, job.workflow_id, call.agent, index)
        workflow = self._workflows.setdefault(number, Workflow(step))
        if self._returns is not None:
            self._returns.arrived(workflow, step, call.prompt_tokens, now)
        if self._agents is None:
            return None
        left: float | None = self._agents.remaining_tokens(workflow, step, call.prompt_tokens)
        live = self._agents.on_prefill(workflow, call.agent, step=index, input_tokens=call.prompt_tokens)
        self._expect(number, live)
        return left

    def _expect(self, number: int, live: LiveForecast) -> None:
        """Tells the autoscaler a model's forecast of a workflow's next agent; counts know no more than it does."""
        if self.scaler is not None and live.source == "champion":
            chances = dict(zip((*live.agents, END), live.probabilities[0].tolist(), strict=True))
            self.scaler.demand.expect(f"{number}", chances)

    def _return(self, number: int, index: int, now: float, ended: bool) -> tuple[float, float]:
        """Reports an answer to the sources; returns the forecast: `return_s` and `end` of a program."""
        job = self._jobs[number]
        if not job.workflow_type:
            return math.nan, 0.0
        call = job.steps[index]
        step, made = Step(job.workflow_type, job.workflow_id, call.agent, index), None
        workflow = self._workflows.setdefault(number, Workflow(step))
        if self._agents is not None:
            live = self._agents.on_completion(workflow, output_tokens=call.output_tokens)
            self._expect(number, live)
            if ended:
                self._agents.close(workflow)
        if self._returns is not None:
            made = self._returns.completed(workflow, step, call.output_tokens, call.finish_reason, now)
            if call.finish_reason is not None or call.tools is not None:
                made = self._returns.answered(workflow, step, call.finish_reason, call.tools) or made
            if ended:
                self._returns.ended(workflow)
        if made is None or not made.seconds:
            return math.nan, 0.0
        return float(np.interp(0.5, made.quantiles, made.seconds)), made.end


def _program(job: int, model: str) -> str:
    return f"{job} on {model}" if model else f"{job}"


def _engine(member: FleetMember) -> FleetEngine:
    file = member.engine
    return FleetEngine(
        member.name,
        file.cache_tokens,
        file.most_requests,
        file.cost.seconds(0, file.most_requests, file.cache_tokens),
        file.cost.prefill_token_s,
        model=member.model,
    )


def _space_time(
    run: PolicyRun, members: Sequence[FleetMember], open_s: Sequence[float], jobs: Sequence[ReplayJob]
) -> Figures:
    """Shares of tokens times seconds; see `FleetRouter.figures`."""
    capacity = sum(member.engine.cache_tokens * seconds for member, seconds in zip(members, open_s, strict=True))
    running = recomputed = idle = 0.0
    ended: dict[tuple[int, int], RequestOutcome] = {(outcome.job, outcome.step): outcome for outcome in run.asked}
    for outcome in run.asked:
        if outcome.began_s is None or outcome.first_token_s is None or outcome.ended_s is None:
            continue
        step = jobs[outcome.job].steps[outcome.step]
        running += (outcome.prompt_tokens + step.output_tokens / 2) * (outcome.ended_s - outcome.began_s)
        lost = max(0, outcome.again_tokens - outcome.hit_tokens)
        share = lost / max(1, outcome.prompt_tokens - outcome.hit_tokens)
        recomputed += (
            share * (outcome.prompt_tokens + outcome.hit_tokens) / 2 * (outcome.first_token_s - outcome.began_s)
        )
        before = None if step.continues is None else ended.get((outcome.job, step.continues))
        if before is not None and before.ended_s is not None:
            idle += outcome.hit_tokens * max(0.0, outcome.began_s - before.ended_s)
    shares = {"running": running / capacity, "recomputed": recomputed / capacity, "idle": idle / capacity}
    shares["unused"] = max(0.0, 1.0 - shares["running"] - shares["idle"])
    return {f"{name}_share": share for name, share in shares.items()}
