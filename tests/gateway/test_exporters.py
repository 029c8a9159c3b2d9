"""Exporters: profile and costs as vllm-router reads them; demand as Prometheus gauges and as replicas of Ray Serve."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from presage.datasets.read import read_traces
from presage.errors import TraceError
from presage.gateway.annotation import Annotation
from presage.gateway.dialects import DIALECTS
from presage.gateway.exporters import router_profile as profiles
from presage.gateway.exporters.demand import DemandGauges, model_demand, read_demand
from presage.gateway.exporters.ray_serve import DemandPolicy, replicas
from presage.gateway.exporters.router_costs import router_costs
from presage.gateway.exporters.router_profile import (
    OUTPUT_BOUNDS_TOKENS,
    RETURN_BOUNDS_S,
    profile_settings,
    router_profile,
)
from presage.serving_hooks.engine_file import Cost, EngineFile
from presage.serving_hooks.workflows.identity import Step


def trace(*workflows: list[tuple[str, float, int]], complete: bool = True, **more: Any) -> pa.Table:
    """Workflows of steps (agent, seconds until it returns, output tokens); each step takes a second."""
    rows = []
    for number, steps in enumerate(workflows):
        at = 1000.0 * number
        for step, (agent, away_s, tokens) in enumerate(steps):
            rows.append(
                {
                    "workflow_type": "review",
                    "workflow_id": f"w{number}",
                    "step": step,
                    "agent": agent,
                    "output_tokens": tokens,
                    "start_time": at,
                    "end_time": at + 1,
                    "complete": complete,
                    **more,
                }
            )
            at += 1 + away_s
    return read_traces(pd.DataFrame(rows)).table


def entry(profile: dict[str, Any], kind: str, **key: Any) -> dict[str, Any]:
    """The one entry whose key has these values, and null elsewhere."""
    found = [
        one
        for one in profile[f"{kind}_profiles"]
        if {name: value for name, value in one["key"].items() if value is not None} == key
    ]
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


TABLE = [("coder", 0.2, 16), ("coder", 4.0, 17), ("tester", 60.0, 20_000)]


def test_a_profile_counts_return_times_and_lengths_by_agent() -> None:
    made = router_profile(trace(TABLE, TABLE))
    assert (made.return_times, made.output_lengths, made.left_out) == (6, 6, 0)
    coder = {"workflow_profile_id": "review", "model_pool": "program:all", "agent_role": "coder"}
    returns = entry(made.file, "return_time", **coder, expected_resume=True, blocks_parent=False)
    assert dict(zip(RETURN_BOUNDS_S, returns["bucket_counts"], strict=False)) == {
        0.5: 2,
        1.0: 0,
        2.0: 0,
        3.0: 0,
        5.0: 2,
        7.0: 0,
        10.0: 0,
    }
    assert (returns["no_return_count"], returns["max_observed_seconds"]) == (0, 4)
    lengths = entry(
        made.file, "output_length", workflow_profile_id="review", model_pool="program:all", profile_role="tester"
    )
    assert lengths["bucket_counts"] == [0] * len(OUTPUT_BOUNDS_TOKENS) + [2]
    assert lengths["max_observed_tokens"] == 20_000


def test_a_bucket_includes_its_upper_bound() -> None:
    lengths = entry(router_profile(trace(TABLE)).file, "output_length")
    assert lengths["bucket_counts"][:3] == [1, 1, 0]


def test_a_workflow_that_ended_does_not_return_and_one_that_was_cut_is_unknown() -> None:
    ended, cut = (
        entry(router_profile(trace(TABLE, complete=complete)).file, "return_time") for complete in (True, False)
    )
    assert (ended["no_return_count"], cut["no_return_count"]) == (1, 0)
    assert ended["bucket_counts"] == cut["bucket_counts"]


def test_less_specific_keys_hold_the_sums() -> None:
    made = router_profile(trace(TABLE, [("tester", 1.0, 40), ("tester", 1.0, 40)]), "pool").file
    everything = entry(made, "output_length")["bucket_counts"]
    agents = [entry(made, "output_length", model_pool="pool", profile_role=name) for name in ("coder", "tester")]
    assert [sum(pair) for pair in zip(*(one["bucket_counts"] for one in agents), strict=True)] == everything
    assert everything == entry(made, "output_length", model_pool="pool")["bucket_counts"]


def test_requests_name_themselves_as_the_profile_does() -> None:
    body, _ = DIALECTS["vllm-router"]({}, {}, Annotation(Step("review", "w", "coder"), 0))
    sent = json.loads(body["vllm_xargs"]["agentic_context"])
    key = {name: sent[name] for name in ("workflow_profile_id", "agent_role", "expected_resume", "blocks_parent")}
    assert entry(router_profile(trace(TABLE)).file, "return_time", model_pool="program:all", **key)


def test_bounds_of_profile_and_settings_agree() -> None:
    made, settings = router_profile(trace(TABLE)).file, profile_settings("/p.json")
    assert made["schema_version"] == "1"
    for name in ("return_time_bucket_bounds_seconds", "output_length_bucket_bounds_tokens"):
        assert made[name] == settings[name] == sorted(set(made[name]))
    assert (settings["mode"], settings["profile_path"]) == ("shadow", "/p.json")


def test_the_rarest_keys_are_left_out_over_the_routers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MOST_KEYS", 4)
    made = router_profile(trace(TABLE, TABLE))
    assert [len(made.file[f"{kind}_profiles"]) for kind in ("return_time", "output_length")] == [4, 4]
    assert made.left_out == 4 + 2
    assert entry(made.file, "output_length", model_pool="program:all")


def test_a_trace_without_times_or_tokens_is_refused() -> None:
    table = trace(TABLE)
    for column, words in (("ended_at", "started_at and ended_at"), ("output_tokens", "output_tokens")):
        place = table.schema.get_field_index(column)
        without = table.set_column(
            place, table.schema.field(place), pa.nulls(len(table), table.schema.field(place).type)
        )
        with pytest.raises(TraceError, match=f"record no {words}"):
            router_profile(without)


def engine(chunked: bool) -> EngineFile:
    cost = Cost(source="test", iteration_s=0.006, prefill_token_s=3e-5, decode_token_s=2e-5, context_token_s=5e-8)
    cost = cost.model_copy(update={"attention_pair_s": 1e-9})
    return EngineFile(cache_tokens=400_000, most_tokens=2048, chunked_prefill=chunked, cost=cost)


@pytest.mark.parametrize("chunked", [True, False])
def test_the_routers_formula_gives_the_prefill_times_of_the_engine_file(chunked: bool) -> None:
    """Against iterations summed one by one; 2 % over prompts of 1,000 to 100,000 tokens, rounding up included."""
    of = engine(chunked)
    prefill = router_costs(of)["prefill_cost_model"]
    chunk = of.most_tokens if chunked else 10**9
    total = estimate = 0.0
    for prompt in range(1000, 100_000, 977):
        parts = [min(chunk, prompt - start) for start in range(0, prompt, chunk)]
        for number, part in enumerate(parts):
            pairs = sum(range(sum(parts[:number]) + 1, sum(parts[: number + 1]) + 1))
            total += of.cost.seconds(part, 0, sum(parts[: number + 1]), pairs=pairs)
        x = prompt / 1000
        estimate += prefill["intercept_seconds"] + prefill["linear_seconds_per_1k_tokens"] * x
        estimate += prefill["quadratic_seconds_per_1k_tokens_squared"] * x * x
    assert estimate == pytest.approx(total, rel=0.02)


def test_decode_coefficients_and_capacity_are_those_of_the_engine_file() -> None:
    found = router_costs(engine(True))
    assert found["token_capacity_per_target"] == 400_000
    assert found["decode_throughput_model"] == {
        "fixed_step_seconds": 0.006,
        "batch_step_seconds_per_request": 2e-5,
        "context_step_seconds_per_token": 5e-8,
    }
    assert 0 < found["prefill_cost_model"]["decode_throughput_alpha"] < 1
    assert all(math.isfinite(value) and value >= 0 for value in found["prefill_cost_model"].values())


MODELS = ("big", "small")
AHEAD = np.array([[1.0, 0.0], [4.0, 16.0]]), np.array([[0.0, 0.0], [3.0, 8.0]])


def page_of(ahead: Any = AHEAD) -> str:
    demands = model_demand(MODELS, np.array([1.0, 2.0]), np.array([0.0, 31.0]), ahead)
    registry = CollectorRegistry()
    registry.register(DemandGauges(lambda: demands))
    return generate_latest(registry).decode()


def test_demand_is_exported_by_model_horizon_and_quantile() -> None:
    lines = page_of().splitlines()
    assert 'presage_demand_requests{horizon_s="0",model="small",quantile="0.9"} 2.0' in lines
    assert 'presage_demand_requests{horizon_s="31",model="small",quantile="0.5"} 16.0' in lines
    assert 'presage_demand_requests{horizon_s="31",model="big",quantile="0.5"} 4.0' in lines
    assert "# TYPE presage_demand_requests gauge" in lines


def test_demand_reads_back_as_it_was_and_rises_with_the_quantile() -> None:
    found = {(one.model, one.horizon_s): one.requests for one in read_demand(page_of())}
    assert found.keys() == {(model, horizon_s) for model in MODELS for horizon_s in (0.0, 31.0)}
    small = found["small", 31.0]
    assert small[0.5] < small[0.9] < small[0.99]
    assert small[0.9] == pytest.approx(16 + 3 * 1.2816, rel=1e-4)
    assert read_demand("# TYPE other gauge\nother 1\n") == []


def test_without_a_forecast_there_is_the_demand_of_now() -> None:
    assert {one.horizon_s for one in read_demand(page_of(None))} == {0.0}


def test_replicas_follow_the_highest_demand_until_the_horizon() -> None:
    demands = read_demand(page_of())
    assert replicas(demands, "small", 0.9, 4.0) == 5
    assert replicas(demands, "small", 0.5, 16.0) == 1
    assert replicas(demands, "unknown", 0.9, 4.0) is None
    assert replicas(demands, "small", 0.75, 4.0) is None


@contextmanager
def served(page: str) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Context:
    total_num_requests: float
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4


def test_ray_gets_forecast_replicas_within_its_bounds() -> None:
    with served(page_of()) as page:
        policy = DemandPolicy(page, "small", 8.0, every_s=3600)
        policy.read()
        assert policy(Context(0.0)) == (3, {"presage": "forecast"})
        assert policy(Context(0.0, capacity_adjusted_max_replicas=2))[0] == 2


def test_ray_follows_the_requests_in_flight_without_a_page() -> None:
    policy = DemandPolicy("http://127.0.0.1:1/metrics", "small", 8.0, every_s=3600)
    assert policy(Context(17.0)) == (3, {"presage": "requests"})
    assert policy(Context(0.0)) == (1, {"presage": "requests"})


def test_an_old_page_counts_no_longer() -> None:
    with served(page_of()) as page:
        policy = DemandPolicy(page, "small", 8.0, every_s=3600, keep_s=-1.0)
        policy.read()
        assert policy(Context(30.0)) == (4, {"presage": "requests"})


def test_rays_own_configuration_takes_the_policy() -> None:
    config = pytest.importorskip("ray.serve.config")
    name = "presage.gateway.exporters.ray_serve:DemandPolicy"
    kwargs = {"page": "http://127.0.0.1:1/metrics", "model": "small", "requests_per_replica": 8}
    policy = config.AutoscalingPolicy(policy_function=name, policy_kwargs=kwargs).get_policy()(**kwargs)
    assert policy(Context(17.0))[0] == 3
