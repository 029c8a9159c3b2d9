"""`presage batch`, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_samples import Ran, run
from prompt_samples import prompted

from presage.cli.demo_gateway import running
from presage.cli.train_predictor import app as train_predictor
from presage.testing.servers import free_port

PLAN = """
from presage.batch import Plan, call, given, join, template
from prompts import SYSTEM

drafts = [call(role, template("{q}", q=given("question")), system=SYSTEM + role, max_tokens=8) for role in ("a", "b")]
plan = Plan("review", answer=call("writer", join(drafts), max_tokens=4), first=drafts[0], count=given("n"))
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "prompts.py").write_text('SYSTEM = "You are a careful reviewer named "\n')
    path = tmp_path / "plan.py"
    path.write_text(PLAN)
    return path


def rows(path: Path, count: int) -> Path:
    lines = [
        json.dumps({"id": f"row {n}", "question": f"why\u2028{n}?", "n": n}, ensure_ascii=False) for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")
    return path


def test_a_plan_runs_on_a_gateway_and_the_same_command_finds_all_done(tmp_path: Path, plan: Path) -> None:
    inputs, to = rows(tmp_path / "rows.jsonl", 6), tmp_path / "to"
    with running(tmp_path, dict(os.environ)) as url:
        command = (
            "batch",
            "run",
            plan,
            inputs,
            "--engine",
            url,
            "--to",
            to,
            "--cache",
            tmp_path / "cache.db",
            "--json",
        )
        first = run(*command)
        assert first.code == 0, first.err
        again = run(*command)
        other = run(*(*command[:7], tmp_path / "other", *command[8:]))
        wrong = tmp_path / "wrong.py"
        wrong.write_text("from presage.batch import *\nplan = Plan('p', out=function(lambda n: 1 // n, given('n')))\n")
        failed = run("batch", "run", wrong, inputs, "--engine", url, "--to", tmp_path / "failed")
    assert (first.json["rows"], first.json["asked"], first.json["failed"]) == (6, 18, 0)
    assert (again.json["kept"], again.json["asked"]) == (6, 0)
    assert (other.json["known"], other.json["asked"]) == (18, 0)
    results = [json.loads(line) for line in (to / "results.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [row["id"] for row in results] == [f"row {n}" for n in range(6)]
    assert [row["count"] for row in results] == list(range(6))
    table = pq.read_table(to / "results.parquet").to_pydict()
    assert table["answer"] == [row["answer"] for row in results]
    assert table["count"] == [str(n) for n in range(6)]
    assert not list(to.glob("*.part"))
    assert failed.code == 1
    assert "1 failed\n  failed 1: function <lambda> raised ZeroDivisionError\n" in failed.out
    assert "by zero (wrong.py, line 2)" in (tmp_path / "failed" / "results.jsonl").read_text()


def test_explain_shows_what_is_shared_and_in_which_order(tmp_path: Path, plan: Path) -> None:
    shown = run("batch", "explain", plan, rows(tmp_path / "rows.jsonl", 3))
    assert shown.code == 0, shown.err
    assert "review: " in shown.out
    assert "careful" not in shown.out  # prompts are private
    data = run("batch", "explain", plan, "--outputs", "first", "--json").json
    assert (data["calls"], data["pruned"]) == (1, 7)
    assert [one["agent"] for one in data["order"]] == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no variable plan that holds a Plan"),
        ("plan = 3", "no variable plan that holds a Plan"),
        ("import nowhere", "it raised ModuleNotFoundError"),
        ("plan = (", "it raised SyntaxError"),
        ("from presage.batch import *\nplan = Plan('p', out=template('{x}'))", "{x} is no plain name"),
    ],
)
def test_a_file_that_makes_no_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.py"
    path.write_text(text)
    assert says in run("batch", "explain", path).complaint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ("[1]\n", "line 1: a list"),
        ('{"question": "a", "n": 1}\nnope\n', "line 2: no JSON"),
        ('{"question": "a"}\n', "line 1: no field 'n'"),
        ('{"id": 1, "question": "a", "n": 1}\n{"id": "1", "question": "a", "n": 1}\n', "id '1' is that of line 1 too"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, plan: Path, text: str, says: str
) -> None:
    inputs = tmp_path / "rows.jsonl"
    inputs.write_text(text)
    said = run("batch", "run", plan, inputs, "--engine", "http://127.0.0.1:1", "--to", tmp_path / "to").complaint
    assert says in said
    assert not (tmp_path / "to").exists()


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path, plan: Path) -> None:
    inputs = rows(tmp_path / "rows.jsonl", 1)
    nowhere = f"http://127.0.0.1:{free_port()}"
    to = ("--to", tmp_path / "to")
    assert "no such Python file" in run("batch", "explain", tmp_path / "none.py").complaint
    assert "no output 'x'" in run("batch", "explain", plan, "--outputs", "x").complaint
    assert "cannot be read" in run("batch", "run", plan, tmp_path / "none", "--engine", nowhere, *to).complaint
    assert "no OpenAI-compatible server" in run("batch", "run", plan, inputs, "--engine", nowhere, *to).complaint
    taken = tmp_path / "taken"
    taken.write_text("")
    said = run("batch", "run", plan, inputs, "--engine", nowhere, "--to", taken).complaint
    assert "no file of answers can be kept there" in said


