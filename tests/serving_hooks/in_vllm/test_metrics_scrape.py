"""Our metrics behind vLLM's on one page, whatever the engines do; the page as a Prometheus client reads it."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client comes with vLLM")

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from fastapi.testclient import TestClient
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from presage.serving_hooks.vllm.http import metrics_page
from presage.serving_hooks.vllm.http.metrics_page import (
    ANSWERED,
    FRESH_S,
    PATH,
    Appended,
    Engines,
    StatusCache,
    exposition,
)
from presage.serving_hooks.vllm.iteration_times import Seconds

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]
THEIRS = '# HELP vllm:requests Of vLLM.\n# TYPE vllm:requests gauge\nvllm:requests{engine="0"} 3.0\n'
STATUS = {
    "workflows": 2,
    "counted": {
        "presage_forecasts_total": [{"labels": ["next-agent", "champion"], "count": 5}],
        "presage_events_total": [{"labels": ['odd "name"\n\\'], "count": 1}],
    },
}


class Engine:
    """Says its status; counts how often it is asked."""

    def __init__(self, status: dict[str, Any] | None = None) -> None:
        self.status = STATUS if status is None else status
        self.asked = 0
        self.error: Exception | None = None
        self.iterates = asyncio.Event()
        self.iterates.set()

    async def __call__(self) -> Engines:
        self.asked += 1
        await self.iterates.wait()
        if self.error is not None:
            raise self.error
        return [("0", self.status), ("1", {})]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(content: bytes | str, **more: Any) -> Callable[[], Response]:
    return lambda: Response(content, **{"media_type": CONTENT_TYPE_LATEST, **more})


@contextmanager
def page(asked: Callable[[], Awaitable[Any]], vllms: Callable[[], Response] | None = None) -> Iterator[TestClient]:
    app = FastAPI()
    app.add_api_route(PATH, vllms or answer(THEIRS), methods=["GET", "POST"])
    app.add_api_route("/v1/other", lambda: Response("other", media_type="text/plain"))
    app.add_middleware(Appended, ask=asked)
    with TestClient(app) as client:
        yield client


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_page_has_vllms_metrics_and_ours() -> None:
    with page(StatusCache(Engine())) as client:
        said = client.get(PATH)
    assert said.headers["content-type"].startswith("text/plain; version=")
    assert int(said.headers["content-length"]) == len(said.content)
    assert said.text.startswith(THEIRS)
    found = families(said.text)
    assert found["vllm:requests"].samples[0].value == 3
    (alive,) = found["presage_workflows"].samples
    assert (alive.labels, alive.value) == ({"engine": "0"}, 2)
    champion = {"engine": "0", "kind": "next-agent", "source": "champion"}
    assert [s.value for s in found["presage_forecasts"].samples if s.labels == champion] == [5]
    (odd,) = found["presage_events"].samples
    assert odd.labels["event"] == 'odd "name"\n\\'
    assert found[ANSWERED].samples[0].value == 1


def test_a_histogram_has_buckets_that_rise_a_sum_and_a_count() -> None:
    held = Seconds()
    for seconds in (0.05, 0.2, 0.2, 1900.0):
        held.observe(seconds)
    with page(StatusCache(Engine({"admission": {"held_times": held.status()}}))) as client:
        family = families(client.get(PATH).text)["presage_request_held_seconds"]
    found = {(one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in family.samples}
    assert family.type == "histogram"
    assert {one.labels["engine"] for one in family.samples} == {"0"}
    assert [found["bucket", le] for le in ("0.1", "0.3", "1.0", "600.0", "+Inf")] == [1, 3, 3, 3, 4]
    assert found["count", None] == 4
    assert found["sum", None] == pytest.approx(0.05 + 0.2 + 0.2 + 1900.0)


def test_the_page_of_a_whole_status_is_the_golden_one() -> None:
    here = Path(__file__).parent
    status = json.loads((here / "metrics_status.json").read_text(encoding="utf-8"))
    assert exposition([("0", status), ("1", {})]) == (here / "metrics_page.txt").read_bytes()


@pytest.mark.parametrize(
    "vllms",
    [
        answer("no", status_code=500),
        answer(gzip.compress(THEIRS.encode()), headers={"content-encoding": "gzip"}),
        answer("{}", media_type="application/json"),
        answer(THEIRS + "# EOF\n", media_type="application/openmetrics-text; version=1.0.0"),
    ],
)
def test_what_is_not_that_page_is_passed_on_as_it_is(vllms: Callable[[], Response]) -> None:
    engine = Engine()
    with page(StatusCache(engine), vllms) as client:
        said = client.get(PATH)
    assert "presage" not in said.text
    assert said.status_code == vllms().status_code
    assert not engine.asked


def test_other_pages_and_methods_do_not_ask_the_engines() -> None:
    engine = Engine()
    with page(StatusCache(engine)) as client:
        assert client.get("/v1/other").text == "other"
        assert client.post(PATH).text == THEIRS
        assert client.get(f"{PATH}/more").status_code == 404
    assert not engine.asked


def test_a_page_in_parts_gets_ours_behind_the_last() -> None:
    def streamed() -> Response:
        return StreamingResponse(iter([THEIRS[:40], THEIRS[40:]]), media_type=CONTENT_TYPE_LATEST)

    with page(StatusCache(Engine()), streamed) as client:
        assert client.get(PATH).text.startswith(THEIRS + f"# HELP {ANSWERED}")


@pytest.mark.parametrize("error", [RuntimeError("about a prompt"), asyncio.CancelledError()])
def test_engines_that_cannot_answer_leave_vllms_page(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.error = error
    with caplog.at_level(logging.DEBUG, "presage"), page(StatusCache(engine)) as client:
        found = families(client.get(PATH).text)
    assert found.keys() == {"vllm:requests", ANSWERED}
    assert found[ANSWERED].samples[0].value == 0
    assert "prompt" not in caplog.text


def test_a_status_that_cannot_be_read_leaves_vllms_page(caplog: pytest.LogCaptureFixture) -> None:
    with page(StatusCache(Engine({"counted": "about a prompt"}))) as client:
        assert client.get(PATH).text == THEIRS
    assert "without the metrics of Presage" in caplog.text
    assert "prompt" not in caplog.text


def test_an_engine_in_a_long_step_is_not_waited_for_nor_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "PATIENCE_S", 0.01)
    engine = Engine()
    engine.iterates.clear()

    async def looks() -> None:
        asked = StatusCache(engine, Clock())
        assert [await asked() for _ in range(3)] == [None, None, None]
        assert engine.asked == 1
        engine.iterates.set()
        assert await asked() == [("0", STATUS), ("1", {})]

    asyncio.run(looks())
    assert engine.asked == 1  # the answer that was under way is taken


def test_however_often_the_page_is_looked_at_engines_are_asked_once_in_a_while() -> None:
    engine, clock = Engine(), Clock()
    asked = StatusCache(engine, clock)

    async def looks(times: int) -> None:
        assert await asyncio.gather(*[asked() for _ in range(times)]) == [[("0", STATUS), ("1", {})]] * times

    asyncio.run(looks(20))
    assert engine.asked == 1
    clock.now = FRESH_S / 2
    asyncio.run(looks(20))
    assert engine.asked == 1
    clock.now = FRESH_S
    asyncio.run(looks(20))
    assert engine.asked == 2


def test_types_can_be_kept_off_the_page() -> None:
    status = json.loads((Path(__file__).parent / "metrics_status.json").read_text(encoding="utf-8"))
    whole, without = (families(exposition([("0", status)], types).decode()) for types in (True, False))
    assert without.keys() == whole.keys()
    for name, family in without.items():
        of_types = any("workflow_type" in sample.labels for sample in whole[name].samples)
        assert family.samples == ([] if of_types else whole[name].samples)
    assert any("workflow_type" in sample.labels for family in whole.values() for sample in family.samples)
