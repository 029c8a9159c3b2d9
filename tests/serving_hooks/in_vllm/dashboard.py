"""The expressions of the dashboard and of the documentation, and which metrics and labels they name."""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
_METRIC = re.compile(r"\b(?:presage_\w+|vllm:\w+)")
_SELECTED = re.compile(r"\b((?:presage_|vllm:)\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|ignoring|on|group_left|group_right)\s*\(([^)]*)\)")
_KEPT = re.compile(r"\bby\s*\(([^)]*)\)")
_SHOWN = re.compile(r"{{\s*(\w+)\s*}}")


def panels() -> list[dict[str, Any]]:
    """Panels that show something, rows left out."""
    found: list[dict[str, Any]] = json.loads((DOCS / "dashboard" / "presage.json").read_text(encoding="utf-8"))[
        "panels"
    ]
    return [panel for panel in found if panel["type"] != "row"]


def of_dashboard() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def legends() -> list[tuple[str, str]]:
    """Each expression of the dashboard, and how its series are called."""
    return [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel["targets"]]


def of_documentation() -> list[str]:
    """Questions and alerts."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    questions = re.findall(r"^    (.*presage_.*)$", text.split("\n## Questions\n")[1].split("\n## ")[0], re.MULTILINE)
    return questions + re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)


def metrics(expression: str) -> set[str]:
    """Names of series: a histogram's end in `_bucket`, `_sum` or `_count`."""
    return set(_METRIC.findall(expression))


def selected(expression: str) -> list[tuple[str, set[str]]]:
    """Each metric that labels are chosen of, and these."""
    return [(metric, set(_LABEL.findall(inside))) for metric, inside in _SELECTED.findall(expression)]


def grouped(expression: str) -> set[str]:
    """Labels that series are put together or matched by."""
    return {name.strip() for inside in _GROUPED.findall(expression) for name in inside.split(",")} - {""}


def kept(expression: str) -> set[str] | None:
    """Labels that its series have left; None where nothing is put together, so that they have all."""
    found = _KEPT.findall(expression)
    if found or re.search(r"\b(?:sum|min|max|avg)\s*\(", expression):
        return {name.strip() for inside in found for name in inside.split(",")} - {""}
    return None


def shown(legend: str) -> set[str]:
    """Labels that are put into the name of a series."""
    return set(_SHOWN.findall(legend))
