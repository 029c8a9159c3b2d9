"""`presage study`, `--report` and `--html` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import FAST, GOOD, run, train, write
from registry_database import new_database
from tiny_model import Tiny

from presage.registry.connect import open_registry

QUICK = ("--set", "network.epochs=1", "--set", "boosting.rounds=1", "--json")
FILES = ["metrics.json", "report.html", "report.md"]


def test_the_learning_curve_prints_and_keeps_one_object(tmp_path: Path, tiny: Tiny) -> None:
    options = ("--sizes", "20,40", "--draws", 1, "--baselines", "markov-3", "--report", tmp_path / "out")
    ran = run("study", "learning-curve", tiny.store, *options, *QUICK)
    assert ran.code == 0, ran.err
    assert (ran.json["kind"], ran.json["study"], ran.json["workflows"]) == ("study", "learning-curve", 16)
    assert [point["workflows"] for point in ran.json["learning_curve"]["points"]] == [20, 40]
    assert list(ran.json["learning_curve"]["models"]) == ["presage", "markov-3"]
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    pictures = ["call-graph.svg", "learning-curve.svg"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, *pictures])
    text = run("study", "learning-curve", tiny.store, *options[:-2], *QUICK[:-1]).out
    assert "Would more traces help?" in text
    quick = run("study", "learning-curve", tiny.store, "--quick", "--baselines", "none", *QUICK)
    assert quick.json["learning_curve"]["points"] == [{"tasks": n, "workflows": float(n), "draws": 1} for n in (25, 64)]
    points = ran.json["learning_curve"]["models"]["presage"]["completion"]["accuracy"]
    assert all(f"{point[0]:.3f}" in text for point in points), "the same seed says the same"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "ten"), "--sizes ten: wanted whole numbers"),
        (("--sizes", "20,99999"), "there are 64 workflows to train on"),
        (("--baselines", "oracle", "--sizes", "20"), "no baseline 'oracle'"),
        (("--set", "network.layers=3"), "no key 'network.layers'"),
    ],
)
def test_what_cannot_be_studied_is_refused_and_nothing_is_written(
    tmp_path: Path, tiny: Tiny, arguments: tuple[str, ...], message: str
) -> None:
    ran = run("study", "learning-curve", tiny.store, *arguments, "--report", tmp_path / "out")
    assert message in ran.complaint
    assert not (tmp_path / "out").exists()


def test_no_other_source_of_states_can_be_studied(tiny: Tiny) -> None:
    assert "'dreams' is not one of" in run("study", "learning-curve", tiny.store, "--states", "dreams").usage_error


def test_a_report_folder_that_is_a_file_is_refused_before_any_training(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "out").write_text("")
    for ran in (
        run("study", "learning-curve", tiny.store, "--report", tmp_path / "out"),
        train(tiny.store, "--report", tmp_path / "out", "--no-register", *FAST),
    ):
        assert "--report" in ran.complaint
        assert "is a file; a folder is wanted" in ran.complaint
        assert "learning" not in ran.err


def test_the_results_of_an_earlier_run_are_replaced_with_force_only(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    for ran in (
        run("study", "learning-curve", tiny.store, "--report", tmp_path),
        train(tiny.store, "--report", tmp_path, "--no-register", *FAST),
    ):
        assert "holds metrics.json of an earlier run: give --force" in ran.complaint
    assert (tmp_path / "metrics.json").read_text() == "{}"


@pytest.mark.slow
def test_the_full_report_adds_the_curve_and_the_ablation(tmp_path: Path, tiny: Tiny) -> None:
    database = new_database(tmp_path / "mlflow.db")
    options = ("--set", "network.epochs=1", "--set", "boosting.rounds=1", "--baselines", "markov-3", "--json")
    ran = train(tiny.store, "--report", tmp_path / "out", "--tracking-uri", database, *options)
    assert ran.code == 0, ran.err
    pictures = ["call-graph.svg", "learning-curve.svg", "reliability.svg"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, *pictures])
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    curve = kept["learning_curve"]
    assert [point["workflows"] for point in curve["points"]] == [25, 64]
    for moment, figures in kept["moments"].items():
        assert curve["models"]["presage"][moment]["accuracy"][-1] == figures["accuracy"]
        rival = kept["baselines"]["markov-3"][moment]["accuracy"]
        assert curve["models"]["markov-3"][moment]["accuracy"][-1] == rival
        for part in ("GraphSAGE", "trees", "n-gram", "states"):
            without = kept["ablation"][part]["moments"][moment]["accuracy"]
            gain = kept["ablation"][part]["differences"][moment]["difference"]
            assert gain == pytest.approx([a - b for a, b in zip(figures["accuracy"], without, strict=True)])
        assert kept["ablation"]["states"]["moments"][moment]["states"] is False
    registry = open_registry(database)
    run_id = registry.version("next-agent", 1).run_id
    logged = {item.path for item in registry.client.list_artifacts(run_id)}
    assert logged == {*FILES, *pictures}


def test_describe_writes_a_page_and_says_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    page = tmp_path / "pages" / "traces.html"
    plain = run("traces", "describe", path, "--json")
    assert run("traces", "describe", path, "--html", page, "--json").json == plain.json
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Call graph" in text
    assert [entry.name for entry in page.parent.iterdir()] == ["traces.html"]
    assert "cannot be written" in run("traces", "describe", path, "--html", tmp_path).complaint


def test_a_study_of_change_judges_one_model_before_and_after_each_change(tmp_path: Path, tiny: Tiny) -> None:
    options = ("--baselines", "markov-3", "--report", tmp_path / "out")
    ran = run("study", "change", tiny.store, *options, *QUICK)
    assert ran.code == 0, ran.err
    assert (ran.json["kind"], ran.json["study"], ran.json["workflows"]) == ("study", "change", 16)
    changes = ran.json["changes"]
    assert list(changes) == ["unchanged", "agents renamed", "an agent split in two", "workflow types renamed"]
    assert changes["unchanged"]["known_steps"] == changes["workflow types renamed"]["known_steps"] == 1.0
    assert changes["agents renamed"]["known_steps"] < 1.0 > changes["an agent split in two"]["known_steps"]
    for of in changes.values():
        assert of["workflows"] == 16
        for model in ("presage", "markov-3"):
            before, after = (one["models"][model]["completion"]["accuracy"] for one in (changes["unchanged"], of))
            gained = of["differences"][model]["completion"]["difference"]
            assert gained == pytest.approx([b - a for a, b in zip(before, after, strict=True)])
    markov = changes["workflow types renamed"]["differences"]["markov-3"]["prefill"]["difference"]
    assert markov == [0.0, 0.0, 0.0], "it reads no type where there is one"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, "call-graph.svg"])
    lengths = ran.json["quantiles"]["remaining-length"]
    assert list(lengths) == list(changes)
    for name, of in lengths.items():
        assert of["models"]["constant"] == lengths["unchanged"]["models"]["constant"], "it reads no names"
        now, before = (one["models"]["presage"]["pinball"]["0.9"] for one in (of, lengths["unchanged"]))
        assert of["difference"]["pinball"]["0.9"]["difference"] == pytest.approx(now - before)
        assert (now == before) == (name == "unchanged")
    text = run("study", "change", tiny.store, *options[:-2], *QUICK[:-1]).out
    assert "What is left after a change?" in text
    assert "Remaining lengths and return times after a change" in text
    assert f"{changes['agents renamed']['models']['presage']['completion']['accuracy'][0]:.3f}" in text


def test_renamed_agents_are_judged_once_more_as_recognised_where_the_traces_have_system_prompts(tmp_path: Path) -> None:
    rows = [
        {
            "workflow_type": "t",
            "workflow_id": f"w{number}",
            "step": step,
            "agent": agent,
            "system_prompt": f"You {agent}.",
        }
        for number in range(60)
        for step, agent in enumerate(["plan", "code", *["review"] * (number % 3 == 0), "test"])
    ]
    traces = write(tmp_path / "prompts.jsonl", rows)
    found = run("study", "change", traces, "--baselines", "markov-3", *QUICK).json
    changes = found["changes"]
    assert found["quantiles"] == {"remaining-length": None, "return-time": None}, "there are neither counts nor times"
    by_prompt = ", recognised by their system prompts"
    renamed, split, reworded = (
        "agents renamed",
        "an agent split in two",
        "agents renamed, their system prompts reworded",
    )
    assert [name for name in changes if not name.startswith(reworded)] == [
        "unchanged", renamed, renamed + by_prompt, split, split + by_prompt, "workflow types renamed"
    ]  # fmt: skip
    assert changes[reworded]["known_steps"] < 1.0
    for change in (renamed, split):
        assert changes[change]["known_steps"] < 1.0
        assert changes[change + by_prompt]["known_steps"] == 1.0
        assert changes[change + by_prompt]["models"] == changes["unchanged"]["models"]


def test_reworded_prompts_and_merged_types_are_judged_where_the_traces_can_tell(tmp_path: Path) -> None:
    duties = {
        "plan": "You plan. Split every wish into small tasks and order them by what depends on what. Be brief.",
        "code": "You write code. Change one file at a time and never touch the build scripts. Be brief.",
        "test": "You test. Run the suite twice, report each failure with its trace, guess no causes. Be brief.",
        "ask": "You greet visitors, find out what they are looking for, then hand over. Be brief.",
        "answer": "You search our catalogue for articles that match, quoting price plus delivery dates. Be brief.",
    }
    calls = {"app": ["plan", "code", "test", "code", "test"], "site": ["ask", "answer"]}
    rows = [
        {
            "workflow_type": kind,
            "workflow_id": f"{number}",
            "step": step,
            "agent": agent,
            "system_prompt": duties[agent],
        }
        for number in range(60)
        for kind, agents in calls.items()
        for step, agent in enumerate(agents)
    ]
    changes = run(
        "study", "change", write(tmp_path / "two.jsonl", rows), "--baselines", "none", "--seed", "1", *QUICK
    ).json["changes"]
    reworded = changes["agents renamed, their system prompts reworded"]
    again = changes["agents renamed, their system prompts reworded, recognised by their system prompts"]
    assert reworded["known_steps"] < again["known_steps"]
    merged = changes["two workflow types merged"]
    assert merged["what"] == "app, site"
    assert merged["workflows"] == changes["unchanged"]["workflows"]
    assert merged["known_steps"] == 1.0


def test_an_agent_that_was_never_seen_is_judged_where_it_comes(tmp_path: Path) -> None:
    def drawn(every: int) -> Path:
        rows = [
            {"workflow_type": "t", "workflow_id": f"w{number}", "step": step, "agent": agent}
            for number in range(60)
            for step, agent in enumerate(["plan", "code", *["review"] * (number % every == every - 1), "test"])
        ]
        return write(tmp_path / f"{every}.jsonl", rows)

    store = drawn(3)
    found = run("study", "change", store, "--baselines", "none", *QUICK).json["never_seen"]
    assert list(found) == ["known", "never seen"]
    assert found["never seen"]["what"] == "review"
    known, unseen = (of["models"]["presage"]["prefill"]["accuracy"][0] for of in found.values())
    assert unseen < known
    assert found["never seen"]["known_steps"] == pytest.approx(0.75)
    regular = run("study", "change", drawn(99), "--baselines", "none", *QUICK)
    assert regular.json["never_seen"] is None


def test_of_many_renamed_agents_some_are_named(tmp_path: Path) -> None:
    rows = [
        {"workflow_type": "t", "workflow_id": f"w{number}", "step": step, "agent": f"agent-{(number + step) % 50:02}"}
        for number in range(100)
        for step in range(3)
    ]
    found = run("study", "change", write(tmp_path / "many.jsonl", rows), "--baselines", "none", *QUICK)
    what = found.json["changes"]["agents renamed"]["what"]
    assert what.count("agent-") == 10
    assert " more" in what
