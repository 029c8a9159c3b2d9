"""Whatever the disk does: counted, said once, gone on with, and readable."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from by_name import Recorder
from recorder_samples import Hands, Named, counts, recorder, serve, vector

from presage.datasets.adapters.recording import TORN, TORN_BYTES
from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.errors import TraceError
from presage.serving_hooks.recorder.config import RecorderConfig

STARTS_WITHIN_S = 60.0


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("engine-*/*.arrows"))


def turn(one: Recorder, hands: Hands, seconds: float = 2.0) -> None:
    """Some time passes, and the writer looks at its queue, at first too early and then not."""
    one.writer.turn(hands.rising)
    hands.on(seconds)
    one.writer.turn(hands.rising)


def test_files_are_rotated_by_rows(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, rows_per_file=6)
    for i in range(4):
        serve(one, f"w{i}", "abc")
        turn(one, hands)
    assert files(tmp_path) == [f"{table}-00000{i}.arrows" for table in ("ends", "steps") for i in (1, 2)]
    serve(one, "v", "a", ends=False)
    turn(one, hands)
    assert files(tmp_path)[-1] == "steps-000003.open.arrows"
    assert read_traces([tmp_path]).table.num_rows == 12
    one.close()
    assert files(tmp_path)[-1] == "steps-000003.arrows"
    assert read_traces([tmp_path]).table.num_rows == 13


def test_files_are_rotated_by_bytes_and_age(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, file_mb=1, file_age_s=60.0, states="prefill", queue_mb=64)
    for i in range(40):
        one.begun(f"r{i}", Named())
        one.states([f"r{i}"], "prefill", vector(i, 32_768)[None])
        one.completed(f"r{i}")
    turn(one, hands)
    assert files(tmp_path) == ["steps-000001.arrows"]
    serve(one, "w", "a", ends=False, first=100)
    turn(one, hands)
    assert files(tmp_path) == ["steps-000001.arrows", "steps-000002.open.arrows"]
    turn(one, hands, 61.0)
    assert files(tmp_path) == ["steps-000001.arrows", "steps-000002.arrows"]


def test_a_row_is_in_its_file_soon(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands)
    serve(one, "w", "ab")
    one.writer.turn(hands.rising)
    assert files(tmp_path) == []
    hands.on(1.0)
    one.writer.turn(hands.rising)
    assert read_traces([tmp_path]).table.num_rows == 2


class Disk:
    """Files of a disk that can be full."""

    def __init__(self) -> None:
        self.full = False

    def open(self, path: str) -> Any:
        disk = self

        file = pa.OSFile(path, "wb")

        class Sink:
            closed = False
            mode = "wb"

            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                if disk.full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(file.write(data) or len(data))

            def tell(self) -> int:
                return int(file.tell())

            def flush(self) -> None:
                pass

            def close(self) -> None:
                self.closed = True
                file.close()

        return Sink()


def test_a_full_disk_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hands, disk = Hands(), Disk()
    one = recorder(tmp_path, hands, open_file=disk.open)
    serve(one, "w", "ab")
    turn(one, hands)
    disk.full = True
    serve(one, "v", "ab")
    for _ in range(5):
        turn(one, hands, 1.0)
    assert one.status().recording == "paused: no space left on device"
    assert read_traces([tmp_path]).table.num_rows == 2
    disk.full = False
    turn(one, hands, 60.0)
    assert one.status().recording == "recording"
    one.close()
    assert read_traces([tmp_path]).table.num_rows == 4
    assert counts(one)["not written at once: no space left on device"] >= 2
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2, "said once, and once that it goes on"
    assert "no space left on device" in caplog.text


def test_a_disk_that_stays_full_costs_rows_that_are_counted(tmp_path: Path) -> None:
    hands, disk = Hands(), Disk()
    one = recorder(tmp_path, hands, queue_rows=20, open_file=disk.open)
    disk.full = True
    for i in range(100):
        serve(one, f"w{i}", "abc")
        turn(one, hands, 0.1)
    one.close()
    found = counts(one)
    lost = found["dropped: queue full"] + found["lost: not written before the end"]
    assert lost == 400
    assert "written: steps" not in found
    assert files(tmp_path) == []


def _record_under_a_limit(folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    one = Recorder(
        RecorderConfig(folder=str(folder), states="both", flush_s=0.01, linger_s=0.0), instance="one"
    ).start()
    for i in range(100):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.states([f"r{i}"], "prefill", vector(i, 2560)[None])
        one.completed(f"r{i}")
        one.ended("t", f"w{i}", "finished")
        while i < 10 and counts(one).get("written: ends", 0) <= i:
            time.sleep(0.005)  # however busy the machine: a batch larger than the limit could not be written at all
    one.close()
    raise SystemExit(7 if one.status().counts["not written at once: file too large"] else 0)


@pytest.mark.slow
def test_a_file_that_may_not_grow_keeps_what_was_whole_in_it(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_record_under_a_limit, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 7
    table = read_traces([tmp_path]).table
    assert 10 <= table.num_rows <= 100
    assert all(state is not None for state in table["prefill_state"].to_pylist())


def _record_for_ever(folder: Path) -> None:
    one = Recorder(
        RecorderConfig(folder=str(folder), states="both", flush_s=0.01, linger_s=0.0), instance="one"
    ).start()
    i = 0
    while True:
        one.begun(f"r{i}", Named(f"w{i // 5}", "abcde"[i % 5]))
        one.states([f"r{i}"], "prefill", vector(0, 2560)[None])
        one.completed(f"r{i}", output_tokens=i)
        if i % 5 == 4:
            one.ended("t", f"w{i // 5}", "finished")
        i += 1
        time.sleep(0.0005)


@pytest.mark.slow
def test_the_recording_of_a_killed_engine_is_read_up_to_its_last_whole_batch(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_record_for_ever, args=(tmp_path / "r",))
    process.start()
    path = tmp_path / "r" / "engine-one" / "steps-000001.open.arrows"
    until = time.monotonic() + STARTS_WITHIN_S
    while not (path.exists() and path.stat().st_size > 3_000_000):
        assert process.is_alive()
        assert time.monotonic() < until
        time.sleep(0.05)
    # while it records: what has ended, and nothing of what goes on
    first = ingest([tmp_path / "r"], tmp_path / "store")
    assert first.steps % 5 == 0
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    torn = path.stat().st_size - 1000
    os.truncate(path, torn)  # inside the last batch, wherever the kill found it
    second = ingest([tmp_path / "r"], tmp_path / "store")
    assert second.already_present == first.workflows
    assert second.skipped[TORN] == 1
    assert 0 < second.skipped[TORN_BYTES] < 3_000_000
    table = read_traces([tmp_path / "store"]).table
    tokens = sorted(table["output_tokens"].to_pylist())
    assert tokens == list(range(len(tokens))), "every step from the first to the last that is whole, once"
    cut = set(table.filter(pc.invert(table["complete"]))["workflow_id"].to_pylist())
    assert len(cut) <= 2, "the one under way, and one whose end was not on disk"
    assert ingest([tmp_path / "r"], tmp_path / "store").workflows == 0


def _record_and_idle(folder: Path, written: Connection) -> None:
    one = Recorder(RecorderConfig(folder=str(folder), states="both"), instance="one").start()
    for i in range(20):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.states([f"r{i}"], "prefill", vector(i)[None])
        one.completed(f"r{i}", state_comes=True)
        one.states([f"r{i}"], "completion", vector(i)[None])
        if i:
            one.ended("t", f"w{i}", "finished")
    while counts(one).get("written: ends") != 19:
        time.sleep(0.01)
    written.send(counts(one)["written: steps"])
    threading.Event().wait()


@pytest.mark.slow
def test_an_idle_engine_that_is_killed_loses_nothing_but_only_when_it_is_dead_nothing_of_it_waits(
    tmp_path: Path,
) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_record_and_idle, args=(tmp_path, there), daemon=True)
    process.start()
    assert here.recv() == 20
    assert read_traces([tmp_path]).table.num_rows == 19, "w0 has not ended and may go on"
    process.kill()
    process.join()
    table = read_traces([tmp_path]).table
    assert table.num_rows == 20
    assert table["complete"].to_pylist().count(False) == 1
    for column in ("prefill_state", "completion_state"):
        assert not table[column].null_count


def test_any_end_of_a_file_may_be_torn(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path / "r", hands)
    for i in range(3):
        serve(one, f"w{i}", "ab")
        turn(one, hands)
    one.close()
    path = tmp_path / "r" / "engine-one" / "steps-000001.arrows"
    whole = path.read_bytes()
    seen = []
    for end in [*range(0, len(whole), 97), len(whole)]:
        path.write_bytes(whole[:end])
        try:
            seen.append(read_traces([tmp_path / "r"]).table.num_rows)
        except TraceError:
            seen.append(0)
    assert seen == sorted(seen)
    assert set(seen) == {0, 2, 4, 6}


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hands = Hands()
    one = recorder(tmp_path / "r", hands)
    serve(one, "w", "ab")
    turn(one, hands)
    shutil.rmtree(tmp_path / "r")
    serve(one, "v", "ab")
    turn(one, hands)
    serve(one, "u", "ab")
    turn(one, hands, 5.0)
    turn(one, hands, 5.0)
    one.close()
    assert {name[0] for name in read_traces([tmp_path / "r"]).table["workflow_id"].to_pylist()} == {"v", "u"}
    assert counts(one) == {
        "written: steps": 6,
        "written: ends": 3,
        "lost: steps in a file that was removed": 2,
        "lost: ends in a file that was removed": 1,
    }
    assert not caplog.records


def test_a_folder_that_cannot_be_made_is_no_error_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    hands = Hands()
    one = recorder(tmp_path / "file" / "r", hands)
    serve(one, "w", "ab")
    turn(one, hands)
    assert one.status().recording == "paused: not a directory"
    one.close()
    assert counts(one)["lost: not written before the end"] == 3


def test_a_recording_takes_no_more_room_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, states="prefill", max_mb=1, queue_mb=64, file_age_s=5.0)

    def some(first: int) -> None:
        for i in range(first, first + 20):
            one.begun(f"r{i}", Named(f"w{i}"))
            one.states([f"r{i}"], "prefill", vector(i, 32_768)[None])
            one.completed(f"r{i}")
            one.ended("t", f"w{i}", "finished")
        turn(one, hands)

    for i in range(5):
        some(20 * i)
    assert counts(one)["written: steps"] == 20
    assert counts(one)["dropped: recording full"] == 160
    assert one.status().recording == "stopped: the recording takes all the room it may"
    assert len(caplog.records) == 1
    for path in tmp_path.glob("engine-*/*-000001*.arrows"):
        path.unlink()
    hands.on(20.0)
    some(100)
    assert one.status().recording == "recording"
    one.close()
    assert counts(one)["written: steps"] == 40
    assert read_traces([tmp_path]).table.num_rows == 20


def test_a_clock_that_is_set_back_is_counted_and_no_time_runs_backwards(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands)
    serve(one, "w", "ab", ends=False)
    hands.wall -= 3600.0
    turn(one, hands)
    serve(one, "w", "cd", first=2)
    hands.rising -= 50.0  # not even this one can be relied on
    serve(one, "v", "a")
    one.close()
    table = read_traces([tmp_path]).table
    assert counts(one)["clock: set back"] == 1
    started = table["started_at"].cast("int64").to_pylist()
    assert started[1:] == sorted(started[1:])
    assert table["complete"].to_pylist() == [True] * 5
