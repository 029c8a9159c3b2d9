"""The expressions of the dashboard and of the documentation, and which metrics and labels they name."""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
_METRIC = re.compile(r"\b(?:presage_\w+|vllm:\w+)")
_SELECTED = re.compile(r"\b((?:presage_|vllm:)\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    """Panels that show something, rows left out."""
    found: list[dict[str, Any]] = json.loads((DOCS / "dashboard" / "presage.json").read_text(encoding="utf-8"))[
        "panels"
    ]
    return [panel for panel in found if panel["type"] != "row"]


def of_dashboard() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def of_documentation() -> list[str]:
    """Questions and alerts."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    questions = re.findall(r"^    (.*presage_.*)$", text.split("\n## Questions\n")[1].split("\n## ")[0], re.MULTILINE)
    return questions + re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)


def metrics(expression: str) -> set[str]:
    return set(_METRIC.findall(expression))


def labels(expression: str) -> set[str]:
    """All that are selected by or grouped by."""
    selected = {label for _, inside in _SELECTED.findall(expression) for label in _LABEL.findall(inside)}
    grouped = {name.strip() for inside in _GROUPED.findall(expression) for name in inside.split(",")}
    return selected | grouped
