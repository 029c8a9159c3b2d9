"""A gateway with a profile and no model annotates requests with the profile's remaining tokens and ranks by them."""

from pathlib import Path

from profile_samples import coding, table_of
from served import WITHOUT_MODELS

from presage.features.sequences import sequences_of
from presage.gateway.config import gateway_config
from presage.gateway.serve import build_decisions
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks.identity.request import ApiRequest


def test_a_request_is_annotated_with_the_tokens_of_the_profile(tmp_path: Path) -> None:
    table = table_of(coding(300), output_tokens=7)
    ProfilePredictor().fit(sequences_of(table)).save(tmp_path / "profile")
    forecasts = {**WITHOUT_MODELS, "profile": str(tmp_path / "profile")}
    of = build_decisions(gateway_config({"upstreams": [{"url": "http://127.0.0.1:1"}], "forecasts": forecasts}, "test"))
    named = {"workflow_type": "app", "workflow_id": "w", "agent": "planner"}
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "vllm_xargs": named}
    made = of.arrived(ApiRequest("chat", body)).annotation
    assert made is not None
    assert made.source == "profile"
    assert made.remaining_tokens is not None
    median, most = made.remaining_tokens
    assert made.rank == median
    assert 6 * 7 < median < most <= 22 * 7, "7 tokens in each of 6 to 22 steps"
    of.close()
