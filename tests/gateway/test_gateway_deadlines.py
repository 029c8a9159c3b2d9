"""The gateway's queue honours deadlines of workflows, as the engine's admission does."""

import asyncio

import pytest
from served import WITHOUT_MODELS

from presage.gateway.config import gateway_config
from presage.gateway.metrics import GatewayMetrics
from presage.gateway.placement import Placements
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.serve import build_decisions
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.policies.routing.fleet import FleetEngine
from presage.serving_hooks.policies.routing.programs import ForecastPrograms, Programs, ProgramScheduling, ThunderAgent

CONFIG = {
    "upstreams": [{"url": "http://127.0.0.1:1"}],
    "objectives": {"workflow_types": {"review": {"deadline_s": 100.0}}},
    "forecasts": WITHOUT_MODELS,
}


class Gateway:
    """Decisions and placements of a gateway with one server that two prompts fill, on a clock that is set."""

    def __init__(self, policy: type[Programs]) -> None:
        self.now = 0.0
        self.decisions = build_decisions(gateway_config(CONFIG, "a test"), lambda: self.now)
        engine = FleetEngine("e", 600, 8, 0.01, 1e-4)
        self.placements = Placements([engine], policy, lambda: self.now, lambda decision, held: None)
        self.placed: list[str] = []

    def arrives(self, kind: str, workflow: str, at: float) -> GatewayDecision:
        self.now = at
        sent = {"workflow_type": kind, "workflow_id": workflow, "agent": "a"}
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1600}], "vllm_xargs": sent}
        return self.decisions.arrived(ApiRequest("chat", body))

    async def place(self, decision: GatewayDecision) -> None:
        await self.placements.place(decision, "")
        self.placed.append(decision.identity.step.workflow_id)

    def leaves(self, decision: GatewayDecision, at: float, ended: bool) -> None:
        self.now = at
        self.placements.answered(decision, 1)
        self.decisions.failed(decision)
        if ended:
            self.placements.ended(decision.identity.step.workflow)


def placed_by(policy: type[Programs]) -> list[str]:
    """In which order those are placed that wait: two chats, and three reviews, of which one is late already."""

    async def run() -> list[str]:
        of = Gateway(policy)
        for at in (0.0, 20.0):  # a review takes two steps of 20 seconds
            step = of.arrives("review", "earlier", at)
            await of.place(step)
            of.leaves(step, at + 5.0, ended=at > 0)
        late = of.arrives("review", "late", 30.0)  # due at 130
        first = of.arrives("review", "first", 80.0)  # due at 180
        of.decisions.failed(late)
        of.decisions.failed(first)
        running = of.arrives("chat", "running", 140.0)
        await of.place(running)
        waiting = []
        for kind, workflow in (
            ("chat", "chat 1"),
            ("review", "late"),
            ("chat", "chat 2"),
            ("review", "new"),  # due at 241
            ("review", "first"),
        ):
            decision = of.arrives(kind, workflow, 141.0)
            waiting.append((decision, asyncio.create_task(of.place(decision))))
            await asyncio.sleep(0)
        of.placed.clear()
        of.now = 145.0
        of.placements.tick()
        of.leaves(running, 145.0, ended=True)
        for _ in range(len(waiting)):
            await asyncio.sleep(0.01)
            decision = next(one for one, _ in waiting if one.identity.step.workflow_id == of.placed[-1])
            of.leaves(decision, 145.0, ended=True)
        await asyncio.gather(*(task for _, task in waiting))
        return of.placed

    return asyncio.run(run())


@pytest.mark.parametrize("policy", [ProgramScheduling, ForecastPrograms])
def test_who_would_miss_its_deadline_goes_first_and_who_has_missed_it_waits_as_all_do(policy: type[Programs]) -> None:
    order = placed_by(policy)
    assert order[0] == "first"  # 35 seconds are left, and two steps take 40
    assert sorted(order[1:]) == ["chat 1", "chat 2", "late", "new"]


def test_the_published_rule_knows_no_deadlines() -> None:
    assert placed_by(ThunderAgent)[0] != "first"


def test_a_deadline_counts_from_the_first_request_of_a_workflow() -> None:
    of = Gateway(ProgramScheduling)
    first = of.arrives("review", "w", 10.0)
    of.decisions.failed(first)
    assert of.arrives("review", "w", 50.0).deadline_at == first.deadline_at == 110.0
    assert of.arrives("chat", "v", 50.0).deadline_at == float("inf")


def test_workflows_that_have_ended_met_or_missed_their_deadline() -> None:
    of = Gateway(ProgramScheduling)
    for workflow, took_s, kind in (("in time", 99.0, "review"), ("late", 101.0, "review"), ("free", 500.0, "chat")):
        began = of.now
        of.decisions.failed(of.arrives(kind, workflow, began))
        of.decisions.failed(of.arrives(kind, workflow, began + took_s))
        assert of.decisions.end(workflow, kind)
    of.decisions.failed(of.arrives("review", "expires", 2000.0))
    of.now = 90_000.0
    of.decisions.tick()  # what counts is its last answer, not its end
    page = GatewayMetrics(of.decisions.status).page(0, 0).decode()
    assert 'presage_workflow_deadlines_total{outcome="met"} 2.0' in page
    assert 'presage_workflow_deadlines_total{outcome="missed"} 1.0' in page
