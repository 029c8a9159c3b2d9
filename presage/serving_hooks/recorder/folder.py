"""The folder of one engine in a recording: claimed by a lock, bounded in bytes, and made again when it is gone."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from presage.datasets.recording import INSTANCE_FOLDER, LOCK

_LOOK_AGAIN_S: Final = 10.0


class Folder:
    """Where an engine records. Other engines may record beside it.

    Args:
        root: of the recording.
        instance: of the engine.
        most: bytes that everything under the root may take.
    """

    def __init__(self, root: Path, instance: str, most: int) -> None:
        self.root, self.path = root, root / f"{INSTANCE_FOLDER}{instance}"
        self._most = most
        self._lock: int | None = None
        self._taken = 0
        self._looked_s = -_LOOK_AGAIN_S
        os.register_at_fork(after_in_child=self._forget)

    def claim(self) -> bool:
        """Makes the folder, for its owner alone, and holds its lock; whether it was not there.

        Raises:
            OSError: it cannot be made.
        """
        if self._lock is not None and (self.path / LOCK).exists():
            return False
        self.release()
        self.root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system gives it back when we are gone
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def release(self) -> None:
        """Says that nothing more will come."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def grew(self, size: int) -> None:
        """So many bytes were written."""
        self._taken += size

    def full(self, now_s: float) -> bool:
        """Whether the recording takes all it may. Looks at the disk now and then, for others write and remove too."""
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = now_s
            self._taken = _bytes_under(self.root)
        return self._taken >= self._most

    def _forget(self) -> None:
        """In a fork: a copy of the lock there would outlive the engine."""
        self.release()


def _bytes_under(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += (Path(folder) / name).stat().st_size
    return total


def reason(error: Exception) -> str:
    """Why something could not be written, in the words of the system: Arrow's own may hold a path."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__
