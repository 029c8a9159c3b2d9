"""An evaluation of lengths by hand: which steps count, every figure of them, and rivals on the same steps."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from presage.datasets.schema import conform
from presage.datasets.synthetic.lengths import generate_lengths
from presage.errors import TraceError
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import LabelledRows, Target
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.evaluate import LengthEvaluation, Predict, evaluate
from presage.training.length.queue import FIRST_COME, compare
from presage.training.length.train import fit_lengths

QUANTILES = (0.5, 0.9)

# Two whole workflows, one that was cut, and one of another type with a count missing; a median and a bound a step.
STEPS = (
    ("app", "a", 0, 10, True, (30, 50)),
    ("app", "a", 1, 30, True, (30, 30)),
    ("app", "b", 0, 5, True, (10, 12)),
    ("app", "c", 0, 100, False, (999, 999)),
    ("bot", "d", 0, None, True, (7, 9)),
    ("bot", "d", 1, 20, True, (8, 12)),
)


def rows_of(target: Target = "remaining", steps: tuple[tuple[object, ...], ...] = STEPS) -> LabelledRows:
    names = ("workflow_type", "workflow_id", "step", "output_tokens", "complete")
    lines = [{**dict(zip(names, step, strict=False)), "agent": "x"} for step in steps]
    table = conform(pa.Table.from_pylist(lines), "test")
    return length_rows(table, LengthEncoder.fit(table), target)


def said(_: LabelledRows) -> NDArray[np.float32]:
    return np.array([step[-1] for step in STEPS], np.float32)


def always(*tokens: float) -> Predict:
    return lambda rows: np.tile(np.array(tokens, np.float32), (len(rows), 1))


def judged(target: Target = "remaining", **baselines: Predict) -> LengthEvaluation:
    return evaluate(said, rows_of(target), QUANTILES, 0, baselines=baselines, resamples=50)


BY_HAND = judged(constant=always(20, 40))


def test_steps_without_a_known_length_are_left_out_and_counted() -> None:
    told = BY_HAND.to_dict()
    assert told["left_out_steps"] == {"cut": 1, "count missing": 1}
    assert (told["steps"], told["workflows"]) == (4, 3)
    assert BY_HAND.figures.positions.tolist() == [2, 1, 0, 1]


def test_order_numbers_and_coverage_by_hand() -> None:
    # Truths 40, 30, 5, 20 and medians 30, 30, 10, 8: one pair of six tied, one wrong; both at arrival in order.
    figures = BY_HAND.figures
    assert figures.tau_distance["all"].value == pytest.approx(1.5 / 6)
    assert figures.tau_distance["arrival"].value == 0
    # Errors 10, 0, −5, 12 at the median; −10, 0, −7, 8 at .9.
    assert figures.pinball[0].value == pytest.approx((5 + 0 + 2.5 + 6) / 4)
    assert figures.pinball[1].value == pytest.approx((1 + 0 + 0.7 + 7.2) / 4)
    assert [share.value for share in figures.coverage] == [2 / 4, 3 / 4]
    assert figures.width == pytest.approx((0, (20 + 0 + 2 + 4) / 4))


def test_a_baseline_stands_on_the_same_steps_and_its_difference_is_ours_minus_its() -> None:
    rival, gain = BY_HAND.baselines["constant"], BY_HAND.differences["constant"]
    assert rival.positions.tolist() == BY_HAND.figures.positions.tolist()
    assert rival.tau_distance["all"].value == rival.tau_distance["arrival"].value == 0.5
    # Errors 20, 10, −15, 0 at the median; 0, −10, −35, −20 at .9.
    assert [share.value for share in rival.pinball] == pytest.approx([22.5 / 4, 6.5 / 4])
    assert gain.tau_distance["all"].value == pytest.approx(0.25 - 0.5)
    assert gain.tau_distance["arrival"].value == pytest.approx(0 - 0.5)
    assert [share.value for share in gain.pinball] == pytest.approx([3.375 - 5.625, 2.225 - 1.625])


def test_each_type_by_hand_and_a_workflow_nobody_judged_is_of_none() -> None:
    app, bot = BY_HAND.by_workflow_type["app"], BY_HAND.by_workflow_type["bot"]
    assert app.tau_distance["all"].value == pytest.approx(0.5 / 3)
    assert app.pinball[0].value == pytest.approx(7.5 / 3)
    assert (app.positions.tolist(), bot.positions.tolist()) == ([2, 1], [1])
    assert bot.pinball[0].value == pytest.approx(6)
    assert np.isnan(bot.tau_distance["all"].value)
    assert BY_HAND.type_of == ("app", "app", "unknown", "bot")


def test_a_type_that_training_never_saw_is_called_unknown() -> None:
    table = conform(pa.Table.from_pylist([{"workflow_type": "new", "workflow_id": "a", "step": 0, "agent": "x",
                                           "output_tokens": 4}]), "test")  # fmt: skip
    known = generate_lengths(5, 0).table
    found = evaluate(always(4, 9), length_rows(table, LengthEncoder.fit(known)), QUANTILES, 0, resamples=10)
    assert list(found.by_workflow_type) == ["unknown"]
    assert found.type_of == ("unknown",)


def test_the_queue_serves_the_workflows_whose_every_step_is_known() -> None:
    assert BY_HAND.queue is not None
    medians = {"shortest total, predicted": np.array([30.0, 30.0, 10.0])}
    assert BY_HAND.queue == compare(np.array([10.0, 30.0, 5.0]), medians, np.array([0, 2, 3]), 0)
    assert BY_HAND.queue.workflows == 2
    # A step's own length has no bound: only the workflow with a count missing stays out.
    steps = judged("step")
    assert steps.queue is not None
    assert steps.queue.workflows == 3
    assert "shortest step, predicted" in steps.queue.completion
    assert steps.to_dict()["left_out_steps"] == {"cut": 0, "count missing": 1}


def test_without_a_whole_workflow_there_is_no_queue() -> None:
    found = evaluate(always(1, 2), rows_of(steps=STEPS[4:]), QUANTILES, 0, resamples=10)
    assert found.queue is None
    assert found.to_dict()["queue"] is None


def test_groups_by_forecast_hold_what_came() -> None:
    assert [(row["steps"], row["forecast"], row["truth_p50"]) for row in BY_HAND.bins] == [
        (1, 8, 20),
        (1, 10, 5),
        (1, 30, 40),
        (1, 30, 30),
    ]
    many = length_rows(generate_lengths(50, 0).table, LengthEncoder.fit(generate_lengths(50, 0).table))
    groups = evaluate(lambda r: np.stack([r.label] * 2, 1), many, QUANTILES, 0, resamples=10).bins
    assert len(groups) == 10
    assert sum(int(row["steps"]) for row in groups) == len(many)
    assert all(row["truth_p10"] <= row["truth_p50"] == row["forecast"] <= row["truth_p90"] for row in groups)


def test_against_itself_nothing_differs_and_the_interval_is_nothing_wide() -> None:
    again = judged(same=said).differences["same"]
    for share in (*again.tau_distance.values(), *again.pinball):
        assert (share.value, share.ci95) == (0, (0, 0))


def test_differences_are_paired() -> None:
    """Always five tokens nearer: no draw of workflows says anything else, however much the workflows differ."""
    table = generate_lengths(40, 0).table
    rows = length_rows(table, LengthEncoder.fit(table))

    def above(tokens: float) -> Predict:
        return lambda of: np.repeat(of.label[:, None] + np.float32(tokens), 2, axis=1)

    found = evaluate(above(5), rows, QUANTILES, 0, baselines={"further": above(10)}, resamples=50)
    share = found.differences["further"].pinball[0]
    assert (share.value, *share.ci95) == pytest.approx((-2.5, -2.5, -2.5), abs=1e-3)


def test_a_narrower_bound_wins_only_where_steps_beyond_it_would_have_shown() -> None:
    def lost(workflows: int) -> list[str]:
        rows = rows_of(steps=tuple(("app", f"{w:03d}", 0, 10, True) for w in range(workflows)))
        found = evaluate(always(10, 50), rows, QUANTILES, 0, baselines={"narrow": always(10, 12)}, resamples=50)
        return [one["at"] for one in found.to_dict()["behind"]]

    assert lost(90) == []  # 9 steps expected beyond .9
    assert lost(110) == ["in pinball loss at 0.9, tokens a step,"]


def test_the_figures_are_json_and_the_same_seed_gives_them_again() -> None:
    told = BY_HAND.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told == judged(constant=always(20, 40)).to_dict()
    assert (told["kind"], told["target"]) == ("remaining-length", "remaining")
    assert told["by_workflow_type"]["bot"]["tau_distance"] == {"all": None, "arrival": None}
    assert told["differences"]["constant"]["tau_distance"]["all"]["difference"] == pytest.approx(-0.25)
    assert told["queue"]["saved"][FIRST_COME] == 0


def test_traces_with_no_known_length_at_all_are_refused() -> None:
    with pytest.raises(TraceError, match=r"of 1 steps none has a known length \(1 are of workflows that were cut\)"):
        evaluate(always(1, 2), rows_of(steps=STEPS[3:4]), QUANTILES, 0)


def test_a_training_says_which_it_is_where_texts_are_not_read() -> None:
    config, table = QuantileConfig(estimator="ridge", refit=False), generate_lengths(40, 0).table
    bare = table
    for name in ("input_text", "output_text"):
        bare = bare.set_column(bare.schema.get_field_index(name), name, pa.nulls(len(bare), pa.large_string()))
    told = [
        fit_lengths(steps, config, texts=texts).facts["texts"]
        for steps, texts in (
            (bare, "auto"),
            (table, "none"),
            (table.slice(0, 12), "auto"),
        )
    ]
    assert told[:2] == ["not recorded", "recorded, not read: --states none"]
    assert str(told[2]).startswith("recorded, not read: ")
