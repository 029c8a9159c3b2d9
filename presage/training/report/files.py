"""The files of a report: `metrics.json`, `report.html`, `report.md` and the pictures the Markdown shows.

Every file is written under another name and renamed: a full disk leaves what was there before.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Final

from presage.errors import OutputError
from presage.training.report.numbers import Metrics

METRICS_FILE: Final = "metrics.json"
PAGE_FILE: Final = "report.html"
MARKDOWN_FILE: Final = "report.md"


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    """Writes `metrics.json` into `folder`, which is made where it does not exist.

    Raises:
        OutputError: the file cannot be written.
    """
    text = json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False)
    return write_file(Path(folder) / METRICS_FILE, text.encode() + b"\n")


def write_report(folder: Path, metrics: Metrics) -> list[Path]:
    """Writes the page, the Markdown and its pictures into `folder`, made from the metrics alone.

    Raises:
        OutputError: a file cannot be written.
    """
    from presage.training.report.markdown import markdown, picture_file
    from presage.training.report.page import page
    from presage.training.report.plot import standalone
    from presage.training.report.report import document

    told = document(metrics)
    folder = Path(folder)
    files = {picture_file(picture): standalone(picture) for picture in told.pictures()}
    files |= {MARKDOWN_FILE: markdown(told), PAGE_FILE: page(told)}
    return [write_file(folder / name, text.encode()) for name, text in files.items()]


def report_files(folder: Path) -> list[Path]:
    """The files of the report in a folder: page, Markdown, pictures."""
    return [folder / PAGE_FILE, folder / MARKDOWN_FILE, *sorted(folder.glob("*.svg"))]


def check_folder(folder: Path, option: str) -> None:
    """Whether a report will find room there, asked before the training.

    Raises:
        OutputError: it is a file, or lies in one, or in a folder that cannot be written to.
    """
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise OutputError(f"{option} {folder}: {there} is a file; a folder is wanted: choose another name")
    if not os.access(there, os.W_OK):
        raise OutputError(f"{option} {folder}: {there} cannot be written to: choose another folder")


def write_file(path: Path, content: bytes) -> Path:
    """Writes a file whole or not at all; its folder is made where it does not exist.

    Raises:
        OutputError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here, and the rename must not come before the bytes
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); what was there before is untouched. "
            "Free space or choose another folder."
        ) from error
    return path
