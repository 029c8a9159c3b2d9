"""Ingestion: the same store as by appending in memory, whatever the portions, and all or nothing."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import row, trace, traces, workflow
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets import ingest
from presage.datasets.ingest import Feed, IngestReport, append, sources, spill
from presage.datasets.ingest.spill import Journal
from presage.datasets.schema import digest
from presage.datasets.schema.source import Origin, Source
from presage.datasets.store import read_store
from presage.datasets.store.parts import WORK, is_store
from presage.errors import OutputError, TraceError

Writer = Callable[..., Path]


def lines(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(one) for one in rows]


def feed(name: str, *chunks: Source) -> Feed:
    return Feed(name, lambda: iter(chunks))


def chunk(name: str, table: pa.Table, **more: Any) -> Source:
    return Source(table, Origin.of(name, table.num_rows), **more)


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run every few rows, a batch a row or two, a range every few workflows, a group every file."""
    monkeypatch.setattr(spill, "RUN_BYTES", 2000)
    monkeypatch.setattr(spill, "BATCH_BYTES", 200)
    monkeypatch.setattr(ingest, "RANGE_BYTES", 1000)
    monkeypatch.setattr(sources, "GROUP_BYTES", 1)


@pytest.mark.usefixtures("small_portions")
@settings(max_examples=40, suppress_health_check=[])
@given(table=traces(), data=st.data())
def test_any_chunks_in_any_order_make_the_store_of_one_append(
    table: pa.Table, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("ingest")
    order = data.draw(st.permutations(range(table.num_rows)))
    cuts = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=4)))
    shuffled = table.take(pa.array(order, pa.int64()))
    chunks = [
        chunk("drawn", shuffled.slice(start, stop - start))
        for start, stop in zip([0, *cuts], [*cuts, table.num_rows], strict=True)
    ]
    report = ingest.ingest([feed("drawn", *chunks)], root / "s")
    assert report.steps == table.num_rows
    assert read_store(root / "s").equals(table)
    append(table, root / "other")
    assert digest(read_store(root / "other")) == digest(read_store(root / "s"))
    assert ingest.ingest([feed("drawn", *chunks)], root / "s").already_present == report.workflows


@pytest.mark.usefixtures("small_portions")
def test_workflows_of_many_types_and_sizes_survive_many_ranges(tmp_path: Path) -> None:
    made = [workflow(f"w{i}", 1 + i % 7, f"type {i % 5}", output_text="long " * (i % 50)) for i in range(300)]
    table = trace(*(one for rows in made for one in rows))
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    report = ingest.ingest([tmp_path / "t.parquet"], tmp_path / "s")
    assert (report.workflows, report.steps) == (300, table.num_rows)
    assert read_store(tmp_path / "s").equals(table)
    assert not (tmp_path / "s" / WORK).exists()


def test_a_file_given_twice_or_a_copy_of_it_adds_nothing(tmp_path: Path, write_jsonl: Writer) -> None:
    path = write_jsonl(*lines(*workflow("w", 3), *workflow("v", 2)))
    copy = shutil.copy(path, tmp_path / "copy.jsonl")
    assert ingest.ingest([path, path, copy], tmp_path / "s") == IngestReport(2, 5, 0, 4, {}, 0)
    assert ingest.ingest([copy], tmp_path / "s") == IngestReport(0, 0, 2, 0, {}, 0)
    assert ingest.ingest([tmp_path / "s"], tmp_path / "s") == IngestReport(0, 0, 2, 0, {}, 0)
    assert read_store(tmp_path / "s").num_rows == 5


