"""Where numba keeps the code that it compiles: 20 to 30 s on the first forecast of a machine, once for a version.

numba itself chooses, in this order: `NUMBA_CACHE_DIR`; `__pycache__` beside the sources; `numba` in the user's cache
folder (`XDG_CACHE_HOME`, else `~/.cache`). Where it may write to none of them, as in a container with a read-only file
system, it refuses to import a function; compiled code then goes into a temporary folder of this process and its
children, and goes with this process. The folder is new and private, since whoever writes a cache of code chooses what
runs.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final

CACHE: Final = "NUMBA_CACHE_DIR"
"""numba's variable for the folder; it is read when numba is imported."""


def choose_cache(sources: Path, environment: MutableMapping[str, str]) -> None:
    """Set `NUMBA_CACHE_DIR` in the environment if numba could write neither beside the sources nor for the user."""
    if CACHE in environment or _writable(sources):
        return
    caches = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/")) / ".cache")
    if not _writable(Path(caches)):
        with suppress(OSError):  # numba's own error says what cannot be written
            folder = environment[CACHE] = tempfile.mkdtemp(prefix="presage-compiled-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _writable(folder: Path) -> bool:
    """Whether the folder can be written, or made in the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
