"""A prefetch takes the likeliest first, and nothing anybody needs: no prefill's time, no active blocks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ConfigurationError
from presage.serving_hooks.policies.prefetch import (
    NO_SPACE,
    NO_TIME,
    NOTHING_WORTH,
    PREFILL_RUNS,
    Candidate,
    EngineState,
    Fetch,
    Prefetch,
    PrefetchConfig,
)
from presage.serving_hooks.policies.score import UNKNOWN, Lookahead, ScoreConfig, lookahead

AGENTS = ("coder", "tester", "writer")
IDLE = EngineState(pure_decode=True, spare_blocks=100, blocks_per_s=10_000, step_s=0.012)  # 120 blocks a step


def soon(*probabilities: float) -> Lookahead:
    return lookahead(np.array([probabilities, (0, 0, 0, 1)]), AGENTS, ScoreConfig())


def prompt(name: str, blocks: int, **uses: str) -> Candidate:
    return Candidate(name, {workflow: frozenset([agent]) for workflow, agent in uses.items()}, blocks)


def test_the_likeliest_prompt_comes_first_and_the_last_one_in_part() -> None:
    forecasts = {"a": soon(0.7, 0.2, 0.1, 0), "b": soon(0, 0.5, 0.4, 0.1)}
    candidates = [
        prompt("a tests", 10, a="tester"),
        prompt("b writes", 60, b="writer"),
        prompt("a codes", 50, a="coder"),
        prompt("a writes", 10, a="writer"),  # below the least value
    ]
    plan = Prefetch().plan(IDLE, candidates, forecasts)
    names = [(fetch.name, fetch.blocks, round(fetch.value, 5)) for fetch in plan.fetches]
    assert names == [("a codes", 50, 0.7), ("b writes", 50, 0.4)]
    assert (plan.blocks, plan.reason) == (100, None)


def test_values_of_several_workflows_add_up_and_only_the_next_step_counts() -> None:
    forecasts = {"a": soon(0.3, 0, 0, 0.7), "b": soon(0.3, 0, 0, 0.7), "c": soon(0.5, 0, 0, 0.5)}
    candidates = [prompt("alone", 5, c="coder"), prompt("shared", 5, a="coder", b="coder", silent="coder")]
    plan = Prefetch().plan(IDLE, candidates, {**forecasts, "silent": UNKNOWN})
    assert [fetch.name for fetch in plan.fetches] == ["shared", "alone"]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineState(False, 100, 10_000, 0.012), PREFILL_RUNS),
        (EngineState(True, 0, 10_000, 0.012), NO_SPACE),
        (EngineState(True, 100, 50, 0.012), NO_TIME),
        (EngineState(True, 100, math.nan, 0.012), NO_TIME),
    ],
)
def test_where_nothing_lies_idle_nothing_is_fetched(engine: EngineState, reason: str) -> None:
    plan = Prefetch().plan(engine, [prompt("p", 5, a="coder")], {"a": soon(1, 0, 0, 0)})
    assert (plan.fetches, plan.reason) == ((), reason)


def test_nothing_likely_nothing_fetched() -> None:
    assert Prefetch().plan(IDLE, [], {}).reason == NOTHING_WORTH
    unlikely = Prefetch().plan(
        IDLE, [prompt("p", 5, a="coder"), prompt("q", 5, b="coder")], {"a": soon(0.1, 0, 0, 0.9)}
    )
    assert unlikely.reason == NOTHING_WORTH


@pytest.mark.parametrize("wrong", [{"least_value": 0.0}, {"most_blocks": 0}])
def test_settings_that_would_fetch_everything_or_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        PrefetchConfig(**wrong)  # type: ignore[arg-type]


engines = st.builds(EngineState, st.booleans(), st.integers(0, 60), st.floats(0, 1e4), st.floats(0, 0.05))
tables = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=3, max_size=3)
lists = st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.sampled_from(AGENTS)), st.integers(0, 40)))


@given(engines, tables, lists)
def test_a_plan_never_exceeds_what_lies_idle_and_leaves_nothing_better_behind(
    engine: EngineState, rows: list[tuple[int, ...]], wanted: list[tuple[dict[str, str], int]]
) -> None:
    forecasts = {w: soon(*(n / max(1, sum(row)) for n in row)) for w, row in zip("abc", rows, strict=True)}
    candidates = [prompt(str(i), blocks, **uses) for i, (uses, blocks) in enumerate(wanted)]
    plan = Prefetch().plan(engine, candidates, forecasts)
    if not engine.pure_decode:
        assert not plan.fetches
    assert plan.blocks <= min(engine.spare_blocks, engine.blocks_per_s * engine.step_s)
    fetched = {fetch.name: fetch for fetch in plan.fetches}
    assert [f.value for f in plan.fetches] == sorted((f.value for f in plan.fetches), reverse=True)
    for candidate in candidates:
        fetch = fetched.get(candidate.name, Fetch("", 0, 0))
        assert fetch.blocks <= candidate.blocks
        value = sum(forecasts[w].one_step(agents) for w, agents in candidate.uses.items()) / 2**20
        if plan.fetches and value >= 0.2 and fetch.blocks < candidate.blocks:
            assert plan.fetches[-1].value >= value  # what was left out is worth no more than what was taken last
    assert bool(plan.fetches) == (plan.reason is None)
