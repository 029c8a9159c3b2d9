"""Both predictors, the counts behind them, and what happens to workflows and predictors that misbehave."""

import logging
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from by_name import Forecaster
from serving_samples import Clock, lengths_of
from tiny_model import STATE_SIZE, WORKFLOWS, Tiny

from presage.datasets.store import read_store
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import (
    LAYER_LEFT_OUT,
    LITTLE_SEEN,
    MISSED_STEP,
    NO_MODEL,
    STATES_LEFT_OUT,
    SWITCHED_OFF,
    LiveForecast,
)

LENGTH_INPUTS = ("input_tokens", "input_text", "system_prompt", "model", "prefill_state")
ROUTE = ("draft", "check", "draft", "check")
NEVER_LATE = Budget(deadline_s=1e9, window=10, share=0.2, at_least=5)


@pytest.fixture(scope="module")
def predictor(tiny: Tiny) -> NextAgentPredictor:
    return NextAgentPredictor.load(tiny.folder)


@pytest.fixture(scope="module")
def lengths(tiny: Tiny) -> RemainingLengthPredictor:
    return lengths_of(tiny.store)


def walk(forecaster: Forecaster, name: str, route: tuple[str, ...] = ROUTE, kind: str = "odd") -> list[LiveForecast]:
    """A workflow from its first step to its end, ten tokens a step; the forecasts of its prefills."""
    live = []
    for agent in route:
        live.append(forecaster.on_prefill(kind, name, agent))
        forecaster.on_completion(kind, name, output_tokens=10)
    forecaster.close(kind, name)
    return live


def failing(predictor: NextAgentPredictor, call: Callable[..., Any]) -> NextAgentPredictor:
    """The same predictor but for its answers at prefill."""
    other = copy(predictor)
    other.prefilled = call  # type: ignore[method-assign]
    return other


def test_tokens_left_are_those_of_the_whole_prefix(
    tiny: Tiny, predictor: NextAgentPredictor, lengths: RemainingLengthPredictor
) -> None:
    forecaster = Forecaster(predictor, 3, lengths=lengths, lengths_version=5, clock=Clock())
    steps = read_store(tiny.held_out).slice(0, 60).to_pylist()
    for at, step in enumerate(steps):
        ids = step["workflow_type"], step["workflow_id"]
        given = {name: step[name] for name in LENGTH_INPUTS}
        live = forecaster.on_prefill(*ids, step["agent"], step=step["step"], **given)
        whole = lengths.forecast(steps[at - step["step"] : at + 1])
        left = live.remaining
        assert dict(zip(left.quantiles, left.tokens, strict=True)) == whole.quantiles
        assert (left.source, left.evidence, left.version) == (whole.source, whole.evidence, 5)
        assert left.ranking == whole.quantiles[0.5]
        assert (live.version, live.source) == (3, "champion")
        of = {name: step[name] for name in ("output_text", "completion_state")}
        after = forecaster.on_completion(*ids, output_tokens=step["output_tokens"], **of).remaining
        assert after.tokens == pytest.approx([max(0, t - step["output_tokens"]) for t in left.tokens])
    assert sum(n for (kind, _, _), n in forecaster.counts.items() if kind == "remaining-length") == 2 * len(steps)


def test_without_models_the_counts_answer_once_they_have_seen_enough() -> None:
    forecaster = Forecaster(None, back_off=OnlineCounts(BackoffConfig(min_evidence=6)), clock=Clock())
    first = walk(forecaster, "w-0")
    assert {live.source for live in first} == {"none"}
    assert first[0].reason == NO_MODEL
    for number in range(1, 10):
        last = walk(forecaster, f"w-{number}")
    draft, second_check = last[0], last[3]
    assert (draft.source, draft.version, draft.reason) == ("back-off", None, NO_MODEL)
    assert draft.evidence == 18
    assert draft.probabilities[0, draft.agents.index("check")] > 0.9
    assert second_check.probabilities[0, -1] > 0.4, "after draft, check half of the workflows end"
    assert (second_check.remaining.source, second_check.remaining.quantiles) == ("back-off", (0.5,))
    assert second_check.remaining.ranking == 20  # 30 at its first call, 10 at its second


