"""What the tests in vLLM's scheduler share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_beside() -> Iterator[None]:
    """A process that a scheduler has started to ask the registry ends with the test, not with all of them."""
    yield
    samples = sys.modules.get("vllm_samples")
    for scheduler in list(samples.BUILT) if samples is not None else ():
        upkeep = getattr(scheduler, "_upkeep", None)
        if upkeep is not None:
            upkeep.close()
