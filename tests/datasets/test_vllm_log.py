"""vLLM's own log: the requests of its lines, in whatever a container puts around them, and the workflows they make."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from presage.datasets.adapters import open_request_logs
from presage.datasets.adapters.requests.inferred import TWICE
from presage.datasets.adapters.requests.vllm_log import CUT, UNANSWERED, is_vllm_log
from presage.datasets.schema.source import Source
from presage.errors import TraceError

CHANGED = datetime(2026, 1, 2, tzinfo=UTC)
START = "(APIServer pid=7) INFO 12-31 23:00:00 [api_server.py:1] vLLM API server version 0.32.0"
PARAMS = "SamplingParams(n=1, stop=['], prompt_token_ids: [9]'])"


def at(second: float) -> str:
    return f"12-31 23:{int(second) // 60:02}:{int(second) % 60:02}"


def request(
    name: str, prompt: str | None, ids: list[int] | None, second: float, *, body: Any = None, lora: str = "None"
) -> list[str]:
    head = f"(APIServer pid=7) DEBUG {at(second)} [request_logger.py:45] Request"
    told = [f"{head} {name.split('-')[1]} JSON body: {json.dumps(body)}"] if body is not None else []
    details = f"{head} {name} details: prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None."
    received = f"(APIServer pid=7) INFO {at(second)} [request_logger.py:57] Received request {name}: params: {PARAMS}"
    return [*told, details, f"{received}, lora_request: {lora}."]


def answer(
    name: str, text: str, ids: list[int] | None, second: float, how: str = "", reason: str = "stop"
) -> list[str]:
    head = f"(APIServer pid=7) {{}} {at(second)} [request_logger.py:91] Generated response {name}{how}"
    return [
        f"{head.format('DEBUG')} details: output_token_ids: {ids}",
        f"{head.format('INFO')}: output: {text!r}, finish_reason: {reason}",
    ]


def run(name: str, second: float, turns: int = 3, seed: int = 1) -> list[str]:
    """The requests of an application whose prompt grows by each answer, three in a second."""
    ids, lines = [seed * 1000 + token for token in range(40)], []
    for turn in range(turns):
        reply = [seed * 1000 + 100 * (turn + 1) + token for token in range(20)]
        lines += request(f"chatcmpl-{name}{turn}", f'{name} {turn}: it\'s "so"\n', ids, second + turn / 3)
        lines += answer(f"chatcmpl-{name}{turn}", f"Because {turn}.", reply, second + turn / 3)
        ids = [*ids, *reply, *range(turn, turn + 8)]
    return lines


def written(path: Path, lines: list[str], changed: datetime = CHANGED) -> Path:
    text = "\n".join([START, *lines, "INFO 12-31 23:59:59 [loggers.py:1] Engine 000: …"]).encode() + b"\n"
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    os.utime(path, (changed.timestamp(), changed.timestamp()))
    return path


def read(*paths: Path, **options: Any) -> list[Source]:
    return list(open_request_logs(paths, **options)())


def rows(*paths: Path, **options: Any) -> list[dict[str, Any]]:
    return [row for chunk in read(*paths, **options) for row in chunk.table.to_pylist()]


def flows(found: list[dict[str, Any]]) -> list[list[int]]:
    """The lengths of the prompts of each workflow, in the order of its steps."""
    made: dict[str, list[int]] = {}
    for row in sorted(found, key=lambda row: row["step"]):
        made.setdefault(row["workflow_id"], []).append(row["input_tokens"])
    return sorted(made.values())


GROWING = [40, 68, 96]


def test_requests_become_steps_with_their_texts_tokens_and_times_also_within_one_second(tmp_path: Path) -> None:
    found = rows(written(tmp_path / "server.log", [*run("a", 0), *run("b", 0, seed=2)]))
    assert flows(found) == [GROWING, GROWING]
    first = min(found, key=lambda row: row["started_at"])
    assert first["started_at"].replace(microsecond=0) == datetime(2025, 12, 31, 23, tzinfo=UTC)
    assert first["started_at"] < first["ended_at"]
    assert (first["input_text"], first["output_text"]) == ('a 0: it\'s "so"\n', "Because 0.")
    assert (first["output_tokens"], first["finish_reason"], first["model"]) == (20, "stop", None)


CONTAINERS: dict[str, Callable[[int, str], str]] = {
    "plain": lambda _, line: line,
    "kubernetes": lambda number, line: f"2025-12-31T23:00:0{number % 10}.{number:06}Z stderr F {line}",
    "docker": lambda number, line: json.dumps(
        {"log": f"{line}\n", "stream": "stderr", "time": f"2025-12-31T23:00:00.{number:06}123Z"}
    ),
    "vLLM's JSON": lambda number, line: json.dumps(
        {"asctime": f"2025-12-31 23:00:00,{number:03}", "levelname": "DEBUG", "message": line.partition("] ")[2]}
    ),
    "syslog": lambda _, line: f"Dec 31 23:00:00 host vllm[7]: {line}",
    "colours": lambda _, line: f"\x1b[0;36m{line[:17]}\x1b[0;0m {line[18:]}",
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["server.log", "server.log.gz", "server.txt"])
def test_lines_are_found_in_what_containers_write_around_them(container: str, name: str, tmp_path: Path) -> None:
    lines = [CONTAINERS[container](number, line) for number, line in enumerate(run("a", 0))]
    path = written(tmp_path / name, lines)
    if container != "plain":
        text = "\n".join(CONTAINERS[container](0, START) if at == 0 else line for at, line in enumerate(["", *lines]))
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        os.utime(path, (CHANGED.timestamp(), CHANGED.timestamp()))
    found = rows(path)
    assert flows(found) == [GROWING]
    assert all(row["started_at"].year == 2025 for row in found)


def test_bodies_tell_the_system_prompt_apart_and_ids_still_decide(tmp_path: Path) -> None:
    body = {"messages": [{"role": "system", "content": "You plan."}, {"role": "user", "content": "Go."}], "model": "m"}
    lora = "LoRARequest(lora_name='tuned', lora_int_id=1)"
    lines = request("chatcmpl-a", "<s>You plan.<u>Go.", [1, 2, 3], 1, body=body, lora=lora)
    (row,) = rows(written(tmp_path / "a.log", [*lines, *answer("chatcmpl-a", "Done", [4], 2)]))
    assert (row["system_prompt"], row["input_text"], row["model"]) == ("You plan.", "Go.", "tuned")
    assert (row["input_tokens"], row["output_tokens"]) == (3, 1)


def test_of_streamed_answers_and_several_choices_the_first_whole_one_counts(tmp_path: Path) -> None:
    lines = request("chatcmpl-a", "Go.", [1, 2, 3], 1)
    lines += answer("chatcmpl-a", "Do", [4], 1, " (streaming delta)", "None")
    lines += answer("chatcmpl-a", "ne", [5], 1, " (streaming delta)", "length")
    lines += answer("chatcmpl-a", "Done", None, 2, " (streaming complete)", "streaming_complete")
    lines += answer("chatcmpl-a", "Other", [6], 3)
    (row,) = rows(written(tmp_path / "a.log", lines))
    assert (row["output_text"], row["output_tokens"], row["finish_reason"]) == ("Done", 2, None)


def test_the_line_that_vllm_wrote_before_it_had_details_is_read(tmp_path: Path) -> None:
    head = "INFO 12-31 23:00:01 [logger.py:42]"
    params = (
        "params: SamplingParams(n=1), prompt_token_ids: [1, 2, 3], lora_request: None, prompt_adapter_request: None."
    )
    lines = [
        f"{head} Received request chatcmpl-a: prompt: 'Say, \\'a\\', ok?', {params}",
        f"{head} Generated response chatcmpl-a: output: 'a', output_token_ids: [4, 5], finish_reason: stop",
    ]
    (row,) = rows(written(tmp_path / "a.log", lines))
    assert (row["input_text"], row["output_text"]) == ("Say, 'a', ok?", "a")
    assert (row["input_tokens"], row["output_tokens"]) == (3, 2)


def test_an_answer_may_stand_in_the_next_file_whatever_the_files_are_called(tmp_path: Path) -> None:
    lines = run("a", 0)
    folder = tmp_path / "logs"
    folder.mkdir()
    cut = len(lines) - 2
    for name, part in (
        ("server.1.log", lines[:cut]),
        ("server.0.log", [line.replace(at(0), at(9)) for line in lines[cut:]]),
    ):
        (folder / name).write_text("\n".join(part) + "\n")
        os.utime(folder / name, (CHANGED.timestamp(), CHANGED.timestamp()))
    found = rows(folder)
    assert flows(found) == [GROWING]
    assert all(row["output_text"] for row in found)


def test_what_the_log_lacks_is_said(tmp_path: Path) -> None:
    lines = [line for line in run("a", 0) if "details" not in line]
    with pytest.raises(TraceError, match=r"a\.log: lines of vLLM's log, but no prompt; .*VLLM_LOGGING_LEVEL=DEBUG"):
        read(written(tmp_path / "a.log", lines))
    lines = [line for line in run("b", 0) if "Generated" not in line]
    (chunk,) = read(written(tmp_path / "b.log", lines))
    assert chunk.notices[UNANSWERED] == 3
    assert flows(chunk.table.to_pylist()) == [GROWING], "the prompts alone go on from each other"
    cut = [line for number in range(4) for line in request(f"chatcmpl-{number}", "Say what", [number] * 8, number)]
    (chunk,) = read(written(tmp_path / "c.log", cut))
    assert chunk.notices[CUT] == 4
    (chunk,) = read(written(tmp_path / "c.log", [line.replace("Say what", "Say what it is.") for line in cut]))
    assert CUT not in chunk.notices
    with pytest.raises(TraceError, match=r"d\.log, line 2: no time before the message"):
        read(written(tmp_path / "d.log", [line.replace("12-31 ", "") for line in lines]))
    whole = written(tmp_path / "e.log", run("b", 0))
    (chunk,) = read(whole, whole)
    assert (chunk.notices[TWICE], chunk.table.num_rows) == (3, 3)


def test_ids_that_clients_choose_are_told_apart_and_their_bodies_counted_once(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Go."}]}
    asked = [line for at in (1, 12, 13) for line in request(f"chatcmpl-run-{at}", f"Go {at}.", [at, 2], 1)]
    bodies = [line for at in (1, 12, 13) for line in request(f"x-{at}abc", None, None, 1, body=body)[:1]]
    answers = [line for at in (13, 1, 12) for line in answer(f"chatcmpl-run-{at}", f"Done {at}", [at], 2)]
    found = rows(written(tmp_path / "a.log", [*bodies, *asked, *answers]))
    assert sorted((row["input_text"], row["output_text"]) for row in found) == [
        (f"Go {at}.", f"Done {at}") for at in (1, 12, 13)
    ]


def test_prompts_of_one_request_to_completions_are_requests_of_their_own(tmp_path: Path) -> None:
    lines = [line for at in range(3) for line in request(f"cmpl-a-{at}", f"Go {at}.", [at, 2], 1)]
    assert {row["input_text"] for row in rows(written(tmp_path / "a.log", lines))} == {"Go 0.", "Go 1.", "Go 2."}


def test_an_id_that_comes_again_is_another_request(tmp_path: Path) -> None:
    lines = [*request("chatcmpl-a", "One", [1, 2], 1), *request("chatcmpl-a", "Two", [3, 4], 2)]
    found = rows(written(tmp_path / "a.log", [*lines, *answer("chatcmpl-a", "Done", [5], 3)]))
    assert [(row["input_text"], row["output_text"]) for row in found] == [("One", None), ("Two", "Done")]


def test_other_text_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Request for comments\n" * 50)
    assert not is_vllm_log(tmp_path / "a.txt")
    with pytest.raises(TraceError, match=r"a\.txt: neither .* nor vLLM's own log"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("damage", ["'", "[", "]", "'Go", ": output: ", "\\", "\ufffd"])
def test_damaged_lines_raise_nothing_but_our_errors(damage: str, tmp_path: Path) -> None:
    lines = run("a", 0)
    for number in range(len(lines)):
        for cut in (30, len(lines[number]) // 2, len(lines[number]) - 3):
            broken = [*lines[:number], lines[number][:cut] + damage, *lines[number + 1 :]]
            message = ""
            try:
                read(written(tmp_path / "a.log", broken))
            except TraceError as error:
                message = str(error)
            assert "Because" not in message
