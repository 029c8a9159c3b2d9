"""Text is kept only if asked for, through the operator's redaction, and is never said anywhere else."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorder_samples import Hands, counts, recorder, serve

from presage.datasets.read import read_traces

SECRET = "the-secret-of-the-user"
MODULE = "test_recorder_private"


def hide(text: str, column: str) -> str | None:
    return None if column == "output_text" else re.sub(r"secret", "…", text)


def fail(text: str, column: str) -> str:
    raise ValueError(f"cannot redact {text}")


def leave(text: str, column: str) -> str:
    raise SystemExit(text)


def wrong(text: str, column: str) -> object:
    return [text]


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_there_is_no_text_unless_asked_for(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "ab", input_text=SECRET, output_text=SECRET)
    one.close()
    assert b"secret" not in everything(tmp_path)
    assert read_traces([tmp_path]).table["input_text"].null_count == 2


def test_the_same_search_finds_what_is_there(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "a-name-to-be-found", "ab")
    one.close()
    assert b"a-name-to-be-found" in everything(tmp_path)


def test_text_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    one = recorder(tmp_path, text="on")
    serve(one, "w", "a", input_text="in \ud800", output_text="out")
    one.close()
    row = read_traces([tmp_path]).table.to_pylist()[0]
    assert (row["input_text"], row["output_text"]) == ("in ?", "out")


def test_redaction_says_what_is_kept(tmp_path: Path) -> None:
    one = recorder(tmp_path, text="on", redact=f"{MODULE}:hide")
    serve(one, "w", "a", input_text=SECRET, output_text=SECRET)
    one.close()
    row = read_traces([tmp_path]).table.to_pylist()[0]
    assert (row["input_text"], row["output_text"]) == ("the-…-of-the-user", None)
    assert b"secret" not in everything(tmp_path)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fail", "text not kept: decoding or redaction failed with ValueError"),
        ("leave", "text not kept: decoding or redaction failed with SystemExit"),
        ("wrong", "text not kept: redaction gave list, no str"),
    ],
)
def test_what_cannot_be_redacted_is_not_kept_and_not_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str, reason: str
) -> None:
    caplog.set_level(logging.DEBUG)
    one = recorder(tmp_path, text="on", redact=f"{MODULE}:{function}")
    serve(one, "w", "ab", input_text=SECRET, output_text=SECRET)
    one.close()
    assert counts(one)[reason] == 4
    assert counts(one)["written: steps"] == 2
    assert b"secret" not in everything(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [f"recorder: {reason}"]
    assert SECRET not in repr([vars(record) for record in caplog.records]) + repr(one.status())


def test_token_ids_become_text_in_the_thread_that_writes(tmp_path: Path) -> None:
    asked: list[Sequence[int]] = []

    def decode(ids: Sequence[int]) -> str:
        asked.append(ids)
        return " ".join(map(str, ids))

    hands = Hands()
    one = recorder(tmp_path, hands, text="on", decode=decode)
    serve(one, "w", "a", input_text=[1, 2], output_text=[3])  # type: ignore[arg-type]
    assert asked == []
    one.close()
    row = read_traces([tmp_path]).table.to_pylist()[0]
    assert (row["input_text"], row["output_text"]) == ("1 2", "3")


def test_token_ids_without_anybody_to_decode_them_are_counted(tmp_path: Path) -> None:
    one = recorder(tmp_path, text="on")
    serve(one, "w", "a", input_text=[1, 2])  # type: ignore[arg-type]
    one.close()
    assert counts(one)["text not kept: nobody decodes token ids"] == 1


class Watched(str):
    """A text of which a test can see whether it is still in memory."""


def test_text_goes_from_memory_once_it_is_written(tmp_path: Path) -> None:
    one = recorder(tmp_path, text="on")
    texts = [Watched(SECRET), Watched(SECRET)]
    alive = [weakref.ref(text) for text in texts]
    serve(one, "w", "ab", input_text=texts[0], output_text=texts[1])
    texts.clear()
    assert all(ref() is not None for ref in alive)
    one.close()
    gc.collect()
    assert one.debug_state()["late"] == 2
    assert all(ref() is None for ref in alive)


def test_a_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    one = recorder(tmp_path / "r")
    serve(one, "w", "a")
    one.close()
    assert (tmp_path / "r" / "engine-one").stat().st_mode & 0o077 == 0
