"""Run as a program: serves workflows on the real engine, tapped and recorded, and prints what came of their states as
JSON.

Short chunks, a cache too small for all (so requests are preempted), prefixes that are shared, answers of one token,
answers that end by a stop token, requests that are aborted, requests without a workflow. Every row the tap takes, and
every state that reaches the forecasts, is noted on the way and compared with a forward pass of Hugging Face's model in
float32, and so is what is read back from the recording. Said "apart", engine and worker are processes of their own, as
in life; nothing is noted on the way then. Said "compiled", the model is; said "layer=N", that layer is tapped.
"""

import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(
    int("apart" in sys.argv)
)  # in one process both ends can be looked at
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import numpy as np
from own_engine import end

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.vllm.start.multi_connector import with_states

APART, COMPILED = "apart" in sys.argv, "compiled" in sys.argv
STOCK = "stock" in sys.argv
LAYER = next((int(said.removeprefix("layer=")) for said in sys.argv if said.startswith("layer=")), None)
BESIDE = next((json.loads(said.removeprefix("beside=")) for said in sys.argv if said.startswith("beside=")), None)
HOOKS = {
    "scheduler_cls": "presage.serving_hooks.vllm.WorkflowScheduler",
}
TAP = {
    "worker_cls": "presage.serving_hooks.vllm.StatesWorker",
    "kv_transfer_config": {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
        "kv_role": "kv_producer",
    },
}
AGENTS = ("planner", "coder", "tester", "coder", "tester")
STOP = list(range(0, 512, 16))


class Noted:
    """What passes, by moment and request; the step that computed it, the step in which it is read.

    An engine that schedules ahead may compute a row of a request that has stopped: `taken` has the rows of each
    iteration, and a completion's is that of the iteration whose states are read when it ends.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[Any, dict[str, Any]]] = []
        self.came: list[Any] = []
        self.rows: dict[str, dict[str, Any]] = {PREFILL: {}, COMPLETION: {}}
        self.states: dict[str, dict[str, Any]] = {PREFILL: {}, COMPLETION: {}}
        self.computed: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.changed: list[bool] = []
        self.step = 0

    def watch(self, forecasts: Any) -> None:
        """Stands between the parts; each goes on as it would."""
        from presage.serving_hooks.forecasting.forecaster import Forecaster
        from presage.serving_hooks.vllm import engine
        from presage.serving_hooks.vllm.hidden_states.connector import States, StatesConnector
        from presage.serving_hooks.vllm.hidden_states.steps import RequestStates
        from presage.serving_hooks.vllm.step_forecasts import StepForecasts

        captured, read, prefill = StatesConnector.captured, RequestStates.read, StepForecasts.prefill_state
        again = Forecaster.on_prefill_state
        reader, last = forecasts.state_source or (None, None)

        def rows_pass(connector: Any, ids: Any, rows: Any) -> None:
            if wanted := connector.requested_rows:
                every = rows().float().cpu().numpy().copy()
                here = {moment: [name for name in names if name in ids] for moment, names in wanted.items()}
                for name in here.get(PREFILL, ()):
                    self.rows[PREFILL][name] = every[list(ids).index(name)]
                    self.computed[name] = self.step
                of = {name: every[list(ids).index(name)] for name in here.get(COMPLETION, ())}
                self.taken.append((connector.build_connector_worker_meta(), of))
            captured(connector, ids, rows)

        def read_passes(states: Any, iteration: Any, output: Any) -> None:
            came = engine.worker_metadata(output)
            self.came = [] if came is None else list(engine.of_kind(States, came))
            read(states, iteration, output)

        def state_passes(workflows: Any, name: str, state: Any) -> None:
            self.states[PREFILL][name] = state
            self.read[name] = self.step
            prefill(workflows, name, state)

        def last_passes(name: str) -> Any:
            found = last(name)
            if found is not None:
                self.states[COMPLETION][name] = found
                came = {id(states) for states in self.came}
                rows = next(rows for states, rows in reversed(self.taken) if id(states) in came)
                self.rows[COMPLETION][name] = rows[name]
            return found

        def answered(forecaster: Any, workflow_type: str, workflow_id: str, projected: Any, of: Any) -> Any:
            live = again(forecaster, workflow_type, workflow_id, projected, of)
            if live is not None:
                self.changed.append(not np.allclose(live.probabilities, of.probabilities, atol=1e-6))
            return live

        StatesConnector.captured, StepForecasts.prefill_state = rows_pass, state_passes  # type: ignore[assignment,method-assign]
        RequestStates.read = read_passes  # type: ignore[method-assign]
        Forecaster.on_prefill_state = answered  # type: ignore[assignment,method-assign]
        if last is not None:
            forecasts.state_source = reader, last_passes


def requests(draw: random.Random) -> list[tuple[str, list[int], Any]]:
    """Name, prompt, and how to answer it, of the steps of twelve workflows, round by round."""
    from vllm import SamplingParams

    made = []
    for number, agent in enumerate(AGENTS):
        for workflow in range(12):
            prompt = [(workflow // 2 * 41 + i) % 500 for i in range(30 + 45 * number)]
            prompt += [draw.randrange(500) for _ in range(draw.randrange(12))]
            tokens = 1 if (workflow + number) % 4 == 0 else draw.randrange(10, 60)
            sent = {"workflow_type": "retry", "workflow_id": f"w{workflow}", "agent": agent, "step": number}
            wanted = SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                stop_token_ids=STOP if workflow % 3 == 0 else None,
                extra_args=None if workflow == 11 else sent,
                detokenize=False,
            )
            made.append((f"{workflow}.{number}", prompt, wanted))
    return made


def serve(llm: Any, noted: Noted) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Tokens and finish reasons by name; one request of each round is aborted after a few steps."""
    engine, tokens, reasons = llm.llm_engine, {}, {}
    made = requests(random.Random(0))
    for number in range(len(AGENTS)):
        for name, prompt, wanted in made[12 * number : 12 * number + 12]:
            engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
        for step in range(10_000):
            if not engine.has_unfinished_requests():
                break
            if step == 3 + 4 * number:
                engine.abort_request([f"{10}.{number}"])
            noted.step += 1
            for answer in engine.step():
                if answer.finished:
                    tokens[answer.request_id] = list(answer.outputs[0].token_ids)
                    reasons[answer.request_id] = answer.outputs[0].finish_reason
        if not APART:
            engine.step()  # as the loop of an engine's own process: it tells the worker of the last that have finished
    return tokens, reasons


