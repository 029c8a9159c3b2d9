"""Profiles with prompt templates: from traces to the artefact and its figures, bounded, without a word of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prompt_samples import STEMS, leaks, prompted

from presage.datasets.schema import conform
from presage.errors import ArtefactError
from presage.features.sequences import sequences_of
from presage.predictors.common.artefact import write_artefact
from presage.predictors.profile import prompts
from presage.predictors.profile.composition import PromptStep
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import ProfileConfig
from presage.predictors.profile.prompts import recorded_prompts
from presage.training.profile.train import evaluate_profiles, fit_profiles


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return conform(pa.Table.from_pylist(rows), "sample")


@pytest.fixture(scope="module")
def predictor() -> ProfilePredictor:
    return fit_profiles(table_of(prompted(60))).predictor


def test_known_templates_survive_the_artefact_and_predict(predictor: ProfilePredictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "model")
    loaded = ProfilePredictor.load(tmp_path / "model")
    of = loaded.templates["loop"]
    assert of.to_json() == predictor.templates["loop"].to_json()
    assert "stem 29 + last answer of coder" in {str(template) for template in of.templates.values()}
    assert not any(leaks(path.read_text(errors="replace")) for path in (tmp_path / "model").iterdir())

    first = [PromptStep("coder", f"{STEMS[0]}sort", "def sort"), PromptStep("tester", f"{STEMS[1]}def sort", "fails")]
    assert of.predict(first, "coder").prefix == ""  # the stem is a digest until it is seen
    of.observe(first, PromptStep("coder", f"{STEMS[2]}fails", "def"))
    assert of.predict(first, "coder").prefix == f"{STEMS[2]}fails"


def test_figures_of_further_workflows(predictor: ProfilePredictor) -> None:
    made = evaluate_profiles(predictor, table_of(prompted(20, seed=1)), 0).evaluation
    of = made.to_dict()["by_workflow_type"]["loop"]["templates"]
    assert of["prompts"] == made.steps
    assert of["precision"] == 1.0
    assert 0.5 < of["recall"] <= 1.0
    assert 0.5 < of["recall_beyond_cache"] <= 1.0
    tester = next(one for one in of["of_agents"] if one["agent"] == "tester")
    assert tester["template"] == "stem 29 + last answer of coder"
    assert [(part["support"], part["precision"]) for part in tester["segments"]] == [(1.0, 1.0)] * 2
    assert not leaks(json.dumps(made.to_dict()))

    silent = [{**row, "input_text": None} for row in prompted(20, seed=1)]
    without = evaluate_profiles(predictor, table_of(silent), 0).evaluation.to_dict()
    assert without["by_workflow_type"]["loop"]["templates"]["prompts"] == 0


def test_types_without_prompts_and_templates_switched_off() -> None:
    rows = prompted(30) + [{**row, "input_text": None} for row in prompted(30, workflow_type="silent")]
    predictor = fit_profiles(table_of(rows)).predictor
    assert set(predictor.profiles) == {"loop", "silent"}
    assert set(predictor.templates) == {"loop"}
    assert not fit_profiles(table_of(rows), ProfileConfig(templates=False)).predictor.templates


def test_stems_are_kept_on_demand_alone() -> None:
    kept = fit_profiles(table_of(prompted(60)), ProfileConfig(keep_stems=True)).predictor.templates["loop"]
    assert STEMS[1] in {s.text for one in kept.templates.values() for s in one.segments}


def test_long_traces_are_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(prompted(60))
    whole = dict(recorded_prompts(table, sequences_of(table))["loop"])
    monkeypatch.setattr(prompts, "MOST_STEPS", len(table) // 3)
    part = dict(recorded_prompts(table, sequences_of(table))["loop"])
    assert 15 < len(part) <= 20
    assert [part[task] for task in part] == [whole[task] for task in part]
    assert {min(whole), max(whole)} <= set(part)
    monkeypatch.setattr(prompts, "MOST_BYTES", 1)
    assert len(dict(recorded_prompts(table, sequences_of(table))["loop"])) == 1


def test_agents_without_a_name_of_their_own_have_no_template() -> None:
    rows = prompted(60)
    predictor = ProfilePredictor(ProfileConfig(max_agents=1))
    table = table_of(rows)
    predictor.fit(sequences_of(table), prompts=recorded_prompts(table, sequences_of(table)))
    assert {context.agent for context in predictor.templates["loop"].templates} == {"coder"}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "templates.json: expected an object by workflow type"),
        ({"other": {}}, "templates.json: expected an object by workflow type"),
        ({"loop": {}}, "templates.json: no presage-prompt-templates of version 1"),
        ({"loop": None}, "templates.json: no presage-prompt-templates of version 1"),
        ("usable", "templates.json: damaged presage-prompt-templates: wrong usable"),
    ],
)
def test_broken_templates_are_refused(predictor: ProfilePredictor, tmp_path: Path, broken: Any, message: str) -> None:
    if broken == "usable":
        of = predictor.templates["loop"].to_json()
        broken = {"loop": {**of, "templates": [{**one, "usable": 99} for one in of["templates"]]}}
    profiles = {name: of.to_dict() for name, of in predictor.profiles.items()}
    write_artefact(
        tmp_path / "model",
        kind="profile",
        config={"predictor": {}, "seed": 0},
        tensors={"tasks": np.zeros(0, np.uint64)},
        training_data={},
        files={"profiles.json": json.dumps(profiles).encode(), "templates.json": json.dumps(broken).encode()},
    )
    with pytest.raises(ArtefactError, match=message):
        ProfilePredictor.load(tmp_path / "model")
