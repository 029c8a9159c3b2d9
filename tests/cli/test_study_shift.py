"""`presage study shift`: the router on families that training never saw, told as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import run

from presage.datasets.outcomes.files import write_outcomes
from presage.datasets.synthetic.outcomes import TOPICS, generate_outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outcomes") / "law.jsonl"
    write_outcomes(generate_outcomes(400, 0).outcomes, path)
    return path


@pytest.mark.slow
def test_every_family_is_judged_by_routers_that_never_saw_it(outcomes: Path) -> None:
    told = run("study", "shift", outcomes, "--json").json
    assert (told["kind"], told["study"]) == ("study", "shift")
    assert set(told["families"]) == set(TOPICS)
    assert sum(of["prompts"] for of in told["families"].values()) == told["pooled"]["prompts"] == 400
    for of in (*told["families"].values(), told["pooled"]):
        for way in ("left_out", "known"):
            assert set(of[way]["routers"]) == {"presage", "tfidf-logistic", "base-rate"}
            for figures in of[way]["routers"].values():
                assert figures["macro_map_ci95"][0] <= figures["macro_map"] <= figures["macro_map_ci95"][1]
                assert 0 <= figures["ece"] <= 1
            assert set(of[way]["differences"]["tfidf-logistic"]) == {"macro_map", "brier", "picked_accuracy"}
    pooled = told["pooled"]
    assert pooled["left_out"]["flagged"] > 0.5
    assert pooled["known"]["flagged"] <= 0.1


@pytest.mark.slow
def test_the_table_has_a_row_a_family_and_both_ways_side_by_side(outcomes: Path) -> None:
    ran = run("study", "shift", outcomes, "--most", 2, "--set", "rank=2")
    assert ran.code == 0
    rows = [line.split()[0] for line in ran.out.splitlines() if line.strip()]
    assert len(set(rows) & set(TOPICS)) == 2
    for said in ("all of them", "with all families known", "router / tfidf-logistic / base-rate", "flagged"):
        assert said in ran.out
    assert "without" in ran.err


@pytest.mark.parametrize(
    ("tasks", "options", "complaint"),
    [
        (None, (), "0 families"),
        ("one", (), "1 families"),
        ("one", ("--family", "("), "no regular expression"),
        ("one", ("--family", "absent"), "0 families"),
        ("one", ("--set", "rank=0"), "rank"),
    ],
)
def test_without_two_families_it_is_refused_in_one_line(
    outcomes: Path, tmp_path: Path, tasks: str | None, options: tuple[str, ...], complaint: str
) -> None:
    rows = [json.loads(line) | {"task": tasks} for line in outcomes.read_text().splitlines()]
    path = tmp_path / "outcomes.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    ran = run("study", "shift", path, *options)
    assert ran.code == 2
    assert complaint in ran.complaint
    assert "Traceback" not in ran.err
