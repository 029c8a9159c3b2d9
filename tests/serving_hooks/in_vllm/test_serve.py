"""`presage serve` as a user starts it, once: a process, a registered champion, and the OpenAI client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from registry_database import new_database

pytest.importorskip("vllm", reason="vLLM is not installed; these tests start its server")

import httpx
import openai
from dashboard import metrics, of_dashboard
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tiny_model import Tiny
from typer.testing import CliRunner, Result

from presage.batch import Plan, call, given
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.run import BatchRun, RunSettings
from presage.batch.schedule import soft_order
from presage.cli.presage import app
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.metrics import HISTOGRAMS, METRICS
from presage.serving_hooks.vllm.http.metrics_page import ANSWERED, FRESH_S
from presage.testing.models import WORDS, save_qwen, save_tokenizer
from presage.testing.servers import free_port, stop

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
KEY, OTHER_KEY, ADMIN_KEY = "a key", "another key", "the key of an admin"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PRESAGE_ADMIN_KEY": ADMIN_KEY,
}
STARTS_WITHIN_S, PATIENT_S = 1200, 300.0


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without a path.
        folder: its working directory.
        log: what it has printed.
    """

    url: str
    folder: Path
    log: Path

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENT_S)

    def status(self) -> dict[str, Any]:
        (told,) = self.http.get("/v1/workflows/status").raise_for_status().json()["engines"]
        return dict(told)

    def named_workflows(self) -> int:
        status = self.status()
        return int(status["workflows"] - status["identity"]["inferred"])

    def count(self, name: str) -> int:
        return int(self.status()["counts"].get(name, 0))

    def scrape(self) -> dict[str, Metric]:
        """The page that Prometheus reads, by its own library; without a key. By the names that expressions use."""
        time.sleep(FRESH_S)  # engines are not asked more often
        answer = httpx.get(f"{self.url}/metrics", timeout=PATIENT_S).raise_for_status()
        assert answer.headers["content-type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.text))
        return {family.name + "_total" * (family.type == "counter"): family for family in families}

    def ask(self, *, words: int = 40, headers: dict[str, str] | None = None, key: str = KEY, **sent: Any) -> str:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENT_S, max_retries=0)
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": " ".join(WORDS[:words])}],
            max_tokens=4,
            temperature=0,
            extra_headers=headers,
            extra_body={"vllm_xargs": sent} if sent else None,
        )
        return str(answer.choices[0].message.content)

    def end(self, name: str, key: str = KEY, **query: str) -> bool:
        http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENT_S)
        return bool(http.post(f"/v1/workflows/{name}/end", params=query).raise_for_status().json()["ended"])


def made(folder: Path) -> Path:
    """A model of random weights that knows 500 words."""
    save_qwen(folder, spread=0.02)
    save_tokenizer(folder, [" ".join(WORDS)])
    return folder


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("serve")
    (root / "registry").mkdir()
    uri = new_database(root / "registry" / "mlflow.db")
    registry = open_registry(uri)
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    register(registry, tiny.folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    folder, log, port = root / "here", root / "log", free_port()
    folder.mkdir()
    (root / "fresh").mkdir()  # each process of the server reads it: a status is computed anew each time
    fresh = "from presage.serving_hooks import explain\nexplain.FRESH_S = 0.0\n"
    (root / "fresh" / "sitecustomize.py").write_text(fresh)
    command = [sys.executable, "-c", "from presage.cli.presage import main; main()", "serve", str(made(root / "model"))]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, OTHER_KEY]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--chat-template", "{% for message in messages %}{{ message.content }} {% endfor %}"]
    command += ["--additional-config.presage.registry", uri, "--additional-config.presage.forecast_deadline_ms", "1000"]
    with log.open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{root / 'fresh'}{os.pathsep}{ROOT}"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        up = Server(f"http://127.0.0.1:{port}", folder, log)
        wait_for(up, process)
        yield up
    finally:
        stop(process)


def wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    for _ in range(STARTS_WITHIN_S):
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    pytest.fail(f"no server: {server.log.read_text()[-4000:]}")


