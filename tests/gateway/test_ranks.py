"""No forecast is never first: what a request without one is ranked by, and who gains nothing."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import gateway, served

from presage.gateway.ranks import LEAST_SEEN, PRIOR, KnownRanks, shrunk
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictors.common.forecast import Source
from presage.serving_hooks.workflows.live import NO_LENGTHS, LiveLengths

CODER: Final = ("review", "coder")


def lengths(tokens: float, evidence: int = 100, source: Source = "champion") -> LiveLengths:
    return LiveLengths(source, evidence, (0.5,), (tokens,), 0, None)


TOKENS = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(tokens=TOKENS)
def test_unknown_is_the_median_and_a_name_never_seen_the_last(tokens: list[float]) -> None:
    ranks = KnownRanks()
    for value in tokens:
        ranks.rank(CODER, lengths(value))
    latest = sorted(tokens[-256:])
    assert ranks.rank(("review", "made-up"), NO_LENGTHS) == (latest[-1], "never seen")
    for _ in range(LEAST_SEEN):
        ranks.answered(CODER)
    assert ranks.rank(CODER, None) == (latest[len(latest) // 2], "nothing forecast")


@given(tokens=TOKENS, claimed=st.floats(0, 1e6), evidence=st.integers(0, 64))
def test_little_evidence_brings_nobody_far_ahead(tokens: list[float], claimed: float, evidence: int) -> None:
    ranks = KnownRanks()
    for value in tokens:
        ranks.rank(CODER, lengths(value))
    before = sorted(tokens[-256:])
    rank, _ = ranks.rank(("review", "planner"), lengths(claimed, evidence, "back-off"))
    assert rank is not None
    assert rank >= claimed * (1 - 1e-12)
    if evidence < LEAST_SEEN:
        assert rank >= max(tokens[-256:])
    elif claimed < before[len(before) // 2]:
        share = evidence / (evidence + PRIOR)
        assert rank == pytest.approx(share * claimed + (1 - share) * before[len(before) // 2])


def test_before_any_forecast_all_are_in_order_of_arrival() -> None:
    assert KnownRanks().rank(CODER, NO_LENGTHS) == (None, "nothing forecast")


def test_five_short_workflows_make_no_end_certain() -> None:
    assert shrunk(1.0, 5) == pytest.approx(0.9167, abs=1e-4)
    assert shrunk(0.0, 5) > 0.05


CHAT: Final = "/v1/chat/completions"


def sent(dialect: str, body: dict[str, Any]) -> float | None:
    """The priority that a server got, the lower being the first."""
    if dialect == "vllm":
        return body.get("priority")
    if dialect == "dynamo":
        hinted = body.get("nvext", {}).get("agent_hints", {}).get("priority")
        return None if hinted is None else -hinted
    told = json.loads(body.get("vllm_xargs", {}).get("agentic_context", "{}")).get("priority")
    return None if told is None else -told


@pytest.mark.parametrize("dialect", ["vllm", "vllm-router", "dynamo"])
def test_who_has_no_forecast_is_before_nobody_that_has_one(dialect: str) -> None:
    engine = SimulatedEngine(token_s=0.0, reply=lambda _: "word " * 30)
    modes = {"default": "on", "workflow_types": {"quiet": "off"}}

    def ask(url: str, workflow_id: str, agent: str, kind: str = "t", path: str = CHAT, **more: Any) -> float | None:
        names = {"workflow_type": kind, "workflow_id": workflow_id, "agent": agent, **more}
        body = {"model": "simulated", "messages": [{"role": "user", "content": "Go."}], "vllm_xargs": names}
        assert httpx.post(url + path, json={**body, "max_tokens": 9}).status_code in (200, 404)
        return sent(dialect, engine.seen[-1][0])

    with served(engine.app()) as upstream, gateway(upstream, modes=modes, upstream={"dialect": dialect}) as (url, _):
        assert ask(url, "first", "coder") is None  # nothing is known, so all are in order of arrival
        for number in range(12):
            ask(url, f"w{number}", "coder", workflow_end="true")
        known = ask(url, "known", "coder")
        assert known is not None
        for agent, kind in (("made-up", "t"), ("coder", "made-up"), ("made-up", "quiet")):
            rank = ask(url, f"{agent}-{kind}", agent, kind)
            if dialect == "dynamo" and kind == "quiet":
                assert rank is None  # its 0 is the last
            else:
                assert rank is not None
                assert rank >= known


def test_a_table_that_is_full_puts_nobody_first() -> None:
    engine = SimulatedEngine(token_s=0.0, reply=lambda _: "word " * 30)
    forecasts = {"max_workflows": 14}
    with served(engine.app()) as upstream, gateway(upstream, forecasts=forecasts) as (url, _):
        for number in range(20):
            names = {"workflow_type": "t", "workflow_id": f"w{number}", "agent": "coder"}
            names |= {"workflow_end": "true"} if number < 8 else {}
            body = {"model": "simulated", "messages": [{"role": "user", "content": "Go."}], "vllm_xargs": names}
            assert httpx.post(url + CHAT, json=body).status_code == 200
            if number >= 8:
                assert engine.seen[-1][0].get("priority", 0) > 0
