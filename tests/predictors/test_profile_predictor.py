"""Profiles: what they claim, what they admit, bad input, drift, and the artefact."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import coding, profile, rows_of, table_of

from presage.errors import ArtefactError, InputError, TraceError
from presage.features.sequences import sequences_of
from presage.predictors.profile.agents import AgentUsage, Percentiles
from presage.predictors.profile.drift import drift
from presage.predictors.profile.predictor import ProfilePredictor


def fitted(workflows: list[list[str]], **more: Any) -> ProfilePredictor:
    return ProfilePredictor().fit(sequences_of(table_of(workflows, **more)))


def test_ten_workflows_say_how_little_they_know() -> None:
    made = profile(table_of(coding(10)))
    assert not made.confident
    assert "10 whole workflows, at least 30 are wanted" in made.doubts[0]
    assert profile(table_of(coding(300))).confident


def test_one_workflow() -> None:
    made = profile(table_of([["a", "b", "b"]]))
    assert (made.text, made.workflows, made.confident) == ("a b{2}", 1, False)


def test_a_loop_without_end_is_bounded_by_the_others() -> None:
    made = profile(table_of([["a", *["b"] * (1 + at % 4), "c"] for at in range(200)] + [["a", *["b"] * 5000, "c"]]))
    assert made.text == "a b{1,4} c"
    assert made.covered == pytest.approx(200 / 201)


def test_ten_thousand_names_are_one_symbol() -> None:
    rng = random.Random(0)
    words = [["start", *(f"agent{rng.randrange(10_000)}" for _ in range(30)), "end"] for _ in range(300)]
    made = profile(table_of(words))
    assert made.known is not None
    assert len(made.known) <= 200
    assert any("agent names; counted together as <other>" in one for one in made.warnings)
    assert any("94% of the steps are of agents counted as <other>" in one for one in made.doubts)
    assert made.text == "start <other>{30} end"


def test_agents_renamed_halfway_are_named() -> None:
    workflows = coding(60) + coding(60, seed=1, explorer="scout")
    made = rows_of(workflows)
    for row in made:
        row |= {"start_time": float(int(row["workflow_id"][1:]) * 1000 + row["step"]), "end_time": None}
    import pandas as pd

    from presage.datasets.read import read_traces

    found = profile(read_traces(pd.DataFrame(made)).table)
    told = next(one for one in found.warnings if "later half" in one)
    assert "explorer no longer runs and scout runs as often: it may have been renamed." in told


def test_one_application_twice_has_not_changed() -> None:
    halves = (AgentUsage.of(coding(200, seed=seed)) for seed in (0, 1))
    found = drift(*halves)
    assert not found.changed
    assert found.sentences() == []
    assert found.distance < 0.05


def test_what_changed_is_said_with_an_interval() -> None:
    before, after = (AgentUsage.of(coding(400, seed=seed, reviewer=share)) for seed, share in ((0, 0.4), (1, 0.8)))
    found = drift(before, after)
    assert found.changed
    told = found.sentences()[0]
    assert told.startswith("reviewer now runs twice [")
    assert "as often: 0.4" in told
    change = found.agents[0]
    assert change.ratio is not None
    assert change.ratio[1] < 2.0 < change.ratio[2]
    assert json.loads(json.dumps(found.to_dict()))["changed"]


@given(st.integers(2, 40), st.integers(2, 40))
def test_a_change_to_itself_is_none(first: int, second: int) -> None:
    usage = AgentUsage.of([["a", "b"]] * first)
    assert not drift(usage, AgentUsage.of([["a", "b"]] * second)).changed


def test_percentiles_have_the_interval_of_their_workflows() -> None:
    values = np.arange(1.0, 1001.0)
    many, few = Percentiles.of(values, 1000), Percentiles.of(values, 10)
    assert many.values == few.values == pytest.approx((500.5, 900.1, 990.01))
    assert many.intervals[0] == pytest.approx((469.6, 531.4), abs=1)
    assert few.intervals[0][0] < 300 < 700 < few.intervals[0][1]


def test_numbers_of_agents_and_what_is_not_recorded() -> None:
    made = profile(table_of([["a", "b"]] * 20, output_tokens=7))
    assert made.numbers["a"]["output_tokens"].values == (7.0, 7.0, 7.0)
    assert made.numbers["a"].keys() == {"output_tokens"}
    assert "not recorded, so without percentiles: return_s, input_tokens" in made.warnings


def test_a_forecast_of_a_running_workflow() -> None:
    predictor = fitted(coding(300))
    steps = [{"workflow_type": "app", "agent": agent} for agent in ("planner", "explorer", "explorer", "explorer")]
    found = predictor.forecast(steps)
    assert (found.source, found.on_graph, found.distance) == ("champion", True, 2)
    assert sum(found.agents.values()) + found.end == pytest.approx(1.0)
    assert set(found.agents) == {"explorer", "coder"}
    assert found.prediction == "explorer"
    assert found.left["0.9"] >= found.left["0.5"] >= 2
    assert json.loads(json.dumps(found.to_dict()))["expression"].startswith("planner explorer{3,12}")
    off = predictor.forecast([*steps, {"workflow_type": "app", "agent": "planner"}])
    assert (off.source, off.on_graph) == ("back-off", False)
    unknown = predictor.forecast([{"workflow_type": "other", "agent": "planner"}])
    assert (unknown.source, unknown.evidence, unknown.prediction) == ("none", 0, "")
    assert predictor.forecast([{"workflow_type": "app", "agent": "nobody"}]).source == "none"
    assert fitted(coding(10)).forecast(steps).source == "back-off"
    with pytest.raises(InputError, match="no steps"):
        predictor.forecast([])


def test_no_workflow_is_refused() -> None:
    with pytest.raises(TraceError, match="at least one"):
        ProfilePredictor().fit({})


def test_an_artefact_gives_the_same_profiles(tmp_path: Path) -> None:
    wide = [(), (0,), (0,), (1, 2)]
    predictor = ProfilePredictor().fit(
        sequences_of(table_of(["pabw", "pbbw"] * 20, parents=wide, output_tokens=3)),
        trained_on=np.array([3, 1, 3], np.uint64),
    )
    predictor.save(tmp_path / "model", {"digest": "sha256:0"})
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "profiles.json",
    }
    loaded = ProfilePredictor.load(tmp_path / "model")
    assert loaded.profiles == predictor.profiles
    assert loaded.trained_on.tolist() == [1, 3]
    loaded.save(tmp_path / "again", {"digest": "sha256:0"})
    for name in ("config.json", "profiles.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_a_damaged_artefact_is_refused(tmp_path: Path) -> None:
    from presage.predictors.common.artefact import write_artefact

    fitted(coding(20)).save(tmp_path / "model")
    path = tmp_path / "model" / "profiles.json"
    path.write_bytes(path.read_bytes().replace(b"planner", b"plumber"))
    with pytest.raises(ArtefactError, match="digest"):
        ProfilePredictor.load(tmp_path / "model")
    write_artefact(
        tmp_path / "empty",
        kind="profile",
        config={"predictor": {}, "seed": 0},
        tensors={"tasks": np.zeros(0, np.uint64)},
        training_data={},
        files={"profiles.json": b'{"app": {}}'},
    )
    with pytest.raises(ArtefactError, match="not a complete profile artefact"):
        ProfilePredictor.load(tmp_path / "empty")
