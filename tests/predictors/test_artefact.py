"""An artefact folder is written whole, read only when unaltered, and never holds code."""

import errno
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ArtefactError, OutputError
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import (
    FORMAT_VERSION,
    artefact_digest,
    artefact_size_bytes,
    find_pickles,
    manifest_digest,
    read_artefact,
    rebuilding,
    under,
    write_artefact,
)

CONFIG = {"horizon": 3, "agents": ["planner", "prüfer"]}
DATA = {"digest": "sha256:abc", "workflows": 10}


def tensors() -> dict[str, np.ndarray]:
    return {
        "weight": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "scalar": np.array(0.5),
        "half": np.ones(3, np.float16),
        "table": np.arange(5, dtype=np.int32),
        "mask": np.array([True, False]),
    }


def write(folder: Path, **changes: Any) -> Path:
    write_artefact(
        folder, **{"kind": "next-agent", "config": CONFIG, "tensors": tensors(), "training_data": DATA} | changes
    )
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def test_what_was_written_is_read_back(folder: Path) -> None:
    artefact = read_artefact(folder, kind="next-agent")
    assert (artefact.kind, artefact.config, artefact.training_data) == ("next-agent", CONFIG, DATA)
    assert artefact.tensors.keys() == tensors().keys()
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(artefact.tensors[name], tensor)
        assert artefact.tensors[name].dtype == tensor.dtype
    assert artefact.digest == artefact_digest(folder)
    assert artefact_size_bytes(folder) == sum(path.stat().st_size for path in folder.iterdir())


def test_equal_models_have_equal_bytes_and_others_another_digest(folder: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "again", tensors=dict(reversed(tensors().items())))
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    other = write(tmp_path / "other", tensors={**tensors(), "scalar": np.array(0.6)})
    assert artefact_digest(other) != artefact_digest(folder)


def test_replacing_an_artefact_keeps_the_files_of_others(folder: Path, tmp_path: Path) -> None:
    (folder / "metrics.json").write_text("{}")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.svg").write_text("<svg/>")
    write(folder, config={"horizon": 2})
    assert read_artefact(folder).config == {"horizon": 2}
    assert (folder / "metrics.json").read_text() == "{}"
    assert (folder / "plots" / "a.svg").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_filled_and_missing_parents_are_made(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    inode = empty.stat().st_ino
    read_artefact(write(empty))
    assert empty.stat().st_ino == inode  # it may be a mounted volume
    assert {path.name for path in empty.iterdir()} == {"config.json", "model.safetensors"}
    read_artefact(write(tmp_path / "a" / "b"))


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="no Presage artefact"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(OutputError, match="is a file"):
        write(tmp_path / "thesis.txt")


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    target = tmp_path / "out" / "model"
    before = artefact_digest(write(target)) if existing else None

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write(target, config={"horizon": 9})
    assert [path.name for path in target.parent.iterdir()] == (["model"] if existing else [])
    if existing:
        assert artefact_digest(target) == before


def test_an_interrupt_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    before = artefact_digest(folder)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(folder, config={"horizon": 9})
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert artefact_digest(folder) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensors": {"w": np.array([object()])}}, "'w' of type object"),
        ({"tensors": {"w": np.array([np.nan])}}, "'w' with NaN"),
        ({"config": {"rate": float("nan")}}, "JSON"),
        ({"config": {"f": np.float32}}, "JSON"),
        ({"kind": "oracle"}, "oracle"),
    ],
)
def test_what_is_no_data_is_not_written(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArtefactError, match=named):
        write(tmp_path / "model", **changes)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_artefact_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"absent: found nothing .*; expected an artefact folder"):
        read_artefact(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtefactError, match="found a file"):
        read_artefact(tmp_path / "file")
    with pytest.raises(ArtefactError, match=r"no readable config\.json"):
        read_artefact(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 768}')
    with pytest.raises(ArtefactError, match="format None"):
        read_artefact(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ArtefactError, match="format list"):
        read_artefact(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_cut_or_missing_file_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-7])
    with pytest.raises(ArtefactError, match=name):
        read_artefact(folder)
    (folder / name).unlink()
    with pytest.raises(ArtefactError, match=name):
        read_artefact(folder)


def test_an_altered_tensor_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"model\.safetensors: found .* digest sha256:.*expected digest sha256:"):
        read_artefact(folder)


def test_an_altered_configuration_is_refused(folder: Path) -> None:
    edit_config(folder, config={"horizon": 5})
    with pytest.raises(ArtefactError, match=r"config\.json: found a digest that does not match"):
        read_artefact(folder)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1, None, "2", [2]])
def test_an_unknown_format_version_is_refused_with_those_read(folder: Path, version: object) -> None:
    edit_config(folder, format_version=version)
    with pytest.raises(
        ArtefactError, match=rf"format version .*; expected one of the format versions {FORMAT_VERSION}\."
    ):
        read_artefact(folder)


@pytest.mark.parametrize(
    "changes",
    [{"files": None}, {"files": {"../../etc/passwd": "sha256:0"}}, {"files": {"model.safetensors": 0}}, {"config": []}],
)
def test_a_consistent_configuration_of_the_wrong_shape_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    manifest = json.loads((folder / "config.json").read_text()) | changes
    edit_config(folder, **changes, digest=manifest_digest(manifest))
    with pytest.raises(ArtefactError, match=rf"config\.json: found {next(iter(changes))} "):
        read_artefact(folder)


def sparse(path: Path, size_bytes: int) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(size_bytes)


def linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".elsewhere")))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def larger(path: Path) -> None:
    sparse(path, 1 << 40)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("harm", "reason"), [(linked, "symbolic link"), (piped, "no regular file"), (larger, "1,099,511,627,776 bytes")]
)
def test_what_no_trainer_writes_is_refused_unread(
    folder: Path, name: str, harm: Callable[[Path], None], reason: str
) -> None:
    harm(folder / name)
    with pytest.raises(ArtefactError, match=reason) as raised:
        read_artefact(folder)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"format": "\\ud800"}', "UnicodeEncodeError"),
        ('{"horizon": ' + "9" * 5000 + "}", "ValueError"),
    ],
)
def test_json_that_python_cannot_hold_is_refused_with_file_and_reason(folder: Path, config: str, reason: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(ArtefactError, match=rf"config\.json: found no valid JSON \({reason}"):
        read_artefact(folder)


@pytest.mark.parametrize(
    "error",
    [TypeError, OverflowError, MemoryError, RecursionError, AttributeError, KeyError, ValueError, IndexError],
)
def test_what_fails_while_it_is_rebuilt_is_one_refusal(folder: Path, error: type[Exception]) -> None:
    wanted = rf"model: not a complete next-agent artefact \({error.__name__}: '?made-up.*train or download"
    with pytest.raises(ArtefactError, match=wanted), rebuilding(folder, "next-agent"):
        raise error("made-up")


def test_another_kind_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtefactError, match="found kind 'next-agent'; expected kind 'router'"):
        read_artefact(folder, kind="router")
    monkeypatch.setattr("presage.predictors.common.artefact.KINDS", {"router": KINDS["router"]})
    with pytest.raises(ArtefactError, match="found kind 'next-agent'; expected one of the kinds router"):
        read_artefact(folder)


@pytest.mark.parametrize("name", ["a.pkl", "a.PICKLE", "a.joblib", "a.pt", "a.pth", "a.bin", "a.ckpt"])
def test_a_name_of_a_pickle_is_refused(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / name).write_text("harmless")
    with pytest.raises(ArtefactError, match=rf"pickle \(sub/{name}\)"):
        read_artefact(folder)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_under_another_name_is_refused(folder: Path, protocol: int) -> None:
    (folder / "notes.txt").write_bytes(pickle.dumps({"a": 1}, protocol=protocol))
    assert find_pickles(folder) == [folder / "notes.txt"]
    with pytest.raises(ArtefactError, match=r"pickle \(notes\.txt\)"):
        read_artefact(folder)


def test_a_zip_is_refused_because_torch_hides_pickles_in_it(folder: Path) -> None:
    with zipfile.ZipFile(folder / "weights", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    assert find_pickles(folder) == [folder / "weights"]


def test_no_header_length_of_safetensors_looks_like_a_pickle(tmp_path: Path) -> None:
    # 640, 896, 1152 and 1408 bytes of header begin with 80 02 … 80 05, as pickles do.
    seen = set()
    for length in range(560, 1500, 8):
        write(tmp_path / "model", tensors={"x" * length: np.zeros(1, np.float32)})
        seen.add((tmp_path / "model" / "model.safetensors").read_bytes()[:2])
        assert find_pickles(tmp_path / "model") == []
    assert {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"} <= seen


@given(content=st.binary(max_size=200))
def test_any_bytes_in_place_of_a_file_give_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = write(tmp_path_factory.mktemp("any") / "model")
    for name in ("config.json", "model.safetensors"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(ArtefactError):
            read_artefact(folder)
        (folder / name).write_bytes(original)


TOKENIZER = {"tokenizer.json": b'{"model": {"type": "WordLevel"}}'}


def test_further_data_files_are_read_back_and_guarded_by_the_digest(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", files=TOKENIZER)
    assert read_artefact(folder).files == TOKENIZER
    assert artefact_size_bytes(folder) == sum(path.stat().st_size for path in folder.iterdir())
    assert artefact_digest(folder) != artefact_digest(write(tmp_path / "without"))
    (folder / "tokenizer.json").write_bytes(b'{"model": {"type": "BPE"}}')
    with pytest.raises(ArtefactError, match=r"tokenizer\.json: found 26 bytes with digest"):
        read_artefact(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtefactError, match=r"tokenizer\.json: found no readable file"):
        read_artefact(folder)


def test_a_replaced_artefact_leaves_none_of_its_further_files_behind(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", files=TOKENIZER)
    (folder / "metrics.json").write_text("{}")
    write(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "metrics.json"}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"../tokenizer.json": b"{}"}, "a further file"),
        ({"tokenizer.py": b"{}"}, "a further file"),
        ({"config.json": b"{}"}, "a further file"),
        ({"metrics.json": b"{}"}, "a further file"),
        ({"tokenizer.json": pickle.dumps({})}, "no valid JSON"),
    ],
)
def test_a_further_file_that_is_no_data_is_not_written(tmp_path: Path, files: dict[str, bytes], named: str) -> None:
    with pytest.raises(ArtefactError, match=named):
        write(tmp_path / "model", files=files)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../model.json", "metrics.json", "run.py"])
def test_a_configuration_naming_a_file_that_is_none_of_ours_is_refused(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "config.json").read_text())
    manifest["files"][name] = "sha256:0"
    edit_config(folder, files=manifest["files"], digest=manifest_digest(manifest))
    with pytest.raises(ArtefactError, match=r"config\.json: found files"):
        read_artefact(folder)


def test_the_tensors_of_a_part_are_known_by_the_rest_of_their_names() -> None:
    held = {"part/a": np.zeros(1), "part/b/c": np.ones(1), "apart/a": np.ones(2)}
    assert {name: len(array) for name, array in under(held, "part/").items()} == {"a": 1, "b/c": 1}
