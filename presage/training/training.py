"""Common to all trainings: progress, versions, latency, and the results folder."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from presage.predictors.common.artefact import artefact_size_bytes
from presage.report.files import write_metrics, write_report
from presage.version import __version__

Progress = Callable[[str, float | None], None]
"""Progress callback: current stage and its completed share, 0 to 1, or None if unknown."""

DIGEST_OF: Final = "digest of the "
"""What the lines of a report begin with that name the digests of its data sets."""

_LIBRARIES: Final = ("torch", "numpy", "scikit-learn", "lightgbm", "numba", "pyarrow")


def versions() -> dict[str, str]:
    """Versions of Python, Presage and the libraries that affect the figures."""
    return {
        "python": platform.python_version(),
        "presage": __version__,
        **{library: metadata.version(library) for library in _LIBRARIES},
    }


Fitted = TypeVar("Fitted")


def fit_baselines(names: Sequence[str], fit: Callable[[str], Fitted], progress: Progress) -> dict[str, Fitted]:
    """Fit each baseline by its name."""
    fitted = {}
    for index, name in enumerate(names):
        progress(f"baseline {name}", index / len(names))
        fitted[name] = fit(name)
    return fitted


_WARM_UP = 50
_QUIET = 50


def median_us(call: Callable[[int], object], rounds: int) -> float:
    """Median of a call, microseconds, in the quietest stretch of `rounds` calls, after warm-up calls.

    Each call receives its number. A stretch is fifty calls in a row: whatever else runs on the machine only ever adds
    time, and comes and goes, so the stretch with the lowest median says most about the call.
    """
    for i in range(min(rounds, _WARM_UP)):
        call(i)
    taken = []
    for i in range(rounds):
        begun = time.perf_counter_ns()
        call(i)
        taken.append(time.perf_counter_ns() - begun)
    stretches = np.array_split(np.array(taken), max(1, rounds // _QUIET))
    return float(min(np.median(stretch) for stretch in stretches)) / 1000


class Saves(Protocol):
    """A fitted predictor."""

    def save(self, folder: Path, training_data: Mapping[str, Any]) -> None:
        """Write the artefact."""


Predictor = TypeVar("Predictor", bound=Saves, covariant=True)
Evaluation = TypeVar("Evaluation", covariant=True)


@dataclass(frozen=True)
class Training(Generic[Predictor, Evaluation]):
    """A fitted predictor and its metrics.

    Attributes:
        metrics: the object of the command contract, with "data", "config", "versions", "fit_seconds", "latency_us" and
            "size_bytes" beside the figures; "traces" (`describe` of the training traces) or "models" (labels, base
            rate, mean cost and tokens of each); "estimators" of a length predictor (the loss of each on the
            selection part); "curves" of a network, by name one number an epoch.
        training_data: the artefact's description of its training data.
        digests: "sha256:…" of "training traces" and "test traces", or of outcomes.
    """

    predictor: Predictor
    metrics: dict[str, Any]
    training_data: dict[str, Any]
    evaluation: Evaluation
    digests: Mapping[str, str]

    def save(self, folder: Path) -> None:
        """Write artefact, `metrics.json` and report, and set "size_bytes"; raises OutputError if that fails."""
        self.predictor.save(folder, self.training_data)
        self.metrics["size_bytes"] = artefact_size_bytes(folder)
        write_metrics(folder, self.metrics)
        write_report(folder, self.metrics)


def named_digests(digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of the data sets as lines of the report."""
    return {f"{DIGEST_OF}{name}": digest for name, digest in digests.items()}


@dataclass(frozen=True)
class Judged(Generic[Evaluation]):
    """Figures of a fitted predictor on data it was not trained on, beside one baseline that needs no training.

    `latency_us` is of one forecast, see `median_us`; `workflows` is "type/id" of each workflow, in the order of the
    figures' rows (empty for a router).
    """

    evaluation: Evaluation
    latency_us: float
    workflows: tuple[str, ...] = ()
