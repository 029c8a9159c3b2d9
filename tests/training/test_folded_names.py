"""Names with ids in them, from ingestion to forecasts: a predictor asked with raw names says what it says of folded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from by_name import Forecaster
from tool_samples import QUICK

from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.errors import ArtefactError, TraceError
from presage.features.prefixes import prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.replay.forecasts import COUNTS, source
from presage.replay.workload import PromptConvention, workload
from presage.training.length.train import fit_lengths
from presage.training.next_agent.train import evaluate_model, fit_predictor
from presage.training.profile.train import fit_profiles
from presage.training.return_time.train import fit_return_times
from presage.training.sets import SHARED_TASKS, held_out, set_apart, shared_tasks

MAPPING = NameMapping(((r"(\w+)-[0-9a-f]{4}", r"\1"),), ((r"(\w+) run \d+", r"\1"),))


def workflow(number: int, *, ids: bool = True) -> list[dict[str, Any]]:
    """A plan, one or two drafts and a check, with an id of the run in each name."""
    mark, kind = (f"-{number * 7919 % 65536:04x}", f"crew run {number}") if ids else ("", "crew")
    steps = []
    for step, agent in enumerate(["plan", *["draft"] * (1 + number % 2), "check"]):
        begun = 1e9 + number * 60 + step * 5
        tokens = {"input_tokens": 50 + 10 * step, "output_tokens": 5 + number % 3 + step}
        times = {"start_time": begun, "end_time": begun + 2 + number % 2}
        names = {"workflow_type": kind, "workflow_id": f"w{number}", "agent": f"{agent}{mark}"}
        steps.append({**names, "step": step, **tokens, **times, "finish_reason": "stop"})
    return steps


def written(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps(step) + "\n" for number in numbers for step in workflow(number)))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    ingest([written(folder / "raw.jsonl", range(60))], folder / "store", names=MAPPING)
    return folder / "store"


@pytest.fixture(scope="module")
def table(store: Path) -> pa.Table:
    return read_traces(store).table


def few(table: pa.Table) -> Any:
    return fit_lengths(table, QuantileConfig(estimator="forest", refit=False), texts="none").predictor


FITS: dict[str, tuple[Callable[[pa.Table], Any], Any]] = {
    "next-agent": (lambda table: fit_predictor(table, QUICK, states="none").predictor, NextAgentPredictor),
    "remaining-length": (few, RemainingLengthPredictor),
    "context-growth": (
        lambda table: fit_lengths(table, target="final-context", texts="none").predictor,
        ContextGrowthPredictor,
    ),
    "return-time": (
        lambda table: fit_return_times(table, ReturnTimeConfig(estimator="ridge")).predictor,
        ReturnTimePredictor,
    ),
    "profile": (lambda table: fit_profiles(table).predictor, ProfilePredictor),
}


@pytest.fixture(scope="module")
def agents(table: pa.Table) -> NextAgentPredictor:
    predictor: NextAgentPredictor = FITS["next-agent"][0](table)
    return predictor


@pytest.mark.parametrize("kind", FITS)
def test_every_kind_keeps_the_mapping_in_its_artefact_and_forecasts_raw_names_by_it(
    kind: str, table: pa.Table, agents: NextAgentPredictor, tmp_path: Path
) -> None:
    fit, loader = FITS[kind]
    (agents if kind == "next-agent" else fit(table)).save(tmp_path / "m")
    predictor = loader.load(tmp_path / "m")
    assert predictor.names == MAPPING
    for number in (3, 100, 101):
        for length in (1, 3):
            raw, folded = (workflow(number, ids=ids)[:length] for ids in (True, False))
            made = predictor.forecast(raw).to_dict()
            assert made == predictor.forecast(folded).to_dict()
            assert made["evidence"] > 0 or length == 3  # of the last step no return time is known
    artefact = read_artefact(tmp_path / "m")
    spoilt = json.loads(json.dumps(artefact.config).replace("(\\\\w+)-", "(\\\\w+-"))
    assert spoilt != artefact.config
    write_artefact(
        tmp_path / "spoilt",
        kind=kind,
        config=spoilt,
        tensors=artefact.tensors,
        training_data={},
        files=artefact.files,
    )
    with pytest.raises(ArtefactError, match="missing \\)"):
        loader.load(tmp_path / "spoilt")


def test_an_artefact_of_unfolded_traces_is_what_it_was_before_there_were_mappings(
    table: pa.Table, tmp_path: Path
) -> None:
    fit_profiles(table.replace_schema_metadata(None)).predictor.save(tmp_path / "m")
    assert read_artefact(tmp_path / "m").config.keys() == {"predictor", "seed"}
    assert ProfilePredictor.load(tmp_path / "m").names == NO_NAMES
    data = Vocabulary.from_table(table.replace_schema_metadata(None)).to_dict()
    assert data.keys() == {"workflow_types", "agents", "tools"}
    assert Vocabulary.from_dict(data).names == NO_NAMES


def test_a_served_workflow_with_raw_names_gets_the_very_forecasts_of_folded_names(
    table: pa.Table, agents: NextAgentPredictor
) -> None:
    forecaster = Forecaster(agents, lengths=few(table))
    assert [of.names for of in forecaster.loaded] == [MAPPING, MAPPING]
    for number in range(90, 94):
        said = []
        for ids in (True, False):
            made = []
            for step in workflow(number, ids=ids):
                names = step["workflow_type"], f"{step['workflow_id']}-{ids}"
                agent, index = step["agent"], step["step"]
                made += [
                    forecaster.on_prefill(*names, agent, step=index, input_tokens=step["input_tokens"]),
                    forecaster.on_completion(*names, step=index, agent=agent, output_tokens=step["output_tokens"]),
                ]
            said.append(made)
        for raw, folded in zip(*said, strict=True):
            assert (raw.source, raw.evidence, raw.reason) == (folded.source, folded.evidence, None)
            assert raw.remaining == folded.remaining
            np.testing.assert_array_equal(raw.probabilities, folded.probabilities)


def test_traces_with_raw_names_are_judged_as_folded_ones_and_known_tasks_left_out(
    table: pa.Table, agents: NextAgentPredictor, tmp_path: Path
) -> None:
    predictor = agents
    raw = read_traces(written(tmp_path / "later.jsonl", range(50, 80))).table
    data, left_out = held_out(raw, predictor)
    assert left_out == 10
    assert data["workflow_type"].unique().to_pylist() == ["crew"]
    figures = evaluate_model(predictor, data, 0).evaluation.to_dict()
    assert figures["by_workflow_type"].keys() == {"crew"}
    later = read_traces(written(tmp_path / "last.jsonl", range(60, 80))).table
    unfolded = prefixes_of(later, predictor.vocabulary, predictor.horizon)  # the vocabulary alone folds too
    folded = prefixes_of(data, predictor.vocabulary, predictor.horizon)
    assert sorted(unfolded.agent.tolist()) == sorted(folded.agent.tolist())
    parts = set_apart(table, raw, 0)
    assert shared_tasks(parts) == 10, SHARED_TASKS
    assert parts.test["agent"].unique().to_pylist() == ["plan", "draft", "check"]


def test_two_workflows_that_become_one_are_refused(table: pa.Table, tmp_path: Path) -> None:
    predictor = FITS["profile"][0](table)
    path = written(tmp_path / "t.jsonl", range(70, 72))
    path.write_text(path.read_text().replace('"w71"', '"w70"'))
    with pytest.raises(TraceError, match="names folded as those that the model was trained on"):
        held_out(read_traces(path).table, predictor)


def test_a_replay_of_raw_names_knows_the_agents_of_a_folded_model(agents: NextAgentPredictor, tmp_path: Path) -> None:
    agents.save(tmp_path / "m")
    jobs = workload(read_traces(written(tmp_path / "t.jsonl", range(70, 72))).table, PromptConvention()).jobs
    assert source(str(tmp_path / "m"))(jobs, lambda: 0.0) is not None
    assert source(COUNTS)(jobs, lambda: 0.0) is not None
