"""The artefact: a folder with a trained predictor, data only, one format for all kinds.

    FOLDER/
      config.json          format, version, kind, the predictor's configuration, digest of the training data
      model.safetensors    the tensors
      NAME.json            further data of some predictors (a tokenizer), listed in config.json with their digests
      ...                  other files (metrics.json, report.md): never read, never removed here

`config.json` holds the SHA-256 of all files and of itself, so truncated or edited artefacts are refused. Digests detect
accidents, not an attacker who recomputes them; but nothing in an artefact can execute: it holds JSON and raw numbers,
and a folder with anything like a pickle is refused. Its files are regular files, not links or pipes, and their sizes
are checked before they are read. Equal models give equal bytes.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NoReturn, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from presage.errors import ArtefactError, OutputError
from presage.predictor_kinds import KINDS
from presage.version import __version__
from presage.wording import counted

FORMAT: Final = "presage-artefact"
FORMAT_VERSION: Final = 4
READS: Final = (FORMAT_VERSION,)
"""Before, tool calls of traces counted as steps of a workflow."""
READS_OF_ROUTERS: Final = (3, FORMAT_VERSION)
"""They know no steps."""

CONFIG_FILE: Final = "config.json"
TENSORS_FILE: Final = "model.safetensors"

_MOST_CONFIG_BYTES: Final = 16 << 20

_MADE_UP: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What reading data that no trainer wrote may raise."""

_FURTHER_FILE: Final = re.compile(r"[a-z0-9_-]+\.json")
_OTHERS: Final = frozenset({CONFIG_FILE, "metrics.json"})  # no predictor's data may be written over these

_PICKLE_SUFFIXES: Final = frozenset({".pkl", ".pickle", ".joblib", ".pt", ".pth", ".bin", ".ckpt"})