@pytest.mark.parametrize(
    "other",
    [
        workflow("w", 3),
        workflow("w", 2, output_text="new"),
        [row("w", 0), row("w", 1, "b", parent_steps=[0])],
        workflow("w", 2, prefill_state=[1.0]),
        [row("w", 1)],
    ],
)
def test_a_workflow_with_other_content_in_a_second_file_is_refused(
    tmp_path: Path, write_jsonl: Writer, other: list[dict[str, Any]]
) -> None:
    one = write_jsonl(*lines(*workflow("w", 2), *workflow("v", 2)), name="1.jsonl")
    two = write_jsonl(*lines(*other, *workflow("u", 1)), name="2.jsonl")
    with pytest.raises(TraceError, match=r"2\.jsonl, line \d, .*workflow 'w' \(t\) also stands in .*1\.jsonl"):
        ingest.ingest([one, two], tmp_path / "s")
    assert not (tmp_path / "s").exists()
    report = ingest.ingest([one, two], tmp_path / "s", skip_bad=True)
    assert report.skipped == {"workflow with workflow in two sources": 1}
    assert set(read_store(tmp_path / "s")["workflow_id"].to_pylist()) == {"v", "u"}


def test_a_workflow_the_store_has_with_other_content_is_refused_and_nothing_changes(
    tmp_path: Path, write_jsonl: Writer
) -> None:
    append(trace(*workflow("w", 2)), tmp_path / "s")
    before = _files(tmp_path / "s")
    path = write_jsonl(*lines(*workflow("new", 2), *workflow("w", 2, success=True)))
    with pytest.raises(TraceError, match=r"workflow 'w' \(t\) is already in .* column 'success' differs"):
        ingest.ingest([path], tmp_path / "s")
    assert _files(tmp_path / "s") == before


def test_states_of_two_sizes_are_refused_across_files_and_with_the_store(tmp_path: Path, write_jsonl: Writer) -> None:
    one = write_jsonl(*lines(row("v", prefill_state=[1.0]), row("x")), name="1.jsonl")
    two = write_jsonl(*lines(row("w", prefill_state=[1.0, 2.0])), name="2.jsonl")
    without = write_jsonl(*lines(row("u")), name="3.jsonl")
    with pytest.raises(TraceError, match=r"mixed state sizes .* 1 in .*1\.jsonl, 2 in .*2\.jsonl"):
        ingest.ingest([without, one, two], tmp_path / "s")
    assert not (tmp_path / "s").exists()
    ingest.ingest([without, one], tmp_path / "s")
    with pytest.raises(TraceError, match=r"mixed state sizes .* 1 in the store .*, 2 in .*2\.jsonl"):
        ingest.ingest([two], tmp_path / "s")
    assert read_store(tmp_path / "s")["prefill_state"].to_pylist() == [None, [1.0], None]


def test_a_truncated_file_as_the_last_of_many(tmp_path: Path, write_jsonl: Writer) -> None:
    good = [write_jsonl(*lines(*workflow(f"g{i}", 2)), name=f"{i}.jsonl") for i in range(5)]
    text = "\n".join(lines(*(one for i in range(300) for one in workflow(f"w{i:03}", 3))))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(text.encode())[:-200])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz, line \d+: the gzip data are cut after this line"):
        ingest.ingest([*good, cut], tmp_path / "s")
    assert not (tmp_path / "s").exists()
    report = ingest.ingest([*good, cut], tmp_path / "s", skip_bad=True)
    assert report.skipped == {"line with cut gzip data after it": 1, "workflow with a skipped row": 1}
    ids = read_store(tmp_path / "s")["workflow_id"].to_pylist()
    assert {f"g{i}" for i in range(5)} < set(ids)
    assert all(ids.count(name) == (2 if name.startswith("g") else 3) for name in set(ids))


def test_a_spoiled_workflow_is_left_out_wherever_it_is_named(tmp_path: Path) -> None:
    early = chunk("f", trace(*workflow("early", 2)), spoiled=frozenset({("t", "late")}))
    late = chunk("f", trace(*workflow("late", 2), *workflow("good", 1)), skipped={"row with x": 1})
    last = chunk("f", trace(row("other")).slice(0, 0), spoiled=frozenset({("t", "early")}), skipped={"row with x": 2})
    report = ingest.ingest([feed("f", early, late, last)], tmp_path / "s", skip_bad=True)
    assert report.skipped == {"row with x": 3, "workflow with a skipped row": 2}
    assert read_store(tmp_path / "s")["workflow_id"].to_pylist() == ["good"]


