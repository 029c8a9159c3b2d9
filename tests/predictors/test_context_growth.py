"""The predictor of context growth: bounds, what it keeps of workflow types, and its artefact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from context_samples import loops

from presage.datasets.schema import conform
from presage.errors import ArtefactError
from presage.features.lengths import length_rows
from presage.features.rows import PROMPT_COLUMN
from presage.predictors.length.context import ContextGrowthConfig, ContextGrowthPredictor, TypeContexts
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.training.length.train import fit_lengths

BOOSTED = ContextGrowthConfig(estimator="boosted")


def fitted(table: pa.Table) -> ContextGrowthPredictor:
    found = fit_lengths(table, BOOSTED, target="final-context").predictor
    assert isinstance(found, ContextGrowthPredictor)
    return found


@pytest.fixture(scope="module")
def predictor() -> ContextGrowthPredictor:
    return fitted(loops(60, 0))


def test_what_training_saw_of_a_workflow_type_is_kept() -> None:
    def step(name: str, workflow: str, number: int, prompt: int | None, complete: bool = True) -> dict[str, object]:
        of = {"workflow_type": name, "workflow_id": workflow, "step": number, "agent": "x", "complete": complete}
        return {**of, "input_tokens": prompt, "output_tokens": 10}

    rows = [step("a", f"a{w}", s, 100 + 50 * s + w) for w in range(4) for s in range(3)]
    rows += [step("b", f"b{w}", s, 1000 + 300 * s) for w in range(3) for s in range(5)]
    rows += [step("b", "cut", s, 1000 + 300 * s, complete=False) for s in range(9)]
    found = fitted(conform(pa.Table.from_pylist(rows), "test"))
    assert found.of_type("a") == TypeContexts(steps=3.0, growth=50.0, largest=213.0)
    # The workflow that was cut has grown as far as it came, but nobody knows how many steps it took.
    assert found.of_type("b") == TypeContexts(steps=5.0, growth=300.0, largest=3410.0)
    overall = found.of_type("never seen")
    assert overall.steps == pytest.approx((4 * 3 + 3 * 5) / 7)
    assert overall.growth == pytest.approx((4 * 100 + 3 * 1200 + 2400) / (4 * 2 + 3 * 4 + 8))
    assert overall.largest == 3410.0


def test_no_forecast_exceeds_the_largest_context_that_training_saw(predictor: ContextGrowthPredictor) -> None:
    largest = predictor.of_type("fix").largest
    of = {"workflow_type": "fix", "agent": "coder", "output_tokens": 50}
    steps = [{**of, "input_tokens": tokens} for tokens in (5000, 20_000, int(largest) - 100)]
    forecast = predictor.forecast(steps)
    assert 0 < max(forecast.quantiles.values()) <= 101
    assert predictor.forecast([{**of, "input_tokens": int(largest) + 5000}]).prediction == 0.0
    rows = length_rows(loops(20, 1), predictor.encoder, "final-context")
    at = rows.take(rows.workflow == 0)
    assert (predictor.predict(at) + at.numbers[:, [PROMPT_COLUMN]] <= largest + 1).all()


def test_an_artefact_forecasts_as_the_predictor_that_wrote_it(
    predictor: ContextGrowthPredictor, tmp_path: Path
) -> None:
    predictor.save(tmp_path / "model")
    loaded = ContextGrowthPredictor.load(tmp_path / "model")
    rows = length_rows(loops(20, 1), predictor.encoder, "final-context")
    np.testing.assert_array_equal(loaded.predict(rows), predictor.predict(rows))
    assert loaded.of_type("fix") == predictor.of_type("fix")
    assert loaded.target == "final-context"
    with pytest.raises(ArtefactError, match="remaining-length"):
        RemainingLengthPredictor.load(tmp_path / "model")