@dataclass(frozen=True)
class Artefact:
    """The checked content of an artefact folder.

    `digest`, `"sha256:…"` of the configuration and all files, is equal for equal models; `files` are further data by
    name.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    training_data: dict[str, Any]
    digest: str
    files: dict[str, bytes]


def write_artefact(
    folder: Path,
    *,
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    training_data: Mapping[str, Any],
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write an artefact folder atomically.

    The folder may be absent, empty, or an earlier artefact, which is replaced by renaming a complete sibling; other
    files in it (metrics, reports) are copied over.

    Args:
        config, training_data: JSON values, finite numbers; the latter `{"digest": "sha256:…", …}` by convention.
        tensors: arrays of floats, integers or booleans; floats finite.
        files: further data by file name, JSON text each, such as a tokenizer's.

    Raises:
        ArtefactError: an argument is not data (an object array, a value that JSON cannot express) or not finite.
        OutputError: the folder holds something else or cannot be written; its content is unchanged.
    """
    folder = Path(folder).resolve()  # resolved, so that a symlink to the folder stays valid
    contents = {TENSORS_FILE: _pack_tensors(folder, tensors), **_check_files(folder, files)}
    config_bytes = _pack_config(folder, kind, config, training_data, contents)

    try:
        foreign = foreign_entries(folder)
        empty = folder.is_dir() and not any(folder.iterdir())
    except PermissionError as error:
        raise OutputError(f"{folder}: cannot be read ({_reason(error)}). Choose another folder.") from error
    # Fill an empty folder in place: it may be a mounted volume or a working directory.
    fresh = (folder if empty else folder.parent) / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.new"
    try:
        fresh.mkdir(parents=True)
        for name, content in {**contents, CONFIG_FILE: config_bytes}.items():
            _write_synced(fresh / name, content)
        if empty:
            for name in (*contents, CONFIG_FILE):  # the configuration last: without it the folder is no artefact
                (fresh / name).rename(folder / name)
        else:
            _swap_in(fresh, folder, foreign)
    except OSError as error:
        raise OutputError(
            f"{folder}: the artefact could not be written ({_reason(error)}); nothing was changed. "
            "Free the disk or choose another folder, then run again."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_artefact(folder: Path, *, kind: str | None = None) -> Artefact:
    """Read and check an artefact folder; `kind` is the expected kind, None for any.

    Raises ArtefactError, which names the file, what it holds and what is expected.
    """
    folder = Path(folder)
    manifest = _read_config(folder)
    if manifest["kind"] not in KINDS or (kind is not None and manifest["kind"] != kind):
        _refuse(
            folder / CONFIG_FILE,
            f"kind {manifest['kind']!r}",
            f"kind {kind!r}" if kind is not None else f"one of the kinds {', '.join(KINDS)}",
            "Give the folder of a predictor of that kind, or use the version of Presage that wrote this artefact.",
        )
    if pickles := find_pickles(folder):
        names = ", ".join(str(path.relative_to(folder)) for path in pickles[:3])
        _refuse(
            folder,
            f"what looks like a pickle ({names}{', …' if len(pickles) > 3 else ''})",
            "data only: JSON and safetensors",
            "A pickle can run code when it is opened. Remove it if you know where it comes from, else train anew.",
        )
    most = KINDS[manifest["kind"]].most_bytes
    contents: dict[str, bytes] = {}
    for name, digest in manifest["files"].items():
        contents[name] = _read_file(folder / name, digest, most - sum(map(len, contents.values())))
    return Artefact(
        kind=manifest["kind"],
        config=manifest["config"],
        tensors=_unpack_tensors(folder / TENSORS_FILE, contents.pop(TENSORS_FILE)),
        training_data=manifest["training_data"],
        digest=manifest["digest"],
        files=contents,
    )


@contextmanager
def rebuilding(folder: str | Path, kind: str) -> Iterator[None]:
    """Context in which a predictor is built from an artefact: missing or malformed parts raise ArtefactError."""
    try:
        yield
    except _MADE_UP as error:
        raise ArtefactError(
            f"{folder}: not a complete {kind} artefact ({type(error).__name__}: {error}); train or download it again"
        ) from error


class Tensors:
    """Base of dataclasses whose fields are arrays: their tensors have the fields' names."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Arrays by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> Self:
        """Inverse of `to_tensors`; other tensors are left alone. Raises KeyError if one is missing."""
        return cls(**{name: tensors[name] for name in cls.__dataclass_fields__})


def nested(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The tensors of several parts, by "part/name"."""
    return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


def under(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The tensors with this prefix, by the rest of their names; "part/" reads a part of `nested`."""
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def artefact_digest(folder: Path) -> str:
    """The digest of an artefact, `"sha256:…"`, from its configuration; raises ArtefactError if that is invalid."""
    return str(_read_config(Path(folder))["digest"])


def artefact_size_bytes(folder: Path) -> int:
    """Bytes of the artefact's own files; raises ArtefactError if it is none, or a file is missing."""
    folder = Path(folder)
    names = [CONFIG_FILE, *_read_config(folder)["files"]]
    try:
        return sum((folder / name).stat().st_size for name in names)
    except OSError as error:
        raise ArtefactError(f"{folder}: a file of the artefact cannot be read ({_reason(error)}).") from error


def find_pickles(folder: Path) -> list[Path]:
    """All files under `folder` that are or may hide a pickle: by name, by their first bytes, or as a zip archive.

    Text pickles (protocols 0 and 1) have no magic bytes and are found by name only. Raises ArtefactError if a file
    cannot be opened.
    """
    paths = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return sorted(p for p in paths if p.suffix.lower() in _PICKLE_SUFFIXES or (p.is_file() and _starts_like_pickle(p)))


def _starts_like_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({_reason(error)}).") from error
    if head == b"PK\x03\x04":  # torch.save and .npz are zip archives around pickles
        return True
    # A safetensors file starts with the length of its header, little-endian: a header of 640 bytes also begins with
    # 80 02. Its next byte is 00 (headers stay below 64 KiB here), which is no pickle opcode.
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[2] != 0


def _pack_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> bytes:
    packed = {}
    for name, tensor in tensors.items():
        array = np.asarray(tensor, order="C")
        if array.dtype.kind not in "fiub":
            _refuse(folder, f"tensor {name!r} of type {array.dtype}", "floats, integers or booleans")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            _refuse(folder, f"tensor {name!r} with NaN or infinite values", "finite numbers", "The fit diverged.")
        packed[name] = array
    return bytes(save_tensors(packed))


def _check_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files sorted by name, unless a name is reserved or a content is not JSON."""
    for name, content in files.items():
        if not _FURTHER_FILE.fullmatch(name) or name in _OTHERS:
            _refuse(folder, f"a further file {name!r}", f"a name like tokenizer.json, none of {', '.join(_OTHERS)}")
        try:
            json.loads(content)
        except ValueError as error:
            _refuse(folder / name, f"no valid JSON ({error})", "data only: JSON", cause=error)
    return dict(sorted(files.items()))


def _pack_config(
    folder: Path,
    kind: str,
    config: Mapping[str, Any],
    training_data: Mapping[str, Any],
    contents: Mapping[str, bytes],
) -> bytes:
    if kind not in KINDS:
        _refuse(folder, f"kind {kind!r}", f"one of the kinds {', '.join(KINDS)}")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "files": {name: _sha256(content) for name, content in contents.items()},
        "config": dict(config),
        "training_data": dict(training_data),
        "presage_version": __version__,
    }
    try:
        manifest["digest"] = manifest_digest(manifest)
        text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArtefactError(
            f"{folder}: the configuration holds a value that JSON cannot express ({error}); "
            "expected text, finite numbers, booleans, lists and mappings with text keys."
        ) from error
    return text.encode() + b"\n"


def foreign_entries(folder: Path) -> list[Path]:
    """Files in an artefact folder that are not the artefact's own; none if the folder is absent or empty.

    Raises OutputError for a file, or a folder with something else: nothing may be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; an artefact is a folder. Choose another name.")
    entries = sorted(folder.iterdir()) if folder.exists() else []
    if not entries:
        return []
    try:
        earlier = json.loads((folder / CONFIG_FILE).read_bytes())
        is_ours = earlier.get("format") == FORMAT
        own = {CONFIG_FILE, TENSORS_FILE, *earlier.get("files", ())}
    except (OSError, ValueError, AttributeError, TypeError):
        is_ours = False
    if not is_ours:
        raise OutputError(
            f"{folder}: holds {counted(len(entries), 'entry', 'entries')} and is no Presage artefact; nothing was "
            "overwritten. Choose a new or an empty folder."
        )
    return [entry for entry in entries if entry.name not in own]


def _swap_in(fresh: Path, folder: Path, foreign: list[Path]) -> None:
    """Replace `folder` by `fresh`, with copies of the files beside the earlier artefact."""
    for entry in foreign:
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, fresh / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, fresh / entry.name, follow_symlinks=False)
    replaced = fresh.with_suffix(".old")
    if folder.exists():
        folder.rename(replaced)
    try:
        fresh.rename(folder)
    except BaseException:
        if replaced.exists():
            replaced.rename(folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a full disk may fail only here, and the bytes must reach the disk before the rename


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        raw = read_regular(path, _MOST_CONFIG_BYTES)
    except OSError as error:
        actual = "a file" if isinstance(error, NotADirectoryError) else "nothing"
        if os.path.isdir(folder):  # noqa: PTH112  False where Path.is_dir raises: below a folder without access
            actual = f"no readable {CONFIG_FILE}"
        wanted = f"an artefact folder ({CONFIG_FILE} and {TENSORS_FILE})"
        _refuse(folder, f"{actual} ({_reason(error)})", wanted, "Check the path.", error)
    try:
        manifest = json.loads(raw)
        digest = manifest_digest(manifest) if isinstance(manifest, dict) else None
    except _MADE_UP as error:
        actual = f"no valid JSON ({type(error).__name__}: {error})"
        _refuse(path, actual, "the configuration of an artefact", _COPY_AGAIN, error)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        actual = repr(manifest.get("format")) if isinstance(manifest, dict) else type(manifest).__name__
        _refuse(path, f"format {actual}", f"format {FORMAT!r}", "Another program wrote this folder; check the path.")
    version = manifest.get("format_version")
    reads = READS_OF_ROUTERS if manifest.get("kind") == "router" else READS
    if version not in reads:
        _refuse(
            path,
            f"format version {version!r}",
            f"one of the format versions {', '.join(map(str, reads))}",
            "Use the version of Presage that wrote it "
            f"({manifest.get('presage_version', 'unknown')}; this is {__version__}), or train anew.",
        )
    if manifest.get("digest") != digest:
        _refuse(path, "a digest that does not match its content", "an unaltered configuration", _COPY_AGAIN)
    for key, kind in {"kind": str, "files": dict, "config": dict, "training_data": dict}.items():
        if not isinstance(manifest.get(key), kind):
            json_type = "string" if kind is str else "object"
            _refuse(path, f"{key} {manifest.get(key)!r}", f"a JSON {json_type} there", _COPY_AGAIN)
    further = set(manifest["files"]) - {TENSORS_FILE}
    digests = all(isinstance(digest, str) for digest in manifest["files"].values())
    named = all(map(_FURTHER_FILE.fullmatch, further)) and not further & _OTHERS
    if TENSORS_FILE not in manifest["files"] or not named or not digests:
        wanted_files = f"{TENSORS_FILE} and further files like tokenizer.json"
        _refuse(path, f"files {sorted(manifest['files'])}", wanted_files, _COPY_AGAIN)
    return manifest


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; raises ArtefactError for anything else, before reading."""
    # Without blocking: opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123  a descriptor
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            _refuse(path, "no regular file", "a regular file: no pipe, no device", _COPY_AGAIN)
        if status.st_size > most:
            _refuse(path, f"{status.st_size:,} bytes", f"at most {most:,}, as larger ones are not read", _COPY_AGAIN)
        return file.read(status.st_size)


def _read_file(path: Path, digest: str, most: int) -> bytes:
    try:
        content = read_regular(path, most)
    except OSError as error:
        _refuse(path, f"no readable file ({_reason(error)})", "a file of the artefact", _COPY_AGAIN, error)
    except MemoryError as error:
        _refuse(path, "more bytes than there is memory for", "a smaller artefact", _COPY_AGAIN, error)
    actual = _sha256(content)
    if actual != digest:
        _refuse(path, f"{len(content)} bytes with digest {actual[:19]}…", f"digest {digest[:19]}…", _COPY_AGAIN)
    return content


def _unpack_tensors(path: Path, content: bytes) -> dict[str, np.ndarray]:
    try:
        tensors: dict[str, np.ndarray] = load_tensors(content)
    except (SafetensorError, *_MADE_UP) as error:
        actual = f"no valid safetensors ({type(error).__name__}: {error})"
        _refuse(path, actual, "the tensors of the artefact", _COPY_AGAIN, error)
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            _refuse(path, f"tensor {name!r} with NaN or infinite values", "finite numbers", "Train anew.")
    return tensors


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """The digest of a configuration without its own `digest`, over one canonical spelling."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return _sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


_COPY_AGAIN: Final = "The artefact was cut or altered: copy it again from its source, or train anew."


def _reason(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.ELOOP:
        return "it is a symbolic link"
    return getattr(error, "strerror", None) or str(error)


def _refuse(path: Path, actual: str, wanted: str, advice: str = "", cause: Exception | None = None) -> NoReturn:
    raise ArtefactError(f"{path}: found {actual}; expected {wanted}. {advice}".rstrip()) from cause