def test_since_takes_workflows_by_their_beginning(tmp_path: Path, write_jsonl: Writer) -> None:
    path = write_jsonl(
        *lines(
            *(row("before", step, start_time=90.0 + 20 * step) for step in range(2)),
            *(row("at", step, start_time=100.0 + step) for step in range(2)),
            row("half", 0),
            row("half", 1, start_time=200.0),
            row("untimed"),
            row("wrong", 3, start_time=10.0),
        )
    )
    moment = dt.datetime.fromtimestamp(100, dt.UTC)
    report = ingest.ingest([path], tmp_path / "s", since=moment)
    assert read_store(tmp_path / "s")["workflow_id"].to_pylist() == ["at", "at", "half", "half"]
    assert report.skipped == {
        "workflow that began before 1970-01-01T00:01:40+00:00": 2,
        "workflow without a start time, which --since and --until go by": 1,
    }
    nothing = ingest.ingest([path], tmp_path / "s", since=moment + dt.timedelta(days=1))
    assert (nothing.workflows, sum(nothing.skipped.values())) == (0, 5)
    earlier = ingest.ingest([path], tmp_path / "earlier", until=moment, skip_bad=True)
    assert set(read_store(tmp_path / "earlier")["workflow_id"].to_pylist()) == {"before"}
    assert earlier.skipped["workflow that began at 1970-01-01T00:01:40+00:00 or later"] == 2
    between = ingest.ingest([path], tmp_path / "b", since=moment, until=moment + dt.timedelta(seconds=99))
    assert set(read_store(tmp_path / "b")["workflow_id"].to_pylist()) == {"at"}
    assert sum(between.skipped.values()) == 4


@pytest.mark.parametrize("skip_bad", [False, True])
def test_nothing_at_all_is_refused(tmp_path: Path, write_jsonl: Writer, skip_bad: bool) -> None:
    for content, words in (((), "an empty trace"), (lines(row(step=1)), r"step 1 of|every workflow breaks a rule")):
        with pytest.raises(TraceError, match=words):
            ingest.ingest([write_jsonl(*content)], tmp_path / "s", skip_bad=skip_bad)
        assert not (tmp_path / "s").exists()


def test_progress_tells_the_share_of_the_bytes(tmp_path: Path, write_jsonl: Writer) -> None:
    told: list[tuple[str, float | None]] = []
    paths = [write_jsonl(*lines(*workflow(f"w{i}", 5)), name=f"{i}.jsonl") for i in range(4)]
    ingest.ingest(paths, tmp_path / "s", progress=lambda doing, share: told.append((doing, share)))
    shares = [share for doing, share in told if doing == "reading traces" and share is not None]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [doing for doing, _ in told if doing != "reading traces"] == ["checking and writing", "committing"]


def _killed_at(paths: list[Path], store: Path, entry: int | None) -> None:
    """Ingests until the journal has that many entries, or until everything is in place but the manifest."""
    sources.GROUP_BYTES, ingest.RANGE_BYTES, spill.BATCH_BYTES = 1, 1000, 200

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    add = Journal.add

    def adding(self: Journal, one: Any) -> None:
        add(self, one)
        if (self.folder / "journal.jsonl").read_bytes().count(b"\n") == entry:
            die()

    Journal.add = adding  # type: ignore[method-assign]
    if entry is None:
        from presage.datasets.store import parts

        parts.save = lambda *_: die()  # type: ignore[assignment]
    ingest.ingest(paths, store)


def _kill(sources: list[Path], store: Path, entry: int | None) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_killed_at, args=(sources, store, entry))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def three_files(write_jsonl: Writer) -> list[Path]:
    return [
        write_jsonl(*lines(*(one for j in range(30) for one in workflow(f"w{i}-{j}", 3))), name=f"{i}.jsonl")
        for i in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "resumed"), [(1, 1), (3, 3), (6, 3), (None, 3)])
