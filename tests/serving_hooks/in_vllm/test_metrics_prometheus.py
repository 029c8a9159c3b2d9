"""A real Prometheus scrapes our page: every query of the dashboard and of the documentation comes to something."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client comes with vLLM")

from ask import Prometheus, Query, Span, read
from dashboard import DOCS, alerts, of_documentation
from prefetch_samples import prefetching, served
from prometheus_client import CONTENT_TYPE_LATEST
from test_policies_in_engine import prompt

from presage.serving_hooks.vllm.http.metrics_page import exposition
from presage.testing.servers import prometheus

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.one_version,
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="no program `prometheus` on PATH (Debian's package prometheus has it)"),
]
WITHIN_S = 300.0
TOLD = {
    "model_versions": {"next-agent": {"reference": "models:/next-agent@champion", "version": 3}},
    "reload": {"renewed": 1},
    "recorder": {"counts": {"rows": 3}},
    "counted": {
        "presage_forecasts_total": [{"labels": ["next-agent", "champion"], "count": 5}],
        "presage_hidden_states_total": [{"labels": ["prefill", "used"], "count": 2}],
        "presage_errors_total": [{"labels": ["prefetch", "ValueError"], "count": 1}],
        "presage_metadata_left_out_total": [{"labels": ["step", "no number from 0"], "count": 1}],
        "presage_events_total": [{"labels": ['odd "name"\n\\'], "count": 1}],
    },
    "monitor": {
        "raised": 1,
        "alarms": {"review": {}},
        "workflow_types": {
            "review": {
                "version 3": {
                    "moments": {"completion": {"accuracy": [0.75], "positions": [8]}},
                    "coverage": {"0.9": 0.8},
                    "steps": 8,
                }
            }
        },
    },
}
OUTLOOK = {name: {"workflows": 3, "steps_per_s": 2.5} for name in ("chosen", "everybody")}
HELD = {"up_to_s": {"0.1": 1, "1.0": 3, "+Inf": 4}, "sum_s": 6.0}
VLLM = "".join(
    f"# TYPE vllm:prefix_cache_{what} counter\nvllm:prefix_cache_{what}_total{{{{engine=\"0\"}}}} {{{what}}}\n"
    for what in ("hits", "queries")
)  # fmt: skip


def times(said: Any, by: int) -> Any:
    """What is said, with all counts so many times as high."""
    if isinstance(said, list):
        return [times(value, by) for value in said]
    if isinstance(said, dict):
        return {key: times(value, by) for key, value in said.items()}
    return said * by if isinstance(said, int) and not isinstance(said, bool) else said


class Page(BaseHTTPRequestHandler):
    """Metrics of an engine that does as much between any two scrapes, and of one with another scheduler."""

    status: dict[str, Any]
    scrapes = 0

    def do_GET(self) -> None:
        type(self).scrapes += 1
        by = self.scrapes
        text = VLLM.format(hits=3 * by, queries=4 * by).encode()
        text += exposition([("0", times(self.status, by)), ("1", {})])
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = prefetching(tmp_path_factory.mktemp("engine"))
    served(engine, "a1", prompt(0, 640))
    status = engine.scheduler.presage_status()
    Page.status = {**status, **TOLD, "admission": {**status["admission"], "outlook": OUTLOOK, "held_times": HELD}}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(str(PROGRAM), folder, f"127.0.0.1:{server.server_port}", 1, rules=alerts()) as found:
        until = time.monotonic() + WITHIN_S
        while Page.scrapes < 4 and time.monotonic() < until:
            time.sleep(0.2)
        yield found
    server.shutdown()
    server.server_close()


def numbers(url: str, asks: str) -> list[float]:
    """What a query comes to now; asked until it comes to any number, or for so long."""
    end = time.monotonic() + WITHIN_S
    while True:
        now = time.time()
        found = Prometheus(url).at_end(Query(asks, ""), Span(now - 60, now, 1, 1))
        values = [value for one in found for value in one.values if math.isfinite(value)]
        if values or time.monotonic() > end:
            return values
        time.sleep(0.5)


@pytest.mark.parametrize(
    "asks", [query.asks for panel in read(DOCS / "dashboard" / "presage.json")[1] for query in panel.queries]
)
def test_every_query_of_the_dashboard_comes_to_numbers(url: str, asks: str) -> None:
    assert numbers(url, asks)


@pytest.mark.parametrize("asks", of_documentation())
def test_every_question_and_alert_is_one_that_prometheus_takes(url: str, asks: str) -> None:
    now = time.time()
    Prometheus(url).at_end(Query(asks, ""), Span(now - 60, now, 1, 1))


def test_the_alerts_of_the_documentation_are_loaded_and_what_stands_fires(url: str) -> None:
    end = time.monotonic() + WITHIN_S
    firing: set[str] = set()
    while not {"PresageDrift", "PresagePolicyFailed"} <= firing and time.monotonic() < end:
        time.sleep(0.5)
        now = time.time()
        found = Prometheus(url).at_end(Query('ALERTS{alertstate="firing"}', ""), Span(now, now, 1, 1))
        firing = {one.labels["alertname"] for one in found}
    assert firing == {"PresageDrift", "PresagePolicyFailed"}


def test_what_is_held_is_what_the_histogram_says(url: str) -> None:
    """Of any four one was held for 0.1 s or less, two for up to 1 s, one longer: half of them for 0.55 s or less."""
    asks = "histogram_quantile(0.5, sum by (le) (rate(presage_request_held_seconds_bucket[30s])))"
    assert numbers(url, asks) == [pytest.approx(0.55)]
    asks = "presage_request_held_seconds_count / ignoring (le) presage_request_held_seconds_bucket{le='+Inf'}"
    assert numbers(url, asks) == [1.0]


def test_the_dashboard_is_drawn_from_it(url: str, tmp_path: Path) -> None:
    draw = [sys.executable, str(DOCS / "dashboard" / "draw.py"), url, "--scraped-every", "1"]
    draw += ["--since", str(time.time() - 5), "--to", str(tmp_path / "drawn.png")]
    done = subprocess.run(draw, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 were rejected" in done.stdout
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
