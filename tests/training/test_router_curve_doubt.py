"""Intervals of the curve of cost and quality."""

from dataclasses import replace

import numpy as np

from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.training.router.cost_quality import TRADE_OFFS, accuracy_cis, cost_quality


def test_every_point_lies_in_its_interval_and_more_prompts_narrow_it() -> None:
    widths = []
    for prompts in (200, 3200):
        drawn = generate_outcomes(prompts, 0)
        curve, ends = (
            cost_quality(drawn.probabilities, drawn.outcomes),
            accuracy_cis(drawn.probabilities, drawn.outcomes, 0),
        )
        assert curve is not None
        assert len(ends) == len(TRADE_OFFS)
        assert all(low <= point.accuracy <= high for point, (low, high) in zip(curve.points, ends, strict=True))
        widths.append(np.mean([high - low for low, high in ends]))
    assert widths[1] < widths[0] / 2.5  # four times as narrow, but for chance


def test_without_costs_there_is_none() -> None:
    drawn = generate_outcomes(50, 0)
    unknown = np.full_like(drawn.outcomes.cost, np.nan)
    assert accuracy_cis(drawn.probabilities, replace(drawn.outcomes, cost=unknown, output_tokens=unknown), 0) == ()
