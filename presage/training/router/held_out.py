"""The prompts that routers may be judged on: those that none of them learnt from."""

from __future__ import annotations

import numpy as np

from presage.datasets.outcomes.schema import Outcomes, prompt_keys
from presage.errors import TraceError
from presage.predictors.router import RouterPredictor


def held_out(outcomes: Outcomes, *routers: RouterPredictor) -> tuple[Outcomes, int]:
    """The prompts that none of the routers learnt from, and how many others were left out.

    Raises:
        TraceError: all were trained on, so that nothing can be judged.
    """
    seen = np.isin(prompt_keys(outcomes), np.concatenate([router.trained_on for router in routers]))
    if seen.all():
        raise TraceError(
            f"all {len(outcomes)} prompts are ones that the model was trained on, so its figures on them prove "
            "nothing: give outcomes that were kept apart, such as later ones or those of --test"
        )
    return outcomes.take(~seen), int(seen.sum())
