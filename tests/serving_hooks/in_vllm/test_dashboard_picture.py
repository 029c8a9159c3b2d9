"""The dashboard is drawn from what is answered to its queries; a server that answers as a test says stands in."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from ask import NoAnswerError, Prometheus, Query, Span, fill, read
from dashboard import DOCS, of_dashboard
from PIL import Image

SPAN = Span(1000.0, 1060.0, 10.0, 2.0)


class Answers(BaseHTTPRequestHandler):
    """Two series of each query, one with a hole; or no for an answer."""

    asked: list[tuple[str, dict[str, str]]]
    refuses: str

    def do_GET(self) -> None:
        at = urlsplit(self.path)
        asked = {name: said for name, (said,) in parse_qs(at.query).items()}
        self.asked.append((at.path, asked))
        labels = {"source": "champion", "kind": "next-agent", "policy": "priority"}
        if self.refuses and self.refuses in asked["query"]:
            self._answer(400, {"status": "error", "error": "parse error"})
        elif at.path.endswith("query_range"):
            start, step = float(asked["start"]), float(asked["step"])
            points = [[start + step * i, str(i / 10)] for i in (0, 1, 2, 4)]
            points.append([start + step * 5, "NaN"])
            results = [{"metric": labels, "values": points}, {"metric": {}, "values": points[:2]}]
            self._answer(200, {"status": "success", "data": {"result": results}})
        else:
            result = [{"metric": labels, "value": [float(asked["time"]), "1"]}]
            self._answer(200, {"status": "success", "data": {"result": result}})

    def _answer(self, code: int, said: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked, Answers.refuses = [], ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def draw(url: str, to: Path, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(DOCS / "dashboard" / "draw.py"), url, "--since", "1000", "--until", "1060"]
    return subprocess.run([*line, "--to", str(to), *more], capture_output=True, text=True, check=False, timeout=600)


def test_variables_are_filled_in_as_grafana_does() -> None:
    asks = 'rate(a{instance=~"$instance"}[$__rate_interval])'
    assert fill(asks, SPAN) == 'rate(a{instance=~".+"}[12s])'  # a step and a scrape
    assert fill(asks, Span(0, 60, 15, 15)) == 'rate(a{instance=~".+"}[60s])'  # four scrapes
    assert not [one for one in of_dashboard() if "$" in fill(one, SPAN)]


def test_series_are_called_by_their_labels_and_have_holes_where_there_is_no_number(url: str) -> None:
    first, second = Prometheus(url).over(Query("a", "{{kind}} of {{ source }}, {{missing}}"), SPAN)
    assert first.name == "next-agent of champion, "
    assert len(SPAN.times) == len(first.values) == 7
    assert [value == value for value in first.values] == [True, True, True, False, True, False, False]
    assert first.values[4] == 0.4
    assert first.known
    assert second.values[:2] == [0.0, 0.1]


def test_a_query_that_is_no_good_is_told_with_what_the_server_says(url: str) -> None:
    Answers.refuses = "sum("
    with pytest.raises(NoAnswerError, match=r"sum\(a: .*parse error"):
        Prometheus(url).at_end(Query("sum(a", ""), SPAN)


@pytest.mark.slow
def test_all_panels_are_drawn_and_every_query_is_asked(url: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text(json.dumps([{"time": 1_010_000, "text": "something began"}]), encoding="utf-8")
    done = draw(url, tmp_path / "drawn.png", "--annotations", str(notes), "--scraped-every", "2")
    assert done.returncode == 0, done.stderr
    _, panels = read(DOCS / "dashboard" / "presage.json")
    assert {asked["query"] for _, asked in Answers.asked} == {
        fill(query.asks, Span(1000, 1060, 2, 2)) for panel in panels for query in panel.queries
    }
    with Image.open(tmp_path / "drawn.png") as picture:
        assert picture.width == 1300
        assert picture.height > 2000
        assert len(picture.convert("RGB").getcolors(10**6) or ()) > 10
    assert "0 were rejected" in done.stdout


@pytest.mark.slow
def test_exit_code_1_where_a_query_is_refused_and_where_nobody_answers(url: str, tmp_path: Path) -> None:
    Answers.refuses = "presage_ageing_total"
    done = draw(url, tmp_path / "drawn.png")
    assert done.returncode == 1
    assert "Ageing: " in done.stdout
    assert "1 were rejected" in done.stdout
    done = draw("http://127.0.0.1:9", tmp_path / "drawn.png")
    assert done.returncode == 1
    assert "did not answer" in done.stdout
