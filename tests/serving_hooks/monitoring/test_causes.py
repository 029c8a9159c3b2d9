"""Where figures differ from the promised ones, the likely cause is named with what mends it."""

import pytest
from monitoring_samples import followed

from presage.serving_hooks.monitoring.causes import CHANGED, OTHER_TYPE
from presage.serving_hooks.monitoring.drift import Drift, DriftConfig
from presage.serving_hooks.monitoring.promoted import Promoted, promoted_by_type


def promised(word: str = "abc", right: int = 8) -> dict[str, Promoted]:
    return promoted_by_type([followed(word, right + number % 2) for number in range(200)])


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("axc", ("called otherwise: 'x' instead of 'b'",)),
        ("abcx", ("agents that the traces do not have: 'x'",)),
        ("ac", ("never serves: 'b'", "kind tool")),
        ("acb", (CHANGED.text,)),
    ],
)
def test_the_agents_tell_the_cause(word: str, texts: tuple[str, ...]) -> None:
    drift = Drift(promised())
    for _ in range(60):
        drift.followed(followed(word, 8))
    (cause,) = drift.causes("t")
    for text in texts:
        assert text in f"{cause.text}; {cause.mend}"


def test_an_agent_is_not_missed_before_it_had_the_time_to_come() -> None:
    drift = Drift(promised())
    for _ in range(40):
        drift.followed(followed("ac", 8))
    assert drift.causes("t") == (CHANGED,)


def test_a_type_that_nothing_was_promised_for_is_named() -> None:
    drift = Drift(promised())
    for _ in range(20):
        drift.followed(followed("abc", workflow_type="other"))
    assert drift.promised() == {"other": {"figures": {}, "kept": None, "causes": [OTHER_TYPE.to_dict()]}}


def test_without_a_promotion_nothing_is_promised() -> None:
    drift = Drift()
    for _ in range(40):
        drift.followed(followed("abc"))
    assert drift.promised() == {}


@pytest.mark.parametrize(("right", "kept"), [(8, True), (9, True), (4, False)])
def test_a_promise_is_kept_unless_the_live_interval_lies_below_it(right: int, kept: bool) -> None:
    drift = Drift(promised(), DriftConfig(false_alarms=1e-12))
    for number in range(100):
        drift.followed(followed("abc", right + number % 2))
    of = drift.promised()["t"]
    figure = of["figures"]["accuracy at prefill"]
    assert figure["promised"][0] == pytest.approx(0.85)
    assert figure["live"][0] == pytest.approx(right / 10 + 0.05)
    assert figure["live"][1] < figure["live"][0] < figure["live"][2]
    assert figure["workflows"] == 100
    assert of["kept"] is kept
    assert of["causes"] == ([] if kept else [CHANGED.to_dict()])


def test_of_a_few_workflows_nothing_is_concluded() -> None:
    drift = Drift(promised())
    for _ in range(19):
        drift.followed(followed("abc", 0))
    assert drift.promised()["t"]["kept"] is None
