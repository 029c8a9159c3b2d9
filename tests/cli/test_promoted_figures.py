"""What a promotion keeps, an engine that loads the version holds its live forecasts against."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from by_name import VersionedForecaster
from cli_samples import Ran, run, train
from registry_database import new_database
from tiny_model import Tiny

from presage.cli.train_predictor import app as train_predictor
from presage.datasets.ingest import append
from presage.datasets.store import read_store
from presage.datasets.synthetic.workflows import generate
from presage.kinds.loaded import load
from presage.kinds.reference_figures import promotion_figures
from presage.progress import note
from presage.registry.connect import attach, attached, open_registry
from presage.serving_hooks.forecasting.champions import load_forecasts
from presage.serving_hooks.monitoring.drift import Drift
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.workflows.identity import Step

pytestmark = pytest.mark.slow

HELD_OUT, SINCE = 80, 150
PARTS = {"tester": "reviewer", "reviewer": "tester"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the registry and of the traces that both versions are promoted on."""
    return tmp_path_factory.mktemp("promoted")


@pytest.fixture(scope="module")
def uri(tiny: Tiny, folder: Path) -> str:
    """A registry with a version of each kind."""
    uri = new_database(folder / "mlflow.db")
    append(generate("retry", HELD_OUT, 31, state_size=16).table, folder / "held-out")
    good = ("--set", "network.epochs=6", "--set", "boosting.rounds=20", "--baselines", "markov-1")
    assert train(tiny.store, "--name", "next-agent", "--tracking-uri", uri, *good).code == 0
    forest = ("--set", "estimator=forest", "--baselines", "constant", "--name", "remaining-length")
    made = Ran(train_predictor, "remaining-length", tiny.store, *forest, "--tracking-uri", uri)
    assert made.code == 0, made.err
    return uri


def promote(name: str, uri: str, traces: Path, *more: object) -> Ran:
    return run("promote", name, "--version", 1, "--traces", traces, "--tracking-uri", uri, *more)


def kept(uri: str, name: str) -> bytes | None:
    """The file of version 1."""
    return attached(open_registry(uri), name, 1, "truth", "promoted.json")


@pytest.fixture(scope="module")
def promoted(uri: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What the two promotions said."""
    done = {}
    for name in ("next-agent", "remaining-length"):
        tried = promote(name, uri, folder / "held-out", "--dry-run")
        assert tried.code == 0, (tried.out, tried.err)
        assert kept(uri, name) is None, "a dry run keeps nothing"
        ran = promote(name, uri, folder / "held-out", "--json")
        assert ran.code == 0, (ran.out, ran.err)
        done[name] = ran.json
    return done


def engine(uri: str) -> VersionedForecaster:
    """What the hooks of an engine ask."""
    return VersionedForecaster(load_forecasts(PresageConfig(registry=uri)).next_agents)


def drift_of(asked: VersionedForecaster) -> Drift:
    truth = asked.latest.monitor
    assert truth is not None
    assert not truth.errors
    return truth.drift


def serve(asked: VersionedForecaster, table: pa.Table, parts: dict[str, str]) -> None:
    """Tells the steps of a trace as an engine does that reads no states and no texts."""
    columns = [table[name].to_pylist() for name in ("workflow_id", "step", "agent", "input_tokens", "output_tokens")]
    rows = list(zip(*columns, strict=True))
    for at, (workflow, number, agent, new, produced) in enumerate(rows):
        played = parts.get(agent, agent)
        asked.remaining_tokens(Step("retry", workflow, played, number, False), new)
        asked.on_prefill("retry", workflow, played, step=number, input_tokens=new)
        asked.on_completion("retry", workflow, output_tokens=produced)
        if at + 1 == len(rows) or rows[at + 1][0] != workflow:
            asked.close("retry", workflow)


def test_a_promotion_says_what_it_keeps_and_both_kinds_are_held_against_it(
    uri: str, promoted: dict[str, dict[str, Any]]
) -> None:
    assert [of["held_against"] for of in promoted.values()] == [{"retry": HELD_OUT // 2}] * 2
    held = drift_of(engine(uri)).watch("retry").promoted
    assert held is not None
    assert {"accuracy at prefill", "coverage at 0.9", "agents never seen", "transition start → 'planner'"} <= {
        *held.figures
    }
    of_lengths = json.loads(kept(uri, "remaining-length") or b"")["workflow_types"]["retry"]["figures"]
    assert not any(name.startswith("accuracy") for name in of_lengths)


def test_agents_that_swap_their_parts_raise_the_alarm_and_the_same_law_does_not(
    uri: str, promoted: dict[str, dict[str, Any]]
) -> None:
    since = generate("retry", SINCE, 32, state_size=16).table
    same, swapped = engine(uri), engine(uri)
    serve(same, since, {})
    assert drift_of(same).watch("retry").workflows == SINCE
    assert drift_of(same).alarms == {}
    serve(swapped, since, PARTS)
    assert swapped.latest.counts["next-agent", "champion", None] > 0
    assert set(drift_of(swapped).alarms) == {"retry"}


def test_a_refusal_keeps_nothing(uri: str, folder: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    append(generate("retry", 5, 41, state_size=16).table, few)
    poor = ("--set", "network.epochs=1", "--set", "boosting.rounds=0", "--baselines", "none")
    assert train(few, "--name", "poor", "--tracking-uri", uri, *poor).code == 0
    assert promote("poor", uri, folder / "held-out").code == 3
    assert kept(uri, "poor") is None


def test_too_few_workflows_of_a_type_are_left_out_and_that_is_said(
    uri: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = read_store(folder / "held-out")
    at = table.schema.get_field_index("workflow_type")
    rare = set(table["workflow_id"].unique().to_pylist()[:19])
    names = ["rare" if workflow in rare else "retry" for workflow in table["workflow_id"].to_pylist()]
    two = table.set_column(at, table.schema.field(at), pa.array(names)).sort_by("workflow_type")
    loaded = load("models:/next-agent/1", lambda: open_registry(uri))
    found = promotion_figures(loaded, two, note, "engine") or {}
    assert {name: of.workflows for name, of in found.items()} == {"retry": 31}
    assert "fewer than 20 ended workflows of 'rare'" in capsys.readouterr().err


def test_where_the_figures_cannot_be_kept_the_alias_stays(
    uri: str, promoted: dict[str, dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlflow.MlflowClient.log_artifact", full)
    ran = promote("next-agent", uri, folder / "held-out", "--to", "other")
    assert "No space left on device" in ran.complaint
    assert "other" not in open_registry(uri).aliases("next-agent")


def test_a_broken_file_is_none_and_the_engine_serves(
    uri: str, promoted: dict[str, dict[str, Any]], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = open_registry(uri)
    whole = kept(uri, "next-agent")
    assert whole is not None
    (tmp_path / "promoted.json").write_bytes(whole[: len(whole) // 2])
    attach(registry, "next-agent", 1, [tmp_path / "promoted.json"], "truth")
    with caplog.at_level(logging.WARNING):
        asked = engine(uri)
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("next-agent version 1: its promoted figures cannot be read") for text in said), said
    assert asked.on_prefill("retry", "w", "planner", step=0, input_tokens=9).source == "champion"
    held = drift_of(asked).watch("retry").promoted
    assert held is not None, "that of lengths is whole"
    assert "accuracy at prefill" not in held.figures
    assert promote("next-agent", uri, folder / "held-out").code == 0
    assert kept(uri, "next-agent") == whole, "promoted again, it is whole again"
