"""A context-growth model in the engine: who begins before anything is measured, and how a workflow is explained."""

from pathlib import Path

import pytest
from context_samples import loops
from test_admission_in_engine import Ticking, held_by
from vllm_samples import ask

from presage.predictors.length.context import ContextGrowthConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.training.length.train import fit_lengths

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

ADMISSION = {"priority": False, "eviction": False, "reload_s": None, "forecast_deadline_ms": 1000.0}
NO_MODELS = dict.fromkeys(("next_agent", "remaining_length", "return_time", "context_growth", "profile"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts grow by thousands of tokens, as those of `loops` do."""
    folder = tmp_path_factory.mktemp("contexts") / "model"
    fit_lengths(loops(60, 0), ContextGrowthConfig(estimator="ridge"), target="final-context").predictor.save(folder)
    return folder


def engine_of(folder: Path, model: Path | None) -> Ticking:
    presage = {**ADMISSION, **NO_MODELS, "context_growth": None if model is None else str(model)}
    engine = Ticking(folder, SyncWorkflowScheduler, presage=presage, blocks=700)
    for number in range(12):
        of = {"workflow_type": "fix", "workflow_id": f"w{number}", "agent": "coder", "step": 0}
        engine.scheduler.add_request(ask(f"w{number}-0", [number] * 600, 40, **of))
    for _ in range(4):
        engine.step()
    return engine


def test_as_many_workflows_begin_as_will_fit_and_without_a_model_all_do(tmp_path: Path, model: Path) -> None:
    assert held_by(engine_of(tmp_path / "counts", None))["held"] == 0
    engine = engine_of(tmp_path / "model", model)
    status = engine.scheduler.presage_status()
    assert 6 <= status["admission"]["held"] <= 11, "11,000 tokens of cache hold few of them"
    assert status["models"]["context-growth"] == str(model)
    assert status["counts"]["forecast of contexts: champion"] == 12
    engine.run()
    assert len(engine.ended) == 12


def test_a_workflow_is_explained_by_the_forecast_of_its_context(tmp_path: Path, model: Path) -> None:
    engine = engine_of(tmp_path, model)
    explained = engine.scheduler.explain("fix", "w0")
    growth = explained["growth"]
    assert growth["source"] == "champion"
    assert list(growth["quantiles"]) == ["0.1", "0.5", "0.9", "0.99"]
    (told,) = [one for one in explained["reasons"] if "context" in one]
    assert told == (
        f"its context is expected to grow by {growth['quantiles']['0.5']:,.0f} tokens (90 %: at most "
        f"{growth['quantiles']['0.9']:,.0f}; champion); admission counts it as "
        f"{explained['admission']['context_tokens']:,} tokens"
    )
    assert explained["admission"]["context_tokens"] > explained["admission"]["own_tokens"]
    engine.run()
    assert engine.scheduler.explain("fix", "w0")["growth"]["quantiles"]["0.5"] < growth["quantiles"]["0.5"]
    engine.scheduler.workflow_ended("fix", "w0")
    assert engine.scheduler.explain("fix", "w0")["growth"] is None
    found = engine.scheduler.debug_state()
    assert (found["workflows"], found["context states"]) == (11, 11)
