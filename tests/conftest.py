"""Fixtures for every test: seeded randomness, one thread, and the path of the shared public traces."""

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
from tiny_model import Tiny

settings.register_profile("presage", deadline=None)  # machines are shared: no test is timed
settings.load_profile("presage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that two processes finish at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds the global generators, for tests that draw from them."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def workflows_folder() -> Path:
    """The folder of the public traces beside the checkout; skips the test without it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "workflows"
    if not folder.is_dir():
        pytest.skip(f"no public traces at {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    from presage.datasets.ingest import append
    from presage.datasets.synthetic.workflows import generate
    from presage.predictors.next_agent.boosting import BoostingConfig
    from presage.predictors.next_agent.network_weights import NetworkConfig
    from presage.predictors.next_agent.parts import NextAgentConfig
    from presage.training.next_agent.train import train

    root = tmp_path_factory.mktemp("tiny")
    drawn = [generate("retry", workflows, seed, state_size=16).table for workflows, seed in ((80, 0), (40, 1))]
    for table, name in zip(drawn, ("store", "held-out"), strict=True):
        append(table, root / name)
    config = NextAgentConfig(network=NetworkConfig(epochs=3), boosting=BoostingConfig(rounds=5))
    training = train(drawn[0], None, config, states="captured", baselines=("markov-1",), name="tiny")
    training.save(root / "model")
    return Tiny(training, root / "model", root / "store", root / "held-out")
