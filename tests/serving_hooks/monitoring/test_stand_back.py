"""A predictor that online counts beat for 1,000 steps stands back for that type, and comes back once it is as good."""

from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.monitoring.outcomes import AgainstCounts
from presage.serving_hooks.monitoring.stand_back import STEPS, TYPES, WORKFLOWS, StandBack


def ended(model: int, counts: int, judged: int = 10, workflow_type: str = "t") -> tuple[str, AgainstCounts]:
    return workflow_type, AgainstCounts(judged, model, counts)


def test_it_stands_back_after_a_thousand_steps_and_only_for_that_type() -> None:
    of = StandBack()
    told = [of.followed(*ended(4, 5 + number % 2)) for number in range(STEPS // 10)]
    assert [number for number, text in enumerate(told, 1) if text] == [STEPS // 10]
    assert "stands back for workflow type 't'" in (told[-1] or "")
    assert "it forecast 0.400 rightly, online counts 0.550" in (told[-1] or "")
    assert ("t" in of, "u" in of) == (True, False)
    assert of.to_dict() == {"t": {"steps": 1000, "model": 0.4, "counts": 0.55, "stands_back": True}}


def test_it_comes_back_once_the_counts_no_longer_lead() -> None:
    of = StandBack()
    for _ in range(STEPS // 10):
        of.followed(*ended(4, 5))
    assert "t" in of
    told = [of.followed(*ended(6, 5)) for _ in range(STEPS // 10)]
    came_back = [number for number, text in enumerate(told, 1) if text]
    assert came_back == [STEPS // 20], "half the window is old"
    assert "again" in (told[came_back[0] - 1] or "")
    assert "t" not in of


def test_a_lead_that_chance_explains_changes_nothing() -> None:
    of = StandBack()
    for number in range(STEPS // 10):
        of.followed(*(ended(10, 0) if number % 2 else ended(0, 10)))
    of.followed(*ended(0, 10))
    assert "t" not in of
    assert not of.is_ahead("t")


def test_one_long_workflow_is_not_evidence_enough() -> None:
    of = StandBack()
    for _ in range(WORKFLOWS - 1):
        of.followed(*ended(0, STEPS, STEPS))
    assert "t" not in of
    of.followed(*ended(0, STEPS, STEPS))
    assert "t" in of


def test_after_an_alarm_the_comparison_begins_anew() -> None:
    of = StandBack()
    for _ in range(STEPS // 10):
        of.followed(*ended(8, 5))
    assert of.is_ahead("t")
    of.restart("t")
    assert not of.is_ahead("t")
    for _ in range(20):
        of.followed(*ended(6, 5))
    assert of.is_ahead("t"), "200 steps after the alarm it still leads"


def test_types_are_bounded() -> None:
    of = StandBack()
    for number in range(2 * TYPES):
        of.followed(*ended(1, 1, workflow_type=str(number)))
    assert len(of.to_dict()) == TYPES


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=400))
def test_law_its_sums_are_those_of_the_latest_workflows(pairs: list[tuple[int, int]]) -> None:
    of = StandBack()
    for model, counts in pairs:
        of.followed(*ended(model, counts, 8))
    kept = pairs[-max(STEPS // 8, WORKFLOWS) :]
    figures = of.to_dict()["t"]
    assert figures["steps"] == 8 * len(kept)
    assert figures["model"] == sum(model for model, _ in kept) / figures["steps"]
    assert figures["counts"] == sum(counts for _, counts in kept) / figures["steps"]
