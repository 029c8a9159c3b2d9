"""The gateway's page of metrics, as Prometheus reads it."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families
from served import gateway, served

from presage.gateway.simulated_engine import SimulatedEngine

CHAT = "/v1/chat/completions"


def run_workflows(url: str, count: int) -> None:
    """Named workflows of two steps; one of each of their clients says that it has ended."""
    for number in range(count):
        for agent, last in (("planner", 0), ("coder", 1)):
            named = {"workflow_type": "review", "workflow_id": f"w{number}", "agent": agent, "workflow_end": last}
            body = {"model": "simulated", "messages": [{"role": "user", "content": f"task {number}"}]}
            httpx.post(url + CHAT, json={**body, "vllm_xargs": named}).raise_for_status()


def test_the_page_is_what_prometheus_reads_and_names_no_client() -> None:
    with served(SimulatedEngine(token_s=0.0).app()) as engine, gateway(engine) as (url, _):
        run_workflows(url, 6)
        page = httpx.get(url + "/metrics").raise_for_status().text
    families = {one.name: one for one in text_string_to_metric_families(page)}
    answers = {tuple(sample.labels.values()): sample.value for sample in families["presage_gateway_answers"].samples}
    assert [value for labels, value in answers.items() if "200" in labels] == [12.0]
    assert "presage_forecasts" in families
    ended = families["presage_workflows_ended"]
    assert sum(sample.value for sample in ended.samples) == 6
    assert "w3" not in page
    assert "task" not in page
