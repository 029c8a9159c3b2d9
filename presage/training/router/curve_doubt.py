"""How sure the curve of cost and quality is: an interval of the accuracy at each trade-off.

By bootstrap over prompts, prices as they are. One draw of prompts serves all points and everything judged on the same
prompts with the same seed, so the points of a curve move together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes.schema import Outcomes
from presage.predictors.bootstrap import ratio_cis
from presage.training.router.cost_quality import TRADE_OFFS, priced


def accuracy_cis(
    probabilities: NDArray[np.floating], outcomes: Outcomes, seed: int, trade_offs: Sequence[float] = TRADE_OFFS
) -> tuple[tuple[float, float], ...]:
    """The 95 % interval of the accuracy at each point of `cost_quality(probabilities, outcomes, trade_offs)`.

    Args:
        probabilities: [n, M].
        outcomes: of the same n prompts and M models.
        seed: of the bootstrap.
        trade_offs: of the points.

    Returns:
        An interval a trade-off; none where costs are not known.
    """
    known = priced(outcomes)
    if known is None:
        return ()
    said = probabilities[known.whole].astype(np.float64)
    hits = np.concatenate([np.take_along_axis(known.truth, known.taken(said, w), axis=1) for w in trade_offs], axis=1)
    return tuple(ratio_cis(hits, np.ones_like(hits), np.random.default_rng(seed)))
