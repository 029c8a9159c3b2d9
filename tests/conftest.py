"""Fixtures for tests of the package: a trained model, the path of the shared public traces; and which are `engine`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from tiny_model import Tiny

TESTS = Path(__file__).resolve().parent

SERVING = {"gateway", "replay", "serving_hooks", "tool_service"}
"""Folders of the tests of serving."""

STARTERS = {"subprocess", "multiprocessing", "uvicorn", "own_engine", "presage.testing.servers"}
"""Modules that start or end processes and servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that two processes finish at about the same time, and marks `engine`.

    That is the mark of tests of serving that start servers, engines or processes, themselves or by a module beside
    them, unless they are marked `any_load`. Elsewhere child processes only import something or run a command, whatever
    else the machine does.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if item.get_closest_marker("any_load") or SERVING.isdisjoint(item.path.parts):
            continue
        if _starts(item.module):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.engine)


@functools.cache
def _starts(module: ModuleType) -> bool:
    names = {
        value.__name__ if isinstance(value, ModuleType) else value.__module__
        for value in vars(module).values()
        if isinstance(value, ModuleType | FunctionType | type)
    }
    beside = [sys.modules[name] for name in names - STARTERS if name in sys.modules and "." not in name]
    own = [of for of in beside if of is not module and Path(getattr(of, "__file__", None) or "/").is_relative_to(TESTS)]
    return bool(names & STARTERS) or any(map(_starts, own))


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
