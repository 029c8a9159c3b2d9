"""What one odd request has switched off in the gateway is made anew: after a pause, or as the mode is set to on."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from served import WITHOUT_MODELS

from presage.gateway.config import gateway_config
from presage.gateway.decisions import Decisions
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.serve import build_decisions
from presage.serving_hooks.identity.request import ApiRequest

CONFIG = {"upstreams": [{"url": "http://127.0.0.1:1"}], "forecasts": WITHOUT_MODELS}
PARTS = {
    "bookkeeping of workflows": "table.arrived",
    "forecasts of next agents": "_forecasts.next_agents.on_prefill",
    "forecasts of return times": "_forecasts.returns.arrived",
}


class Gateway:
    """Decisions on a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.decisions: Decisions = build_decisions(gateway_config(CONFIG, "a test"), lambda: self.now)

    def asks(self, workflow: str) -> GatewayDecision:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "vllm_xargs": {"workflow_id": workflow}}
        return self.decisions.arrived(ApiRequest("chat", body))

    def is_whole(self, workflow: str) -> bool:
        decision = self.asks(workflow)
        self.decisions.failed(decision)
        return decision.annotation is not None and decision.forecast is not None and not self.off

    @property
    def off(self) -> list[str]:
        return list(self.decisions.status().off)


@pytest.mark.parametrize("by_mode", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_what_one_request_has_switched_off_is_made_anew(
    part: str, by_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway()
    assert gateway.is_whole("before")
    owner, _, name = PARTS[part].rpartition(".")

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as odd:
        odd.setattr(attrgetter(owner)(gateway.decisions), name, fails)
        gateway.asks("odd")
    assert gateway.off == [part]
    gateway.asks("meanwhile")
    gateway.now += 1.0
    gateway.decisions.tick()
    assert gateway.off == [part], "its pause is not over"
    if by_mode:
        gateway.decisions.set_mode("on", None, None)
    else:
        gateway.now += 120.0
        gateway.decisions.tick()
    assert gateway.is_whole("after")
    state = gateway.decisions.debug_state()
    assert state["workflows"] == len(gateway.decisions.table)
