"""Every counter is declared once, counted somewhere, exported, and documented; each count keeps its labels."""

import ast
from pathlib import Path

from presage.serving_hooks import counts
from presage.serving_hooks.counts import (
    ERRORS,
    FORECASTS,
    HIDDEN_STATES,
    METADATA_LEFT_OUT,
    RECORDER,
    CounterMetric,
    EventCounts,
)
from presage.serving_hooks.metrics import HISTOGRAMS, METRICS, counted
from presage.serving_hooks.status import EngineStatus, read_status

ROOT = Path(__file__).resolve().parents[2]
TAKES_APART = {"split", "rsplit", "partition", "rpartition", "startswith", "removeprefix", "replace"}
DECLARED = {name: of for name, of in vars(counts).items() if isinstance(of, CounterMetric)}


def test_every_declared_counter_is_counted_in_the_package() -> None:
    added = {
        node.args[0].id
        for path in (ROOT / "presage").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"
        if node.args and isinstance(node.args[0], ast.Name)
    }
    assert DECLARED.keys() <= added


def test_every_declared_counter_is_exported_once_under_its_own_name() -> None:
    names = [of.name for of in DECLARED.values()]
    assert len(set(names)) == len(names)
    exported = {one.name: one for one in METRICS}
    for of in DECLARED.values():
        if of.name.startswith("presage_gateway_"):  # on the gateway's page: test_identity.py
            assert of.name not in exported
            continue
        assert (exported[of.name].labels, exported[of.name].help) == (of.labels, of.help)
        assert all(len(labels) == len(of.labels) for labels in of.from_zero)


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [one.name for one in (*METRICS, *HISTOGRAMS) if f"| `{one.name}` |" not in text] == []


def test_no_code_takes_the_key_of_a_count_apart() -> None:
    taken = [
        path
        for path in (ROOT / "presage" / "serving_hooks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES_APART
        if node.args and isinstance(node.args[0], ast.Constant) and str(node.args[0].value).endswith(": ")
    ]
    assert taken == []


def test_counts_as_data_and_by_the_keys_of_the_json_status() -> None:
    of = EventCounts(FORECASTS)
    of.add(FORECASTS, "next-agent", "champion")
    of.add(FORECASTS, "next-agent", "champion", times=2)
    of.add(FORECASTS, "remaining-length", "none")
    of.add(HIDDEN_STATES, "prefill", "late")
    of.add(METADATA_LEFT_OUT, "agent", "too long")
    of.add(ERRORS, "a policy: with a colon", "ValueError")
    assert of.add(RECORDER, "written", "steps", times=3) == 3
    of.add(RECORDER, "lost with its file", "steps")
    assert of.by_key() == {
        "forecast: champion": 3,
        "forecast of lengths: none": 1,
        "prefill states: late": 1,
        "agent: too long": 1,
        "a policy: with a colon: ValueError": 1,
        "written: steps": 3,
        "lost: steps in a file that was removed": 1,
    }
    status = read_status({"counted": of.by_metric()})
    assert status is not None
    assert status.by_labels(FORECASTS) == {("next-agent", "champion"): 3, ("remaining-length", "none"): 1}
    assert status.by_labels(ERRORS) == {("a policy: with a colon", "ValueError"): 1}
    assert status.by_labels(RECORDER) == {("written: steps",): 3, ("lost: steps in a file that was removed",): 1}
    twice = of + of
    assert (of.by_key()["written: steps"], twice.by_key()["written: steps"]) == (3, 6)


def test_what_is_exported_from_zero_is_there_before_the_first_event_where_it_is_counted_at_all() -> None:
    status = read_status({"counted": EventCounts(FORECASTS).by_metric()})
    assert status is not None
    assert dict(counted(FORECASTS, status)) == dict.fromkeys(FORECASTS.from_zero, 0.0)
    assert not status.by_labels(FORECASTS)
    assert not list(counted(FORECASTS, EngineStatus()))


def test_an_engine_without_our_scheduler_reports_nothing_and_unknown_keys_are_ignored() -> None:
    assert read_status({}) is None
    assert read_status({"workflows": 2, "of a later version": {"a": 1}}) == EngineStatus(workflows=2)
