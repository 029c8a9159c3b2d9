"""How the metrics are read out of a status: nothing counted is lost, nothing private is told, labels are bounded."""

from __future__ import annotations

from collections import Counter
from typing import Any

from by_name import ForecastMonitor
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks import counts
from presage.serving_hooks.counts import CounterMetric, EventCounts
from presage.serving_hooks.metrics import METRICS, MOST_TYPES, OTHER, Sample
from presage.serving_hooks.status import EngineStatus, read_status
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import LiveForecast
from presage.serving_hooks.workflows.metadata import read


def samples(name: str, status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    (metric,) = [one for one in METRICS if one.name == name]
    found: list[Sample] = list(metric.read(read_status(status) or EngineStatus()))
    assert len(dict(found)) == len(found)
    return dict(found)


def test_names_are_as_prometheus_wants_them() -> None:
    assert len({one.name for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert one.name.startswith("presage_")
        assert one.type == ("counter" if one.name.endswith("_total") else "gauge")
        assert one.help.endswith(".")
        assert "engine" not in one.labels


DECLARED = [  # without those of the gateway
    of for of in vars(counts).values() if isinstance(of, CounterMetric) and not of.name.startswith("presage_gateway_")
]
LABELS = st.text(min_size=1, max_size=20)
EVENTS = st.sampled_from(DECLARED).flatmap(
    lambda metric: st.tuples(st.just(metric), st.tuples(*[LABELS] * len(metric.labels)), st.integers(1, 10**6))
)


@given(st.lists(EVENTS))
def test_whatever_is_counted_is_in_its_metric_with_its_labels(events: list[Any]) -> None:
    counted, by_hand = EventCounts(), Counter[Any]()
    for metric, labels, times in events:
        counted.add(metric, *labels, times=times)
        by_hand[metric.name, labels] += times
    status = {"counted": counted.by_metric()}
    found = {(metric.name, labels): n for metric in DECLARED for labels, n in samples(metric.name, status).items() if n}
    assert found == by_hand


@given(st.dictionaries(st.sampled_from(["workflow_type", "agent", "step", "workflow_end", "app_metadata"]), st.text()))
def test_all_metadata_that_is_left_out_is_told_as_that(sent: dict[str, Any]) -> None:
    counted = EventCounts()
    read({**sent, "workflow_id": "\n" * 300}, 3.5, counted)
    read("no table at all", None, counted)
    status = {"counted": counted.by_metric()}
    assert not samples("presage_events_total", status)
    assert sum(samples("presage_metadata_left_out_total", status).values()) == sum(counted.by_key().values()) >= 3


def test_a_model_is_named_and_what_is_private_of_it_is_not() -> None:
    versions = {
        "a": {"reference": "models:/next-agent@champion", "version": 12, "reason": None},
        "b": {
            "reference": None,
            "version": None,
            "reason": "sqlite:////home/somebody/mlflow.db: there is no such file",
        },
        "c": {"reference": "/home/somebody/model", "version": None, "reason": None},
        "d": {"reference": "models:/d@champion", "version": None, "reason": "no version has this alias"},
    }
    assert samples("presage_model_info", {"model_versions": versions}) == {
        ("a", "models:/next-agent@champion", "12"): 1,
        ("b", "none", ""): 1,
        ("c", "folder", ""): 1,
        ("d", "none", ""): 1,
    }


def figures(accuracy: list[float | None], positions: list[int]) -> dict[str, Any]:
    return {"version 1": {"moments": {"prefill": {"accuracy": accuracy, "positions": positions}}}}


def test_of_many_workflow_types_those_judged_least_are_one_with_their_mean() -> None:
    types = {f"t{n}": figures([1.0], [100 + n]) for n in range(MOST_TYPES)}
    rare = {"seldom": figures([0.5], [30]), "seldomer": figures([0.2], [10])}
    found = samples("presage_forecast_accuracy", {"monitor": {"workflow_types": {**rare, **types}}})
    assert len(found) == MOST_TYPES + 1
    assert round(found[OTHER, "version 1", "prefill", "1"], 9) == (0.5 * 30 + 0.2 * 10) / 40
    assert {labels[0] for labels in found} == {*types, OTHER}


def test_coverage_and_alarms() -> None:
    truth = {
        "workflow_types": {"review": {"version 2": {"coverage": {"0.5": 0.25, "0.9": 1.0}, "steps": 4}}},
        "alarms": {f"t{n:02}": {} for n in range(MOST_TYPES + 2)},
        "raised": 60,
    }
    assert samples("presage_forecast_coverage", {"monitor": truth}) == {
        ("review", "version 2", "0.5"): 0.25,
        ("review", "version 2", "0.9"): 1.0,
    }
    standing = samples("presage_drift_alarm", {"monitor": truth})
    assert len(standing) == MOST_TYPES + 1
    assert (OTHER,) in standing
    assert samples("presage_drift_alarms_total", {"monitor": truth}) == {(): 60}


def test_figures_of_live_accuracy_are_read_as_they_are_made() -> None:
    """Two workflows of which the likeliest agent came once."""
    import numpy as np

    truth = ForecastMonitor(horizon=1)
    for name, came in (("w1", "b"), ("w2", "c")):
        said = LiveForecast("champion", 9, "prefill", np.array([[0.1, 0.8, 0.1]], np.float32), ("a", "b"), 3)
        truth.begun("review", name, "a", said)
        truth.completed("review", name, LiveForecast("champion", 9, "completion", said.probabilities, ("a", "b"), 3))
        truth.begun("review", name, came, said)
        truth.ended("review", name, EndReason.EXPIRED)
    ((name, model),) = truth.live.models()
    moments = truth.live.agents(name, model, resamples=0)
    status = {"monitor": {"workflow_types": {name: {model: {"moments": moments}}}}}
    assert samples("presage_forecast_accuracy", status) == {
        ("review", "version 3", "prefill", "1"): 0.5,
        ("review", "version 3", "completion", "1"): 0.5,
    }
