"""A change is noticed and named, its absence is not, and an alarm ends by its rule."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from monitoring_samples import followed

from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig, Recovered
from presage.serving_hooks.monitoring.outcomes import END, Followed
from presage.serving_hooks.monitoring.promoted import NEVER_SEEN, Promoted, promoted_by_type

WORDS = ("abc", "abbc", "abcbc", "acbc")


def traffic(
    seed: int, words: tuple[str, ...] = WORDS, accuracy: float = 0.7, covered: float = 0.9, workflow_type: str = "t"
) -> Iterator[Followed]:
    """Workflows drawn one by one; hits within a workflow go together, as they do in life."""
    rng = np.random.default_rng(seed)
    while True:
        hard = rng.normal(0, 0.1)
        right, within = (int(rng.binomial(10, np.clip(mean + hard, 0, 1))) for mean in (accuracy, covered))
        yield followed(words[rng.integers(len(words))], right, 10, within, workflow_type=workflow_type)


def take(source: Iterator[Followed], count: int) -> list[Followed]:
    return [next(source) for _ in range(count)]


@pytest.fixture(scope="module")
def promoted() -> dict[str, Promoted]:
    return promoted_by_type(take(traffic(0), 600))


def noticed(drift: Drift, source: Iterator[Followed], most: int = 1000) -> Alarm | None:
    for _ in range(most):
        change = drift.followed(next(source))
        if isinstance(change, Alarm):
            return change
    return None


CHANGES = {
    "accuracy": ({"accuracy": 0.5}, "accuracy at prefill"),
    "coverage": ({"covered": 0.75}, "coverage at 0.9"),
    "a new agent": ({"words": (*WORDS, "axbc")}, NEVER_SEEN),
    "the shares of the call graph": ({"words": ("abc", "abbc", "abbc", "abbc")}, "transition "),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", [True, False], ids=["promoted figures", "its own beginning"])
def test_a_change_is_noticed_within_200_workflows_and_named(
    promoted: dict[str, Promoted], change: str, known: bool
) -> None:
    drift = Drift(promoted if known else None)
    before = traffic(1)
    assert noticed(drift, before, 700) is None
    altered, figure = CHANGES[change]
    alarm = noticed(drift, traffic(2, **altered), 200)  # type: ignore[arg-type]
    assert alarm is not None
    assert alarm.reasons[0].figure.startswith(figure)
    assert drift.alarms == {"t": alarm}
    assert drift.falls_back("t")
    assert drift.falls_back("t", "next-agent") == (change != "coverage")
    assert drift.falls_back("t", "remaining-length") == (change != "accuracy")
    assert not drift.falls_back("another")
    assert "'t'" in alarm.text
    assert figure in alarm.text


@pytest.mark.slow
def test_in_50_runs_of_1000_workflows_without_change_there_is_at_most_one_false_alarm() -> None:
    alarms = 0
    for run in range(50):
        drift = Drift(promoted_by_type(take(traffic(100 + run), 400)))
        alarms += noticed(drift, traffic(200 + run), 1000) is not None
    assert alarms <= 1


def test_an_alarm_ends_in_a_block_that_is_as_it_was_and_not_before(promoted: dict[str, Promoted]) -> None:
    drift = Drift(promoted, DriftConfig(recovery=100))
    changed = traffic(3, accuracy=0.4)
    assert noticed(drift, changed, 200) is not None
    assert all(drift.followed(workflow) is None for workflow in take(changed, 300))
    assert drift.falls_back("t")
    changes = [drift.followed(workflow) for workflow in take(traffic(4), 200)]
    ended = [index for index, one in enumerate(changes) if isinstance(one, Recovered)]
    assert len(ended) == 1
    assert not drift.falls_back("t")
    assert noticed(drift, traffic(5, accuracy=0.4), 200) is not None, "it begins anew"
    assert drift.raised == 2


def test_an_alarm_about_a_model_that_is_no_longer_asked_stays(
    promoted: dict[str, Promoted],
) -> None:
    drift = Drift(promoted)
    assert noticed(drift, traffic(3, accuracy=0.4), 200) is not None
    for _ in range(500):
        drift.followed(followed("abc", judged=0))
    assert drift.falls_back("t")


def test_a_type_without_figures_learns_them_and_is_then_held_against_them() -> None:
    drift, source = Drift(config=DriftConfig(learn_from=10)), traffic(6)
    for _ in range(9):
        drift.followed(next(source))
    watch = drift.watch("t")
    assert watch is not None
    assert watch.promoted is None
    drift.followed(next(source))
    assert watch.promoted is not None
    assert watch.promoted.workflows == 5
    assert watch.workflows == 0


def test_made_up_types_are_bounded_and_never_push_a_promoted_one_out(promoted: dict[str, Promoted]) -> None:
    drift = Drift(promoted, DriftConfig(types=3))
    assert noticed(drift, traffic(3, accuracy=0.4), 200) is not None
    for number in range(1000):
        drift.followed(followed("abc", workflow_type=f"made up {number}"))
    assert sum(drift.watch(f"made up {number}") is not None for number in range(1000)) == 3
    assert drift.falls_back("t")


def cut(source: Iterator[Followed]) -> Iterator[Followed]:
    """The same workflows, expired: without an end."""
    for of in source:
        kept = {pair: count for pair, count in of.transitions.items() if pair[1] != END}
        yield replace(of, ended=False, transitions=kept)


def test_workflows_that_were_cut_are_not_held_against_those_that_ended(promoted: dict[str, Promoted]) -> None:
    assert promoted["t"].ended
    drift, silent = Drift(promoted), cut(traffic(9))
    assert noticed(drift, silent, 700) is None, "they have no end, and that is no change"
    assert drift.watch("t").workflows == 0
    assert noticed(drift, cut(traffic(10, accuracy=0.4)), 200) is not None, "a change in their own kind is one"
    assert noticed(drift, traffic(11, accuracy=0.4), 200) is not None
    for _ in range(200):
        drift.followed(next(silent))
    assert drift.falls_back("t"), "one of both has recovered"
    ended = traffic(12)
    changes = [drift.followed(next(ended)) for _ in range(200)]
    assert sum(isinstance(one, Recovered) for one in changes) == 1
    assert not drift.alarms


def test_figures_of_workflows_of_both_kinds_are_for_both() -> None:
    source, silent = traffic(13), cut(traffic(14))
    mixed = promoted_by_type([next(silent if number % 3 == 0 else source) for number in range(300)])
    assert not mixed["t"].ended
    drift = Drift(mixed)
    drift.followed(next(source))
    drift.followed(next(silent))
    assert drift.watch("t").workflows == 2


def test_types_do_not_touch_each_other(promoted: dict[str, Promoted]) -> None:
    drift = Drift(dict.fromkeys(("t", "u"), promoted["t"]))
    good, bad = traffic(7), traffic(8, accuracy=0.4, workflow_type="u")
    for _ in range(200):
        drift.followed(next(good))
        drift.followed(next(bad))
    assert set(drift.alarms) == {"u"}