def test_after_a_kill_the_same_command_goes_on(
    tmp_path: Path, three_files: list[Path], entry: int | None, resumed: int
) -> None:
    append(trace(*workflow("old", 2)), tmp_path / "s")
    _kill(three_files, tmp_path / "s", entry)
    assert read_store(tmp_path / "s").num_rows == 2
    report = ingest.ingest(three_files, tmp_path / "s")
    assert report == IngestReport(90, 270, 0, 0, {}, resumed)
    assert read_store(tmp_path / "s").num_rows == 272
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [".lock", "_manifest.json", "workflow_type=t"]


@pytest.mark.slow
def test_a_file_that_changed_after_the_kill_is_read_again_and_others_are_not(
    tmp_path: Path, three_files: list[Path]
) -> None:
    _kill(three_files, tmp_path / "s", 3)
    assert not is_store(tmp_path / "s")
    three_files[1].write_text("\n".join(lines(*workflow("new", 4))))
    report = ingest.ingest(three_files, tmp_path / "s")
    assert (report.workflows, report.resumed) == (61, 2)
    assert set(read_store(tmp_path / "s")["workflow_id"].to_pylist()) >= {"new", "w0-0", "w2-29"}


@pytest.mark.slow
def test_what_another_command_left_is_swept_a_day_later(tmp_path: Path, three_files: list[Path]) -> None:
    _kill(three_files, tmp_path / "s", 2)
    left = next((tmp_path / "s" / WORK).iterdir())
    ingest.ingest(three_files[:1], tmp_path / "s")
    assert left.is_dir()
    long_ago = time.time() - 25 * 3600
    os.utime(left / "journal.jsonl", (long_ago, long_ago))
    ingest.ingest(three_files[1:], tmp_path / "s")
    assert not left.exists()


@pytest.mark.slow
def test_after_a_kill_another_append_in_between_is_seen(tmp_path: Path, three_files: list[Path]) -> None:
    _kill(three_files, tmp_path / "s", 6)
    append(trace(*workflow("w1-7", 3)), tmp_path / "s")
    report = ingest.ingest(three_files, tmp_path / "s")
    assert (report.workflows, report.already_present, report.resumed) == (89, 1, 3)
    assert read_store(tmp_path / "s").num_rows == 270


def _ingest_under_a_limit(source: Path, store: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        ingest.ingest([source], store)
    except OutputError:
        raise SystemExit(7) from None


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(tmp_path: Path, there: bool) -> None:
    if there:
        append(trace(*workflow("w", 2)), tmp_path / "s")
    before = _files(tmp_path / "s")
    noise = np.random.default_rng(0).integers(33, 126, (2000, 500), np.uint8)
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines(*(row("big", i, output_text=bytes(noise[i]).decode()) for i in range(2000)))))
    process = multiprocessing.get_context("spawn").Process(target=_ingest_under_a_limit, args=(path, tmp_path / "s"))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert _files(tmp_path / "s") == before
    assert (tmp_path / "s").exists() == there


def _long_texts(workflows: int) -> Iterator[Source]:
    draw = np.random.default_rng(0)
    for first in range(0, workflows, 50):
        rows = [
            row(f"w{name}", step, input_text=draw.bytes(10_000).hex())
            for name in range(first, first + 50)
            for step in range(10)
        ]
        yield chunk("texts", trace(*rows))


def _peak_of_ingesting(store: Path, workflows: int, answer: Any) -> None:
    report = ingest.ingest([Feed("texts", partial(_long_texts, workflows))], store)
    # Not getrusage, whose peak includes that of the process which started this one.
    status = Path("/proc/self/status").read_text()
    answer.send(
        (report.workflows, next(int(s.split()[1]) for s in status.splitlines() if s.startswith("VmHWM")) / 1024)
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_is_bounded_however_much_comes_in(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak_of_ingesting, args=(tmp_path / "s", 3000, there))
    process.start()
    assert here.poll(600)
    workflows, peak_mib = here.recv()
    process.join()
    assert workflows == 3000  # 30,000 steps of 20,000 characters: 572 MiB, beside some 150 of libraries
    assert peak_mib < 600


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
