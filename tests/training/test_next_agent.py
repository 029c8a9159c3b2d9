"""Training end to end on a small known law: what is fitted on what, what is kept, and what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tiny_model import Tiny

from presage.datasets.schema import digest
from presage.datasets.synthetic.workflows import generate
from presage.errors import ConfigurationError, TraceError
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.training.baselines import BASELINES
from presage.training.next_agent.train import evaluate_model, train
from presage.training.sets import SHARED_TASKS

FAST = NextAgentConfig(network=NetworkConfig(epochs=2), boosting=BoostingConfig(rounds=3))


def drawn(workflows: int = 30, seed: int = 0) -> pa.Table:
    return generate("retry", workflows, seed, state_size=16).table


def test_the_metrics_are_the_command_contract(tiny: Tiny) -> None:
    found = json.loads((tiny.folder / "metrics.json").read_text())
    assert (found["kind"], found["model"], found["version"]) == ("next-agent", "tiny", None)
    assert (found["workflows"], list(found["baselines"])) == (16, ["markov-1"])
    for moment in ("prefill", "completion"):
        assert len(found["moments"][moment]["accuracy"]) == 3
        assert found["moments"][moment]["states"] is True
    assert found["config"]["network"]["epochs"] == 3
    assert found["versions"]["torch"].startswith("2.")
    assert 0 < found["latency_us"] < 10_000
    assert found["size_bytes"] == sum((tiny.folder / f).stat().st_size for f in ("config.json", "model.safetensors"))
    assert found["data"]["seed"] == 0
    assert found["data"]["split"].startswith("by time")
    assert (tiny.folder / "report.md").read_text().startswith("# Next agent: tiny")


def test_the_artefact_names_what_it_was_trained_on(tiny: Tiny) -> None:
    said = json.loads((tiny.folder / "config.json").read_text())["training_data"]
    assert said == tiny.training.training_data
    assert said["workflows"] == 64
    assert said["digest"] == tiny.training.metrics["data"]["digest of the training traces"]


def test_evaluating_the_saved_model_on_the_test_set_gives_the_figures_of_the_training(tiny: Tiny) -> None:
    table, later = drawn(40), drawn(20, 7)
    fitted = train(table, later, FAST, baselines=())
    judged = evaluate_model(fitted.predictor, later, 0)
    found = judged.evaluation.to_dict()
    assert found["moments"] == fitted.metrics["moments"]
    assert list(found["baselines"]) == ["n-gram"]
    assert judged.workflows[0].startswith("retry/")
    assert len(judged.workflows) == judged.evaluation.moments["prefill"].correct.shape[0] == 20


def test_separate_test_traces_leave_all_others_for_training() -> None:
    table, later = drawn(30), drawn(10, 3)
    fitted = train(table, later, FAST, baselines=())
    assert fitted.training_data["workflows"] == 30
    assert fitted.training_data["digest"] == f"sha256:{digest(table)}"
    assert fitted.metrics["workflows"] == 10
    assert fitted.metrics["data"][SHARED_TASKS] == 0
    assert train(table, table, FAST, baselines=()).metrics["data"][SHARED_TASKS] == 30


def test_names_that_only_the_test_set_has_are_unknown() -> None:
    later = drawn(10, 3)
    renamed = pc.if_else(pc.equal(later["agent"], "coder"), "newcomer", later["agent"])
    later = later.set_column(later.schema.get_field_index("agent"), later.schema.field("agent"), renamed)
    fitted = train(drawn(30), later, FAST, baselines=("markov-3",))
    assert "newcomer" not in fitted.predictor.vocabulary.agents
    assert fitted.metrics["moments"]["prefill"]["unseen"][0] > 0.1


@pytest.mark.slow
def test_the_default_baselines_stand_beside_ours() -> None:
    fitted = train(drawn(40), None, FAST)
    assert list(fitted.metrics["baselines"]) == list(BASELINES)
    for figures in fitted.metrics["baselines"].values():
        assert 0 < figures["prefill"]["accuracy"][0] < 1


@pytest.mark.slow
def test_any_other_baseline_does_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "from presage.training.baselines import BASELINES as OURS\nBASELINES = {'mine': OURS['boosted-trees']}\n"
    (tmp_path / "own_baselines.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    fitted = train(drawn(40), None, FAST, baselines=("own_baselines:mine",))
    assert tuple(fitted.metrics["baselines"]) == ("own_baselines:mine",)
    for figures in fitted.metrics["baselines"].values():
        assert 0 < figures["prefill"]["accuracy"][0] < figures["completion"]["accuracy"][0] < 1


def test_the_same_seed_trains_the_same_model_and_says_the_same() -> None:
    first, second = (train(drawn(), None, FAST, baselines=(), seed=4) for _ in range(2))
    for changing in ("fit_seconds", "latency_us"):
        first.metrics.pop(changing), second.metrics.pop(changing)
    assert first.metrics == second.metrics


@pytest.mark.parametrize(("states", "kind"), [("none", "none"), ("text", "sketch"), ("captured", "captured")])
def test_states_come_from_where_they_were_asked_for(states: str, kind: str) -> None:
    fitted = train(drawn(), None, FAST, baselines=(), states=states)  # type: ignore[arg-type]
    assert fitted.predictor.source.kind == kind
    assert fitted.metrics["moments"]["completion"]["states"] is (kind != "none")


def test_a_trace_of_ids_alone_trains() -> None:
    table = drawn().drop_columns(["prefill_state", "completion_state"])
    for column in ("input_text", "output_text", "system_prompt", "input_tokens", "output_tokens"):
        nulls = pa.nulls(len(table), table.schema.field(column).type)
        table = table.set_column(table.schema.get_field_index(column), table.schema.field(column), nulls)
    fitted = train(table, None, FAST, baselines=("boosted-trees",))
    assert fitted.predictor.source.kind == "none"
    assert np.isfinite(fitted.metrics["moments"]["prefill"]["nll"]).all()


def test_a_trace_of_cut_workflows_alone_trains() -> None:
    table = drawn()
    cut = pa.array(np.zeros(len(table), bool))
    table = table.set_column(table.schema.get_field_index("complete"), table.schema.field("complete"), cut)
    fitted = train(table, None, FAST, baselines=())
    forecast = fitted.predictor.forecast([{"workflow_type": "retry", "agent": "planner"}])
    assert all(end < 0.05 for end in forecast.end), "END was never seen, and never taught"


def test_progress_tells_what_is_done() -> None:
    told: list[tuple[str, float | None]] = []
    train(drawn(), None, FAST, baselines=("markov-1",), progress=lambda *what: told.append(what))
    doing = list(dict.fromkeys(text for text, _ in told))
    assert doing[0] == "reading states"
    assert "baseline markov-1" in doing
    assert doing[-1] == "judging on the test set"
    assert all(share is None or 0 <= share <= 1 for _, share in told)


@pytest.mark.parametrize(
    ("workflows", "options", "error", "message"),
    [
        (10, {"horizon": 0}, ConfigurationError, "horizon is 0"),
        (10, {"baselines": ["markov-9"]}, ConfigurationError, "no baseline 'markov-9'; there are: markov-1"),
        (1, {}, TraceError, "single task cannot be split"),
        (2, {}, TraceError, "a single task is left for training"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    workflows: int, options: dict[str, Sequence[str]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(drawn(workflows), None, FAST, **options)  # type: ignore[arg-type]


def test_without_trees_it_trains() -> None:
    fitted = train(drawn(), None, replace(FAST, boosting=BoostingConfig(rounds=0)), baselines=())
    assert fitted.predictor.forecast([{"workflow_type": "retry", "agent": "planner"}]).source == "champion"