def test_the_champions_forecasts_reach_the_scheduler(server: Server) -> None:
    told = server.status()
    assert told["on"] == {"priority": True, "eviction": True, "admission": True}
    assert told["models"]["next-agent"] == "models:/next-agent@champion, version 1"
    assert told["models"]["remaining-length"].startswith("none: no model 'remaining-length'")
    before = server.count("forecast: champion")
    for step, agent in enumerate(("planner", "coder", "tester")):
        assert server.ask(workflow_type="retry", workflow_id="r1", agent=agent, step=step)
    assert server.count("forecast: champion") == before + 6
    assert "next-agent: models:/next-agent@champion, version 1" in server.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_told_how_an_answer_ended(server: Server, stream: bool) -> None:
    name = "forecast of return times: none"
    before = server.count(name)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=PATIENT_S, max_retries=0)
    given = {"workflow_type": "answers", "workflow_id": f"answer-{stream}", "agent": "planner"}
    messages: Any = [{"role": "user", "content": WORDS[0]}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, stream=stream, extra_body={"vllm_xargs": given}
    )
    for _ in answer:
        pass
    deadline = time.monotonic() + PATIENT_S
    while server.count(name) < before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.count(name) == before + 2, "one when the step completed, one when its answer was known"
    assert server.count("answers that could not be read") == 0


def test_a_workflow_ends_over_http(server: Server) -> None:
    alive = server.status()["workflows"]
    server.ask(workflow_type="retry", workflow_id="of/slashes", agent="planner")
    assert server.status()["workflows"] == alive + 1
    assert not server.end("of%2Fslashes")  # of no type: another workflow
    assert server.end("of%2Fslashes", workflow_type="retry")
    assert not server.end("of%2Fslashes", workflow_type="retry")
    assert server.status()["workflows"] == alive


def test_a_workflow_ends_with_its_last_request(server: Server) -> None:
    alive, says = server.status()["workflows"], ("true", 1, True)
    for number, _ in enumerate(says):
        server.ask(workflow_id=f"last-{number}", agent="planner")
    assert server.status()["workflows"] == alive + 3
    for number, end in enumerate(says):
        server.ask(workflow_id=f"last-{number}", agent="coder", workflow_end=end)
    assert server.status()["workflows"] == alive


def test_the_header_of_a_session_names_a_workflow(server: Server) -> None:
    server.ask(headers={"X-Session-ID": "s1"})
    assert server.end("s1")


def test_metadata_that_is_no_good_is_counted_and_the_request_served(server: Server) -> None:
    unsound: list[tuple[dict[str, Any], str]] = [
        ({"workflow_id": "x" * 300, "agent": "planner"}, "workflow_id: too long"),
        ({"workflow_id": [1, 2]}, "workflow_id: wrong type"),
        ({"agent": "planner"}, "workflow_id: missing"),
        ({"workflow_id": "bad", "agent": "a\u0000b", "workflow_end": 1}, "agent: not printable"),
        ({"workflow_id": "bad", "step": -1, "workflow_end": 1}, "step: no number from 0"),
        ({"workflow_id": "bad", "workflow_end": "maybe"}, "workflow_end: neither true nor false"),
    ]
    before, plain = server.status()["counts"], server.ask()
    assert {server.ask(**sent) for sent, _ in unsound} == {plain}
    after = server.status()["counts"]
    assert [after[reason] - before.get(reason, 0) for _, reason in unsound] == [1] * len(unsound)


def test_an_unchanged_client_in_a_loop_is_a_workflow_with_forecasts(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=PATIENT_S, max_retries=0)
    before = server.status()
    messages: list[Any] = [{"role": "user", "content": " ".join(WORDS[200:230])}]
    for turn in range(3):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": " ".join(WORDS[300 + 10 * turn : 310 + 10 * turn])})
    after = server.status()
    found, known = after["identity"], before["identity"]
    assert found["inferred"] == known["inferred"] + 1
    assert sum(found["sources"].values()) == sum(known["sources"].values()) + 3
    assert found["sources"]["new"] == known["sources"].get("new", 0) + 1
    forecasts = [sum(n for key, n in one["counts"].items() if key.startswith("forecast:")) for one in (before, after)]
    assert forecasts[1] > forecasts[0]


