"""A workflow type is acted on when its forecasts have shown enough, and never where they are over-confident."""

from collections.abc import Iterator

import numpy as np
import pytest

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.modes import RISK, TOLERANCE, Evidence, Mode, Modes
from presage.serving_hooks.status import EvidenceStatus, ModesStatus
from presage.serving_hooks.workflows import EndReason

AGENTS = ("coder", "tester")


def forecast(sure: float, version: int | None = 1) -> LiveForecast:
    rows = np.array([[sure, 1 - sure, 0.0]], np.float32)
    return LiveForecast("champion", 50, PREFILL, rows, AGENTS, version)


def workflow(evidence: Evidence, name: str, sure: float, came: Iterator[str], of: str = "t", version: int = 1) -> None:
    """Ten steps, each forecast with this certainty to be the coder's."""
    made = forecast(sure, version)
    for number in range(10):
        evidence.tracker.begun(of, name, next(came), made, number)
        evidence.forecast(of, made)
        evidence.tracker.completed(of, name, LiveForecast("none", 0, COMPLETION, np.empty((0, 0)), (), None))
    evidence.tracker.ended(of, name, EndReason.EXPIRED)


def agents(share: float, seed: int) -> Iterator[str]:
    draw = np.random.default_rng(seed)
    while True:
        yield AGENTS[int(draw.random() >= share)]


def needed(sure: float, share: float, seed: int, least: int = 1, most: int = 400) -> int | None:
    """Workflows until the type suffices."""
    evidence, came = Evidence(least, lambda: None), agents(share, seed)
    for number in range(most):
        workflow(evidence, str(number), sure, came)
        if evidence.suffices("t"):
            return number + 1
    return None


def test_what_says_how_sure_it_is_suffices_after_some_tens_of_workflows() -> None:
    for sure, share in ((0.6, 0.6), (0.9, 0.9), (0.7, 0.9)):
        found = [needed(sure, share, seed) for seed in range(5)]
        assert all(number is not None and 5 < number < 120 for number in found), (sure, share, found)


def test_what_is_over_confident_by_the_tolerance_hardly_ever_suffices() -> None:
    lucky = sum(needed(0.7, 0.7 - TOLERANCE, seed, most=150) is not None for seed in range(60))
    assert lucky <= 8  # of 60 at most RISK, 3 on the mean
    assert all(needed(0.9, 0.5, seed, most=150) is None for seed in range(5))
    assert RISK == 0.05


def test_the_odds_are_those_of_the_bets_by_hand() -> None:
    """One workflow, ten forecasts of 0.75 of which all that were judged came true: x = (1 + 0.25) / 2."""
    evidence = Evidence(1, lambda: None)
    workflow(evidence, "w", 0.75, iter(["coder"] * 10))
    shares = (0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125)
    odds = sum(1 + share / 0.45 * (0.625 - 0.45) for share in shares) / 6
    assert evidence.status() == {"t": {"version 1": EvidenceStatus(1, round(odds, 3), suffices=False)}}


def test_no_fewer_workflows_than_are_asked_for() -> None:
    assert needed(0.5, 1.0, 0, least=1) < needed(0.5, 1.0, 0, least=90) == 90  # type: ignore[operator]


def test_another_version_begins_in_shadow_again_and_so_does_another_type() -> None:
    changes: list[int] = []
    evidence = Evidence(1, lambda: changes.append(1))
    modes = Modes(suffices=evidence.suffices)
    came = agents(0.9, 0)
    assert modes.whole["eviction"] is Mode.SHADOW
    for number in range(100):
        workflow(evidence, str(number), 0.9, came)
    modes.changed()
    assert (changes, modes.of("eviction", "t"), modes.whole["eviction"]) == ([1], Mode.ON, Mode.ON)
    assert modes.of("eviction", "other") is Mode.SHADOW
    evidence.forecast("t", forecast(0.9, version=2))
    assert modes.of("eviction", "t") is Mode.SHADOW
    evidence.forecast("t", forecast(0.9, version=1))
    assert modes.of("eviction", "t") is Mode.ON


def test_types_without_end_are_bounded_and_push_out_none_that_suffices() -> None:
    evidence, came = Evidence(1, lambda: None), agents(0.9, 0)
    for number in range(100):
        workflow(evidence, str(number), 0.9, came)
    for number in range(1200):
        evidence.tracker.begun(f"u{number}", "w", "coder", forecast(0.9), 0)
        evidence.tracker.begun(f"u{number}", "w", "coder", forecast(0.9), 1)
        evidence.tracker.ended(f"u{number}", "w")
    assert len(evidence.status()) == 1000
    assert evidence.status()["t"]["version 1"].suffices


@pytest.mark.parametrize(
    ("said", "policy", "name", "mode"),
    [
        ({}, "priority", "t", Mode.ON),
        ({"default": "shadow", "policies": {"eviction": "on"}}, "eviction", "t", Mode.ON),
        ({"default": "shadow", "policies": {"eviction": "on"}}, "priority", "t", Mode.SHADOW),
        ({"default": "shadow", "workflow_types": {"t": "on"}}, "priority", "t", Mode.ON),
        ({"policies": {"eviction": "off"}, "workflow_types": {"t": "on"}}, "eviction", "t", Mode.OFF),
        ({"policies": {"eviction": "on"}, "workflow_types": {"t": "shadow"}}, "eviction", "t", Mode.SHADOW),
        ({"policies": {"eviction": "shadow"}}, "prefetch", "t", Mode.SHADOW),
    ],
)
def test_what_is_said_of_less_goes_before_what_is_said_of_more(said: dict, policy: str, name: str, mode: Mode) -> None:  # type: ignore[type-arg]
    assert Modes(**said).of(policy, name) is mode


def test_both_together_go_before_each_and_everything_takes_all_back() -> None:
    modes = Modes()
    modes.set("off", "eviction")
    modes.set("on", "eviction", "t")
    assert (modes.of("eviction", "t"), modes.of("eviction", "u")) == (Mode.ON, Mode.OFF)
    assert modes.whole == {"priority": Mode.ON, "eviction": Mode.ON, "admission": Mode.ON, "prefetch": Mode.ON}
    modes.set("off")
    assert set(modes.whole.values()) == {Mode.OFF}
    assert modes.of("eviction", "t") is Mode.OFF
    assert modes.status() == ModesStatus("off", [], dict.fromkeys(modes.whole, "off"))
