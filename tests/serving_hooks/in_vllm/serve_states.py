"""Run as a program: serves workflows on the real engine in several ways, one after another, and prints what came of
their states as one JSON object by way.

    python serve_states.py MODEL WAY ...

Short chunks, a cache too small for all (so requests are preempted), prefixes that are shared, answers of one token,
answers that end by a stop token, requests that are aborted, requests without a workflow. Every row the tap takes, and
every state that reaches the forecasts, is noted on the way and compared with a forward pass of Hugging Face's model in
float32, and so is what is read back from the recording.
"""

import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_CI_ENV"] = "1"  # a compiled model is traced as ever, but no C++ is made of it, which takes minutes

import numpy as np
from own_engine import end

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.vllm.start.multi_connector import ALONE, with_states


@dataclass(frozen=True)
class Way:
    """How an engine serves.

    Attributes:
        hooked: with the hooks; without, it is vLLM alone.
        apart: engine and worker are processes of their own, as in life; nothing is noted on the way then.
        layer: of `state_layer`.
        compiled: the model is traced and compiled.
        beside: another connector of vLLM, beside ours.
    """

    hooked: bool = True
    apart: bool = False
    layer: int | None = None
    compiled: bool = False
    beside: dict[str, Any] | None = None


TIER = {"spec_name": "MemcpySpec", "spec_module_path": "memcpy_tier", "cpu_bytes_to_use": 2**26}
WAYS = {
    "stock": Way(hooked=False),
    "tapped": Way(),
    "beside": Way(
        beside={"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": TIER}
    ),
    "last layer": Way(layer=-1, compiled=True),
    "apart": Way(apart=True),
}
HOOKS = {
    "scheduler_cls": "presage.serving_hooks.vllm.WorkflowScheduler",
    "worker_cls": "presage.serving_hooks.vllm.StatesWorker",
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

    def watch(self, forecasts: Any, until: ExitStack) -> None:
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

        def answered(forecaster: Any, *given: Any) -> Any:
            live, of = again(forecaster, *given), given[-1]
            if live is not None:
                self.changed.append(not np.allclose(live.probabilities, of.probabilities, atol=1e-6))
            return live

        for kind, name, watched in (
            (StatesConnector, "captured", rows_pass),
            (StepForecasts, "prefill_state", state_passes),
            (RequestStates, "read", read_passes),
            (Forecaster, "on_prefill_state", answered),
        ):
            until.enter_context(mock.patch.object(kind, name, watched))
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


def serve(llm: Any, noted: Noted, apart: bool) -> tuple[dict[str, list[int]], dict[str, str]]:
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
        if not apart:
            engine.step()  # as the loop of an engine's own process: it tells the worker of the last that have finished
    return tokens, reasons


@cache
def reference(model: str) -> Callable[[tuple[int, ...]], dict[int | None, Any]]:
    """Gives the states that Hugging Face's model computes of tokens, by layer; of None those after the final norm."""
    import torch
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    behind: list[Any] = []  # of the last layer: Hugging Face's own list has it only after the final norm
    reference.norm.register_forward_pre_hook(lambda _, given: behind.append(given[0]))

    @cache
    def states(tokens: tuple[int, ...]) -> dict[int | None, Any]:
        with torch.inference_mode():
            out = reference(torch.tensor([tokens]))
        return {None: out.last_hidden_state[0].numpy(), -1: behind.pop()[0].numpy()}

    return states


def hugging_face(model: str, layer: int | None, tokens: dict[str, list[int]]) -> Callable[..., dict[str, Any]]:
    """Gives the rows that the states of a request should be, by moment."""

    def rows(name: str, prompt: list[int]) -> dict[str, Any]:
        every = reference(model)((*prompt, *tokens[name]))[layer]
        return {PREFILL: every[len(prompt) - 1], COMPLETION: every[len(prompt) + len(tokens[name]) - 2]}

    return rows


def recorded(recording: Path, noted: Noted, rows: Any, tokens: dict[str, list[int]]) -> dict[str, Any]:
    """How many states were read back from the recording, and their largest differences: to Hugging Face's rows, by
    what is left of a number in float16; to the rows that the tap has taken, in that type."""
    from recorded_forecasts import read_forecasts

    from presage.datasets.read import read_traces

    off: dict[str, float] = defaultdict(float)
    checked: dict[str, int] = defaultdict(int)
    prompts = {name: prompt for name, prompt, _ in requests(random.Random(0))}
    table = read_traces([recording]).table
    for row in table.to_pylist():
        name = f"{row['workflow_id'].split('@')[0][1:]}.{row['step']}"
        if name not in tokens or row["finish_reason"] == "abort":
            continue
        wanted = rows(name, prompts[name])
        for moment in (PREFILL, COMPLETION):
            state, exact = np.asarray(row[f"{moment}_state"], np.float16), wanted[moment]
            least = 2.0**-10 * np.abs(exact) + 1e-4
            off[moment] = max(off[moment], float((np.abs(state.astype(np.float32) - exact) / least).max()))
            checked[moment] += 1
            own = next((key for key in noted.rows[moment] if key == name or key.startswith(f"{name}-")), None)
            if own is not None:
                off["rows"] = max(off["rows"], float(np.abs(state - noted.rows[moment][own].astype(np.float16)).max()))
    layers = table["state_layer"].filter(table["prefill_state"].is_valid()).unique().to_pylist()
    why = read_forecasts(recording)["reason"].unique().to_pylist()
    return {"off": dict(off), "checked": dict(checked), "layers": layers, "why": why}


def compared(noted: Noted, rows: Any, tokens: dict[str, list[int]]) -> dict[str, Any]:
    """The largest difference of any row to Hugging Face's, and of any state to the projection of its row."""
    from presage.predictors.next_agent.predictor import NextAgentPredictor

    predictor = NextAgentPredictor.load(os.environ["PREDICTOR"])
    off: dict[str, float] = defaultdict(float)
    checked: dict[str, int] = defaultdict(int)
    for name, prompt, _ in requests(random.Random(0)):
        own = next((key for key in noted.rows[PREFILL] if key == name or key.startswith(f"{name}-")), None)
        if own is None or name not in tokens:
            continue
        for moment, exact in rows(name, prompt).items():
            if own not in noted.states[moment]:
                continue
            row, state = noted.rows[moment][own], noted.states[moment][own]
            step = {f"{moment}_state": row}
            wanted = predictor.project(moment, predictor.source.of_step(step, moment))
            off[moment] = max(off[moment], float(np.abs(row - exact).max()))
            off["projection"] = max(off["projection"], float(np.abs(state - wanted).max()))
            checked[moment] += 1
    return {"off": dict(off), "checked": dict(checked)}


@dataclass(frozen=True)
class Run:
    """What was served in a way: answers, and what was noted meanwhile."""

    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    noted: Noted
    counted: dict[str, Any]


def run(model: str, way: Way, recording: Path) -> Run:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(way.apart))  # in one process both ends can be looked at
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    transfer = with_states(way.beside) if way.beside else ALONE
    llm = LLM(
        model=model,
        served_model_name="synthetic",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=not way.compiled,
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
                "recorder": {"folder": str(recording), "states": "both"},
                "state_layer": way.layer,
                "forecast_deadline_ms": 1000,  # the machine may be busy
                "infer_workflows": False,  # requests without names have no states
            }
        },
        **({"distributed_executor_backend": "mp"} if way.apart else {}),
        **({**HOOKS, "kv_transfer_config": KVTransferConfig(**transfer)} if way.hooked else {}),  # type: ignore[arg-type]
    )
    client: Any = llm.llm_engine.engine_core
    noted, counted = Noted(), defaultdict[str, Any](int)
    if way.apart:
        tokens, reasons = serve(llm, noted, apart=True)
        counted["status"] = client.call_utility("presage_call", "presage_status")
        end(client)  # what waits is written
        return Run(tokens, reasons, noted, counted)
    scheduler: Any = client.engine_core.scheduler
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counted["preempted"] += len(output.preempted_req_ids or ())
        counted["hits"] += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        counted["chunks"] += sum(1 for name in output.num_scheduled_tokens if scheduler.requests[name].is_prefill_chunk)
        return output

    scheduler.schedule = watched
    with ExitStack() as until:
        if way.hooked:
            noted.watch(scheduler.step_forecasts, until)
        tokens, reasons = serve(llm, noted, apart=False)
        if way.hooked:
            counted["status"], counted["ahead"] = scheduler.presage_status(), scheduler.schedules_ahead
        client.shutdown()  # what waits is written
    # It is done, and vLLM's second search for kernels falls over modules such as llvmlite's.
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
    return Run(tokens, reasons, noted, counted)


def judged(model: str, way: Way, recording: Path, run: Run) -> dict[str, Any]:
    """The run as JSON, with what comparisons say of its states."""
    rows = hugging_face(model, way.layer, run.tokens)
    tier = sys.modules.get("memcpy_tier")
    late = [run.noted.read[name] - step for name, step in run.noted.computed.items() if name in run.noted.read]
    told = {
        "tokens": run.tokens,
        "reasons": run.reasons,
        "late": {steps: late.count(steps) for steps in sorted(set(late))},
        "changed": [sum(run.noted.changed), len(run.noted.changed)],
        "copied": dict(tier.Copies.copied) if tier is not None else {},
        **run.counted,
    }
    if way.hooked:
        told |= {**compared(run.noted, rows, run.tokens), "recorded": recorded(recording, run.noted, rows, run.tokens)}
    return told


def main(model: str, ways: list[str]) -> dict[str, Any]:
    recordings = Path(os.environ["RECORDINGS"])
    runs = {way: run(model, WAYS[way], recordings / way) for way in ways}
    return {way: judged(model, WAYS[way], recordings / way, of) for way, of in runs.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:])))