def test_names_in_headers_and_in_metadata_reach_the_scheduler(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=PATIENT_S, max_retries=0)
    messages: Any = [{"role": "user", "content": WORDS[0]}]
    named = {"workflow_type": "retry", "workflow_id": "in-metadata", "agent": "planner", "step": "0"}
    headers = {
        "X-Presage-Workflow-Type": "retry",
        "X-Presage-Workflow-Id": "in-headers",
        "X-Presage-Agent": "planner",
    }
    before = server.count("forecast: champion")
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, metadata=named)
    client.completions.create(model="tiny", prompt=WORDS[0], max_tokens=2, extra_headers=headers)
    answer = client.responses.create(
        model="tiny", input=WORDS[0], max_output_tokens=2, metadata={**named, "workflow_id": "in-response"}
    )
    assert chat.choices[0].message.content
    assert answer.metadata == {**named, "workflow_id": "in-response"}  # vLLM's own use of the field
    assert server.count("forecast: champion") == before + 6
    for name in ("in-metadata", "in-headers", "in-response"):
        assert server.end(name, workflow_type="retry"), name


def test_a_key_that_nothing_reads_is_counted_shown_and_logged_once(server: Server) -> None:
    body = {"model": "tiny", "prompt": WORDS[0], "max_tokens": 2, "metadata": {"workflowId": "of nobody's business"}}
    for _ in range(2):
        server.http.post("/v1/completions", json=body).raise_for_status()
    assert server.count("workflow_id: misspelt") == 2
    assert server.status()["examples"]["workflow_id: misspelt"] == "workflowId"
    left_out = values(server.scrape()["presage_metadata_left_out_total"])
    assert left_out["workflow_id", "misspelt"] == 2
    log = server.log.read_text()
    assert log.count("a client sends `workflowId`, which is not read; send `workflow_id` in `vllm_xargs`") == 1
    assert "nobody's business" not in log


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """By values of the labels but the engine, which is the one there is."""
    assert {sample.labels["engine"] for sample in family.samples} <= {"0"}
    return {tuple(v for k, v in s.labels.items() if k != "engine"): s.value for s in family.samples}


