"""Files of step times are read as they were written, and what is wrong with one is said in a line."""

from pathlib import Path

import numpy as np
import pytest
from step_time_samples import iterations, measured, times_of, write_steps

from presage.errors import TraceError
from presage.replay.calibrate import read_step_times

TIMES = measured(iterations(5), times_of(iterations(5)))


def test_several_files_of_one_engine_are_one(tmp_path: Path) -> None:
    paths = [write_steps(tmp_path / name, TIMES) for name in ("a.jsonl", "b.jsonl")]
    found = read_step_times(paths)
    assert found.engine == TIMES.engine
    assert np.array_equal(found.tokens, np.concatenate([TIMES.tokens] * 2))
    assert np.array_equal(found.seconds, np.concatenate([TIMES.seconds] * 2))


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "a.jsonl", TIMES)
    path.write_text(path.read_text()[:-9])
    assert len(read_step_times([path]).seconds) == 4


def test_an_engine_that_has_done_nothing_has_no_iterations(tmp_path: Path) -> None:
    found = read_step_times([write_steps(tmp_path / "a.jsonl", measured(iterations(0), times_of(iterations(0))))])
    assert (found.tokens.shape, found.seconds.shape) == ((0, 4), (0,))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prefill_tokens": 1, "decode_tokens": 2, "context_tokens": 3, "seconds": -1}', "line 7: seconds"),
        ('{"prefill_tokens": 1.5, "decode_tokens": 2, "context_tokens": 3, "seconds": 1}', "line 7: prefill_tokens"),
        ('{"prefill_tokens": 1, "decode_tokens": 2, "seconds": 1}', "line 7: context_tokens"),
        ("no JSON", "line 7: the line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write_steps(tmp_path / "a.jsonl", TIMES)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match=said):
        read_step_times([path])


def test_other_files_and_other_engines_are_refused(tmp_path: Path) -> None:
    first, other = write_steps(tmp_path / "a.jsonl", TIMES), write_steps(tmp_path / "b.jsonl", TIMES, model="other")
    with pytest.raises(TraceError, match="another engine"):
        read_step_times([first, other])
    (tmp_path / "trace.jsonl").write_text('{"workflow_type": "t"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    for path in (tmp_path / "trace.jsonl", tmp_path / "empty.jsonl"):
        with pytest.raises(TraceError, match="first line is not that of step times"):
            read_step_times([path])
    with pytest.raises(TraceError, match="FileNotFoundError"):
        read_step_times([tmp_path / "nowhere"])
