"""A predictor of lengths for tests of serving, and the pieces around it."""

from functools import cache
from pathlib import Path

from presage.datasets.store import read_store
from presage.features.lengths import LengthEncoder, length_rows
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.train import LengthTexts


class Clock:
    """Shows the time it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@cache
def lengths_of(store: Path) -> RemainingLengthPredictor:
    """A small forest on the traces of a store."""
    table = read_store(store)
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    encoder, rows = texts.fit(encoder, relevant=False, seed=0, size=4)
    held = rows.task % 5 == 0
    config = QuantileConfig(estimator="forest", refit=False)
    return RemainingLengthPredictor(config, 0).fit(rows.take(~held), rows.take(held), encoder=encoder)
