"""On a GPU: what do the hooks and the reading of hidden states add to an iteration, and are the states right?

One engine in this process, with random weights in the shape of Qwen3-0.6B or 8B, compiled and with CUDA graphs as vLLM
does by default. Its scheduler changes in turns: vLLM's own; ours with every policy; ours with states read by a
predictor (projected, a row per token); ours with whole states recorded as well. All serve the same workflows, and with
room for all of them. Forecasts are drawn in advance, so models' own time is left out. In each round every variant has a
turn, and ratios are to vLLM's own scheduler in the same round. With `--no-states` the engine has neither our worker nor
our connector, and the first two variants remain.

Then one more turn, not timed, in which the worker keeps a copy of each row on the GPU: every state that arrives must
equal its copy to the bit, and no call of the worker's end may synchronise with the GPU.

    python benchmarks/gpu_hooks.py [--shape 0.6b] [--rounds 8] [--no-states] [--layer -1] [--eager]

Needs vLLM. Without a GPU it runs with `--shape tiny` and measures that machine instead. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is replaced, and the worker's end looked at
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.workflows.live import LiveForecast
from presage.testing.forecasts import AGENTS, Noise

WORKFLOWS, STEPS, PROMPT, ADDED, OUTPUT = 64, 2, (200, 400), (30, 90), 96
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
STATES: dict[str, Any] = {
    "worker_cls": "presage.serving_hooks.vllm.StatesWorker",
    "kv_transfer_config": {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
        "kv_role": "kv_producer",
    },
}
STOCK, HOOKS, READ, RECORDED = "vLLM alone", "hooks", "and states read", "and recorded"


class Drawn:
    """A source that returns forecasts drawn in advance; it reads states of this width, or none."""

    def __init__(self, width: int) -> None:
        noise, draw = Noise(0), np.random.default_rng(0)
        self.seen = [noise.on_prefill() for _ in range(1000)]
        self.turn = 0
        self.arrived: list[tuple[str, Any]] = []
        self.projections = {
            moment: (draw.normal(size=(width, size)).astype(np.float32), np.zeros(size, np.float32))
            for moment, size in ((PREFILL, 16), (COMPLETION, 24))
            if width
        }

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        """The next one."""
        self.turn += 1
        return self.seen[self.turn % len(self.seen)]

    on_prefill_state = on_completion = on_prefill

    def remaining_tokens(self, *_: object) -> float:
        """The same for all, so that the order stays that of arrival."""
        return 100.0

    def await_states(self) -> None:
        """They are not looked at."""

    def close(self, workflow: object) -> None:
        """Keeps nothing."""


def no_states() -> Forecasts:
    """The setting `forecasts` of variants that read no states."""
    source = Drawn(0)
    return Forecasts(source, source)


def with_states() -> Forecasts:
    """The setting `forecasts` of variants that read states."""
    source = Drawn(int(os.environ["GPU_HOOKS_WIDTH"]))
    return Forecasts(source, source)


class Engine:
    """vLLM's engine with a scheduler for each variant."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        given: dict[str, Any] = {}
        if not args.no_states:
            given = {**STATES, "kv_transfer_config": KVTransferConfig(**STATES["kv_transfer_config"])}
        if torch.cuda.is_available():
            given |= {"kv_cache_memory_bytes": args.cache_gib << 30, "gpu_memory_utilization": args.memory}
        self.llm = LLM(
            model=save_shape(folder, args.shape),
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=args.eager,
            max_model_len=2048,
            max_num_seqs=WORKFLOWS,
            max_num_batched_tokens=2048,
            disable_log_stats=True,
            seed=0,
            additional_config={"presage": {"state_layer": args.layer, "forecasts": "gpu_hooks:no_states"}},
            **given,
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.config = self.core.vllm_config
        self._folder, self._layer = folder, args.layer
        names = (STOCK, HOOKS) if args.no_states else (STOCK, HOOKS, READ, RECORDED)
        self.schedulers = {name: self._scheduler(name) for name in names}

    def _scheduler(self, name: str) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler

        ahead, old = self.config.scheduler_config.async_scheduling, self.core.scheduler
        own, ours = (AsyncScheduler, WorkflowScheduler) if ahead else (Scheduler, SyncWorkflowScheduler)
        reads = "with_states" if name in (READ, RECORDED) else "no_states"
        settings: dict[str, Any] = {"state_layer": self._layer, "forecasts": f"gpu_hooks:{reads}"}
        if name == RECORDED:
            settings["recorder"] = {"folder": str(self._folder / "recording"), "states": "both"}
        self.config.additional_config = {"presage": settings}
        block = self.config.cache_config.block_size
        return (own if name == STOCK else ours)(
            vllm_config=self.config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            block_size=block,
            hash_block_size=block,
            log_stats=False,
        )

    def turn(self, name: str) -> tuple[list[float], list[float], int]:
        """Serves all workflows; seconds of the iterations that only decode for all of them, of all, and tokens."""
        from vllm import SamplingParams

        scheduler = self.core.scheduler = self.schedulers[name]
        if name in (READ, RECORDED):
            scheduler._states.renew()  # the worker has the projections of another variant
        scheduler.reset_prefix_cache()
        draw, engine, prefilled = random.Random(0), self.llm.llm_engine, [0]
        history = [[draw.randrange(1000) for _ in range(draw.randrange(*PROMPT))] for _ in range(WORKFLOWS)]
        decodes, every, tokens = list[float](), list[float](), 0
        schedule = scheduler.schedule

        def watched(*given: Any, **more: Any) -> Any:
            output = schedule(*given, **more)
            counts = output.num_scheduled_tokens.values()
            prefilled[0] = 2 if len(counts) < WORKFLOWS or max(counts) > 1 else max(prefilled[0] - 1, 0)
            return output

        scheduler.schedule = watched
        try:
            for step in range(STEPS):
                for number, prompt in enumerate(history):
                    sent = {"workflow_type": "t", "workflow_id": f"w{number}", "agent": AGENTS[number % 3]}
                    wanted = SamplingParams(
                        temperature=0.0,
                        max_tokens=OUTPUT,
                        ignore_eos=True,
                        detokenize=False,
                        extra_args={**sent, "step": step, "workflow_end": step + 1 == STEPS},
                    )
                    engine.add_request(f"{number}", {"prompt_token_ids": prompt}, wanted)
                while engine.has_unfinished_requests():
                    begun = time.perf_counter()
                    answers = engine.step()
                    took = time.perf_counter() - begun
                    every.append(took)
                    if not prefilled[0] and not any(answer.finished for answer in answers):
                        decodes.append(took)
                    tokens += sum(len(answer.outputs[0].token_ids) for answer in answers if answer.finished)
                self.drain()
                history = [one + [draw.randrange(1000) for _ in range(draw.randrange(*ADDED))] for one in history]
        finally:
            del scheduler.schedule
        return decodes, every, tokens

    def drain(self) -> None:
        """What an engine of its own process would do: the worker is told which requests have finished."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()


def save_shape(folder: Path, shape: str) -> str:
    """The configuration of a Qwen3 of this shape."""
    from transformers import Qwen3Config

    small = shape == "tiny"
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=1024 if small else 151936,
        num_key_value_heads=2 if small else 8,
        head_dim=32 if small else 128,
        max_position_embeddings=4096,
        **SHAPES[shape],
    )
    config.save_pretrained(folder / "model")
    os.environ["GPU_HOOKS_WIDTH"] = str(config.hidden_size)
    return str(folder / "model")


class Looked:
    """One turn in which every row that is taken is also kept on its device, and every state that arrives is kept."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Any, dict[str, int], Any]] = []
        self.kept: dict[int, tuple[dict[str, int], Any]] = {}
        self.last: dict[str, int] = {}
        self.came: dict[int, Any] = {}
        self.taken: list[float] = []
        self.synchronised: list[str] = []

    def watch(self, engine: Engine, name: str) -> Callable[[], None]:
        """Stands between the parts; returns what ends it."""
        from presage.serving_hooks.vllm.hidden_states.connector import StatesConnector
        from presage.serving_hooks.vllm.hidden_states.steps import RequestStates

        captured, read, looked = StatesConnector.captured, RequestStates.read, self
        send = StatesConnector._send_kept
        calls = [0]

        def rows_pass(connector: Any, ids: Sequence[str], rows: Any) -> None:
            states, wanted, iteration = connector._states, connector.requested_rows, connector._keep_as
            if (wanted and states is not None) or iteration:
                places = {request: place for place, request in enumerate(ids)}
                copied = rows().clone()
                if wanted and states is not None:
                    looked.rows.append((states, wanted, places, copied))
                if iteration:
                    looked.kept[iteration] = places, copied
            calls[0] += 1
            strict = torch.cuda.is_available() and calls[0] > 3
            begun = time.perf_counter()
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                captured(connector, ids, rows)
            finally:
                if strict:
                    torch.cuda.set_sync_debug_mode("default")
            if wanted:
                looked.taken.append(time.perf_counter() - begun)
            if connector._projector is None and looked.rows:
                looked.synchronised.append("switched off")

        def kept_pass(connector: Any, wanted: Any) -> None:
            looked.last.update((name, iteration) for iteration, names in wanted.last.items() for name in names)
            send(connector, wanted)

        def states_pass(states_of: Any, iteration: Any, output: Any) -> None:
            read(states_of, iteration, output)
            looked.came.update((id(states), states) for states in states_of._came)

        StatesConnector.captured, RequestStates.read = rows_pass, states_pass  # type: ignore[method-assign]
        StatesConnector._send_kept = kept_pass  # type: ignore[method-assign]

        def end() -> None:
            StatesConnector.captured, RequestStates.read = captured, read  # type: ignore[method-assign]
            StatesConnector._send_kept = send  # type: ignore[method-assign]

        return end

    def compared(self, projections: Any) -> dict[str, Any]:
        """How many states came, and how many are not those of their rows: projected, to one unit of float32, and
        whole, to the bit."""
        found: dict[str, Any] = defaultdict(int)
        largest = 0.0
        for states, wanted, places, rows in self.rows:
            if id(states) not in self.came:
                found["not read"] += 1
                continue
            half = rows.half().cpu()
            for moment, names in wanted.items():
                weights, bias = (torch.from_numpy(part).double() for part in projections[moment])
                for name, state in states.rows(moment):
                    right = (half[places[name]].double() @ weights + bias).float().numpy()
                    off = float(np.abs(state - right).max() / max(np.abs(right).max(), 1e-30))
                    found["projected"] += 1
                    found["projected, wrong"] += off > 1e-6
                    largest = max(largest, off)
                found["requested"] += len([name for name in names if name in places])
        by_place = {id(states): (places, rows) for states, _, places, rows in self.rows}
        for states in self.came.values():
            for moment, (names, whole) in states.whole():
                for name, state in zip(names, whole, strict=True):
                    of_end = moment == COMPLETION
                    places, rows = self.kept[self.last[name]] if of_end else by_place[id(states)]
                    found[f"whole, {moment}"] += 1
                    found["whole, wrong"] += not np.array_equal(state, rows[places[name]].half().cpu().numpy())
        return {**found, "largest": largest}


def memory() -> dict[str, float]:
    """MiB that torch holds on the device, and of pinned memory on the host."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return {"device": torch.cuda.memory_allocated() / 2**20, "pinned": pinned / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-states", action="store_true", help="neither our worker nor our connector")
    parser.add_argument("--layer", type=int, help="read the states after this layer")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cache-gib", type=int, default=8)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory, as vLLM takes it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measured(Path(folder), args)
    print(json.dumps({"benchmark": "gpu_hooks", **vars(args), **report}))


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The report, printed as a table too."""
    engine = Engine(folder, args)
    of = engine.config
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    ahead, second = of.scheduler_config.async_scheduling, of.use_v2_model_runner
    graphs = str(of.compilation_config.cudagraph_mode)
    print(f"{where}, torch {torch.__version__}, one step ahead: {ahead}, second runner: {second}, graphs: {graphs}")
    for name in engine.schedulers:  # what is made once is made
        engine.turn(name)
    gc.collect()
    gc.freeze()  # as vLLM does when its engine has started
    medians: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    held, counted = [memory()], 0
    for _ in range(args.rounds):
        for name in engine.schedulers:
            decodes, every, counted = engine.turn(name)
            medians[name].append(statistics.median(decodes) * 1e6)
            whole[name].append(sum(every))
        held.append(memory())
    report: dict[str, Any] = {"device": where, "ahead": ahead, "second_runner": second, "graphs": graphs}
    report |= {"tokens_a_turn": counted, "memory_mib": [held[0], held[-1]]}
    report["requests_between"] = args.rounds * len(engine.schedulers) * WORKFLOWS * STEPS
    print(f"{'':20}{'decode, µs':>12}{'spread':>10}{'ratio':>8}{'a turn, s':>12}{'ratio':>8}")
    for name, taken in medians.items():
        ratio, over = relative(taken, medians[STOCK]), relative(whole[name], whole[STOCK])
        median, spread = statistics.median(taken), max(taken) - min(taken)
        turn = statistics.median(whole[name])
        print(f"{name:20}{median:12.0f}{spread:10.0f}{ratio:8.3f}{turn:12.3f}{over:8.3f}")
        report[name] = {"decode_us": round(median, 1), "spread_us": round(spread, 1), "ratio": ratio, "turn_s": turn}
        report[name] |= {"turn_ratio": over}
    print(f"memory, MiB: {held[0]} before, {held[-1]} after {report['requests_between']} requests")
    for name in (READ, RECORDED) if RECORDED in engine.schedulers else ():
        looked = Looked()
        end = looked.watch(engine, name)
        engine.turn(name)
        end()
        scheduler = engine.schedulers[name]
        compared = looked.compared(scheduler._states._source.projections)
        status = scheduler.presage_status()
        states = {"projected": status["states"], "recorded": status["recorder"]["states"]}
        report[f"{name}, looked at"] = {
            **compared,
            "captured_us": round(statistics.median(looked.taken) * 1e6, 1) if looked.taken else None,
            "switched_off": len(looked.synchronised),
            "states": states,
            "counts": {key: count for key, count in status["counts"].items() if "state" in key},
        }
        print(name, report[f"{name}, looked at"])
    for scheduler in engine.schedulers.values():
        scheduler.shutdown()
    return report


def relative(taken: list[float], to: list[float]) -> float:
    """The median ratio over rounds."""
    return round(statistics.median(a / b for a, b in zip(taken, to, strict=True)), 4)


if __name__ == "__main__":
    main()
