"""Outcomes: rows in, one matrix out; what is refused and how it is said."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.datasets.outcomes.read import read_outcomes
from presage.datasets.outcomes.schema import keys_of, outcomes_digest, prompt_keys
from presage.errors import TraceError

ROWS = [
    {
        "prompt": "What is 2+2?",
        "model": "b",
        "correct": 1,
        "task": "sums",
        "output_tokens": 5,
        "cost": 0.5,
        "extra": [],
    },
    {"prompt": "What is 2+2?", "model": "a", "correct": 0},
    {"prompt": "Name a river", "model": "a", "correct": True},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    names = sorted({name for row in rows for name in row} - {"extra"})
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    return path


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz", "o.parquet"])
def test_rows_become_a_matrix_with_unknown_as_nan(tmp_path: Path, name: str) -> None:
    rows = [{**row, "correct": int(row["correct"])} for row in ROWS]  # type: ignore[call-overload]
    read = read_outcomes([(parquet if name.endswith("parquet") else write)(tmp_path / name, rows)])
    found = read.outcomes
    assert found.prompts == ("What is 2+2?", "Name a river")
    assert found.models == ("a", "b")
    np.testing.assert_array_equal(found.correct, np.float32([[0, 1], [1, np.nan]]))
    np.testing.assert_array_equal(found.output_tokens, np.float32([[np.nan, 5], [np.nan, np.nan]]))
    np.testing.assert_array_equal(found.cost, np.float32([[np.nan, 0.5], [np.nan, np.nan]]))
    assert found.task == ("sums", None)
    assert (read.rows, read.duplicates, read.contradictions, read.skipped) == (3, 0, 0, {})


def test_one_prompt_in_several_spellings_and_files_is_one_row(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"prompt": "A  ﬁve\nb", "model": "m", "correct": 1, "cost": 2}])
    second = parquet(
        tmp_path / "b.parquet",
        [
            {"prompt": " a five B ", "model": "m", "correct": 0, "task": "t", "cost": 4.0},
            {"prompt": "a five b", "model": "n", "correct": 1, "task": "u", "cost": None},
            {"prompt": "a five b", "model": "n", "correct": 1, "task": "u", "cost": None},
        ],
    )
    read = read_outcomes([first, second])
    assert read.outcomes.prompts == ("A  ﬁve\nb",)
    np.testing.assert_array_equal(read.outcomes.correct, np.float32([[0.5, 1]]))
    assert read.outcomes.cost[0, 0] == 3
    assert read.outcomes.task == ("t",)
    assert (read.rows, read.duplicates, read.contradictions) == (4, 2, 1)
    assert read_outcomes([tmp_path]).outcomes.prompts == read.outcomes.prompts  # a folder is its files


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"correct": 2}, r'line 2, column "correct": 2; 0 or 1'),
        ({"correct": -0.5}, 'column "correct": -0.5'),
        ({"correct": "yes"}, 'column "correct": type str'),
        ({"prompt": " \n "}, 'column "prompt": no text'),
        ({"prompt": 7}, 'column "prompt": type int'),
        ({"model": ""}, 'column "model": an empty string'),
        ({"model": None}, 'column "model": type NoneType'),
        ({"output_tokens": -1}, 'column "output_tokens": -1'),
        ({"cost": "1 USD"}, 'column "cost": type str'),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_column_or_counted(
    tmp_path: Path, row: dict[str, object], told: str
) -> None:
    bad = {"prompt": "secret words", "model": "m", "correct": 1} | row
    file = write(tmp_path / "o.jsonl", [ROWS[0], bad, ROWS[2]])
    with pytest.raises(TraceError, match=told) as raised:
        read_outcomes([file])
    assert str(file) in str(raised.value)
    assert "secret" not in str(raised.value)
    read = read_outcomes([file], skip_bad=True)
    assert read.rows == 2
    assert sum(read.skipped.values()) == 1


@pytest.mark.parametrize("column", ["prompt", "model", "correct"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    rows: list[dict[str, object]] = [{"prompt": "p", "model": "m", "correct": 1}]
    del rows[0][column]
    with pytest.raises(TraceError, match=f'line 1, column "{column}": missing'):
        read_outcomes([write(tmp_path / "o.jsonl", rows)])
    with pytest.raises(TraceError, match=f'no column "{column}"'):
        read_outcomes([parquet(tmp_path / "o.parquet", rows)], skip_bad=True)


def test_a_label_not_known_is_no_label_and_is_counted(tmp_path: Path) -> None:
    read = read_outcomes([write(tmp_path / "o.jsonl", [*ROWS, {"prompt": "x", "model": "a", "correct": None}])])
    assert len(read.outcomes) == 2
    assert read.skipped == {"no label": 1}


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "the files are empty"), (b'{"prompt": "x", "model"', "line 1: not JSON"), (b"[1]\n", "a JSON int")],
)
def test_files_without_rows_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "o.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=told):
        read_outcomes([tmp_path / "o.jsonl"])


def test_paths_that_are_no_outcomes_are_refused(tmp_path: Path) -> None:
    for name, told in (
        ("gone.jsonl", "cannot be read"),
        ("gone.parquet", "cannot be read"),
        ("o.csv", "are read from"),
    ):
        with pytest.raises(TraceError, match=told):
            read_outcomes([tmp_path / name])
    with pytest.raises(TraceError, match="a folder without"):
        read_outcomes([tmp_path])
    with pytest.raises(TraceError, match="no outcomes given"):
        read_outcomes([])
    (tmp_path / "o.parquet").write_bytes(b"no parquet")
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        read_outcomes([tmp_path / "o.parquet"])


def test_a_cut_file_is_refused_or_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())[:-10])
    with pytest.raises(TraceError, match="gzip data are cut"):
        read_outcomes([file])
    assert read_outcomes([file], skip_bad=True).skipped


def test_progress_tells_every_row(tmp_path: Path) -> None:
    told: list[int] = []
    read_outcomes([write(tmp_path / "o.jsonl", ROWS * 5000)], progress=told.append)
    assert sum(told) == 15_000


def test_keys_are_those_of_the_normalised_prompt_and_the_digest_knows_no_order(tmp_path: Path) -> None:
    read = read_outcomes([write(tmp_path / "o.jsonl", ROWS)]).outcomes
    assert prompt_keys(read).tolist() == keys_of([" WHAT is\t2+2?", "name a  RIVER"]).tolist()
    assert len(keys_of(["\ud800"])) == 1
    assert outcomes_digest(read) == outcomes_digest(read.take(np.array([1, 0])))
    assert outcomes_digest(read) != outcomes_digest(read.take(np.array([1])))
