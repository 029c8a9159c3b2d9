"""On the real engine: hidden states are those of the model, they reach the forecasts, and they change no token."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from registry_database import new_database
from tiny_hybrid import save_hybrid
from tiny_model import STATE_SIZE, Tiny

from presage.datasets.read import read_traces
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.workflows.live import LAYER_LEFT_OUT
from presage.testing.models import save_qwen

pytest.importorskip("vllm", reason="vLLM is not installed; these tests start its engine")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
HERE = Path(__file__).resolve().parent


def ran(*program: str, **environment: str) -> Any:
    paths = os.pathsep.join(map(str, (HERE.parents[2], HERE.parents[1], HERE)))
    done = subprocess.run(
        [sys.executable, *program],
        cwd=HERE,
        env={**os.environ, **environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith(("{", "[{"))]  # vLLM may say more
    return json.loads(told[-1])


@pytest.fixture(scope="module")
def served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of the same requests, by way.

    The model has random weights, and states as wide as those that the small predictor learnt. That is the champion; it
    learnt states of the model "synthetic", which is served under this name.
    """
    root = tmp_path_factory.mktemp("states")
    model = save_qwen(root / "model", hidden_size=STATE_SIZE, inner=64, spread=0.5)
    uri = new_database(root / "mlflow.db")
    registry = open_registry(uri)
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    register(registry, tiny.folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    return ran(
        *("serve_states.py", str(model), "apart", "stock", "tapped", "beside", "last layer"),
        **{"MLFLOW_TRACKING_URI": uri, "PREDICTOR": str(tiny.folder), "RECORDINGS": str(root)},
    )


@pytest.fixture
def tapped(served: Any) -> Any:
    return served["tapped"]


@pytest.fixture
def apart(served: Any) -> Any:
    """The same with engine and worker in processes of their own."""
    return served["apart"]


@pytest.fixture
def beside(served: Any) -> Any:
    """The engine of `tapped`, with vLLM's offloading connector beside ours."""
    return served["beside"]


@pytest.fixture
def last_layer(served: Any) -> Any:
    """The engine of `tapped`, compiled, which taps the last layer and not what the predictor learnt."""
    return served["last layer"]


def test_the_engine_was_made_to_do_what_is_hard(tapped: Any) -> None:
    assert tapped["preempted"] >= 1
    assert tapped["chunks"] > 50
    assert tapped["hits"] >= 64
    assert "stop" in tapped["reasons"].values()
    assert sum(len(tokens) == 1 for tokens in tapped["tokens"].values()) > 10


def test_states_are_those_of_hugging_face_in_float32(tapped: Any) -> None:
    assert min(tapped["checked"]["prefill"], tapped["checked"]["completion"]) >= 50
    assert max(tapped["off"].values()) < 1e-4, tapped["off"]


def test_states_reach_the_forecasts_and_change_them(tapped: Any) -> None:
    counts = tapped["status"]["counts"]
    assert tapped["status"]["states"] == "on"
    assert counts["completion states: used"] == tapped["checked"]["completion"]
    assert counts["prefill states: used"] >= tapped["checked"]["prefill"]
    assert "completion states: missing" not in counts
    assert "prefill states: missing" not in counts
    assert counts["forecast: champion"] >= 100
    assert all(tapped["status"]["on"].values())
    changed, made_again = tapped["changed"]
    assert changed > made_again // 2


def test_every_state_is_read_in_the_step_that_computed_it(tapped: Any) -> None:
    calls = int(tapped["ahead"])  # as on a GPU: the call that schedules the next step reads the output of this one
    assert list(tapped["late"]) == [str(calls)]


@pytest.mark.parametrize("way", ["tapped", "apart"])
def test_what_is_recorded_is_the_models_own_states(way: str, served: Any) -> None:
    told = served[way]
    assert told["status"]["recorder"]["states"] == "on"
    assert not [name for name in told["status"]["recorder"]["counts"] if not name.startswith("written")]
    recorded = told["recorded"]
    finished = sum(reason != "abort" for name, reason in told["reasons"].items() if not name.startswith(("10.", "11.")))
    assert finished == 50
    assert min(recorded["checked"]["prefill"], recorded["checked"]["completion"]) >= finished
    assert max(recorded["off"]["prefill"], recorded["off"]["completion"]) <= 1, "rounded to float16, and no further off"
    assert recorded["off"].get("rows", 0.0) == 0.0, "what the tap took, to the last bit"


def test_states_of_a_layer_are_those_of_hugging_face(last_layer: Any) -> None:
    assert last_layer["status"]["state_layer"] == 2
    assert last_layer["status"]["recorder"]["states"] == "on"
    recorded = last_layer["recorded"]
    assert min(recorded["checked"]["prefill"], recorded["checked"]["completion"]) >= 50
    assert max(recorded["off"]["prefill"], recorded["off"]["completion"]) <= 1, "rounded to float16, and no further off"
    assert recorded["off"].get("rows", 0.0) == 0.0
    assert recorded["layers"] == [2]


def test_vllms_cache_of_compiled_models_keeps_layers_apart() -> None:
    from vllm.config import VllmConfig

    keys = {VllmConfig(additional_config={"presage": {"state_layer": n}}).compute_hash() for n in (None, 1, 2)}
    assert len(keys) == 3


def test_a_predictor_of_another_layer_does_without_states_and_says_so(last_layer: Any) -> None:
    assert last_layer["status"]["states"].startswith("off: no predictor reads")
    assert last_layer["status"]["counts"]["forecast: champion"] >= 50  # the first ones may come before it is loaded
    assert last_layer["recorded"]["why"] == [LAYER_LEFT_OUT]
    assert last_layer["changed"] == [0, 0]


def test_states_come_from_a_worker_in_a_process_of_its_own(tapped: Any, apart: Any) -> None:
    counts, known = apart["status"]["counts"], tapped["status"]["counts"]
    assert apart["status"]["states"] == "on"
    finished = sum(reason != "abort" for reason in apart["reasons"].values())
    assert finished >= 50
    assert counts["completion states: used"] == counts["prefill states: used"] == known["completion states: used"]
    assert not [name for name in counts if "missing" in name or "late" in name]


def test_another_connector_stores_and_loads_beside_ours(beside: Any) -> None:
    assert beside["preempted"] >= 1
    assert beside["copied"]["stored"] >= 30
    assert beside["copied"]["loaded"] > 10
    assert beside["status"]["prompts"]["external_tokens"] > 0
    assert all(beside["status"]["on"].values())


def test_states_come_beside_another_connector(beside: Any) -> None:
    counts = beside["status"]["counts"]
    assert beside["status"]["states"] == beside["status"]["recorder"]["states"] == "on"
    assert min(beside["checked"]["prefill"], beside["checked"]["completion"]) >= 50
    assert max(beside["off"].values()) < 1e-4, beside["off"]
    assert counts["completion states: used"] == beside["checked"]["completion"]
    assert not [name for name in counts if "missing" in name]
    assert max(beside["recorded"]["off"]["prefill"], beside["recorded"]["off"]["completion"]) <= 1


@pytest.mark.parametrize("way", ["tapped", "beside", "last layer", "apart"])
def test_answers_are_those_of_vllm_alone(way: str, served: Any) -> None:
    stock, told = served["stock"], served[way]
    finished = [name for name in stock["tokens"] if "abort" not in (stock["reasons"][name], told["reasons"][name])]
    assert len(finished) >= 50
    assert len({json.dumps(stock["tokens"][name]) for name in finished}) > 30
    for name in finished:
        assert told["tokens"][name] == stock["tokens"][name]


def test_a_hybrid_model_has_states_and_the_tokens_of_vllm_alone(tmp_path: Path) -> None:
    model, recording = str(save_hybrid(tmp_path / "hybrid")), str(tmp_path / "recording")
    alone, recorded = ran("serve_hybrid.py", model, recording)
    assert recorded["kinds"] == ["MambaSpec", "FullAttentionSpec"]
    assert recorded["tokens"] == alone["tokens"]
    assert recorded["states"] == "on"
    table = read_traces([recording]).table
    assert (table["prefill_state"].null_count, table["completion_state"].null_count, len(table)) == (0, 0, 3)
