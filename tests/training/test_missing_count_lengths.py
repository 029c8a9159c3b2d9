"""Lengths of traces that lack token counts: learnt about as well as with all, judged on all steps, and so reported."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from presage.datasets.split import Split
from presage.datasets.synthetic.lengths import generate_lengths
from presage.predictors.quantiles.choice import QuantileConfig
from presage.report.files import document, markdown
from presage.training.length.train import (
    LengthTraining,
    assess_lengths,
    evaluate_lengths,
    fit_lengths,
    train_lengths,
)

SHARE = 0.3
CONFIG = QuantileConfig(estimator="boosted")
WHOLE, TEST = generate_lengths(300, 0).table, generate_lengths(150, 1).table


def lacking(table: pa.Table, seed: int = 0, share: float = SHARE) -> pa.Table:
    """The trace without both counts on a share of its steps, drawn at random."""
    missing = np.random.default_rng(seed).random(len(table)) < share
    for name in ("input_tokens", "output_tokens"):
        column = pa.array(table[name].to_numpy(), pa.int32(), mask=missing)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


@pytest.fixture(scope="module")
def training() -> LengthTraining:
    return train_lengths(lacking(WHOLE), lacking(TEST, 1), CONFIG, texts="none", baselines=("constant",))


@pytest.mark.slow
def test_without_three_counts_in_ten_the_loss_is_about_that_with_all_and_bounds_hold() -> None:
    table, test = generate_lengths(800, 4).table, generate_lengths(300, 5).table
    full, ours = (
        assess_lengths(fit_lengths(of, CONFIG, texts="none"), Split(of, test, "separate"), baselines=())
        for of in (table, lacking(table))
    )
    loss, whole = (sum(of.value for of in one.evaluation.figures.pinball[:2]) for one in (ours, full))
    assert loss < 1.1 * whole
    assert ours.evaluation.figures.coverage[1].value == pytest.approx(0.9, abs=0.03)


def test_every_step_is_judged_and_those_with_an_estimate_are_marked(training: LengthTraining) -> None:
    told = training.evaluation.to_dict()
    assert told["left_out_steps"] == {"cut": 0, "count missing": 0}
    assert (told["steps"], told["workflows"]) == (len(TEST), 150)
    # By hand: a step is marked if its own count or one of a later step of its workflow is missing.
    missing = lacking(TEST, 1)["output_tokens"].is_null().to_numpy(zero_copy_only=False)
    names = TEST["workflow_id"].to_pylist()
    marked = [any(missing[i] and names[i] == name for i in range(row, len(TEST))) for row, name in enumerate(names)]
    assert told["estimated_steps"] == sum(marked)
    with_any = {name for name, lacks in zip(names, missing, strict=True) if lacks}
    assert told["recorded"]["workflows"] == 150 - len(with_any)
    assert told["recorded"]["steps"] == sum(name not in with_any for name in names)


def test_figures_of_recorded_workflows_are_those_of_a_trace_of_them_alone(training: LengthTraining) -> None:
    shown = lacking(TEST, 1)
    missing = set(shown.filter(shown["output_tokens"].is_null())["workflow_id"].to_pylist())
    alone = shown.filter(pa.array([name not in missing for name in shown["workflow_id"].to_pylist()]))
    judged = evaluate_lengths(training.predictor, alone, 0).evaluation
    assert judged.recorded is None
    assert training.evaluation.recorded is not None
    assert training.evaluation.recorded.to_dict() == judged.figures.to_dict()


def test_a_step_alone_is_marked_by_its_own_count() -> None:
    fitted = fit_lengths(lacking(WHOLE), CONFIG, target="step", texts="none")
    found = evaluate_lengths(fitted.predictor, lacking(TEST, 1), 0).evaluation
    assert found.estimated == lacking(TEST, 1)["output_tokens"].null_count


def test_estimates_of_the_test_part_come_from_the_training_part() -> None:
    """The training part has answers of 7 tokens only: so have the estimates of the test part, whatever else it has."""
    sevens = pa.array(np.full(len(WHOLE), 7), pa.int32())
    train = lacking(WHOLE.set_column(WHOLE.schema.get_field_index("output_tokens"), "output_tokens", sevens))
    fitted = fit_lengths(train, CONFIG, texts="none")
    filled = fitted.counts.fill(lacking(TEST, 1))
    assert set(filled.table["output_tokens"].filter(filled.estimated["output_tokens"]).to_pylist()) == {7}


def test_the_report_says_what_is_missing_and_shows_both_figures(training: LengthTraining) -> None:
    metrics = training.metrics
    text = markdown(document(metrics))
    assert f"The length of {metrics['estimated_steps']:,} judged steps contains an estimated token count." in text
    missing = metrics["traces"]["missing_counts"]["output_tokens"]
    assert f"output_tokens are missing on {missing['steps']:,} of {len(WHOLE):,} LLM steps" in text
    assert "include_usage" in text
    assert "Not judged" not in text
    recorded = metrics["recorded"]
    assert f"| all counts recorded | {recorded['workflows']} | {recorded['steps']} |" in text


def test_with_all_counts_nothing_is_marked_or_said() -> None:
    told = train_lengths(WHOLE, TEST, CONFIG, texts="none", baselines=()).metrics
    assert (told["estimated_steps"], told["recorded"]) == (0, None)
    assert "estimated" not in markdown(document(told))
