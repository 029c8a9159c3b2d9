"""A reload takes nothing from running workflows: each goes on with the version it began with."""

import numpy as np
from by_name import Forecaster, VersionedForecaster
from serving_samples import lengths_of
from tiny_model import WORKFLOWS, Tiny

from presage.features.moment import COMPLETION, PREFILL
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.workflows.live import LiveForecast

STEPS = WORKFLOWS["loop"]


def version(tiny: Tiny, number: int, counts: OnlineCounts | None = None) -> Forecaster:
    """Each its own copy, so that one cannot use what the other keeps."""
    predictor = NextAgentPredictor.load(tiny.folder)
    return Forecaster(predictor, number, lengths=lengths_of(tiny.store), lengths_version=number, back_off=counts)


def begin(of: VersionedForecaster | Forecaster, step: int, workflow_id: str = "w") -> LiveForecast:
    row = STEPS[step]
    return of.on_prefill("retry", workflow_id, row["agent"], step=step, input_tokens=row["input_tokens"])


def end(of: VersionedForecaster | Forecaster, step: int, workflow_id: str = "w") -> LiveForecast:
    return of.on_completion("retry", workflow_id, output_tokens=STEPS[step].get("output_tokens", 7))


def test_a_running_workflow_hears_what_it_would_have_heard_without_a_reload(tiny: Tiny) -> None:
    alone, of = version(tiny, 1), VersionedForecaster(version(tiny, 1))
    for step in range(len(STEPS)):
        if step == 2:
            of.take_over(version(tiny, 2))
        for ask in (begin, end):
            one, other = ask(alone, step), ask(of, step)
            assert np.array_equal(one.probabilities, other.probabilities)
            assert (one.source, one.version, one.remaining) == (other.source, other.version, other.remaining)
    assert begin(of, 0, "new").version == 2
    assert begin(of, 0, "new").remaining.version == 2


def test_a_version_goes_when_its_last_workflow_has_ended(tiny: Tiny) -> None:
    counts = OnlineCounts()
    of = VersionedForecaster(version(tiny, 1, counts))
    begin(of, 0, "a"), begin(of, 0, "b")
    of.take_over(version(tiny, 2, counts))
    begin(of, 0, "c")
    of.take_over(version(tiny, 3, counts))
    assert (of.under_older, begin(of, 1, "c").version) == (3, 2)
    for name, left in (("a", 2), ("c", 1), ("b", 0)):
        of.close("retry", name)
        assert of.under_older == left
    assert begin(of, 0, "a").version == 3, "of a name that has ended, another workflow"
    of.take_over(version(tiny, 4, counts))
    assert of.under_older == 1


def test_of_versions_without_end_the_oldest_are_let_go_and_say_so(tiny: Tiny) -> None:
    of = VersionedForecaster(version(tiny, 1))
    for number in range(12):
        begin(of, 0, f"w{number}")
        of.take_over(Forecaster(of.latest.predictor, number + 2))
    assert of.under_older == 8
    late = begin(of, 1, "w0")
    assert (late.source, late.reason) == ("none", "an earlier step was missed")
    assert begin(of, 1, "w11").source == "champion"


def test_what_counts_learn_is_learnt_once_whatever_the_version(tiny: Tiny) -> None:
    counts = OnlineCounts()
    of = VersionedForecaster(Forecaster(None, back_off=counts))
    for number in range(6):
        for step in range(3):
            begin(of, step, f"w{number}"), end(of, step, f"w{number}")
        if number == 3:
            begin(of, 0, "over the reload")
            of.take_over(version(tiny, 1, counts))
        of.close("retry", f"w{number}")
    counted = counts.next_agents("retry", (STEPS[0]["agent"],))
    assert counted is not None
    assert counted.evidence == 6
    assert (begin(of, 1, "over the reload").source, begin(of, 0, "new").source) == ("back-off", "champion")


def test_states_projected_for_the_latest_are_for_the_latest_alone(tiny: Tiny) -> None:
    of = VersionedForecaster(version(tiny, 1))
    of.await_states()
    old = begin(of, 0)
    of.take_over(version(tiny, 2))
    of.await_states()
    first, last = (np.ones(len(of.projections[moment][1]), np.float32) for moment in (PREFILL, COMPLETION))
    assert of.on_prefill_state("retry", "w", first, old) is None
    done = of.on_completion("retry", "w", output_tokens=9, projected=np.ones(99, np.float32))
    assert (done.source, done.version) == ("champion", 1)
    new = begin(of, 0, "new")
    with_state = of.on_prefill_state("retry", "new", first, new)
    assert with_state is not None
    assert not np.allclose(with_state.probabilities, new.probabilities)
    assert of.on_completion("retry", "new", output_tokens=9, projected=last).source == "champion"