def test_counts_that_have_seen_more_go_before_a_model_that_knows_too_little(
    predictor: NextAgentPredictor, lengths: RemainingLengthPredictor
) -> None:
    forecaster = Forecaster(predictor, 3, lengths=lengths, back_off=OnlineCounts(), clock=Clock())
    assert walk(forecaster, "w-0")[0].source == "back-off"
    for number in range(1, 8):
        last = walk(forecaster, f"w-{number}")[0]
    assert (last.source, last.version, last.reason) == ("back-off", None, LITTLE_SEEN)
    assert set(last.agents) == {"draft", "check"}
    assert last.remaining.ranking == 30  # 40 at its first call, 20 at its second
    known = forecaster.on_prefill("retry", "w", "planner")
    assert (known.source, known.version, known.reason) == ("champion", 3, None)
    assert known.remaining.source == "champion"


def test_where_the_model_errs_the_counts_answer_and_say_why(predictor: NextAgentPredictor) -> None:
    forecaster = Forecaster(predictor, 3, back_off=OnlineCounts(), clock=Clock())
    for number in range(8):
        walk(forecaster, f"w-{number}", ("planner", "coder"), "retry")
    forecaster.on_prefill("retry", "w", "planner", prefill_state=np.zeros(3))
    answer = forecaster.on_completion("retry", "w", output_tokens=5)
    assert (answer.source, answer.version, answer.reason) == ("back-off", None, "InputError")
    assert forecaster.counts["next-agent", "back-off", "InputError"] == 2


@pytest.mark.parametrize("number", [np.nan, np.inf, -1.0, 0.3], ids=str)
def test_what_is_no_distribution_is_no_forecast(predictor: NextAgentPredictor, number: float) -> None:
    def answer(*given: Any) -> int:
        given[-1][:] = number
        return 100

    forecaster = Forecaster(failing(predictor, answer), clock=Clock())
    live = forecaster.on_prefill("retry", "w", "planner")
    assert (live.source, live.reason, live.probabilities.shape) == ("none", "NotAForecast", (0, 0))


def test_a_predictor_that_writes_nothing_is_found_out(predictor: NextAgentPredictor) -> None:
    forecaster = Forecaster(failing(predictor, lambda *_: 100), clock=Clock())
    assert forecaster.on_prefill("retry", "w", "planner").reason == "NotAForecast"


def test_tokens_that_are_none_are_no_forecast(tiny: Tiny, lengths: RemainingLengthPredictor) -> None:
    class Odd:
        quantiles, ranks, open = lengths.quantiles, lengths.ranks, lengths.open

        def __init__(self, tokens: list[float]) -> None:
            forecast = lengths.forecast([{"workflow_type": "retry", "agent": "planner"}])
            self.forecast = replace(forecast, quantiles=dict(zip((0.5, 0.9, 0.99), tokens, strict=False)))

        def begun(self, *_: Any) -> Any:
            return self.forecast

    for tokens in ([1, 2, np.nan], [3, 2, 4], [-1, 2, 3], [1, 2]):
        forecaster = Forecaster(None, lengths=Odd(tokens), clock=Clock())  # type: ignore[arg-type]
        assert forecaster.on_prefill("retry", "w", "planner").remaining.reason == "NotAForecast"
    good = Forecaster(None, lengths=Odd([1, 2, 3]), clock=Clock())  # type: ignore[arg-type]
    assert good.on_prefill("retry", "w", "planner").remaining.tokens == (1, 2, 3)


def test_a_broken_predictor_is_switched_off_alone_and_comes_back_for_new_workflows(
    predictor: NextAgentPredictor, lengths: RemainingLengthPredictor, caplog: pytest.LogCaptureFixture
) -> None:
    broken, calls = True, []

    def at_times(*given: Any) -> int:
        calls.append(1)
        if broken:
            raise RuntimeError("the text of a request")
        return predictor.prefilled(*given)

    forecaster = Forecaster(failing(predictor, at_times), 3, lengths=lengths, budget=NEVER_LATE, clock=Clock())
    with caplog.at_level(logging.DEBUG):
        for number in range(20):
            live = forecaster.on_prefill("retry", f"w-{number}", "planner")
            assert live.remaining.source == "champion"
    assert live.reason == SWITCHED_OFF
    assert len(calls) < 10
    assert [("next-agent version 3" in r.getMessage(), "request" in r.getMessage()) for r in caplog.records] == [
        (True, False)
    ]
    broken = False
    assert forecaster.on_prefill("retry", "new", "planner").reason == SWITCHED_OFF, "until it is reset"
    forecaster.reset()
    assert forecaster.on_prefill("retry", "newer", "planner").source == "champion"
    assert forecaster.on_completion("retry", "new").source == "none", "its state has missed a step"


