"""Which report a `metrics.json` asks for."""

from __future__ import annotations

from presage.training.report import lengths, losses, next_agent, replay, router, study
from presage.training.report.blocks import Document
from presage.training.report.numbers import Metrics


def document(metrics: Metrics) -> Document:
    """The report of a training, an evaluation or a study."""
    makers = {
        "study": study.document,
        "next-agent": next_agent.document,
        "remaining-length": lengths.document,
        "router": router.document,
        "replay": replay.document,
    }
    return losses.opened(makers[metrics["kind"]](metrics), metrics)
