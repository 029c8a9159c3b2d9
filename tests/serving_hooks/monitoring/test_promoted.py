"""What a workflow type is held against: by hand, and the same after it was written down."""

import json

import numpy as np
import pytest
from monitoring_samples import followed

from presage.errors import ConfigurationError
from presage.serving_hooks.monitoring.outcomes import COUNTS, END
from presage.serving_hooks.monitoring.promoted import (
    NEVER_SEEN,
    NEVER_SEEN_PAIRS,
    PAIRS_KEPT,
    PAIRS_WATCHED,
    Figure,
    Promoted,
    Sums,
    Transitions,
    figures_of,
    name_of,
    promoted_by_type,
)


def known(*words: str) -> Transitions:
    transitions = Transitions()
    for word in words:
        transitions.add(followed(word).transitions)
    return transitions


def test_figures_of_a_workflow_by_hand() -> None:
    figures = figures_of(followed("abb", right=3, judged=4, within=7), known("ab", "abb"))
    assert figures[NEVER_SEEN] == figures[NEVER_SEEN_PAIRS] == 0
    assert figures["accuracy at prefill"] == 0.75
    assert "accuracy at completion" not in figures
    assert figures["coverage at 0.9"] == 0.7
    shares = {name: value for name, value in figures.items() if name.startswith("transition ")}
    assert shares == {
        "transition start → 'a'": 0.25,
        "transition 'a' → 'b'": 0.25,
        "transition 'b' → 'b'": 0.25,
        "transition 'b' → end": 0.25,
    }


def test_a_new_agent_is_no_new_transition_of_old_ones() -> None:
    assert figures_of(followed("axb"), known("ab"))[NEVER_SEEN] == 1
    assert figures_of(followed("axb"), known("ab"))[NEVER_SEEN_PAIRS] == 0
    assert figures_of(followed("ba"), known("ab"))[NEVER_SEEN] == 0
    assert figures_of(followed("ba"), known("ab"))[NEVER_SEEN_PAIRS] == 1


def test_what_counts_said_is_not_held_against_the_model() -> None:
    assert "accuracy at prefill" not in figures_of(followed("ab", model=COUNTS, within=1), known("ab"))
    assert "coverage at 0.9" not in figures_of(followed("ab", model=COUNTS, within=1), known("ab"))


def test_intervals_by_hand_and_never_without_width() -> None:
    sums = Sums()
    values = [0.2, 0.4, 0.9, 0.5]
    for value in values:
        sums.add(value)
    figure = sums.figure()
    reach = 1.959964 * np.std(values, ddof=1) / 2 + 3 / 4
    assert figure.mean == pytest.approx(0.5)
    assert (figure.low, figure.high) == (0.0, 1.0) == (max(0, 0.5 - reach), min(1, 0.5 + reach))
    always = Sums()
    for _ in range(300):
        always.add(1.0)
    assert (always.figure().low, always.figure().high) == (pytest.approx(0.99), 1.0)


def test_graph_and_figures_are_of_different_workflows() -> None:
    workflows = [followed("ab")] * 10 + [followed("ac")] * 10
    promoted = promoted_by_type(workflows)["t"]
    assert promoted.transitions.agents == {"a", "b"}
    assert promoted.workflows == 10
    assert promoted.figures[NEVER_SEEN].mean == 1
    assert promoted_by_type(workflows, at_least=21) == {}


def test_it_is_the_same_when_read_again() -> None:
    (promoted,) = promoted_by_type([followed("ab")] * 2 + [followed("abb", within=3), followed("ab")], 4).values()
    again = Promoted.from_dict(json.loads(json.dumps(promoted.to_dict())))
    assert again.to_dict() == promoted.to_dict()
    assert again.figures == promoted.figures
    assert again.transitions.watched == promoted.transitions.watched


@pytest.mark.parametrize("ends", [(0.5, 0.6, 0.7), (0.5, 0.1, 1.2), (float("nan"), 0.0, 1.0)])
def test_what_is_no_figure_is_refused(ends: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        Figure(*ends)


def test_graphs_are_bounded_and_names_quoted() -> None:
    transitions = Transitions({(f"agent {n}", "b"): n + 1 for n in range(PAIRS_KEPT + 5)})
    assert len(transitions.counts) == PAIRS_KEPT
    assert len(transitions.watched) == PAIRS_WATCHED
    assert transitions.watched[0] == (f"agent {PAIRS_KEPT - 1}", "b")
    assert name_of((END, "a\nb")) == "start → 'a\\nb'"
