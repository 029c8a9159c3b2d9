"""What holds for every test, of the package and of the benchmarks: one thread, seeds, no real registry."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy or torch is loaded
# A separate cache for each environment: versions of numba would overwrite each other's compiled code.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "compiled"))
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist set it, which would narrow tables
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_TRACKING_URI", None)  # no test may reach a real registry

import random

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("presage", deadline=None)  # machines are shared: no test is timed
settings.register_profile("ci", settings.get_profile("presage"), derandomize=True)  # CI fails for a change, not by luck
settings.load_profile("ci" if os.environ.get("CI") else "presage")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds the global generators, for tests that draw from them."""
    random.seed(0)
    np.random.seed(0)
