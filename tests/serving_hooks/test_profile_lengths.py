"""Remaining tokens by a profile: its turn after their model and before online counts, and who reads them."""

from pathlib import Path

import pyarrow as pa
import pytest
from by_name import Forecaster, VersionedForecaster
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import coding, profile, table_of
from serving_samples import Clock, lengths_of
from tiny_model import Tiny

from presage.features.sequences import sequences_of
from presage.predictors.profile.automaton import QUANTILES
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.drift import Alarm, Reason
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.promoted import Figure
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import DRIFTED, NO_MODEL, LiveLengths

PLAN = coding(300)
TOKENS = 7
"""Of every step."""


def profile_with_tokens(tokens: int | None = TOKENS) -> ProfilePredictor:
    return ProfilePredictor().fit(sequences_of(table_of(PLAN, output_tokens=tokens)))


def walk(forecaster: Forecaster, agents: list[str], name: str = "w", kind: str = "app") -> list[LiveLengths]:
    """The remaining tokens as each step of a whole workflow begins."""
    made = []
    for agent in agents:
        made.append(forecaster.on_prefill(kind, name, agent, input_tokens=100).remaining)
        forecaster.on_completion(kind, name, output_tokens=TOKENS)
    forecaster.close(kind, name)
    return made


def test_they_are_those_that_training_workflows_had_left_there() -> None:
    forecaster = Forecaster(None, profile=profile_with_tokens(), profile_version=7, clock=Clock())
    lengths = sorted(TOKENS * len(agents) for agents in PLAN)
    first = forecaster.on_prefill("app", "w", "planner").remaining
    assert (first.source, first.version, first.evidence, first.reason) == ("profile", 7, 300, NO_MODEL)
    assert first.quantiles == QUANTILES
    assert first.tokens == tuple(lengths[-(-round(q * 299 * 100) // 100)] for q in QUANTILES)
    assert first.ranking == first.tokens[0]
    assert forecaster.counts["remaining-length", "profile", NO_MODEL] == 1
    after = forecaster.on_completion("app", "w", output_tokens=TOKENS).remaining
    assert after.tokens == tuple(tokens - TOKENS for tokens in first.tokens)


def test_the_model_comes_before_the_profile_and_the_profile_before_counts(tiny: Tiny) -> None:
    predictor = profile_with_tokens()
    predictor.profiles["retry"] = predictor.profiles["app"]
    forecaster = Forecaster(
        None, lengths=lengths_of(tiny.store), profile=predictor, back_off=OnlineCounts(), clock=Clock()
    )
    for number, agents in enumerate(PLAN[:9]):
        made = walk(forecaster, agents, f"w{number}")
    assert {left.source for left in made} == {"profile"}, "the model does not know these agents"
    assert walk(forecaster, ["planner"], kind="retry")[0].source == "champion"
    assert {left.source for left in walk(forecaster, ["coder"])} == {"back-off"}, "off the graph"


def test_without_recorded_tokens_there_are_none() -> None:
    forecaster = Forecaster(None, profile=profile_with_tokens(None), back_off=OnlineCounts(), clock=Clock())
    assert {left.source for left in walk(forecaster, PLAN[0])} == {"none"}


def test_during_an_alarm_counts_answer_and_where_they_know_too_little_the_profile() -> None:
    monitor = ForecastMonitor()
    forecaster = Forecaster(None, profile=profile_with_tokens(), back_off=OnlineCounts(), monitor=monitor)
    for number, agents in enumerate(PLAN[:9]):
        walk(forecaster, agents, f"w{number}")
    reason = Reason("transitions never seen", "above", 0.5, Figure(0.1, 0.0, 0.2))
    monitor.drift.alarms["app"] = Alarm("app", 99, (reason,))
    assert {(left.source, left.reason) for left in walk(forecaster, PLAN[9])} == {("back-off", DRIFTED)}
    fresh = Forecaster(None, profile=profile_with_tokens(), back_off=OnlineCounts(), monitor=monitor)
    assert walk(fresh, PLAN[9])[0].source == "profile"


def test_requests_are_ranked_by_them_and_coverage_is_judged() -> None:
    monitor = ForecastMonitor()
    forecaster = Forecaster(None, profile=profile_with_tokens(), profile_version=7, monitor=monitor, clock=Clock())
    of = VersionedForecaster(forecaster)
    early = of.remaining_tokens(Step("app", "early", "planner"), 100)
    of.on_prefill("app", "late", "planner")
    late = of.remaining_tokens(Step("app", "late", "explorer"), 100)
    assert early is not None
    assert late is not None
    assert early > late > 0
    walk(forecaster, PLAN[0], "whole")
    judged = monitor.live.lengths("app", "profile version 7", 0)
    assert judged["steps"] == len(PLAN[0])
    assert judged["coverage"].keys() == {"0.5", "0.9", "0.99"}


words = st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 9)), min_size=1), min_size=1)


@given(words)
def test_law_no_number_of_tokens_is_negative_or_falls_with_the_quantile(
    workflows: list[list[tuple[str, int | None]]],
) -> None:
    table = table_of([[agent for agent, _ in steps] for steps in workflows], output_tokens=0)
    tokens = [number for steps in workflows for _, number in steps]
    column = table.schema.get_field_index("output_tokens")
    table = table.set_column(column, table.schema.field(column), pa.array(tokens, pa.int32()))
    states = profile(table).automaton.states
    whole = [[number for _, number in steps] for steps in workflows]
    totals = [sum(of) for of in whole if None not in of]  # type: ignore[type-var]
    assert (0 if states[0].tokens is None else states[0].tokens.observations) == len(totals)
    if totals and states[0].tokens is not None:
        assert states[0].tokens.mean == pytest.approx(sum(totals) / len(totals))
    for state in states:
        left = state.tokens
        assert left is None or 0 <= left.quantiles[0] <= left.quantiles[1] <= left.quantiles[2]
        assert left is None or left.observations <= max(state.visits, len(workflows))


def test_an_artefact_from_before_they_were_kept_still_loads(tmp_path: Path) -> None:
    made = profile(table_of(PLAN, output_tokens=TOKENS))
    older = made.to_dict()
    for state in older["automaton"]:
        del state["tokens"]
    read = type(made).from_dict(older)
    assert all(state.tokens is None for state in read.automaton.states)
    assert read.automaton.states[1].left == made.automaton.states[1].left
    assert type(made).from_dict(made.to_dict()).automaton.states[1].tokens == made.automaton.states[1].tokens
    predictor = profile_with_tokens()
    predictor.profiles["app"] = read
    predictor.save(tmp_path)
    forecaster = Forecaster(None, profile=ProfilePredictor.load(tmp_path), clock=Clock())
    live = forecaster.on_prefill("app", "w", "planner")
    assert (live.source, live.remaining.source) == ("profile", "none")
