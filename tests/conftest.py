"""Fixtures for tests of the package: a trained model, the path of the shared public traces; and which run first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import Tiny

LONGEST = ("test_notebooks.py", "test_states_in_engine.py", "test_router_finetune.py", "test_gateway_walk.py")
"""Files whose tests take minutes: the processes that share the tests begin with them, to finish at the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, then those with slow tests, so that two processes finish at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path not in slow))


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
