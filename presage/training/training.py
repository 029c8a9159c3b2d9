"""What every training has, whatever the kind of predictor: progress, versions, latency, and a folder of results."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from presage import __version__
from presage.predictors.common.artefact import artefact_size_bytes
from presage.training.report.files import write_metrics, write_report

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


_WARM_UP = 50


def median_us(call: Callable[[int], object], rounds: int) -> float:
    """Median of `rounds` calls, microseconds; each is given its number, and as many as warm it up are not counted."""
    for i in range(min(rounds, _WARM_UP)):
        call(i)
    taken = []
    for i in range(rounds):
        begun = time.perf_counter_ns()
        call(i)
        taken.append(time.perf_counter_ns() - begun)
    return float(np.median(taken)) / 1000


class Saves(Protocol):
    """A fitted predictor."""

    def save(self, folder: Path, training_data: Mapping[str, Any]) -> None:
        """Writes the artefact."""
        ...


Predictor = TypeVar("Predictor", bound=Saves, covariant=True)
Evaluation = TypeVar("Evaluation", covariant=True)


@dataclass(frozen=True)
class Training(Generic[Predictor, Evaluation]):
    """A fitted predictor and what is known of it.

    Attributes:
        predictor: fitted.
        metrics: the object of the command contract, with "data", "config", "versions", "fit_seconds", "latency_us" and
            "size_bytes" beside the figures, and what the kind adds.
        training_data: what the artefact says of what it was trained on.
        evaluation: the figures behind the metrics.
    """

    predictor: Predictor
    metrics: dict[str, Any]
    training_data: dict[str, Any]
    evaluation: Evaluation

    def save(self, folder: Path) -> None:
        """Writes artefact, `metrics.json` and report; "size_bytes" is known from then on.

        Raises:
            OutputError: the folder cannot be written, or holds something else than an artefact.
        """
        self.predictor.save(folder, self.training_data)
        self.metrics["size_bytes"] = artefact_size_bytes(folder)
        write_metrics(folder, self.metrics)
        write_report(folder, self.metrics)
