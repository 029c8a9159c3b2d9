"""What a training gives, whatever the kind of predictor: the predictor, its figures, and a folder of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from presage.predictors.artefact import artefact_size_bytes
from presage.training.report.files import write_metrics, write_report


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
