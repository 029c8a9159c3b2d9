"""What the engine's thread tells is what is written; what is not is counted; nothing is raised."""

from __future__ import annotations

import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from by_name import Recorder
from hypothesis import example, given
from hypothesis import strategies as st
from recorder_samples import SIZE, Hands, Named, counts, forecast, recorder, serve, vector

from presage.datasets.read import read_traces
from presage.datasets.recording import RECORDED_EXPIRED
from presage.errors import ConfigurationError, TraceError
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import NoRecorder, start
from presage.serving_hooks.recorder.rows import State
from presage.serving_hooks.recorder.writer import StateColumn
from presage.serving_hooks.status import RecorderStatus


def test_a_step_is_written_as_it_was_told(tmp_path: Path) -> None:
    hands = Hands(1_800_000_000.0)
    one = recorder(tmp_path, hands, states="both")
    one.begun("r", Named("w", "planner", 0), input_tokens=412, cached_input_tokens=64)
    first, last = vector(0), vector(1, dtype=np.float16)
    one.states(["r"], "prefill", first[None])
    hands.on(2.5)
    one.completed("r", output_tokens=9, finish_reason="stop", state_comes=True)
    one.states(["r"], "completion", last[None])  # a state may come after the request has left
    one.ended("t", "w", "finished")
    one.close()
    row = read_traces([tmp_path]).table.to_pylist()[0]
    assert row["workflow_id"] == "w@one.0"
    assert (row["workflow_type"], row["step"], row["agent"], row["model"]) == ("t", 0, "planner", "m")
    assert (row["input_tokens"], row["output_tokens"], row["cached_input_tokens"]) == (412, 9, 64)
    assert (row["finish_reason"], row["kind"], row["complete"]) == ("stop", "llm", True)
    assert row["started_at"].timestamp() == 1_800_000_000.0
    assert (row["ended_at"] - row["started_at"]).total_seconds() == 2.5
    assert np.array_equal(np.array(row["prefill_state"], np.float16), first.astype(np.float16))
    assert np.array_equal(np.array(row["completion_state"], np.float16), last)


def test_a_moment_not_asked_for_is_not_kept(tmp_path: Path) -> None:
    one = recorder(tmp_path, states="prefill")
    one.begun("r", Named())
    one.states(["r"], "prefill", vector(0)[None])
    one.states(["r"], "completion", vector(1)[None])
    one.completed("r")
    one.close()
    table = read_traces([tmp_path]).table
    assert np.array_equal(np.array(table["prefill_state"][0].as_py(), np.float16), vector(0).astype(np.float16))
    assert "completion_state" not in table.column_names


def test_a_state_keeps_the_rows_beside_it_only_until_it_is_heard(tmp_path: Path) -> None:
    one, batch = recorder(tmp_path, states="both"), np.ones((64, 2560), np.float16)
    alive = weakref.ref(batch)
    one.begun("r", Named())
    one.states(["r"], "completion", batch[5][None])
    assert one.debug_state()["bytes"] == batch.nbytes, "what is really kept is what counts"
    del batch
    assert alive() is not None
    one.completed("r")
    one.writer.turn(0.0)
    assert alive() is None
    one.close()
    assert np.array_equal(read_traces([tmp_path]).table["completion_state"][0].as_py(), np.ones(2560))


@pytest.mark.parametrize(
    "states",
    [
        *(None, "x", [[1.0]], vector(0), vector(0)[None].astype(np.float64), np.empty((1, 0), np.float32)),
        np.ones((2, 2), np.float32),
    ],
)
def test_what_is_no_state_is_counted(tmp_path: Path, states: Any) -> None:
    one = recorder(tmp_path, states="both")
    one.begun("r", Named())
    one.states(["r"], "prefill", states)
    one.close()
    assert counts(one)["state: no float16 or float32 array [n, d]"] == 1


