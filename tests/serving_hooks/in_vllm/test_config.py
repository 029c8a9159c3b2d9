"""Settings have defaults, each policy its switch, and what nobody knows is refused in one sentence."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ConfigurationError
from presage.serving_hooks.forecasting.champions import load_forecasts
from presage.serving_hooks.forecasting.circuit_breaker import HANG_S, Budget
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.policies.admission import AdmissionConfig
from presage.serving_hooks.policies.eviction import EvictionConfig
from presage.serving_hooks.policies.prefetch import PrefetchConfig
from presage.serving_hooks.policies.priority import PriorityConfig
from presage.serving_hooks.policies.score import ScoreConfig
from presage.serving_hooks.policies.wait_bounds import Objective, Objectives
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.vllm.config import PresageConfig, counted_from_1, read_config
from presage.serving_hooks.workflows.identity import Step, scoped

SECONDS = (*("time_to_live_s", "reload_s", "forecast_deadline_ms", "held_at_most_s"),)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"presage": {}}, "a hash"])
def test_what_is_not_said_is_the_policies_own_default(additional: Any) -> None:
    config = read_config(additional)
    assert (config.priority, config.eviction, config.forecasts, config.registry) == (True, True, None, None)
    kinds = ("next_agent", "remaining_length", "return_time", "context_growth", "profile")
    assert {getattr(config, kind) for kind in kinds} == {f"models:/{kind.replace('_', '-')}@champion" for kind in kinds}
    assert config.forecast_budget() == Budget(first_hang_s=HANG_S)
    assert config.priority_settings() == PriorityConfig()
    assert config.score_settings() == ScoreConfig()
    assert config.eviction_settings() == EvictionConfig()
    assert config.admission_settings() == AdmissionConfig()
    assert (config.prefetch, config.prefetch_settings()) == (False, PrefetchConfig())
    assert (config.recorder, config.reload_s, config.monitor) == (None, 30.0, True)


def test_what_is_said_arrives() -> None:
    said = {"starved_after": 7, "quantum": 3, "horizon": 2, "gamma": 0.5, "eviction_rule": "pbkv"}
    said |= {"prefetch": True, "prefetch_least_value": 0.5, "prefetch_most_blocks": 9, "prefetch_memory_mb": 3}
    more = {"forecast_deadline_ms": 2, "error_budget": 0.5, "next_agent": None, "registry": "http://there"}
    config = read_config({"presage": {**said, **more, "eviction": False, "time_to_live_s": 60}})
    assert (config.forecast_budget().deadline_s, config.forecast_budget().share) == (0.002, 0.5)
    assert (config.next_agent, config.registry) == (None, "http://there")
    assert config.prefetch_settings() == PrefetchConfig(0.5, 9)
    assert (config.prefetch, config.prefetch_memory_mb) == (True, 3)
    assert config.priority_settings() == PriorityConfig(7, 3)
    assert config.score_settings() == ScoreConfig(2, 0.5)
    assert config.eviction_settings() == EvictionConfig("pbkv")
    assert (config.eviction, config.priority, config.time_to_live_s) == (False, True, 60)
    assert read_config({"presage": {"admission_least_gain": 0.2}}).admission_settings() == AdmissionConfig(0.2)


def test_service_objectives_are_those_of_the_type_then_of_the_tenant_then_the_default() -> None:
    assert read_config({}).objectives_settings() == Objectives()
    said = {"default": {"max_hold_s": 9}, "tenants": {"key-0": {"first_token_s": 2.5}}, "factor": 4}
    objectives = read_config(
        {"presage": {"objectives": {**said, "workflow_types": {"chat": {"max_hold_s": 0}}}}}
    ).objectives_settings()
    of = [(kind, name) for kind in ("chat", "batch") for name in (scoped("key-0", "w"), "w")]
    assert [objectives.of(Step(kind, name, "a")) for kind, name in of] == [
        Objective(0),
        Objective(0),
        Objective(None, 2.5),
        Objective(9),
    ]
    assert (objectives.of(None), objectives.factor) == (Objective(9), 4)
    with pytest.raises(ConfigurationError, match=r"presage.objectives.tenants.key-0.max_hold_s is -1"):
        read_config({"presage": {"objectives": {"tenants": {"key-0": {"max_hold_s": -1}}}}})


def test_an_unknown_key_is_one_clear_error() -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_config({"presage": {"evictoin": True, "gamma": 2, "quantum": "many"}})
    said = str(refused.value)
    assert "presage.evictoin is unknown; the settings are admin_key_variable, admission, " in said
    assert "presage.gamma is 2: input should be less than or equal to 1" in said
    assert "presage.quantum is 'many'" in said
    assert "\n" not in said
    with pytest.raises(ConfigurationError, match=r"presage\.weights\.tenant is unknown; the settings are tenants, "):
        read_config({"presage": {"weights": {"tenant": {}}}})


def test_the_recorder_is_set_by_an_object_of_its_own() -> None:
    config = read_config({"presage": {"recorder": {"folder": "there", "states": "both"}, "reload_s": None}})
    assert config.recorder == RecorderConfig(folder="there", states="both")
    assert config.reload_s is None
    with pytest.raises(ConfigurationError) as refused:
        read_config({"presage": {"recorder": {"stats": "both"}}})
    assert "presage.recorder.folder is missing" in str(refused.value)
    assert "presage.recorder.stats is unknown; the settings are file_age_s, " in str(refused.value)


@pytest.mark.parametrize("given_", [[], "on", 3, {"time_to_live_s": float("inf")}, {"forecasts": "no function"}])
def test_what_is_no_object_or_no_good_value_is_refused(given_: Any) -> None:
    with pytest.raises(ConfigurationError, match="additional_config: presage"):
        read_config({"presage": given_})


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        *((name, (0, -1, 1.5)) for name in ("starved_after", "quantum", "horizon", "prefetch_most_blocks")),
        *((name, (0.0, -1.0, math.nan, math.inf)) for name in SECONDS),
        *((name, (-0.1, math.nan)) for name in ("admission_least_gain", "error_budget")),
        ("error_budget", (1.0,)),
        ("gamma", (0.0, 1.5, math.nan)),
        ("prefetch_least_value", (0.0, math.nan)),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_its_name(setting: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=f"presage.{setting} is {value}"):
            read_config({"presage": {setting: value}})


@given(
    st.dictionaries(
        st.sampled_from(list(PresageConfig.model_fields)), st.none() | st.text() | st.floats() | st.integers()
    )
)
def test_whatever_is_accepted_the_policies_accept_too(said: dict[str, Any]) -> None:
    try:
        config = read_config({"presage": said})
    except ConfigurationError:
        return
    config.priority_settings(), config.score_settings(), config.eviction_settings(), config.forecast_budget()
    config.admission_settings(), config.prefetch_settings()


@pytest.mark.parametrize(("said", "layer"), [(None, None), (1, 1), (30, 30), (-1, 30), (-30, 1)])
def test_layers_count_from_1_or_from_the_end(said: int | None, layer: int | None) -> None:
    assert counted_from_1(read_config({"presage": {"state_layer": said}}).state_layer, 30) == layer


@pytest.mark.parametrize("said", [0, 31, -31])
def test_a_layer_that_is_none_of_the_models_is_refused(said: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"presage.state_layer is {said}; this model has 30 transformer layers"
    ):
        counted_from_1(said, 30)


def test_every_setting_is_explained() -> None:
    assert all(field.description for field in PresageConfig.model_fields.values())


def nothing() -> Forecasts:
    return Forecasts()


def something_else() -> int:
    return 3


def test_forecasts_come_from_the_function_that_is_named() -> None:
    assert load_forecasts(PresageConfig(forecasts=f"{__name__}:nothing")) == Forecasts()
    for name, said in (("something_else", "returns a int"), ("missing", "cannot be loaded")):
        with pytest.raises(ConfigurationError, match=said):
            load_forecasts(PresageConfig(forecasts=f"{__name__}:{name}"))
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_forecasts(PresageConfig(forecasts="no_such_package.at_all:make"))


def test_the_documentation_lists_the_settings_and_no_others() -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving_settings.md").read_text(encoding="utf-8")
    section = text.split("## Settings\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    told = {name: row[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert told == {
        name: "none" if field.default is None else json.dumps(field.default).strip('"')
        for name, field in PresageConfig.model_fields.items()
    }
