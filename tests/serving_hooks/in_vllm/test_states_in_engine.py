"""On the real engine: hidden states are those of the model, they reach the forecasts, and they change no token."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose states are as wide as those the predictor learnt."""
    return save_qwen(tmp_path_factory.mktemp("model"), hidden_size=STATE_SIZE, inner=64, spread=0.5)


@pytest.fixture(scope="module")
def registry(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the small predictor is the champion; it learnt states of the model "synthetic"."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('registry') / 'mlflow.db'}"
    at = open_registry(uri)
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    register(at, tiny.folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[row])
    at.client.set_registered_model_alias("next-agent", "champion", "1")
    return {"MLFLOW_TRACKING_URI": uri, "PREDICTOR": str(tiny.folder)}


def served(model: Path, name: str, registry: dict[str, str], recording: Path, *how: str) -> Any:
    return ran("serve_states.py", str(model), name, *how, **registry, RECORDING=str(recording))


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
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])  # vLLM may say more


@pytest.fixture(scope="module")
def tapped(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return served(model, "synthetic", registry, tmp_path_factory.mktemp("tapped"))


@pytest.fixture(scope="module")
def apart(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with engine and worker in processes of their own."""
    return served(model, "synthetic", registry, tmp_path_factory.mktemp("apart"), "apart")


@pytest.fixture(scope="module")
def beside(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine of `tapped`, with vLLM's offloading connector beside ours."""
    tier = {"spec_name": "MemcpySpec", "spec_module_path": "memcpy_tier", "cpu_bytes_to_use": 2**26}
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
    recording = tmp_path_factory.mktemp("beside")
    return served(model, "synthetic", registry, recording, f"beside={json.dumps(other)}")


@pytest.fixture(scope="module")
def stock(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The requests of `tapped`, by vLLM alone."""
    return served(model, "synthetic", registry, tmp_path_factory.mktemp("stock"), "stock")


@pytest.fixture(scope="module")
def first_layer(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine of `tapped`, which taps the first layer and not what the predictor learnt."""
    return served(model, "synthetic", registry, tmp_path_factory.mktemp("first"), "layer=1")


@pytest.fixture(scope="module")
def compiled(model: Path, registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, compiled and in processes of their own; after the engine without a layer has filled vLLM's cache."""
    here = {**registry, "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    served(model, "synthetic", here, tmp_path_factory.mktemp("no-layer"), "compiled")
    return served(model, "synthetic", here, tmp_path_factory.mktemp("last"), "compiled", "apart", "layer=-1")


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


@pytest.mark.parametrize("how", ["tapped", "apart"])
def test_what_is_recorded_is_the_models_own_states(how: str, request: pytest.FixtureRequest) -> None:
    of = request.getfixturevalue(how)
    assert of["status"]["recorder"]["states"] == "on"
    assert not [name for name in of["status"]["recorder"]["counts"] if not name.startswith("written")]
    recorded = of["recorded"]
    finished = sum(reason != "abort" for name, reason in of["reasons"].items() if not name.startswith(("10.", "11.")))
    assert finished == 50
    assert min(recorded["checked"]["prefill"], recorded["checked"]["completion"]) >= finished
    assert max(recorded["off"]["prefill"], recorded["off"]["completion"]) <= 1, "rounded to float16, and no further off"
    assert recorded["off"].get("rows", 0.0) == 0.0, "what the tap took, to the last bit"


@pytest.mark.parametrize(
    ("how", "layer"), [("first_layer", 1), pytest.param("compiled", 2, marks=pytest.mark.one_version)]
)
def test_states_of_a_layer_are_those_of_hugging_face(how: str, layer: int, request: pytest.FixtureRequest) -> None:
    of = request.getfixturevalue(how)
    assert of["status"]["state_layer"] == layer
    assert of["status"]["recorder"]["states"] == "on"
    recorded = of["recorded"]
    assert min(recorded["checked"]["prefill"], recorded["checked"]["completion"]) >= 50
    assert max(recorded["off"]["prefill"], recorded["off"]["completion"]) <= 1, "rounded to float16, and no further off"
    assert recorded["off"].get("rows", 0.0) == 0.0
    assert recorded["layers"] == [layer]


def test_tapping_a_layer_changes_no_token(tapped: Any, first_layer: Any) -> None:
    for name, reason in tapped["reasons"].items():
        if reason != "abort":
            assert tapped["tokens"][name] == first_layer["tokens"][name]


def test_a_predictor_of_another_layer_does_without_states_and_says_so(first_layer: Any) -> None:
    assert first_layer["status"]["states"].startswith("off: no predictor reads")
    assert first_layer["status"]["counts"]["forecast: champion"] >= 100
    assert first_layer["recorded"]["why"] == [LAYER_LEFT_OUT]
    assert first_layer["changed"] == [0, 0]


def test_states_come_from_a_worker_in_a_process_of_its_own(tapped: Any, apart: Any) -> None:
    counts, known = apart["status"]["counts"], tapped["status"]["counts"]
    assert apart["status"]["states"] == "on"
    finished = sum(reason != "abort" for reason in apart["reasons"].values())
    assert finished >= 50
    assert counts["completion states: used"] == counts["prefill states: used"] == known["completion states: used"]
    assert not [name for name in counts if "missing" in name or "late" in name]
    for name, reason in apart["reasons"].items():
        if reason != "abort":
            assert apart["tokens"][name] == tapped["tokens"][name]


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


@pytest.mark.parametrize("how", ["tapped", "beside"])
def test_answers_are_those_of_vllm_alone(how: str, stock: Any, request: pytest.FixtureRequest) -> None:
    of = request.getfixturevalue(how)
    finished = [name for name in stock["tokens"] if "abort" not in (stock["reasons"][name], of["reasons"][name])]
    assert len(finished) >= 50
    assert len({json.dumps(stock["tokens"][name]) for name in finished}) > 30
    for name in finished:
        assert of["tokens"][name] == stock["tokens"][name]


def test_a_hybrid_model_has_states_and_the_tokens_of_vllm_alone(tmp_path: Path) -> None:
    model, recording = str(save_hybrid(tmp_path / "hybrid")), str(tmp_path / "recording")
    alone, recorded = ran("serve_hybrid.py", model), ran("serve_hybrid.py", model, recording)
    assert recorded["kinds"] == ["MambaSpec", "FullAttentionSpec"]
    assert recorded["tokens"] == alone["tokens"]
    assert recorded["states"] == "on"
    table = read_traces([recording]).table
    assert (table["prefill_state"].null_count, table["completion_state"].null_count, len(table)) == (0, 0, 3)
