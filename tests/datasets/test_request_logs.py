"""Logs of requests without workflows: what is read of a line, and which workflow each request is given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.continuation import HEAD_TOKENS, head_of, text_tokens
from presage.datasets.adapters import open_request_logs
from presage.datasets.adapters.requests.inferred import EMPTY, IDS, QUIET_S, SINGLE, TWICE
from presage.datasets.adapters.requests.logs import NotARequestError, logged_request
from presage.datasets.ingest import ingest, request_logs
from presage.datasets.read import read_traces
from presage.datasets.schema.source import Source
from presage.datasets.store import read_store
from presage.errors import TraceError

T = 1_767_225_600
SYSTEM = "You are the reviewer of a small team. Read what the author wrote, then say what is wrong with it, and why."
MESSAGE = {"role": "user", "content": "Why?"}


def log(path: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def run(name: str, start: float, turns: int = 3, **more: Any) -> list[dict[str, Any]]:
    """The requests of an application whose prompt grows by each answer."""
    messages, found = [{"role": "system", "content": SYSTEM}], []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"Question {turn} of {name}, what about the {name} then?"}]
        answer = {"role": "assistant", "content": f"Answer {turn} to {name}: because {name} is so."}
        found.append(
            {
                "messages": messages,
                "choices": [{"message": answer, "finish_reason": "stop"}],
                "start_time": start + 10 * turn,
                "end_time": start + 10 * turn + 5,
                "usage": {"prompt_tokens": 40 + turn, "completion_tokens": 9},
                **more,
            }
        )
        messages = [*messages, answer]
    return found


def read(*paths: Path, **options: Any) -> list[Source]:
    return list(open_request_logs(paths, **options)())


def rows(*paths: Path, **options: Any) -> list[dict[str, Any]]:
    return [row for chunk in read(*paths, **options) for row in chunk.table.to_pylist()]


def by_workflow(found: list[dict[str, Any]]) -> list[list[int]]:
    """The starts of the steps of each workflow, in seconds after T."""
    flows: dict[str, list[int]] = {}
    for row in sorted(found, key=lambda row: row["step"]):
        flows.setdefault(row["workflow_id"], []).append(round(row["started_at"].timestamp() - T))
    return sorted(flows.values())


def test_requests_that_go_on_from_each_other_become_the_steps_of_a_workflow(tmp_path: Path) -> None:
    lines = [line for n in range(3) for line in run(f"case{n}", T + n)]
    ingest([request_logs([log(tmp_path / "a.jsonl", lines)])], tmp_path / "s")
    table = read_store(tmp_path / "s")
    assert by_workflow(table.to_pylist()) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert read_traces(tmp_path / "s").workflows == 3
    first, second = table.to_pylist()[:2]
    assert first["agent"] == f"agent-{head_of(text_tokens(SYSTEM), least=1)}"
    assert first["workflow_type"] == first["agent"].replace("agent", "app")
    assert (first["input_tokens"], first["output_tokens"], first["finish_reason"]) == (40, 9, "stop")
    assert first["system_prompt"] == SYSTEM
    assert first["input_text"].startswith("Question 0")
    assert first["output_text"].startswith("Answer 0")
    assert first["identity_confidence"] is None, "it begins the workflow, and continues nothing"
    assert second["identity_confidence"] == pytest.approx(0.99)


def test_an_agent_that_few_workflows_have_is_not_named_and_recorded_names_are_kept(tmp_path: Path) -> None:
    lines = [*run("one", T), *run("two", T + 1, 1, agent="critic", workflow_type="review")]
    found = rows(log(tmp_path / "a.jsonl", lines))
    assert {(row["workflow_type"], row["agent"]) for row in found} == {("app", "assistant"), ("review", "critic")}
    typed = rows(log(tmp_path / "b.jsonl", lines), workflow_type="support")
    assert {row["workflow_type"] for row in typed} == {"support"}


def test_an_answer_is_known_only_once_its_request_has_ended(tmp_path: Path) -> None:
    plan = " ".join(f"step{n} of the plan is thing{n * n}" for n in range(20))
    asked = {"prompt": "Make a plan.", "output": plan, "timestamp": T, "end_time": T + 30}
    quotes = {"prompt": f"Somebody wrote this: {plan}", "output": "Fine.", "timestamp": T + 20}
    assert by_workflow(rows(log(tmp_path / "a.jsonl", [asked, quotes]))) == [[0], [20]]
    quotes |= {"timestamp": T + 31}
    found = rows(log(tmp_path / "b.jsonl", [asked, quotes]))
    assert by_workflow(found) == [[0, 31]]
    assert found[1]["identity_confidence"] == pytest.approx(0.95)


def test_token_ids_are_compared_as_they_are(tmp_path: Path) -> None:
    asked = {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4], "timestamp": T}
    more = {"prompt_token_ids": [1, 2, 3, 4, 5], "output_token_ids": [6], "timestamp": T + 1}
    found = rows(log(tmp_path / "a.jsonl", [more, asked]))
    assert by_workflow(found) == [[0, 1]]
    assert [(row["input_tokens"], row["output_tokens"]) for row in found] == [(3, 1), (5, 1)]


def test_workflows_at_the_end_of_the_logs_may_go_on(tmp_path: Path) -> None:
    lines = [*run("early", T), *run("late", T + QUIET_S + 100)]
    found = rows(log(tmp_path / "a.jsonl", lines))
    assert [row["complete"] for row in found] == [True] * 3 + [False] * 3


def test_a_log_that_goes_on_extends_the_workflows_of_a_store(tmp_path: Path) -> None:
    lines, path = run("growing", T, 4), tmp_path / "a.jsonl"
    ingest([request_logs([log(path, lines[:2])])], tmp_path / "s")
    report = ingest([request_logs([log(path, lines)])], tmp_path / "s")
    assert (report.workflows, report.extended) == (0, 1)
    assert by_workflow(read_store(tmp_path / "s").to_pylist()) == [[0, 10, 20, 30]]


def test_what_is_left_out_or_doubtful_is_counted(tmp_path: Path) -> None:
    single = {"prompt": "Hello?", "output": "Hi.", "timestamp": T, "workflow_id": "w"}
    nothing = {"prompt": "", "output": "Hi.", "timestamp": T}
    (chunk,) = read(log(tmp_path / "a.jsonl", [single, single, nothing]))
    assert chunk.skipped == {EMPTY: 1}
    assert chunk.notices == {IDS: 2, TWICE: 1, SINGLE: 1}


def test_uncertain_workflows_can_be_left_out(tmp_path: Path) -> None:
    edited = run("edited", T + 1)
    edited[1]["messages"][2] = {"role": "assistant", "content": "Cut."}
    path = log(tmp_path / "a.jsonl", [*run("whole", T), *edited])
    all_of_them = ingest([request_logs([path])], tmp_path / "s", min_identity_confidence=0.95)
    assert (all_of_them.workflows, all_of_them.skipped) == (2, {})
    report = ingest([request_logs([path])], tmp_path / "t", min_identity_confidence=0.96)
    assert report.workflows == 1
    assert report.skipped == {"workflow with a step of an identity less certain than 0.96": 1}


@pytest.mark.parametrize(
    ("value", "us"),
    [
        (T, T * 10**6),
        (T + 0.25, T * 10**6 + 250_000),
        (T * 10**3 + 7, T * 10**6 + 7000),
        (T * 10**6 + 1, T * 10**6 + 1),
        (T * 10**9 + 2000, T * 10**6 + 2),
        (str(T), T * 10**6),
        ("2026-01-01T00:00:00Z", T * 10**6),
        ("2026-01-01 01:00:00.5+01:00", T * 10**6 + 500_000),
    ],
)
def test_times_in_any_unit_are_read(value: object, us: int) -> None:
    assert logged_request({"prompt": "a", "timestamp": value}).started_us == us


@pytest.mark.parametrize(
    ("line", "said", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, [("", "p")], "c"),
        ({"input": "p", "output": '{"a": 1}'}, [("", "p")], '{"a": 1}'),
        ({"input": [MESSAGE], "output_text": "c"}, [("user", "Why?")], "c"),
        ({"messages": json.dumps([MESSAGE]), "response": "c"}, [("user", "Why?")], "c"),
        ({"system": "s", "messages": [MESSAGE]}, [("system", "s"), ("user", "Why?")], None),
        ({"instructions": "s", "input": "p"}, [("system", "s"), ("user", "p")], None),
        (
            {"request": {"messages": [MESSAGE]}, "response": {"choices": [{"message": {"content": "c"}}]}},
            [("user", "Why?")],
            "c",
        ),
        (
            {"messages": [MESSAGE], "response": {"content": [{"type": "text", "text": "c"}]}},
            [("user", "Why?")],
            "c",
        ),
    ],
)
def test_prompts_and_answers_are_read_under_the_names_of_servers_and_gateways(
    line: dict[str, Any], said: list[tuple[str, str]], answer: str | None
) -> None:
    found = logged_request({"timestamp": T, **line})
    assert (found.said, found.answer) == (said, answer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "no JSON object"),
        ({"timestamp": T}, "no prompt; expected one of prompt_token_ids"),
        ({"prompt": "a"}, "no time; expected one of"),
        ({"prompt": "a", "timestamp": "soon"}, '"timestamp" is no time'),
        ({"prompt": "a", "timestamp": -5}, '"timestamp" is no time'),
        ({"prompt": "a", "timestamp": True}, '"timestamp" is no time'),
        ({"prompt": "a", "timestamp": float("inf")}, '"timestamp" is no time'),
        ({"prompt": "a", "timestamp": 1e30}, '"timestamp" is no time'),
        ({"prompt": 5, "timestamp": T}, '"prompt" of type int'),
        ({"prompt_token_ids": ["a"], "timestamp": T}, "a list of token ids"),
        ({"prompt_token_ids": [2**70], "timestamp": T}, "a list of token ids"),
        ({"prompt": "a", "start_time": T, "end_time": T - 1}, "ends before it starts"),
    ],
)
def test_a_line_that_is_no_request_is_refused_and_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(NotARequestError, match=message):
        logged_request(line)
    path = tmp_path / "a.jsonl"
    good = json.dumps({"prompt": "b", "timestamp": T})
    path.write_text(f"{good}\n{json.dumps(line).replace('Infinity', '1e999')}\n")
    if isinstance(line, list):
        return  # an array of requests
    with pytest.raises(TraceError, match=r"a\.jsonl, line 2: "):
        read(path)
    (chunk,) = read(path, skip_bad=True)
    assert chunk.table.num_rows == 1
    assert sum(chunk.skipped.values()) == 1


def test_sources_that_have_workflows_or_are_no_logs_are_refused(tmp_path: Path) -> None:
    ingest([request_logs([log(tmp_path / "a.jsonl", run("x", T))])], tmp_path / "s")
    with pytest.raises(TraceError, match="its requests have workflows"):
        request_logs([tmp_path / "s"])
    with pytest.raises(TraceError, match=r"neither \.json.* nor vLLM's own log"):
        request_logs([log(tmp_path / "a.txt", run("x", T))])
    with pytest.raises(TraceError, match="no such file"):
        request_logs([tmp_path / "nothing.jsonl"])
    with pytest.raises(TraceError, match=r"no request \(request with an empty prompt: 1\)"):
        read(log(tmp_path / "b.jsonl", [{"prompt": "", "timestamp": T}]))
    with pytest.raises(TraceError, match="--infer-workflows"):
        read_traces(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_tables_of_requests_are_read(kind: str, tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": line["start_time"],
            "end_time": line["end_time"],
            "messages": json.dumps(line["messages"]),
            "response": line["choices"][0]["message"]["content"],
            "prompt_tokens": line["usage"]["prompt_tokens"],
        }
        for line in run("x", T)
    ]
    path, frame = tmp_path / f"log.{kind}", pd.DataFrame(lines)
    if kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    found = rows(path)
    assert by_workflow(found) == [[0, 10, 20]]
    assert [row["input_tokens"] for row in found] == [40, 41, 42]
    assert {row["system_prompt"] for row in found} == {SYSTEM}


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    lines = []
    for number in range(draw(st.integers(1, 4))):
        of = run(f"n{number % 3}", T + draw(st.integers(0, 30)), draw(st.integers(1, 4)))
        lines += of if draw(st.booleans()) else [{**line, "end_time": None} for line in of]
    order = draw(st.permutations(lines))
    cut = draw(st.integers(0, len(order)))
    return lines, [order[:cut], order[cut:]]


@settings(max_examples=40)
@given(drawn=shuffled())
def test_neither_the_order_of_lines_nor_their_files_matter(
    drawn: tuple[list[dict[str, Any]], list[list[dict[str, Any]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    lines, parts = drawn
    paths = [log(folder / f"{number}.jsonl.gz", part) for number, part in enumerate(parts)]
    wanted = rows(log(folder / "all.jsonl", lines))
    found = rows(*reversed(paths))
    assert {json.dumps(row, default=str) for row in found} == {json.dumps(row, default=str) for row in wanted}
    ids = {row["workflow_id"] for row in found}
    assert len(found) == sum(1 + max(r["step"] for r in found if r["workflow_id"] == of) for of in ids)


@given(st.text(), st.text())
def test_texts_are_cut_alike_in_every_process_and_without_loss(one: str, other: str) -> None:
    assert (text_tokens(one) == text_tokens(other)) == (one == other)
    assert text_tokens("Presage 12 ab") == text_tokens("Presage") + text_tokens(" 12 ab")
    assert text_tokens("Presage") == [1337729777, 1455258184]


def test_agents_are_known_by_enough_first_tokens() -> None:
    assert head_of(range(HEAD_TOKENS - 1)) == ""
    assert head_of(range(HEAD_TOKENS)) == head_of(range(HEAD_TOKENS + 9)) != ""