def test_the_documentations_example_runs_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    written = tmp_path / "plan.py"
    written.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    line = next(line for line in page.splitlines() if line.strip().startswith("printf"))
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    inputs = tmp_path / "rows.jsonl"
    assert run("batch", "explain", written, inputs).code == 0
    with running(tmp_path, dict(os.environ)) as url:
        done = run("batch", "run", written, inputs, "--engine", url, "--to", tmp_path / "answers", "--json")
    assert (done.code, done.json["rows"], done.json["failed"]) == (0, 2, 0), done.err


GRAPH = """
from typing import TypedDict
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

class State(TypedDict):
    question: str
    answer: str

def ask(state: State) -> dict:
    return {"answer": ChatOpenAI(model="simulated", temperature=0, api_key="none").invoke(state["question"]).text}

built = StateGraph(State)
built.add_node("asker", ask)
built.add_edge(START, "asker")
built.add_edge("asker", "asker")
graph = built.compile().with_config(recursion_limit=7)
built.edges.discard(("asker", "asker"))
built.add_edge("asker", END)
whole = built.compile()
"""


def test_a_graph_of_langgraph_runs_as_it_stands(tmp_path: Path) -> None:
    path, inputs, to = tmp_path / "support.py", rows(tmp_path / "rows.jsonl", 3), tmp_path / "to"
    path.write_text(GRAPH)
    shown = run("batch", "explain", f"{path}:graph", inputs)
    assert "start -> asker" in shown.out
    assert "again and again: asker; at most 7 steps" in shown.out
    with running(tmp_path, dict(os.environ)) as url:
        done = run("batch", "run", f"{path}:whole", inputs, "--engine", url, "--to", to, "--json")
    assert done.code == 0, done.err
    assert (done.json["rows"], done.json["asked"]) == (3, 3)
    results = [json.loads(line) for line in (to / "results.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [row["question"] for row in results] == [f"why\u2028{n}?" for n in range(3)]
    assert all(row["answer"] for row in results)
    path.write_text(GRAPH + "# another\n")
    said = run("batch", "run", f"{path}:whole", inputs, "--engine", url, "--to", to).complaint
    assert "another plan or other rows" in said


def test_what_is_no_graph_or_does_not_fit_is_said_in_one_line(tmp_path: Path) -> None:
    path, inputs = tmp_path / "support.py", tmp_path / "rows.jsonl"
    path.write_text(GRAPH)
    inputs.write_text('{"id": 1, "text": "a"}\n')
    assert "built is a graph that is not compiled" in run("batch", "explain", f"{path}:built").complaint
    assert "no variable graph2 that holds a Plan" in run("batch", "explain", f"{path}:graph2").complaint
    assert "question, answer, and the rows have none of these but id, text" in (
        run("batch", "explain", f"{path}:whole", inputs).complaint
    )
    path.write_text("import langgraph_none.x\n")
    assert "it raised ModuleNotFoundError" in run("batch", "explain", path).complaint


def learned(*arguments: object) -> Ran:
    return Ran(train_predictor, "profile", *arguments)


def test_a_profile_becomes_a_plan_that_is_not_replaced_by_chance(tmp_path: Path) -> None:
    traces, out, to = tmp_path / "traces.jsonl", tmp_path / "profile", tmp_path / "plan.py"
    found = [*prompted(60), *prompted(60, workflow_type="other")]
    traces.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    learn = (traces, "--no-register", "--baselines", "none", "--out", out)
    assert learned(*learn).code == 0
    assert "other, name one with --type" in run("batch", "plan", out, "--to", to).complaint.replace("; ", ", ")
    assert "--set keep_stems=true" in run("batch", "plan", out, "--type", "loop", "--to", to).complaint
    assert not to.exists()
    assert learned(*learn, "--set", "keep_stems=true", "--force").code == 0
    made = run("batch", "plan", out, "--type", "loop", "--to", to, "--json")
    assert made.code == 0, made.err
    assert made.json == {"to": str(to), "workflow_type": "loop", "edits": 1}
    assert run("batch", "explain", to, "--json").json["calls"] == 7
    assert "--force" in run("batch", "plan", out, "--type", "loop", "--to", to).complaint
    assert run("batch", "plan", out, "--type", "loop", "--to", to, "--force", "--without-prompts").code == 0
