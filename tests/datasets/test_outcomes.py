"""Outcomes: rows in, one matrix out; what is refused and how it is said; written ones are read as they were."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.datasets.outcomes import outcomes_digest, prompt_keys
from presage.datasets.outcomes.files import read_outcomes, write_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import OutputError, TraceError

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


def csv(path: Path, rows: list[dict[str, object]]) -> Path:
    pd.DataFrame(rows).to_csv(path)
    return path


WRITERS = {"o.jsonl": write, "o.jsonl.gz": write, "o.parquet": parquet, "o.csv": csv, "o.csv.gz": csv}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_become_a_matrix_with_unknown_as_nan(tmp_path: Path, name: str) -> None:
    rows = [{**row, "correct": int(row["correct"])} for row in ROWS]  # type: ignore[call-overload]
    read = read_outcomes([WRITERS[name](tmp_path / name, rows)])
    found = read.outcomes
    assert found.prompts == ("What is 2+2?", "Name a river")
    assert found.models == ("a", "b")
    np.testing.assert_array_equal(found.correct, np.float32([[0, 1], [1, np.nan]]))
    np.testing.assert_array_equal(found.output_tokens, np.float32([[np.nan, 5], [np.nan, np.nan]]))
    np.testing.assert_array_equal(found.cost, np.float32([[np.nan, 0.5], [np.nan, np.nan]]))
    assert found.task == ("sums", None)
    assert (read.rows, read.duplicates, read.contradictions, read.skipped) == (3, 0, 0, {})


def test_spellings_of_a_prompt_have_labels_of_their_own_and_one_key(tmp_path: Path) -> None:
    spellings = ["Is CO toxic?", "Is Co toxic?", "if x:\n    y()\nz()", "if x:\n    y()\n    z()", "ﬁve", "five"]
    rows = [{"prompt": prompt, "model": "m", "correct": n % 2} for n, prompt in enumerate(spellings)]
    read = read_outcomes([write(tmp_path / "o.jsonl", rows)])
    assert read.outcomes.prompts == tuple(spellings)
    assert read.outcomes.correct[:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert (read.duplicates, read.contradictions) == (0, 0)
    keys = prompt_keys(read.outcomes).tolist()
    assert keys[::2] == keys[1::2]
    assert len(set(keys)) == 3


def test_one_prompt_in_several_files_is_one_row(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"prompt": "a five b", "model": "m", "correct": 1, "cost": 2}])
    second = parquet(
        tmp_path / "b.parquet",
        [
            {"prompt": "a five b", "model": "m", "correct": 0, "task": "t", "cost": 4.0},
            {"prompt": "a five b", "model": "n", "correct": 1, "task": "u", "cost": None},
            {"prompt": "a five b", "model": "n", "correct": 1, "task": "u", "cost": None},
        ],
    )
    read = read_outcomes([first, second])
    assert read.outcomes.prompts == ("a five b",)
    np.testing.assert_array_equal(read.outcomes.correct, np.float32([[0.5, 1]]))
    assert read.outcomes.cost[0, 0] == 3
    assert read.outcomes.task == ("t",)
    assert (read.rows, read.duplicates, read.contradictions) == (4, 2, 1)
    assert read_outcomes([tmp_path]).outcomes.prompts == read.outcomes.prompts  # a folder is its files


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"correct": 2}, r'line 2, column "correct": 2; expected 0 or 1'),
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
    with pytest.raises(TraceError, match=f"no column '{column}'"):
        read_outcomes([parquet(tmp_path / "o.parquet", rows)], skip_bad=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt,model,correct\np,m,perhaps\n", r'line 2, column "correct": type str'),
        ('prompt,model,correct\n"p\nq",m,1\np,,0\n', r'line 4, column "model": an empty string'),
        ("prompt,model,correct,cost\np,m,1,1 USD\n", r'line 2, column "cost": type str'),
        ("prompt,model,correct\np,m\n", "line 2: 2 fields; expected 3"),
        ("prompt,model,model,correct\np,m,m,1\n", "column 'model' appears twice"),
        ("prompt,model,score\np,m,1\n", "no column 'correct'; found: prompt, model, score"),
        ("prompt;model;correct\np;m;1\n", "separated by semicolons"),
    ],
)
def test_csv_that_is_not_as_wanted_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "o.csv").write_text(text)
    with pytest.raises(TraceError, match=told):
        read_outcomes([tmp_path / "o.csv"])


def test_names_in_csv_stay_as_they_are_written_and_labels_may_be_words_or_shares(tmp_path: Path) -> None:
    (tmp_path / "o.csv").write_text(
        "prompt,model,correct,task\n12,007,True,\n13,007,0.5,1.0\n14,1e3,false,\n15,007,,\n"
    )
    read = read_outcomes([tmp_path / "o.csv"])
    assert read.outcomes.models == ("007", "1e3")
    assert read.outcomes.task == (None, "1.0", None)
    np.testing.assert_array_equal(read.outcomes.correct, np.float32([[1, np.nan], [0.5, np.nan], [np.nan, 0]]))
    assert read.skipped == {"no label": 1}


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv"])
def test_bytes_that_are_no_utf8_are_named_or_cost_their_row(tmp_path: Path, name: str) -> None:
    head, line = (
        ("prompt,model,correct\n", "caf\xe9,m,1\n")
        if name == "o.csv"
        else ("", '{"prompt": "caf\xe9", "model": "m", "correct": 1}\n')
    )
    file = tmp_path / name
    file.write_bytes((head + line.replace("caf\xe9", "tea") + line).encode("latin-1"))
    with pytest.raises(TraceError, match=rf"line {3 if head else 2}: byte \d+ of the line is not UTF-8"):
        read_outcomes([file])
    read = read_outcomes([file], skip_bad=True)
    assert (read.rows, read.skipped) == (1, {"line with no UTF-8": 1})


def test_nan_that_python_writes_is_no_label(tmp_path: Path) -> None:
    read = read_outcomes([write(tmp_path / "o.jsonl", [*ROWS, {"prompt": "x", "model": "a", "correct": float("nan")}])])
    assert read.skipped == {"no label": 1}


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
        ("gone.csv", "cannot be read"),
        ("o.tsv", "are read from"),
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
    spelt = replace(read, prompts=(" WHAT is\t2+2?", "name a  RIVER"))
    assert prompt_keys(read).tolist() == prompt_keys(spelt).tolist()
    assert len(prompt_keys(replace(read, prompts=("\ud800",)))) == 1
    assert outcomes_digest(read) == outcomes_digest(read.take(np.array([1, 0])))
    assert outcomes_digest(read) != outcomes_digest(read.take(np.array([1])))


def test_written_and_read_are_the_same(tmp_path: Path) -> None:
    drawn = generate_outcomes(80, 3).outcomes
    drawn = replace(drawn, group=tuple(f"g{i // 2}" if i % 3 else None for i in range(80)))
    rows = write_outcomes(drawn, tmp_path / "new" / "outcomes.jsonl")
    found = read_outcomes([tmp_path / "new"])
    assert rows == found.rows == int((~np.isnan(drawn.correct)).sum())
    assert outcomes_digest(found.outcomes) == outcomes_digest(drawn)
    assert (found.outcomes.task, found.outcomes.group) == (drawn.task, drawn.group)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        write_outcomes(generate_outcomes(3, 0).outcomes, tmp_path / "file" / "outcomes.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
