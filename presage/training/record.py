"""What a training says of itself while it runs, and of what it ran on."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Final

from presage import __version__

Progress = Callable[[str, float | None], None]
"""Told what is being done and the share of it that is done, 0 to 1, or None where that is not known."""

_LIBRARIES: Final = ("torch", "numpy", "scikit-learn", "lightgbm", "numba", "pyarrow")


def versions() -> dict[str, str]:
    """Python, Presage and the libraries that decide the numbers."""
    return {
        "python": platform.python_version(),
        "presage": __version__,
        **{library: metadata.version(library) for library in _LIBRARIES},
    }
