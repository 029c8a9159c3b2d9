"""Night after night into one store: what went on is extended, what was cut is completed, in any order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from dataset_samples import row, trace, workflow
from span_samples import Recorder, agent, chat, envelope, steps, tool, write_lines

from presage.datasets.ingest import IngestReport, append, ingest
from presage.datasets.read import read_traces
from presage.datasets.store import parts, read_store
from presage.errors import TraceError


def nights(folder: Path, count: int = 3) -> list[Path]:
    """A session with one run a night, of which each fans out and joins; and a run of its own each night."""
    recorder, files = Recorder(), []
    for night in range(count):
        first = len(recorder.spans)
        for session, at in (("s", 1000.0 * night), (f"own-{night}", 1000.0 * night + 50)):
            with recorder.span(
                "invoke_agent boss", at, at + 9, attributes=agent("boss", **{"session.id": session})
            ) as r:
                recorder.add("chat m", at + 1, at + 2, r, chat(**{"gen_ai.usage.output_tokens": 10 + night}))
                recorder.add("execute_tool a", at + 2.1, at + 4, r, tool("a"))
                recorder.add("execute_tool b", at + 2.2, at + 3, r, tool("b"))
                recorder.add("chat m", at + 5, at + 6, r, chat())
        files.append(write_lines(folder / f"night-{night}.json", envelope(recorder.spans[first:])))
    return files


def test_any_order_of_nights_twice_each_is_what_all_at_once_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_ROWS", 3)  # workflows of a part stand in several portions of it
    files = nights(tmp_path)
    joint = read_traces(files).table
    session = joint.filter([name == "s" for name in joint["workflow_id"].to_pylist()])
    assert session["parent_steps"].to_pylist()[3:6] == [[1, 2], [3], [4]]
    for number, order in enumerate(itertools.permutations(files)):
        store = tmp_path / f"store-{number}"
        for file in order:
            ingest([file], store)
        assert read_store(store).equals(joint)
        before = {path.name for path in store.rglob("*.parquet")}
        for file in order:
            report = ingest([file], store)
            assert (report.workflows, report.extended, report.already_present) == (0, 0, 2)
        assert {path.name for path in store.rglob("*.parquet")} == before


def test_a_workflow_that_was_cut_is_completed(tmp_path: Path) -> None:
    recorder = Recorder(**{"gen_ai.workflow.name": "run"})
    with recorder.span("invoke_agent bot", 0, 9, attributes=agent("bot")) as root:
        with recorder.span("invoke_agent a", 1, 4, root, agent("a")) as one:
            recorder.add("chat m", 2, 3, one, chat())
        recorder.add("chat m", 5, 6, root, chat())
    early = write_lines(tmp_path / "early.json", envelope(recorder.spans[:2]))
    late = write_lines(tmp_path / "late.json", envelope(recorder.spans[2:]))
    ingest([early], tmp_path / "store")
    assert read_store(tmp_path / "store")["complete"].to_pylist() == [False]
    report = ingest([late], tmp_path / "store")
    assert (report.workflows, report.extended, report.steps) == (0, 1, 2)
    found = read_store(tmp_path / "store")
    assert steps(found, "agent", "parent_steps", "complete") == [("a", [], True), ("bot", [0], True)]


def test_what_one_export_does_not_know_the_other_tells(tmp_path: Path) -> None:
    timed = [row("w", n, started_at=f"2026-01-01T00:00:0{n}Z", output_tokens=5 if n else None) for n in range(2)]
    append(trace(*timed), tmp_path / "store")
    known = [one | {"output_tokens": 7 if not one["output_tokens"] else None} for one in timed]
    assert append(trace(*known), tmp_path / "store").extended == 1
    assert read_store(tmp_path / "store")["output_tokens"].to_pylist() == [7, 5]


def test_other_content_is_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    timed = [row("w", n, started_at=f"2026-01-01T00:00:0{n}Z", output_tokens=5) for n in range(2)]
    append(trace(*timed), tmp_path / "store")
    path = tmp_path / "other.jsonl"
    lines = [*(one | {"output_tokens": 6} for one in timed), *workflow("good", 2)]
    write_lines(path, *lines)
    with pytest.raises(TraceError, match=r"workflow 'w' \(t\) is already in .* column 'output_tokens' differs"):
        ingest([path], tmp_path / "store")
    report = ingest([path], tmp_path / "store", skip_bad=True)
    assert report.skipped == {"workflow that the store has with other content": 1}
    assert set(read_store(tmp_path / "store")["workflow_id"].to_pylist()) == {"w", "good"}


def _killed(file: Path, store: Path) -> None:
    """Ingests until everything is in place but the manifest."""
    parts.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    ingest([file], store)


@pytest.mark.slow
def test_a_kill_before_the_commit_of_an_extension_changes_nothing(tmp_path: Path) -> None:
    first, second = nights(tmp_path, 2)
    ingest([first], tmp_path / "store")
    before = read_store(tmp_path / "store")
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(second, tmp_path / "store"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_store(tmp_path / "store").equals(before)
    report = ingest([second], tmp_path / "store")
    assert report == IngestReport(1, 12, 0, 0, {}, 1, 1)
    assert read_store(tmp_path / "store").equals(read_traces([first, second]).table)


def test_the_store_keeps_what_its_spans_were_read_with(tmp_path: Path) -> None:
    recorder = Recorder(**{"gen_ai.workflow.name": "run"})
    with recorder.span("invoke_agent bot", 0, 9, attributes=agent("bot")) as root:
        recorder.add("chat m", 1, 2, root, chat())
        recorder.add("embed", 3, 4, root, {"gen_ai.operation.name": "embeddings"})
    spans = write_lines(tmp_path / "spans.json", envelope(recorder.spans))
    store = tmp_path / "store"
    told = ingest([spans], store).notices
    assert told
    assert read_traces(store).notices == told
    ingest([spans], store)
    append(trace(*workflow("w", 2)), store)
    assert read_traces(store).notices == told, "twice is as once, and what has no notices takes none away"
    ingest([store], tmp_path / "copy")
    assert read_traces(tmp_path / "copy").notices == told