def test_the_page_of_metrics_has_all_that_the_dashboard_shows(server: Server) -> None:
    page = server.scrape()
    spread = {f"{one.name}_{part}" for one in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert {one.name for name in page if page[name].type == "histogram" for one in page[name].samples} >= spread
    assert {name for expression in of_dashboard() for name in metrics(expression)} <= page.keys() | spread
    assert {name: page[name].type for name in page if name.startswith("presage_")} == {
        ANSWERED: "gauge",
        **{one.name: one.type for one in METRICS},
        **{one.name: "histogram" for one in HISTOGRAMS},
    }
    assert {one.name: page[one.name].documentation for one in METRICS} == {one.name: one.help for one in METRICS}
    assert [sample.value for sample in page[ANSWERED].samples] == [1]
    assert values(page["presage_model_info"]) == {
        ("next-agent", "models:/next-agent@champion", "1"): 1,
        ("remaining-length", "none", ""): 1,
        ("return-time", "none", ""): 1,
        ("context-growth", "none", ""): 1,
        ("profile", "none", ""): 1,
    }


def test_metrics_rise_with_what_is_served_and_agree_with_the_status(server: Server) -> None:
    before = server.scrape()
    for step, agent in enumerate(("planner", "coder")):
        server.ask(words=300, workflow_type="retry", workflow_id="metrics", agent=agent, step=step, workflow_end=step)
    after, told = server.scrape(), server.status()

    def risen(name: str) -> dict[tuple[str, ...], float]:
        was = values(before[name])
        return {key: value - was.get(key, 0) for key, value in values(after[name]).items() if value != was.get(key)}

    # At prefill and completion of each step.
    assert risen("presage_forecasts_total")["next-agent", "champion"] == 4
    assert sum(n for (kind, _), n in risen("presage_forecasts_total").items() if kind == "remaining-length") == 2
    assert risen("presage_workflows_ended_total") == {("finished",): 1}
    prompts, found = risen("presage_prompt_tokens_total")[()], risen("presage_hit_tokens_total")
    assert found.keys() == {("local",)}  # the same prompt twice: its whole blocks, which are large on a CPU
    assert prompts / 4 < found["local",] < prompts
    assert values(after["presage_prompt_tokens_total"]) == {(): told["prompts"]["tokens"]}
    assert values(after["presage_policy_on"]) == {
        ("priority",): 1,
        ("eviction",): 1,
        ("admission",): 1,
        ("prefetch",): 0,
    }
    theirs = sum(s.value for s in after["vllm:prefix_cache_hits_total"].samples if s.name.endswith("_total"))
    assert theirs >= sum(values(after["presage_hit_tokens_total"]).values())


def typed(*arguments: str, **environment: str) -> Result:
    """A command, with the key that vLLM asks for."""
    return CliRunner().invoke(app, list(arguments), env={"VLLM_API_KEY": KEY, **environment})


def test_the_status_is_shown_on_a_terminal(server: Server) -> None:
    shown = typed("status", server.url).stdout
    assert "models:/next-agent@champion, version 1" in shown
    assert "priority on, eviction on, admission on, prefetch off" in shown
    assert "inferred workflows" in shown


def test_the_commands_pass_on_why_the_server_refuses(server: Server) -> None:
    for ran, said in (
        (typed("explain", server.url, "nobody"), "no engine knows this workflow; give the workflow_type that its"),
        (typed("mode", server.url, "off", PRESAGE_ADMIN_KEY="another long admin key"), "this is not the admin key; "),
    ):
        assert ran.exit_code == 2
        assert said in ran.stderr.replace("\n", " ")


def test_vllm_refuses_objects_in_metadata(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        server.ask(app_metadata={"workflow_id": "r1"})


def test_the_routes_stand_behind_the_same_door_as_the_api(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/workflows/status").status_code == 401
    assert httpx.post(f"{server.url}/v1/workflows/r1/end").status_code == 401
    page = httpx.get(f"{server.url}/")  # which holds no data
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_a_workflow_belongs_to_the_key_it_came_with(server: Server) -> None:
    alive = server.status()["workflows"]
    server.ask(workflow_id="shared", agent="planner")
    server.ask(workflow_id="shared", agent="planner", key=OTHER_KEY, presage_tenant="key-0")
    assert server.status()["workflows"] == alive + 2  # one name, two workflows, whatever a client claims
    assert server.end("shared", key=OTHER_KEY)
    assert not server.end("shared", key=OTHER_KEY)
    assert server.status()["workflows"] == alive + 1
    server.ask(workflow_id="shared", agent="planner", key=OTHER_KEY, workflow_end=1)
    assert server.end("shared")


def test_a_stranger_is_served_where_vllm_asks_for_no_key_and_touches_no_workflow(server: Server) -> None:
    server.ask(workflow_id="guessed", agent="planner")
    alive, left_out = server.status()["workflows"], server.count("workflow_id: without a key")
    sent = {"workflow_id": "guessed", "agent": "planner", "workflow_end": "true", "presage_tenant": "key-0"}
    body = {"model": "tiny", "prompt": " ".join(WORDS[:20]), "max_tokens": 2, "vllm_xargs": sent}
    for number in range(3):
        asked = {**body, "vllm_xargs": {**sent, "workflow_id": ("guessed", "own", "other")[number]}}
        httpx.post(f"{server.url}/invocations", json=asked, timeout=PATIENT_S).raise_for_status()
    header = {"X-Session-ID": "guessed"}
    httpx.post(f"{server.url}/invocations", json={**body, "vllm_xargs": {}}, headers=header, timeout=PATIENT_S)
    assert server.status()["workflows"] == alive
    assert server.count("workflow_id: without a key") == left_out + 4
    assert server.end("guessed")


def test_a_stream_is_its_clients_as_well(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=OTHER_KEY, timeout=PATIENT_S, max_retries=0)
    said = {"vllm_xargs": {"workflow_id": "streamed", "agent": "planner"}}
    parts = client.completions.create(model="tiny", prompt=WORDS[0], max_tokens=3, stream=True, extra_body=said)
    assert list(parts)[-1].choices[0].finish_reason == "length"
    assert not server.end("streamed")
    assert server.end("streamed", key=OTHER_KEY)


def test_an_admin_and_nobody_else_switches_policies_while_the_server_runs(server: Server) -> None:
    url, admin = "/v1/workflows/mode", {"X-Presage-Admin-Key": ADMIN_KEY}
    assert server.http.post(url, json={"mode": "off"}).status_code == 401
    assert server.http.post(url, json={"mode": "off"}, headers={"X-Presage-Admin-Key": KEY}).status_code == 403
    assert httpx.post(f"{server.url}{url}", json={"mode": "off"}, headers=admin).status_code == 401  # vLLM's own door
    plain = server.ask()
    for mode in ("off", "shadow", "on"):
        (told,) = server.http.post(url, json={"mode": mode}, headers=admin).raise_for_status().json()["engines"]
        assert set(told["policies"].values()) == {mode}
        before = server.count("forecast: champion")
        assert server.ask(workflow_type="retry", workflow_id=f"m-{mode}", agent="planner", step=0) == plain
        assert server.count("forecast: champion") == before + (0 if mode == "off" else 2)
        assert server.status()["on"]["eviction"] is (mode == "on")
        assert server.end(f"m-{mode}", workflow_type="retry") is (mode != "off")


def test_a_workflow_is_explained_to_its_own_client(server: Server) -> None:
    server.ask(workflow_type="retry", workflow_id="why", agent="planner", step=0)
    url = "/v1/workflows/why/explain?workflow_type=retry"
    (told,) = server.http.get(url).raise_for_status().json()["engines"]
    assert [made["moment"] for made in told["forecasts"]] == ["prefill", "completion"]
    assert (told["workflow_id"], told["forecasts"][-1]["source"]) == ("why", "champion")
    other = httpx.get(f"{server.url}{url}", headers={"Authorization": f"Bearer {OTHER_KEY}"})
    assert other.status_code == 404
    assert server.end("why", workflow_type="retry")


def test_the_gateway_before_it_changes_no_token_and_names_workflows(server: Server, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [
        sys.executable,
        "-c",
        "from presage.cli.presage import main; main()",
        "gateway",
        "--upstream",
        server.url,
    ]
    command += ["--dialect", "presage", "--listen", f"127.0.0.1:{port}"]
    with log.open("w") as said:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        front = Server(f"http://127.0.0.1:{port}", tmp_path, log)
        wait_for(front, process)
        named = server.named_workflows()
        for words in (3, 17, 40):
            assert front.ask(words=words) == server.ask(words=words)
        direct, proxied = (
            openai.OpenAI(base_url=f"{one.url}/v1", api_key=KEY, timeout=PATIENT_S, max_retries=0)
            for one in (server, front)
        )
        messages: Any = [{"role": "user", "content": " ".join(WORDS[:9])}]
        told = [
            "".join(  # a busy server puts several tokens into one part
                part.choices[0].delta.content or ""
                for part in one.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=6, temperature=0, stream=True
                )
                if part.choices
            )
            for one in (direct, proxied)
        ]
        assert told[0] == told[1] != ""
        assert server.named_workflows() == named + 4  # by the gateway; the client named none
        wrong = openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):  # the server's own refusal
            wrong.models.list()
    finally:
        stop(process)


def test_it_leaves_nothing_in_the_working_directory(server: Server) -> None:
    assert not list(server.folder.iterdir())
    assert "Traceback" not in server.log.read_text()


def test_a_batch_runs_in_any_order_with_the_same_answers_and_ends_its_workflows(server: Server, tmp_path: Path) -> None:
    text = given("text")
    first = call("planner", text, max_tokens=8)
    history = (("user", text), ("assistant", first))
    plan = Plan("retry", out=call("coder", WORDS[7], history=history, max_tokens=8), first=first)
    rows = [{"text": " ".join(WORDS[n : n + 100])} for n in range(12)]
    alive, named = server.status()["workflows"], server.count("forecast: champion")
    tree = tree_of(plan, field_tokens(plan, rows))
    found = []
    for name, order, settings in (
        ("one", soft_order(plan, tree, rows), RunSettings(api_key=KEY)),
        ("two", None, RunSettings(api_key=KEY, concurrency=1, open_rows=1)),
    ):
        run = BatchRun(plan, rows, [server.url], tmp_path / name, order=order, settings=settings)
        report = asyncio.run(run.run())
        assert (report.asked, report.failed) == (24, 0)
        assert report.output_tokens == 24 * 8
        found.append(list(run.results()))
        run.close()
    assert found[0] == found[1]
    assert server.count("forecast: champion") >= named + 2 * 12
    assert server.status()["workflows"] == alive
