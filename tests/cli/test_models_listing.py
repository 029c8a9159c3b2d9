"""`presage models` where several kinds of predictors stand in one registry: each is told by its own figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_samples import run
from registry_database import new_database
from tiny_model import Tiny

from presage.cli.kinds import unseen
from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.input_profiles import as_served
from presage.predictors.quantiles.choice import QuantileConfig
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.training.length.train import train_lengths


@pytest.fixture(scope="module")
def registered(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, object]]]:
    """A registry of three models: two kinds that are known, one of a later version; and the metrics of the two."""
    folder = tmp_path_factory.mktemp("registry")
    uri = new_database(folder / "mlflow.db")
    registry = open_registry(uri)
    config = QuantileConfig(estimator="boosted", quantiles=(0.5, 0.9))
    lengths = train_lengths(generate_lengths(60, 0).table, None, config, baselines=(), name="lengths")
    lengths.save(folder / "lengths")
    example = [{"workflow_type": "x", "workflow_id": "w", "step": 0, "agent": "a"}]
    metrics = {"agents": tiny.training.metrics, "lengths": lengths.metrics, "later": lengths.metrics}
    for name, artefact in (("agents", tiny.folder), ("lengths", folder / "lengths"), ("later", folder / "lengths")):
        register(
            registry, artefact, name=name, metrics=metrics[name], params={}, tags={}, input_example=example
        )  # fmt: skip
    registry.client.set_model_version_tag("later", "1", "presage.kind", "oracle")
    return uri, metrics


def shown(text: str, name: str) -> tuple[str, str]:
    """The head of the table a model stands in, and its row."""
    lines = text.splitlines()
    row = next(place for place, line in enumerate(lines) if line.startswith(f"{name} "))
    return " ".join(lines[row - 1].split()), " ".join(lines[row].split())


@pytest.mark.slow
def test_each_kind_is_told_by_its_own_figures(
    registered: tuple[str, dict[str, dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    uri, metrics = registered
    ran = run("models", "--tracking-uri", uri)
    assert ran.code == 0, ran.err
    agents, lengths = as_served(metrics["agents"]), as_served(metrics["lengths"])
    head, row = shown(ran.out, "agents")
    assert head.startswith("name version aliases verdict prefill completion size")
    for moment in ("prefill", "completion"):
        assert " ".join(f"{one:.3f}" for one in agents["moments"][moment]["accuracy"]) in row
    head, row = shown(ran.out, "lengths")
    assert head.startswith("name version aliases verdict tau distance pinball size")
    assert " ".join(f"{lengths['tau_distance'][scope]:.3f}" for scope in ("all", "arrival")) in row
    assert f"0.5: {lengths['pinball']['0.5']:.1f}, 0.9: {lengths['pinball']['0.9']:.1f}" in row
    assert "next-agent: accuracy 1, 2, … steps ahead in an engine" in ran.out
    assert "remaining-length: tau distance in an engine, of all steps and at arrival (0 best, .5 none)" in ran.out
    head, row = shown(ran.out, "later")
    assert head == "name version aliases verdict size registered"
    assert row.startswith("later 1 – not judged")
    assert "oracle: a kind that this version of Presage does not support" in " ".join(ran.out.split())


@pytest.mark.slow
def test_the_figures_of_every_kind_are_in_json(registered: tuple[str, dict[str, dict[str, object]]]) -> None:
    uri, metrics = registered
    listed = {entry["name"]: entry for entry in run("models", "--tracking-uri", uri, "--json").json["models"]}
    assert [listed[name]["kind"] for name in ("agents", "lengths", "later")] == [
        "next-agent", "remaining-length", "oracle",
    ]  # fmt: skip
    figures, served = listed["lengths"]["figures"], as_served(metrics["lengths"])
    assert figures["pinball_0.9"] == served["pinball"]["0.9"] != metrics["lengths"]["pinball"]["0.9"]
    assert figures["all_inputs_pinball_0.9"] == metrics["lengths"]["pinball"]["0.9"]


@pytest.mark.slow
def test_an_alias_that_moves_while_a_version_is_judged_refuses_it_in_one_line(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    for _ in range(3):
        register(
            registry, tiny.folder, name="race", metrics={}, params={}, tags={},
            input_example=[{"workflow_type": "x", "workflow_id": "w", "step": 0, "agent": "a"}],
        )  # fmt: skip
    registry.client.set_registered_model_alias("race", "champion", "1")
    asked = ("promote", "race", "--version", 3, "--traces", tiny.held_out, "--tracking-uri", uri)
    assert "alias 'not one'" in run(*asked, "--to", "not one").complaint

    def meanwhile(*arguments: Any) -> Any:
        registry.client.set_registered_model_alias("race", "champion", "2")
        return unseen(*arguments)

    monkeypatch.setattr("presage.cli.models.unseen", meanwhile)
    ran = run(*asked)
    assert (ran.code, ran.out) == (3, "")
    assert "judged while version 1 was champion, and version 2 is champion now" in ran.err
    assert "Traceback" not in ran.err
    assert registry.aliases("race") == {"champion": 2}
    monkeypatch.setattr("presage.cli.models.unseen", unseen)
    assert run(*asked).code == 0
    registry.client.delete_model_version("race", "3")
    shown = " ".join(run("models", "--tracking-uri", uri).out.split())
    back = "`presage rollback race --alias champion` gives it to version 2"
    assert f"race: champion points to no version; {back}" in shown
    listed = run("models", "--tracking-uri", uri, "--json").json["vacant_aliases"]
    assert listed == [{"name": "race", "alias": "champion", "version": None, "former": 2}]
    assert "champion was no version, is version 2" in run("rollback", "race", "--tracking-uri", uri).out


def test_figures_that_a_version_lacks_are_dashes() -> None:
    from presage.kinds.loaded import kind_of

    assert kind_of("next-agent").headline({"prefill_accuracy_1": 0.5}) == {"prefill": "0.500", "completion": "–"}
    assert kind_of("next-agent").headline({f"prefill_accuracy_{k}": 0.1 * k for k in range(1, 5)})["prefill"] == (
        "0.100 0.200 0.300 0.400"
    )
    both = {"prefill_accuracy_1": 0.5, "all_inputs_prefill_accuracy_1": 0.8}
    assert kind_of("next-agent").headline(both)["prefill"] == "0.500 (all inputs: 0.800)"
    assert kind_of("remaining-length").headline({}) == {"tau distance": "– –", "pinball": "–"}
    only_upper = kind_of("remaining-length").headline({"pinball_0.99": 7.04, "tau_distance_all": 0.25})
    assert only_upper == {"tau distance": "0.250 –", "pinball": "0.99: 7.0"}


def test_listing_creates_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    listed = run("models", "--json")
    assert (listed.code, listed.json["models"], list(tmp_path.iterdir())) == (0, [], [])


@pytest.mark.parametrize("scheme", ["sqlite:///", "file://", ""])
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_registry_that_was_named_and_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, by: str
) -> None:
    place = tmp_path / "mlfow.db"
    if by == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}{place}")
    ran = run("models", *(("--tracking-uri", f"{scheme}{place}") if by == "option" else ()))
    assert f"{scheme}{place}: there is no {place}. Correct the URI" in " ".join(ran.complaint.split())
    assert not list(tmp_path.iterdir())
