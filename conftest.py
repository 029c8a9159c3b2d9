"""What holds for every test, of the package and of the benchmarks: one thread, seeds, no real registry."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy or torch is loaded
# A cache for each version of numba, since they would overwrite each other's compiled code; environments share it.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent / "build" / "tests" / f"numba-{version('numba')}"))
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of tests without the marks that `-m` asks for: most of the time of a short run went there."""
    asked = str(config.option.markexpr)
    if " or " in asked or collection_path.suffix != ".py":
        return None
    written = {line.split(":")[0] for line in config.getini("markers")} - {"hypothesis"}  # it marks tests by itself
    marks = {mark for negated, mark in re.findall(r"(not )?\b(\w+)", asked) if not negated} & written
    text = collection_path.read_text(encoding="utf-8") if marks else ""
    return any(f"mark.{mark}" not in text for mark in marks) or None
