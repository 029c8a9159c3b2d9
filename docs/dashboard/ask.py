"""Reads the panels of a Grafana dashboard and sends their queries to a Prometheus server.

Variables are replaced as Grafana does: all servers are selected, and a rate covers at least four scrapes.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAITED_S = 60


@dataclass(frozen=True)
class Span:
    """A time range: start and end in seconds since 1970, seconds between two points, and between two scrapes."""

    since: float
    until: float
    step_s: float
    scraped_every_s: float

    @property
    def times(self) -> list[float]:
        """Times of the points, seconds since 1970."""
        return [self.since + i * self.step_s for i in range(int((self.until - self.since) / self.step_s) + 1)]


@dataclass(frozen=True)
class Query:
    """One query of a panel: its expression, and the template of its series' names."""

    asks: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """The name of a series with these labels."""
        return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard.

    Attributes:
        kind: row, stat, table or timeseries.
        place: column, row, width and height on Grafana's grid of 24 columns.
        unit, low, high: unit and axis limits of its numbers; None for an automatic limit.
        words: text and colour shown in place of a number.
    """

    kind: str
    title: str
    place: tuple[int, int, int, int]
    queries: tuple[Query, ...] = ()
    unit: str = "short"
    low: float | None = None
    high: float | None = None
    words: Mapping[float, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Series:
    """One number per point of a span; NaN where there is none."""

    name: str
    labels: Mapping[str, str]
    values: Sequence[float]

    @property
    def known(self) -> bool:
        """Whether any value is a number."""
        return any(map(math.isfinite, self.values))


class NoAnswerError(Exception):
    """Prometheus did not answer, or rejected a query; the message quotes it."""


def read(dashboard: Path) -> tuple[str, list[Panel]]:
    """The title of a dashboard, and its panels from top to bottom."""
    found = json.loads(dashboard.read_text(encoding="utf-8"))
    panels = [_panel(panel) for panel in found["panels"]]
    return found["title"], sorted(panels, key=lambda panel: (panel.place[1], panel.place[0]))


def fill(asks: str, span: Span) -> str:
    """The query with its variables replaced."""
    window_s = math.ceil(max(span.step_s + span.scraped_every_s, 4 * span.scraped_every_s))
    return asks.replace("$__rate_interval", f"{window_s}s").replace("$instance", ".+")


class Prometheus:
    """A Prometheus server.

    Args:
        url: of the server, without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def over(self, query: Query, span: Span) -> list[Series]:
        """The series of a query over a span.

        Raises:
            NoAnswerError: Prometheus did not answer, or rejected the query.
        """
        times = span.times
        asked = {"query": fill(query.asks, span), "start": times[0], "end": times[-1], "step": span.step_s}
        found = []
        for one in self._asked("query_range", asked):
            at = {round((float(when) - times[0]) / span.step_s): float(value) for when, value in one["values"]}
            values = [at.get(i, math.nan) for i in range(len(times))]
            found.append(Series(query.name(one["metric"]), one["metric"], values))
        return found

    def at_end(self, query: Query, span: Span) -> list[Series]:
        """The series of a query at the end of a span, one number each.

        Raises:
            NoAnswerError: Prometheus did not answer, or rejected the query.
        """
        found = self._asked("query", {"query": fill(query.asks, span), "time": span.until})
        return [Series(query.name(one["metric"]), one["metric"], [float(one["value"][1])]) for one in found]

    def _asked(self, what: str, parameters: Mapping[str, Any]) -> list[Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=WAITED_S) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise NoAnswerError(f"{parameters['query']}: {error.read().decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise NoAnswerError(f"{self._url} did not answer as a Prometheus server: {error}") from error
        result: list[Any] = said["data"]["result"]
        return result


def _panel(told: Mapping[str, Any]) -> Panel:
    place, how = told["gridPos"], told.get("fieldConfig", {}).get("defaults", {})
    words = {
        float(value): (said["text"], said.get("color", "gray"))
        for mapping in how.get("mappings", ())
        for value, said in mapping["options"].items()
    }
    return Panel(
        told["type"],
        told["title"],
        (place["x"], place["y"], place["w"], place["h"]),
        tuple(Query(target["expr"], target.get("legendFormat", "")) for target in told.get("targets", ())),
        how.get("unit", "short"),
        how.get("min"),
        how.get("max"),
        words,
    )