def test_states_of_several_steps_come_at_once(tmp_path: Path) -> None:
    one, rows = recorder(tmp_path, states="both"), np.stack([vector(seed) for seed in range(4)])
    for i in range(4):
        one.begun(f"r{i}", Named(f"w{i}"))
    one.states(["r2", "nobody", "r0"], "prefill", rows[:3])
    for i in (0, 2, 3):
        one.completed(f"r{i}", state_comes=i != 3)
    one.states(["r3", "r2", "r0"], "completion", rows[1:])  # r3 awaits none
    one.close()
    table = read_traces([tmp_path]).table.to_pylist()
    found = {row["workflow_id"][:2]: (row["prefill_state"], row["completion_state"]) for row in table}
    halves = rows.astype(np.float16).tolist()
    assert found == {
        "w0": (halves[2], halves[3]),
        "w1": (None, None),
        "w2": (halves[0], halves[2]),
        "w3": (None, None),
    }


def test_a_state_that_comes_late_takes_room_in_the_queue_until_its_row_is_written(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, states="both", linger_s=10.0, flush_s=0.01)
    first, second = np.ones((2, 2560), np.float16) * np.array([[1], [2]], np.float16)
    for name in "rs":
        one.begun(name, Named(name))
        one.completed(name, state_comes=True)
    one.writer.turn(hands.rising)
    before = one.debug_state()["bytes"]
    one.states(["s"], "completion", second[None].copy())
    one.writer.turn(hands.rising)
    assert one.debug_state()["bytes"] == before + second.nbytes, "r is waited for, and s is behind it"
    one.states(["r"], "completion", first[None].copy())
    one.writer.turn(hands.rising)
    assert one.debug_state()["bytes"] == 0
    hands.on(1.0)
    one.writer.turn(hands.rising)
    one.states(["r"], "completion", second[None].copy())  # too late, and not kept
    one.close()
    assert read_traces([tmp_path]).table["completion_state"].to_pylist() == [first.tolist(), second.tolist()]


def test_a_state_that_never_comes_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, states="both", linger_s=10.0, flush_s=0.01)
    for name, comes in (("awaits none", False), ("awaits", True)):
        one.begun(name, Named(name))
        one.completed(name, state_comes=comes)
    for seconds, written in ((1.0, 1), (8.0, 1), (2.0, 2)):
        hands.on(seconds)
        for _ in range(2):
            one.writer.turn(hands.rising)
            hands.on(0.02)
        assert counts(one).get("written: steps", 0) == written
    one.close()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (np.full(SIZE, np.nan, np.float32), "prefill_state not kept: NaN, infinity or past ±65504"),
        (np.full(SIZE, 1e6, np.float32), "prefill_state not kept: NaN, infinity or past ±65504"),
        (vector(0, SIZE + 1), "prefill_state not kept: of another width"),
    ],
)
def test_a_state_no_trace_can_hold_costs_its_step_only_that(tmp_path: Path, bad: Any, reason: str) -> None:
    one = recorder(tmp_path, states="both")
    for i, state in enumerate((vector(1), bad, vector(2))):
        one.begun(f"r{i}", Named())
        one.states([f"r{i}"], "prefill", state[None])
        one.completed(f"r{i}")
    one.close()
    table = read_traces([tmp_path]).table
    assert table["prefill_state"].is_valid().to_pylist() == [True, False, True]
    assert np.array_equal(np.array(table["prefill_state"][2].as_py(), np.float16), vector(2).astype(np.float16))
    assert counts(one)[reason] == 1
    assert counts(one)["completion_state that never came"] == 3


def test_no_number_is_taken_for_infinity_and_no_infinity_for_a_number() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    column = StateColumn("prefill_state", EventCounts())
    built = column.build([State("float16", half.tobytes()) for half in halves])
    assert np.array_equal(np.array(built.is_valid()), np.isfinite(halves))


