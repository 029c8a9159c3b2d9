"""A champion of two workflow types and new traces with one of them: nothing is lost silently, and there is a way on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Ran, run, write
from profile_samples import coding, rows_of
from registry_database import new_database

import presage
from presage.cli.train_predictor import app as train_predictor
from presage.registry.connect import attached, open_registry


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "profile", *arguments)


def rows(count: int, seed: int, workflow_type: str) -> list[dict[str, Any]]:
    made = rows_of(coding(count, seed=seed), workflow_type=workflow_type)
    return [row | {"workflow_id": f"{seed}-{row['workflow_id']}"} for row in made]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A registry whose champion knows chat and code, and whose version 2 learnt code alone; held-out traces of both."""
    root = tmp_path_factory.mktemp("types")
    uri = new_database(root / "mlflow.db")
    held = write(root / "held.jsonl", rows(60, 1, "code") + rows(60, 1, "chat"))
    both = write(root / "both.jsonl", rows(300, 0, "code") + rows(300, 0, "chat"))
    code = write(root / "code.jsonl", rows(300, 2, "code"))
    for at, learnt in enumerate((both, code), start=1):
        assert train(learnt, "--tracking-uri", uri).code == 0
        if at == 1:
            first = run("promote", "profile", "--version", 1, "--traces", held, "--tracking-uri", uri, "--json")
            assert first.code == 0, first.out
            assert not any(gate["warning"] for gate in first.json["gates"])
    return uri, held


def promote(later: tuple[str, Path], *options: object) -> Ran:
    return run("promote", "profile", "--version", 2, "--traces", later[1], "--tracking-uri", later[0], *options)


def test_a_type_that_would_be_lost_refuses_with_a_way_on(later: tuple[str, Path]) -> None:
    ran = promote(later, "--json")
    assert (ran.code, ran.json["types"]) == (3, None)
    (gate,) = (gate for gate in ran.json["gates"] if gate["name"] == "workflow-types")
    assert not gate["passed"]
    assert "does not know 1 workflow type (chat) that the champion knows" in gate["reason"]
    assert "with --types code it is judged on these alone" in gate["reason"]


def test_it_goes_on_with_the_types_that_are_named_and_the_verdict_keeps_the_warning(later: tuple[str, Path]) -> None:
    shown = promote(later, "--types", "code", "--dry-run")
    assert shown.code == 0, shown.out
    assert "WARNING" in shown.out
    assert "gives up 1 workflow type (chat) that the champion knows" in " ".join(shown.out.split())
    ran = promote(later, "--types", "code", "--json")
    assert (ran.code, ran.json["moved"], ran.json["types"]) == (0, True, ["code"])
    evidence = next(gate for gate in ran.json["gates"] if gate["name"] == "evidence")
    assert evidence["value"] == 60, "the workflows of this type alone"
    registry = open_registry(later[0])
    kept = json.loads(attached(registry, "profile", 2, "verdict", "verdict.json") or b"")
    assert [gate["name"] for gate in kept["gates"] if gate["warning"]] == ["workflow-types"]
    page = (attached(registry, "profile", 2, "verdict", "verdict.html") or b"").decode()
    assert "<td>warning</td><td>judged on code alone" in page


def test_names_that_cannot_be_judged_are_errors(later: tuple[str, Path]) -> None:
    said = promote(later, "--types", "code,chta").complaint
    assert "--types: there is no held-out workflow of chta, so nothing can be judged; there are chat, code" in said
    assert "an empty list of types" in promote(later, "--types", " ").complaint


def test_from_python(later: tuple[str, Path]) -> None:
    verdict = presage.promote("profile", 2, later[1], types=["code"], dry_run=True, tracking_uri=later[0])
    assert verdict.promoted
