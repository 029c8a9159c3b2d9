"""The table of metrics is the code's, and the dashboard and the examples name only what there is."""

import json
from itertools import combinations

import pytest
from dashboard import (
    DOCS,
    grouped,
    kept,
    legends,
    metrics,
    of_dashboard,
    of_documentation,
    panels,
    selected,
    shown,
)

from presage.serving_hooks.metrics import HISTOGRAMS, METRICS
from presage.serving_hooks.vllm.http.metrics_page import ANSWERED, ANSWERED_HELP

SPREAD = {
    f"{one.name}_{part}": {"engine", *more}
    for one in HISTOGRAMS
    for part, more in (("bucket", ["le"]), ("sum", []), ("count", []))
}
LABELS = {ANSWERED: set(), **{one.name: {"engine", *one.labels} for one in METRICS}, **SPREAD}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus gives whatever it scrapes."""


def test_the_table_lists_the_metrics_and_no_others() -> None:
    lines = (DOCS / "metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `presage_")]
    assert [[*row[:-1], row[-1].replace("`", "")] for row in rows] == [
        [f"`{ANSWERED}`", "gauge", "", ANSWERED_HELP],
        *([f"`{one.name}`", one.type, ", ".join(one.labels), one.help] for one in METRICS),
        *([f"`{one.name}`", "histogram", "", one.help] for one in HISTOGRAMS),
    ]


@pytest.mark.parametrize("expression", [*of_dashboard(), *of_documentation()])
def test_every_expression_names_metrics_and_labels_that_there_are(expression: str) -> None:
    named = metrics(expression)
    assert named
    assert {name for name in named if name.startswith("presage_")} <= LABELS.keys()
    of_vllm = {name: {"engine", "model_name"} for name in named if name.startswith("vllm:")}
    known = {name: SCRAPED | labels for name, labels in {**LABELS, **of_vllm}.items()}
    for name, labels in selected(expression):
        assert labels <= known[name], name
    assert grouped(expression) <= set().union(*(known[name] for name in named))


@pytest.mark.parametrize(("expression", "legend"), legends())
def test_a_series_is_called_by_labels_that_it_has(expression: str, legend: str) -> None:
    left = kept(expression)
    assert shown(legend) <= (set().union(*(LABELS[name] for name in metrics(expression))) if left is None else left)


def test_there_are_questions_and_alerts_and_every_metric_has_a_panel() -> None:
    assert len(of_documentation()) >= 10
    assert {name for one in of_dashboard() for name in metrics(one) if name.startswith("presage_")} == LABELS.keys()


def test_a_counter_is_shown_by_its_rate_and_a_gauge_as_it_is() -> None:
    rising = {one.name for one in METRICS if one.type == "counter"} | SPREAD.keys()
    counters = rising - {"presage_errors_total"}  # see docs/metrics.md
    for expression in [*of_dashboard(), *of_documentation()]:
        for name in metrics(expression):
            if name in LABELS:
                assert (f"rate({name}" in expression or f"increase({name}" in expression) == (name in counters), name


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    made = json.loads((DOCS / "dashboard" / "presage.json").read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "templating", "panels", "time"} <= made.keys()
    assert (
        made["templating"]["list"][0] | {"name": "datasource", "type": "datasource", "query": "prometheus"}
        == (made["templating"]["list"][0])
    )
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all("$instance" in target["expr"] for target in panel["targets"])


def test_no_two_panels_lie_over_each_other() -> None:
    made = json.loads((DOCS / "dashboard" / "presage.json").read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in made["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)