def test_states_of_both_types_are_one_column() -> None:
    states = [vector(0), vector(1, dtype=np.float16), vector(2)]
    built = StateColumn("s", EventCounts()).build([None, *(State(one.dtype.name, one.tobytes()) for one in states)])
    assert built[0].as_py() is None
    for value, state in zip(built[1:], states, strict=True):
        assert np.array_equal(np.frombuffer(value.as_py(), np.float16), state.astype(np.float16))


def test_a_queue_that_is_full_drops_and_counts(tmp_path: Path) -> None:
    one = recorder(tmp_path, queue_rows=10)
    for i in range(5):
        serve(one, f"w{i}", "abc")
    one.close()
    assert counts(one) == {"written: steps": 8, "written: ends": 5, "dropped: queue full": 7}
    done = read_traces([tmp_path])
    # two whole workflows, and two steps of the third, whose last step is missing: cut, and no false end
    assert done.table["complete"].to_pylist() == [True] * 6 + [False] * 2


def test_a_queue_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    one = recorder(tmp_path, queue_mb=1, states="both")
    for i in range(100):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.states([f"r{i}"], "prefill", vector(i, 32_768)[None])
        one.completed(f"r{i}")
    assert 2**19 < one.debug_state()["bytes"] <= 2**20
    one.close()
    found, states = counts(one), read_traces([tmp_path]).table["prefill_state"]
    assert (len(states) - states.null_count) + found["dropped: queue full"] == 100
    assert found["dropped: queue full"] > 80
    assert one.debug_state()["bytes"] == 0


def test_a_writer_that_does_not_come_costs_what_is_counted_and_no_more(tmp_path: Path) -> None:
    one = recorder(tmp_path, queue_rows=10)  # so forty calls may wait, three of each workflow
    serve(one, "known", "abc", ends=False)
    while one.writer.turn(0.0):
        pass
    for i in range(15):
        serve(one, f"w{i}", "a")
    one.begun("late", Named("known", "d"))  # not taken, so its end is not missed
    one.completed("late", output_tokens=1)
    assert one.debug_state()["events"] == 42  # the end of what was taken finds room
    while one.writer.turn(0.0):
        pass
    serve(one, "known", "e", first=4)
    one.close()
    table = read_traces([tmp_path]).table
    known = table.filter(pc.starts_with(table["workflow_id"], "known"))
    assert known["agent"].to_pylist() == ["a", "b", "c"], "what comes behind a gap is no part of a whole workflow"
    assert not any(known["complete"].to_pylist())
    assert counts(one)["dropped: queue full"] > 0
    assert one.debug_state()["running"] == 0


def test_a_state_that_is_told_in_time_is_waited_for_however_late_the_writer_comes(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands, states="both", linger_s=0.25, flush_s=0.01)
    one.begun("r", Named())
    one.states(["r"], "prefill", vector(0)[None])
    one.completed("r", state_comes=True)
    serve(one, "others", "a" * 300)  # more than the writer hears at once
    hands.on(0.05)
    one.states(["r"], "completion", vector(1)[None])
    hands.on(10.0)  # the disk hangs
    while one.writer.turn(hands.rising):
        pass
    hands.on(10.0)
    one.writer.turn(hands.rising)
    assert counts(one)["completion_state that never came"] == 300, "of the others alone"
    one.close()


def test_at_the_end_all_that_was_told_is_heard_before_it_is_written(tmp_path: Path) -> None:
    one = recorder(tmp_path, states="both")
    for i in range(1000):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.states([f"r{i}"], "prefill", vector(i)[None])
        one.completed(f"r{i}", state_comes=True)
        one.states([f"r{i}"], "completion", vector(i)[None])
    one.close()
    assert counts(one) == {"written: steps": 1000}


