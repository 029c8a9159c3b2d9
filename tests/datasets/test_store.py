"""The store: what goes in comes out, whatever the order, and a failed append leaves no mark."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from dataset_samples import row, trace, traces, workflow
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.ingest import IngestReport, append
from presage.datasets.read import read_traces
from presage.datasets.schema import digest, trace_schema
from presage.datasets.store import open_store, read_store, scan_store
from presage.datasets.store import parts as parts_module
from presage.datasets.store.parts import WORK, is_store
from presage.errors import OutputError, TraceError


def added(report: IngestReport) -> tuple[int, int, int]:
    return report.workflows, report.steps, report.already_present


@settings(max_examples=40)
@given(table=traces(), data=st.data())
def test_store_round_trip_in_any_portions(table: pa.Table, data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store") / "s"
    keys = (
        table.select(["workflow_type", "workflow_id"])
        .group_by(["workflow_type", "workflow_id"])
        .aggregate([])
        .to_pylist()
    )
    portions = data.draw(st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys)))
    for portion in data.draw(st.permutations(sorted(set(portions)))):
        mask = [
            portions[keys.index({"workflow_type": kind, "workflow_id": name})] == portion
            for kind, name in zip(table["workflow_type"].to_pylist(), table["workflow_id"].to_pylist(), strict=True)
        ]
        append(table.filter(pa.array(mask)), store)
    assert digest(read_store(store)) == digest(table)
    assert read_store(store).equals(table)
    assert added(append(table, store)) == (0, 0, len(keys))


def test_the_store_is_lazy_partitioned_and_readable_by_others(tmp_path: Path) -> None:
    table = trace(*workflow("w", 2, "a/b"), *workflow("v", 3, "c"))
    assert added(append(table, tmp_path / "s")) == (2, 5, 0)
    dataset = open_store(tmp_path / "s")
    assert dataset.schema.equals(trace_schema())
    assert len(list(dataset.get_fragments(filter=ds.field("workflow_type") == "c"))) == 1
    assert read_store(tmp_path / "s", ["a/b"], ["step", "agent"]).to_pylist() == [
        {"step": 0, "agent": "a"},
        {"step": 1, "agent": "b"},
    ]
    assert sorted(pq.read_table(tmp_path / "s")["workflow_type"].to_pylist()) == ["a/b"] * 2 + ["c"] * 3


def test_rows_without_state_survive(tmp_path: Path) -> None:
    append(trace(*workflow("w", 2)), tmp_path / "s")
    append(trace(row("v", prefill_state=[1.0, 2.0]), row("v", 1, prefill_state=None)), tmp_path / "s")
    assert read_store(tmp_path / "s")["prefill_state"].to_pylist() == [[1.0, 2.0], None, None, None]


def test_a_store_of_before_there_were_finish_reasons_and_layers_reads_and_grows(tmp_path: Path) -> None:
    old = trace(*workflow("w", 2), *workflow("v", 3, output_tokens=4, prefill_state=[1.0]))
    append(old, tmp_path)
    for part in tmp_path.glob("workflow_type=*/*.parquet"):
        pq.write_table(pq.read_table(part, partitioning=None).drop_columns(["finish_reason", "state_layer"]), part)
        assert not {"finish_reason", "state_layer"} & {*pq.read_schema(part).names}
    assert read_store(tmp_path).equals(old)
    assert read_traces([tmp_path]).table.equals(old)
    new = workflow("u", 1, finish_reason="stop", prefill_state=[1.0], state_layer=20)
    assert added(append(trace(*workflow("w", 2), *new), tmp_path)) == (1, 1, 1)
    assert read_store(tmp_path)["finish_reason"].to_pylist() == ["stop"] + [None] * 5
    assert read_store(tmp_path)["state_layer"].to_pylist() == [20] + [None] * 5
    for i in range(15):  # until the parts are joined, old ones with new ones
        append(trace(*workflow(f"x{i:02}", 1, finish_reason="length")), tmp_path)
    assert len(list(tmp_path.glob("workflow_type=t/*"))) < 16
    assert read_traces([tmp_path]).table["finish_reason"].to_pylist() == ["stop"] + [None] * 5 + ["length"] * 15


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (workflow("w", 3), "2 steps there and 3 here"),
        (workflow("w", 2, output_text="new"), "column 'output_text' differs"),
    ],
)
def test_a_workflow_with_other_content_is_refused_and_nothing_changes(
    tmp_path: Path, again: list[dict[str, Any]], words: str
) -> None:
    append(trace(*workflow("w", 2)), tmp_path)
    before = _files(tmp_path)
    with pytest.raises(TraceError, match=words):
        append(trace(*workflow("new", 1), *again), tmp_path)
    assert _files(tmp_path) == before


def test_states_of_another_size_are_refused(tmp_path: Path) -> None:
    append(trace(row("w", prefill_state=[1.0, 2.0])), tmp_path)
    with pytest.raises(TraceError, match="mixed state sizes"):
        append(trace(row("v", prefill_state=[1.0])), tmp_path)


def test_a_folder_of_other_things_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TraceError, match="other files"):
        append(trace(row()), tmp_path)
    with pytest.raises(TraceError, match="no trace store"):
        open_store(tmp_path)
    with pytest.raises(TraceError, match="a file"):
        append(trace(row()), tmp_path / "thesis.txt")


def test_a_crash_before_the_commit_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(trace(*workflow("w", 2)), tmp_path)
    before = _files(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "save", full)
        with pytest.raises(OutputError, match="No space left on device"):
            append(trace(*workflow("v", 2), *workflow("u", 2, "other")), tmp_path)
    assert _files(tmp_path) == before
    # A kill leaves the files behind: readers do not see them, and the next append sweeps them away.
    stale = tmp_path / "workflow_type=t" / "part-dead.parquet"
    stale.write_bytes(b"half")
    assert read_store(tmp_path).num_rows == 2
    append(trace(*workflow("v", 2)), tmp_path)
    assert not stale.exists()
    assert read_store(tmp_path).num_rows == 4


def test_many_small_parts_are_joined_and_nothing_is_lost(tmp_path: Path) -> None:
    made = [workflow(f"w{i:02}", 1 + i % 3, prefill_state=[float(i), 1.0] if i % 5 == 0 else None) for i in range(40)]
    append(trace(*workflow("x", 2, "other")), tmp_path)
    for rows in made:
        append(trace(*rows), tmp_path)
    files = list(tmp_path.glob("workflow_type=t/*"))
    assert len(files) < 16
    assert len(pq.ParquetDataset(tmp_path).files) == len(files) + 1
    whole = trace(*workflow("x", 2, "other"), *(one for rows in made for one in rows))
    assert digest(read_store(tmp_path)) == digest(whole)
    assert added(append(whole, tmp_path)) == (0, 0, 41)


def test_a_reader_whose_parts_were_joined_meanwhile_is_told_to_read_again(tmp_path: Path) -> None:
    for i in range(15):
        append(trace(*workflow(f"w{i}", 1)), tmp_path)
    chunks = scan_store(tmp_path)
    next(chunks)
    append(trace(*workflow("w15", 1)), tmp_path)
    with pytest.raises(TraceError, match="joined with others, if the store was written to: read it again"):
        list(chunks)
    assert sum(chunk.table.num_rows for chunk in scan_store(tmp_path)) == 16


def test_a_crash_while_joining_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(15):
        append(trace(*workflow(f"w{i}", 1)), tmp_path)
    before = _files(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            append(trace(*workflow("w15", 1)), tmp_path)
    assert _files(tmp_path) == before
    append(trace(*workflow("w15", 1)), tmp_path)
    assert len(list(tmp_path.glob("workflow_type=t/*"))) == 1
    assert read_store(tmp_path).num_rows == 16


def _append_under_a_limit(store: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    text = "".join(chr(33 + i * i % 90) for i in range(3000))
    rows = [row("big", i, output_text=f"{text[i:]}{i**7}") for i in range(200)]
    try:
        append(trace(*rows), store)
    except OutputError:
        raise SystemExit(7) from None


def test_a_disk_that_fills_up_while_writing_is_one_clear_error(tmp_path: Path) -> None:
    append(trace(*workflow("w", 2)), tmp_path)
    before = _files(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=_append_under_a_limit, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert _files(tmp_path) == before


def _append_some(store: Path, worker: int) -> None:
    for i in range(4):
        append(trace(*workflow(f"w{worker}-{i}", 2)), store)


def test_appends_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_some, args=(tmp_path / "s", i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert pc.count_distinct(read_store(tmp_path / "s")["workflow_id"]).as_py() == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw | {"schema_version": 2}, "schema version 2"),
        (lambda raw: raw | {"format": "other"}, "not the manifest"),
        (lambda raw: {"parts": []}, "not the manifest"),
        (lambda raw: raw | {"parts": [raw["parts"][0] | {"path": "gone.parquet"}]}, "gone.parquet"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    append(trace(row()), tmp_path)
    manifest = tmp_path / "_manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    assert is_store(tmp_path)
    with pytest.raises(TraceError, match=words):
        read_store(tmp_path)


def test_a_damaged_part_is_named_as_such(tmp_path: Path) -> None:
    append(trace(row()), tmp_path)
    part = next(tmp_path.glob("workflow_type=*/*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(TraceError, match="a part cannot be read"):
        read_traces([tmp_path])


@pytest.mark.parametrize(
    ("options", "words"), [({"workflow_types": ["x"]}, "no workflow type 'x'"), ({"columns": ["x"]}, "no column 'x'")]
)
def test_what_the_store_lacks_is_said(tmp_path: Path, options: Any, words: str) -> None:
    append(trace(row()), tmp_path)
    with pytest.raises(TraceError, match=words):
        read_store(tmp_path, **options)


def _files(folder: Path) -> dict[str, bytes]:
    """All files but those of an interrupted ingestion, which are not of the store yet."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and WORK not in p.parts]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}
