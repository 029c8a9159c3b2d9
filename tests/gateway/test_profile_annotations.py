"""A gateway with a profile and no model annotates requests with the profile's remaining tokens and ranks by them."""

from pathlib import Path

from profile_samples import coding, table_of
from served import WITHOUT_MODELS

from presage.features.sequences import sequences_of
from presage.gateway.annotation import Annotation
from presage.gateway.config import gateway_config
from presage.gateway.decisions import Decisions
from presage.gateway.serve import build_decisions
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.listeners.overview import LEAST_ENDED
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step


def built(folder: Path) -> Decisions:
    table = table_of(coding(300), output_tokens=7)
    ProfilePredictor().fit(sequences_of(table)).save(folder / "profile")
    forecasts = {**WITHOUT_MODELS, "profile": str(folder / "profile")}
    return build_decisions(
        gateway_config({"upstreams": [{"url": "http://127.0.0.1:1"}], "forecasts": forecasts}, "test")
    )


def asked(of: Decisions, **named: str) -> Annotation:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "vllm_xargs": {"agent": "planner", **named}}
    made = of.arrived(ApiRequest("chat", body)).annotation
    assert made is not None
    return made


def test_a_request_is_annotated_with_the_tokens_of_the_profile(tmp_path: Path) -> None:
    of = built(tmp_path)
    made = asked(of, workflow_type="app", workflow_id="w")
    assert made.source == "profile"
    assert made.remaining_tokens is not None
    median, most = made.remaining_tokens
    assert made.rank == median
    assert 6 * 7 < median < most <= 22 * 7, "7 tokens in each of 6 to 22 steps"
    of.close()


def test_where_runs_are_not_recognised_their_forecasts_rank_nobody(tmp_path: Path) -> None:
    """Most workflows of one step: a planner would seem to be the last of its run, and be first in the queue."""
    of = built(tmp_path)
    before = asked(of, workflow_type="app")
    for number in range(LEAST_ENDED):
        step = Step("app", f"auto-x-{number}", "planner")
        of.overview.workflow_ended(Workflow(step, 0.0, latest=0), EndReason.EXPIRED)
    assert before.rank_from == "forecast" != asked(of, workflow_type="app").rank_from
    assert asked(of, workflow_type="app", workflow_id="w").rank_from == "forecast", "its client names the run"
    of.close()