def test_after_the_end_nothing_is_kept(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.close()
    serve(one, "w", "abc")
    assert one.status().waiting == 0
    assert counts(one) == {"dropped: recorder closed": 3}


def test_forecasts_and_texts_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    one = recorder(tmp_path, queue_mb=1, text="on")
    agents = tuple(f"agent {i}" for i in range(1000))
    one.begun("r", Named())
    for _ in range(1000):
        one.forecast("r", forecast(agents=agents))
    assert one.debug_state()["bytes"] <= 2**20
    assert counts(one)["dropped: queue full"] > 900
    while one.writer.turn(0.0):
        pass
    for i in range(20):
        one.begun(f"s{i}", Named(f"w{i}"))
        one.completed(f"s{i}", output_text="x" * 100_000)
    assert one.debug_state()["bytes"] <= 2**20
    one.close()
    lost = counts(one)["text not kept: queue full"]
    table = read_traces([tmp_path]).table
    assert lost > 10
    assert table["output_text"].null_count == lost + 1  # the first step said nothing
    assert table.num_rows == 21


def test_a_step_that_finds_no_room_is_not_kept_for_what_may_still_come_of_it(tmp_path: Path) -> None:
    def fails(path: str) -> object:
        raise OSError("no disk")

    hands = Hands()
    one = recorder(tmp_path, hands, queue_rows=4, open_file=fails)
    serve(one, "first", "a", ends=False)
    one.writer.turn(hands.rising)
    hands.on(1.0)
    one.writer.turn(hands.rising)  # fails, and is not tried again before a second has passed
    assert one.status().recording == "paused: OSError"
    for i in range(50):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.completed(f"r{i}")
        one.writer.turn(hands.rising)
    assert one.debug_state()["late"] == 1 + 4


def test_of_a_large_array_only_the_row_is_kept(tmp_path: Path) -> None:
    one, batch = recorder(tmp_path, states="both", queue_mb=1), np.ones((256, 2560), np.float16)
    for i in range(64):
        one.begun(f"r{i}", Named(f"w{i}"))
        one.states([f"r{i}"], "prefill", batch[i][None])
    assert one.debug_state()["bytes"] == 64 * 2 * 2560
    one.close()
    assert read_traces([tmp_path]).table["prefill_state"].null_count == 0


@given(st.lists(st.sampled_from("bcsfet"), max_size=60), st.integers(1, 6))
@example(["b", "b", "f", "c", "t"], 1)
def test_whatever_is_dropped_no_workflow_looks_whole_that_is_not(events: list[str], room: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        one, begun, told = recorder(Path(name), queue_rows=room), 0, 0
        for what in events:
            if what == "b":
                begun += 1
                one.begun(f"r{begun}", Named("w", "a", begun - 1))
            elif what == "c" and told < begun:
                told += 1
                one.completed(f"r{told}")
            elif what == "f":
                one.forecast(f"r{begun}", forecast())
            elif what == "s":
                one.states([f"r{begun}"], "prefill", vector(0)[None])
            elif what == "t":
                one.writer.turn(0.0)
            elif what == "e":
                break
        one.ended("t", "w", "finished")
        one.close()
        found = counts(one)
        if found.get("written: steps"):
            with suppress(TraceError):  # none is usable: the first step was dropped
                table = read_traces([Path(name)]).table
                assert table.num_rows == begun or not all(table["complete"].to_pylist())


@pytest.mark.parametrize(
    "step",
    [
        Named(workflow_id=""),
        Named(workflow_id="x" * 257),
        Named(workflow_id="a\nb"),
        Named(workflow_type="\ud800"),
        Named(agent="x" * 257),
        Named(workflow_id=7),  # type: ignore[arg-type]
        Named(agent=None),  # type: ignore[arg-type]
    ],
)
def test_names_are_bounded(tmp_path: Path, step: Named) -> None:
    one = recorder(tmp_path)
    one.begun("r", step)
    one.completed("r")
    one.close()
    assert counts(one) == {"not recorded: no name, or none of at most 256 printable characters": 1}


def test_a_step_that_was_refused_is_a_gap(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", ["a", "b" * 300, "c"])
    serve(one, "v", ["a"])
    one.close()
    table = read_traces([tmp_path]).table
    assert list(zip(table["agent"].to_pylist(), table["complete"].to_pylist(), strict=True)) == [
        ("a", True),
        ("a", False),
    ]


def test_types_are_bounded(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    for i in range(1010):
        one.begun(f"r{i}", Named("w", "a", None, f"type {i}"))
    assert counts(one) == {"not recorded: too many workflow types": 10}


def test_nothing_is_raised_whatever_comes(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.begun("r", object())  # type: ignore[arg-type]
    one.begun(["r"], Named())  # type: ignore[arg-type]
    one.completed({})  # type: ignore[arg-type]
    one.forecast("never begun", None)  # type: ignore[arg-type]
    one.begun("s", Named(), input_tokens="many", cached_input_tokens=-1)  # type: ignore[arg-type]
    one.forecast("s", None)  # type: ignore[arg-type]
    one.completed("s", output_tokens=2**40, finish_reason=3)  # type: ignore[arg-type]
    one.close()
    assert counts(one)["failed: AttributeError"] == 3
    assert counts(one)["failed: TypeError"] == 2
    row = read_traces([tmp_path]).table.to_pylist()[0]
    assert [row[name] for name in ("input_tokens", "output_tokens", "cached_input_tokens", "finish_reason")] == [
        None
    ] * 4


def test_a_forecast_nobody_can_write_costs_no_other_row(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.begun("r", Named())
    for live in (forecast(), forecast(agents=("a", 5)), forecast()):  # type: ignore[arg-type]
        one.forecast("r", live)
    one.completed("r")
    one.close()
    assert counts(one)["written: forecasts"] == 2
    assert counts(one)["row not written: ArrowTypeError"] == 1
    assert counts(one)["written: steps"] == 1


def test_steps_under_way_at_the_end_are_written_as_far_as_they_are_known(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "ab", ends=False)
    one.begun("w-2", Named("w", "c"), input_tokens=7)
    one.close()
    table = read_traces([tmp_path]).table
    assert table["agent"].to_pylist() == ["a", "b", "c"]
    assert table["ended_at"].is_valid().to_pylist() == [True, True, False]
    assert table["complete"].to_pylist() == [False] * 3


def test_an_end_while_a_step_runs_waits_for_it(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.begun("r", Named())
    one.ended("t", "w", RECORDED_EXPIRED)
    one.begun("s", Named())  # the same name again: another run
    one.completed("r")
    one.completed("s")
    one.close()
    table = read_traces([tmp_path]).table
    assert table["workflow_id"].to_pylist() == ["w@one.0", "w@one.1"]
    assert table["complete"].to_pylist() == [True, False]


def test_a_thread_writes_while_the_engine_goes_on(tmp_path: Path) -> None:
    one = Recorder(RecorderConfig(folder=str(tmp_path), flush_s=0.01), model="m").start()
    for i in range(300):
        serve(one, f"w{i}", "abc")
    one.close()
    assert one.status().counts == {"written: steps": 900, "written: ends": 300}
    assert one.status().recording == "closed"
    assert not any(thread.name == "presage-recorder" for thread in threading.enumerate())
    assert read_traces([tmp_path]).table.num_rows == 900


def test_without_settings_nothing_is_recorded() -> None:
    none = start(None)
    assert isinstance(none, NoRecorder)
    none.begun("r", Named())
    none.forecast("r", forecast())
    none.states(["r"], "prefill", vector(0)[None])
    none.close()
    assert none.status() == RecorderStatus()


@pytest.mark.parametrize("name", ["no.such.module:redact", "json:no_such_function", "json:__name__"])
def test_a_redaction_that_cannot_be_had_is_said_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"recorder\.redact is"):
        start(RecorderConfig(folder=str(tmp_path), redact=name))
