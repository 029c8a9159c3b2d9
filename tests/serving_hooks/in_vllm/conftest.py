"""What the tests in vLLM's scheduler share."""

import math
import sys
from collections.abc import Iterator

import pytest

from presage.serving_hooks import explain
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.settings import ForecastSettings


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models may take as long as they need: none is switched off because the machine is busy."""
    monkeypatch.setattr(ForecastSettings, "forecast_budget", lambda _: Budget(deadline_s=math.inf, hang_s=None))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status and explanations are computed anew each time."""
    monkeypatch.setattr(explain, "FRESH_S", 0.0)


@pytest.fixture(autouse=True)
def nothing_beside() -> Iterator[None]:
    """A process that a scheduler has started to ask the registry ends with the test, not with all of them."""
    yield
    samples = sys.modules.get("vllm_samples")
    while samples is not None and samples.BUILT:
        upkeep = getattr(samples.BUILT.pop(), "upkeep", None)
        if upkeep is not None:
            upkeep.close()