def hugging_face(model: str, tokens: dict[str, list[int]]) -> Callable[[str, list[int]], dict[str, Any]]:
    """Gives the rows that the states of a request should be, by moment."""
    import torch
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    behind: list[Any] = []  # of the last layer: Hugging Face's own list has it only after the final norm
    reference.norm.register_forward_pre_hook(lambda _, given: behind.append(given[0]))

    def rows(name: str, prompt: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            out = reference(torch.tensor([prompt + tokens[name]]), output_hidden_states=LAYER is not None)
        every = (out.last_hidden_state if LAYER is None else behind[-1] if LAYER == -1 else out.hidden_states[LAYER])[0]
        every = every.numpy()
        return {PREFILL: every[len(prompt) - 1], COMPLETION: every[len(prompt) + len(tokens[name]) - 2]}

    return rows


def recorded(noted: Noted, reference: Any, tokens: dict[str, list[int]]) -> dict[str, Any]:
    """How many states were read back from the recording, and their largest differences: to Hugging Face's rows, by
    what is left of a number in float16; to the rows that the tap has taken, in that type."""
    from recorded_forecasts import read_forecasts

    from presage.datasets.read import read_traces

    off: dict[str, float] = defaultdict(float)
    checked: dict[str, int] = defaultdict(int)
    prompts = {name: prompt for name, prompt, _ in requests(random.Random(0))}
    table = read_traces([os.environ["RECORDING"]]).table
    for row in table.to_pylist():
        name = f"{row['workflow_id'].split('@')[0][1:]}.{row['step']}"
        if name not in tokens or row["finish_reason"] == "abort":
            continue
        wanted = reference(name, prompts[name])
        for moment in (PREFILL, COMPLETION):
            state, exact = np.asarray(row[f"{moment}_state"], np.float16), wanted[moment]
            least = 2.0**-10 * np.abs(exact) + 1e-4
            off[moment] = max(off[moment], float((np.abs(state.astype(np.float32) - exact) / least).max()))
            checked[moment] += 1
            own = next((key for key in noted.rows[moment] if key == name or key.startswith(f"{name}-")), None)
            if own is not None:
                off["rows"] = max(off["rows"], float(np.abs(state - noted.rows[moment][own].astype(np.float16)).max()))
    layers = table["state_layer"].filter(table["prefill_state"].is_valid()).unique().to_pylist()
    why = read_forecasts(Path(os.environ["RECORDING"]))["reason"].unique().to_pylist()
    return {"off": dict(off), "checked": dict(checked), "layers": layers, "why": why}


def compared(noted: Noted, reference: Any, tokens: dict[str, list[int]]) -> dict[str, Any]:
    """The largest difference of any row to Hugging Face's, and of any state to the projection of its row."""
    from presage.predictors.next_agent.predictor import NextAgentPredictor

    predictor = NextAgentPredictor.load(os.environ["PREDICTOR"])
    off: dict[str, float] = defaultdict(float)
    checked: dict[str, int] = defaultdict(int)
    for name, prompt, _ in requests(random.Random(0)):
        own = next((key for key in noted.rows[PREFILL] if key == name or key.startswith(f"{name}-")), None)
        if own is None or name not in tokens:
            continue
        for moment, exact in reference(name, prompt).items():
            if own not in noted.states[moment]:
                continue
            row, state = noted.rows[moment][own], noted.states[moment][own]
            step = {f"{moment}_state": row}
            wanted = predictor.project(moment, predictor.source.of_step(step, moment))
            off[moment] = max(off[moment], float(np.abs(row - exact).max()))
            off["projection"] = max(off["projection"], float(np.abs(state - wanted).max()))
            checked[moment] += 1
    return {"off": dict(off), "checked": dict(checked)}


def main(model: str, served: str) -> dict[str, Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer: Any = TAP["kv_transfer_config"]
    if BESIDE is not None:
        transfer = with_states(BESIDE)
    hooks = {} if STOCK else {**HOOKS, **TAP, "kv_transfer_config": KVTransferConfig(**transfer)}
    noted = Noted()
    llm = LLM(
        model=model,
        served_model_name=served,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=not COMPILED,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=20,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        additional_config={
            "presage": {
                "recorder": {"folder": os.environ["RECORDING"], "states": "both"},
                "state_layer": LAYER,
                "forecast_deadline_ms": 1000,  # the machine may be busy
                "infer_workflows": False,  # requests without names have no states
            }
        },
        **({"distributed_executor_backend": "mp"} if APART else {}),
        **hooks,
    )
    if STOCK:
        tokens, reasons = serve(llm, noted)
        return {"tokens": tokens, "reasons": reasons}
    if APART:
        tokens, reasons = serve(llm, noted)
        status = llm.llm_engine.engine_core.call_utility("presage_call", "presage_status")  # type: ignore[attr-defined]
        end(llm.llm_engine.engine_core)  # what waits is written
        back = recorded(noted, hugging_face(model, tokens), tokens)
        return {"tokens": tokens, "reasons": reasons, "status": status, "recorded": back}
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    noted.watch(scheduler.step_forecasts)
    counted: dict[str, int] = defaultdict(int)
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counted["preempted"] += len(output.preempted_req_ids or ())
        counted["hits"] += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        counted["chunks"] += sum(1 for name in output.num_scheduled_tokens if scheduler.requests[name].is_prefill_chunk)
        return output

    scheduler.schedule = watched
    tokens, reasons = serve(llm, noted)
    status = scheduler.presage_status()
    scheduler.shutdown()  # what waits is written
    reference = hugging_face(model, tokens)
    tier = sys.modules.get("memcpy_tier")
    late = [noted.read[name] - step for name, step in noted.computed.items() if name in noted.read]
    return {
        "tokens": tokens,
        "reasons": reasons,
        "status": status,
        "steps": noted.step,
        "late": {steps: late.count(steps) for steps in sorted(set(late))},
        "ahead": scheduler.schedules_ahead,
        "changed": [sum(noted.changed), len(noted.changed)],
        "copied": dict(tier.Copies.copied) if tier is not None else {},
        **counted,
        **compared(noted, reference, tokens),
        "recorded": recorded(noted, reference, tokens),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
