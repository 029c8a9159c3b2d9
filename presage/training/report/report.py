"""Which report a `metrics.json` asks for."""

from __future__ import annotations

from presage.training.report import next_agent, study
from presage.training.report.blocks import Document
from presage.training.report.numbers import Metrics


def document(metrics: Metrics) -> Document:
    """The report of a training, an evaluation or a study."""
    return study.document(metrics) if metrics["kind"] == "study" else next_agent.document(metrics)
