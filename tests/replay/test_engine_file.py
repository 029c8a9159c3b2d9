"""An engine file says what an engine is, and one that cannot be is refused with all that is wrong."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ConfigurationError
from presage.serving_hooks.engine_file import Cost, checked, engine_text, read_engine, shipped

GOOD = """
cache_tokens = 1600
[cost]
source = "a test"
iteration_s = 0.01
prefill_token_s = 1e-4
decode_token_s = 1e-5
context_token_s = 0.0
"""


def test_an_iteration_costs_the_sum_of_its_parts() -> None:
    cost = Cost(source="a test", iteration_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-3, context_token_s=1e-6)
    assert cost.seconds(100, 10, 5000) == pytest.approx(0.01 + 0.01 + 0.01 + 0.005)
    loading = cost.model_copy(update={"host_token_s": 2e-5})
    assert loading.seconds(100, 10, 5000, 320) == pytest.approx(0.035 + 0.0064)


def test_a_file_is_read_and_an_option_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(GOOD)
    engine = read_engine(str(tmp_path / "e.toml"))
    assert (engine.blocks, engine.block_tokens, engine.cost.iteration_s) == (100, 16, 0.01)
    assert read_engine(str(tmp_path / "e.toml"), 160).blocks == 10


def test_a_host_is_part_of_a_file_and_an_option_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("host_cache_tokens = 3200\n" + GOOD + "host_token_s = 2e-5\n")
    engine = read_engine(str(tmp_path / "e.toml"))
    assert (engine.host_blocks, engine.cost.host_token_s) == (200, 2e-5)
    assert read_engine(str(tmp_path / "e.toml"), host_cache_tokens=47).host_blocks == 2
    assert read_engine(str(tmp_path / "e.toml"), host_cache_tokens=0).host_blocks == 0


def test_a_long_prompt_costs_more_than_its_tokens_and_the_same_in_any_parts() -> None:
    """97,000 tokens on one H100: 32e-6 · 97,000 + 1.06e-9 · 97,000 · 97,001 / 2 = 3.104 + 4.987 s."""
    cost = read_engine("h100-8b-datasheet").cost
    assert cost.prefill_s(97_000) == pytest.approx(8.091, abs=1e-3)
    parts = cost.prefill_s(90_000) + cost.prefill_s(7_000, before=90_000)
    assert parts == pytest.approx(cost.prefill_s(97_000), rel=1e-9)


def test_every_engine_that_comes_along_can_have_a_host() -> None:
    for name in shipped():
        assert read_engine(name, host_cache_tokens=10**6).cost.host_token_s > 0
        assert read_engine(name).host_blocks == 0


@given(
    source=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    costs=st.lists(st.floats(0, 60, allow_nan=False), min_size=3, max_size=3),
    cache_tokens=st.integers(32, 10**9),
    chunked=st.booleans(),
    host=st.none() | st.floats(0, 60, allow_nan=False),
)
def test_what_is_written_is_what_is_read(
    source: str, costs: list[float], cache_tokens: int, chunked: bool, host: float | None
) -> None:
    names = ("prefill_token_s", "decode_token_s", "context_token_s")
    cost = {"source": source, "iteration_s": 0.01, **dict(zip(names, costs, strict=True))}
    cost |= {} if host is None else {"host_token_s": host}
    engine = checked({"cache_tokens": cache_tokens, "chunked_prefill": chunked, "cost": cost}, "a test")
    assert checked(tomllib.loads(engine_text(engine)), "again") == engine


def test_every_engine_that_comes_along_says_where_its_costs_come_from() -> None:
    assert "invented" in shipped()
    for name in shipped():
        source = read_engine(name).cost.source
        assert "invented" in source or "not measured" in source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("0.01", "0"), "cost.iteration_s: input should be greater than 0"),
        (GOOD.replace("1e-4", "-1.0"), "cost.prefill_token_s"),
        (GOOD.replace("1e-4", "nan"), "cost.prefill_token_s"),
        (GOOD.replace("1600", "0"), "cache_tokens"),
        (GOOD.replace("1600", "16"), "1 blocks of 16"),
        (GOOD.replace("cache_tokens", "cash_tokens"), "cache_tokens: field required; cash_tokens: extra inputs"),
        ("most_tokens = 10\nmost_requests = 20\n" + GOOD, "most_tokens is 10"),
        ("host_cache_tokens = -1\n" + GOOD, "host_cache_tokens: input should be greater than or equal to 0"),
        ("host_cache_tokens = 15\n" + GOOD, "host_cache_tokens is 15, less than a block of 16"),
        ("host_cache_tokens = 1600\n" + GOOD, "[cost] has no host_token_s"),
        (GOOD + "host_token_s = -1.0", "cost.host_token_s"),
        ("[cost", "not valid TOML"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_engine(str(tmp_path / "e.toml"))
    assert said in str(refused.value)


def test_a_file_that_is_not_there_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="invented"):
        read_engine(str(tmp_path / "none.toml"))
