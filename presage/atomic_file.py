"""Writing a file so that a full disk or a kill leaves what was there before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from presage.errors import OutputError


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically, and its folder if it does not exist; raises OutputError if it cannot be written."""
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