def test_a_late_predictor_is_switched_off(predictor: NextAgentPredictor) -> None:
    budget = Budget(deadline_s=0.0, window=10, share=0.5, at_least=5)
    forecaster = Forecaster(predictor, budget=budget, clock=Clock())
    sources = [forecaster.on_prefill("retry", "w", "coder").source for _ in range(12)]
    assert sources == ["champion"] * 4 + ["none"] * 8, "opening is a call as well"
    assert forecaster.breakers["next-agent"].late == 5


def test_an_expired_workflow_teaches_its_end_and_one_that_comes_back_is_recognised(
    predictor: NextAgentPredictor,
) -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    forecaster = Forecaster(predictor, back_off=counts, clock=Clock())
    forecaster.on_prefill("odd", "quiet", "draft", step=0)
    forecaster.on_completion("odd", "quiet", output_tokens=7)
    forecaster.on_prefill("odd", "busy", "draft", step=0)
    assert (len(forecaster), counts.next_agents("odd", ["draft"])) == (2, None)
    forecaster.close("odd", "quiet", EndReason.EXPIRED)
    assert len(forecaster) == 1
    counted = counts.next_agents("odd", ["draft"])
    assert counted is not None
    assert counted.probabilities[0, -1] > counted.probabilities[0, 0], "to expire is to end"
    assert forecaster.on_prefill("retry", "quiet", "coder", step=1).reason == MISSED_STEP


def test_an_aborted_workflow_teaches_no_end() -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    forecaster = Forecaster(None, back_off=counts, clock=Clock())
    forecaster.on_prefill("odd", "w", "draft")
    forecaster.on_completion("odd", "w", output_tokens=7)
    forecaster.close("odd", "w", EndReason.ABORTED)
    assert counts.next_agents("odd", ["draft"]) is None
    assert len(forecaster) == 0


@pytest.mark.parametrize(
    ("source", "served", "layer", "reason"),
    [
        ({"served_model": "model-7b"}, "model-14b", None, STATES_LEFT_OUT),
        ({"served_model": "model-7b"}, "model-7b", None, None),
        ({"served_model": "model-7b"}, None, None, None),  # an engine that does not say what it serves
        ({"layer": None}, "synthetic", 20, LAYER_LEFT_OUT),
        ({"layer": 20}, "synthetic", None, LAYER_LEFT_OUT),
        ({"layer": 20}, "synthetic", 15, LAYER_LEFT_OUT),
        ({"layer": 20}, "synthetic", 20, None),
        ({"layer": 20}, None, None, None),
    ],
)
def test_states_of_another_served_model_or_layer_are_left_out_and_it_is_said(
    predictor: NextAgentPredictor, source: dict[str, Any], served: str | None, layer: int | None, reason: str | None
) -> None:
    learnt = copy(predictor)
    learnt.source = replace(learnt.source, **source)
    step, state = WORKFLOWS["loop"][0], np.ones(STATE_SIZE, np.float32)
    ids = step["workflow_type"], step["workflow_id"], step["agent"]
    bare = Forecaster(predictor, clock=Clock()).on_prefill(*ids)
    seeing = Forecaster(predictor, clock=Clock()).on_prefill(*ids, prefill_state=state)
    assert not np.array_equal(bare.probabilities, seeing.probabilities)
    forecaster = Forecaster(learnt, served_model=served, state_layer=layer, clock=Clock())
    live = forecaster.on_prefill(*ids, prefill_state=state)
    assert (live.source, live.reason) == ("champion", reason)
    assert np.array_equal(live.probabilities, (bare if reason else seeing).probabilities)


def test_no_text_of_a_request_is_kept(predictor: NextAgentPredictor, lengths: RemainingLengthPredictor) -> None:
    texts = ["a prompt " * 20, "a system prompt " * 20, "an answer " * 20]
    forecaster = Forecaster(predictor, lengths=lengths, back_off=OnlineCounts(), clock=Clock())
    before = [sys.getrefcount(text) for text in texts]
    for name in ("w", "v"):
        forecaster.on_prefill("retry", name, "planner", input_text=texts[0], system_prompt=texts[1])
        forecaster.on_completion("retry", name, output_text=texts[2])
    assert [sys.getrefcount(text) for text in texts] == before
