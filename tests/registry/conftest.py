"""One database for all registry tests (making one takes seconds); every test uses model names of its own."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from registry_database import new_database
from registry_samples import METRICS, STEPS, EchoPredictor

from presage.predictors.common.artefact import write_artefact
from presage.registry.connect import Registry, open_registry
from presage.registry.package import RegisteredVersion, register


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[EchoPredictor]:
    module = ModuleType("presage.predictors.next_agent.predictor")
    module.NextAgentPredictor = EchoPredictor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "presage.predictors.next_agent.predictor", module)
    return EchoPredictor


@pytest.fixture(scope="session")
def artefact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "model"
    write_artefact(
        folder,
        kind="next-agent",
        config={"horizon": 3},
        tensors={"bias": np.array(0.75)},
        training_data={"digest": "sha256:training"},
    )
    (folder / "report.md").write_text("# Report\n")
    (folder / "report.html").write_text("<!doctype html>\n")
    return folder


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return open_registry(new_database(tmp_path_factory.mktemp("registry") / "mlflow.db"))


@pytest.fixture(scope="session")
def registered(registry: Registry, artefact_folder: Path) -> Callable[[str], RegisteredVersion]:
    """Registers the artefact under a name; again under the same name makes the next version."""

    def make(name: str) -> RegisteredVersion:
        return register(
            registry,
            artefact_folder,
            name=name,
            metrics=METRICS,
            params={"seed": 0, "rate": 1e-3},
            tags={"team": "search"},
            summary="prefill 0.900 0.800",
            input_example=pd.DataFrame(STEPS),
            report=[artefact_folder / "report.md", artefact_folder / "report.html"],
        )

    return make
