"""What predictors are given while they serve is, bit for bit, what training makes of the same trace.

200 random workflows go through vLLM's own scheduler with our hooks in it; what the model would compute is made up.
Their trace, texts included, is masked to the input profile `engine` and goes the way of training traces.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

import torch
from test_hidden_states import ALONE, WIDTH, Worked, hooked
from vllm_samples import ask, build

from presage.datasets.schema import trace_schema
from presage.datasets.synthetic.workflows import generate
from presage.features.input_profiles import PROFILES, masked
from presage.features.lengths import LengthEncoder, LengthWorkflow, length_rows
from presage.features.moment import COMPLETION, MOMENTS, PREFILL
from presage.features.prefixes import prefixes_of
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig, project_all, unrolled
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows import Workflow
from presage.training.length.train import LengthTexts
from presage.training.next_agent.train import fit_predictor

pytestmark = pytest.mark.vllm

WORKFLOWS, AT_ONCE = 200, 24
TYPES = ("research", "retry", "a type that training never saw")
PATIENT = Budget(deadline_s=1e9, hang_s=None)
"""A predictor that is late on a busy machine is not switched off."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """One step of a random workflow; a workflow's states come always, never, or by chance."""

    agent: str
    prompt: list[int]
    output_tokens: int
    states: float

    def state(self, request_id: str, position: int) -> NDArray[np.float32]:
        """The model's row of a request at a position, float32 [WIDTH]; NaN where none is to be had."""
        draw = np.random.default_rng(zlib.crc32(f"{request_id}@{position}".encode()))
        if draw.random() >= self.states:
            return np.full(WIDTH, np.nan, np.float32)
        return np.asarray(draw.normal(scale=10.0 ** draw.uniform(-3, 1), size=WIDTH), np.float32)


@dataclass
class Given:
    """What predictors were given, by workflow, a value a step."""

    inputs: dict[str, dict[Key, list[NDArray[np.float32]]]] = field(default_factory=lambda: {m: {} for m in MOMENTS})
    lengths: dict[Key, list[tuple[int, int, int, NDArray[np.float32]]]] = field(default_factory=dict)


@cache
def predictors() -> tuple[NextAgentPredictor, RemainingLengthPredictor]:
    """Both, small, learnt from texts, token counts and states of two laws."""
    drawn = [generate(law, 60, seed, state_size=WIDTH).table for seed, law in enumerate(TYPES[:2])]
    table = pa.concat_tables(drawn)
    config = NextAgentConfig(network=NetworkConfig(epochs=2), boosting=BoostingConfig(rounds=5), refit=False)
    agents = fit_predictor(table, config, states="captured").predictor
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    texts = LengthTexts.of(table, rows, 0)
    assert texts is not None
    encoder, rows = texts.fit(encoder, relevant=False, seed=0, size=4)
    held = rows.task % 5 == 0
    forest = QuantileConfig(estimator="forest", refit=False)
    return agents, RemainingLengthPredictor(forest, 0).fit(rows.take(~held), rows.take(held), encoder=encoder)


def random_workflows(agents: Sequence[str], seed: int) -> dict[Key, list[Step]]:
    draw = random.Random(seed)
    found: dict[Key, list[Step]] = {}
    for number in range(WORKFLOWS):
        states = draw.choice((0.0, 0.6, 1.0))
        found[draw.choice(TYPES), f"w{number:03}"] = [
            Step(
                draw.choice((*agents, "a stranger", "another")),
                [draw.randrange(500) for _ in range(int(draw.lognormvariate(4, 1)) % 1000 + 1)],
                draw.choice((1, 2, 5, 20, 60)),
                states,
            )
            for _ in range(draw.randint(1, 12))
        ]
    return found


class Watched(Forecaster):
    """A forecaster that keeps what its predictors were given."""

    def __init__(self, given: Given, begun: dict[int, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given, self._begun_lengths = given, begun

    def on_prefill(self, workflow: Workflow, agent: str, **sent: Any) -> Any:
        live = super().on_prefill(workflow, agent, **sent)
        key = workflow.step.workflow_type, workflow.step.workflow_id
        self._given.inputs[PREFILL].setdefault(key, []).append(self._row(workflow))
        self._given.lengths.setdefault(key, []).append(self._begun_lengths[id(self._running(workflow).lengths)])
        return live

    def on_prefill_state(self, workflow: Workflow, *told: Any) -> Any:
        live = super().on_prefill_state(workflow, *told)
        if live is not None:
            key = workflow.step.workflow_type, workflow.step.workflow_id
            self._given.inputs[PREFILL][key][-1] = self._row(workflow)
        return live

    def on_completion(self, workflow: Workflow, **sent: Any) -> Any:
        live = super().on_completion(workflow, **sent)
        key = workflow.step.workflow_type, workflow.step.workflow_id
        self._given.inputs[COMPLETION].setdefault(key, []).append(self._row(workflow))
        return live

    def _row(self, workflow: Workflow) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._running(workflow).agents.copy()
        return row

    def _running(self, workflow: Workflow) -> Any:
        return workflow.forecast_state


class Model(Worked):
    """Computes the rows that the steps say."""

    def __init__(self, scheduler: Any, ahead: bool, steps: dict[str, Step]) -> None:
        super().__init__(scheduler, ahead)
        self._steps = steps

    def row(self, request_id: str, position: int) -> torch.Tensor:
        return torch.from_numpy(self._steps[request_id].state(request_id, position))


def serve(engine: Model, workflows: dict[Key, list[Step]], steps: dict[str, Step], seed: int) -> None:
    """AT_ONCE workflows at a time; each sends its next step a few iterations after the last one's answer."""
    draw, coming = random.Random(seed), list(workflows)[::-1]
    waiting: list[tuple[int, Key, int]] = []
    running: dict[str, tuple[Key, int]] = {}
    iteration = ended = 0
    while coming or waiting or running:
        while coming and len(waiting) + len(running) < AT_ONCE:
            waiting.append((iteration + draw.randrange(20), coming.pop(), 0))
        for at, key, number in [next_step for next_step in waiting if next_step[0] <= iteration]:
            waiting.remove((at, key, number))
            step, request = workflows[key][number], f"{key[1]}.{number}"
            steps[request] = step
            running[request] = key, number
            last = number == len(workflows[key]) - 1 and draw.random() < 0.5
            sent = {"workflow_type": key[0], "workflow_id": key[1], "agent": step.agent, "workflow_end": last}
            sent |= {"step": number} if number % 2 else {}
            engine.scheduler.add_request(ask(request, step.prompt, step.output_tokens, arrival=iteration, **sent))
        engine.step()
        iteration += 1
        for request in engine.ended[ended:]:
            key, number = running.pop(request)
            if number + 1 < len(workflows[key]):
                waiting.append((iteration + draw.randrange(8), key, number + 1))
        ended = len(engine.ended)


def trace_of(workflows: dict[Key, list[Step]]) -> pa.Table:
    """The trace of these workflows in canonical order, with texts that an engine never sees."""
    rows = []
    for key in sorted(workflows):
        for number, step in enumerate(workflows[key]):
            last = len(step.prompt) - 1
            states = [
                step.state(f"{key[1]}.{number}", position).astype(np.float16)
                for position in (last, last + step.output_tokens - 1)
            ]
            rows.append(
                {
                    "workflow_type": key[0],
                    "workflow_id": key[1],
                    "step": number,
                    "agent": step.agent,
                    "kind": "llm",
                    "complete": True,
                    "model": "some-model",
                    "input_tokens": len(step.prompt),
                    "output_tokens": step.output_tokens,
                    "system_prompt": f"You are {step.agent}.",
                    "input_text": f"step {number} of something to do",
                    "output_text": f"done by {step.agent}",
                    "prefill_state": None if np.isnan(states[0][0]) else states[0],
                    "completion_state": None if np.isnan(states[1][0]) else states[1],
                }
            )
    return pa.Table.from_pylist(rows, trace_schema(WIDTH, WIDTH))


def same_bits(found: Sequence[NDArray[np.float32]], wanted: NDArray[np.float32]) -> None:
    width = wanted.shape[1]
    bits = np.stack([row[:width] for row in found]).view(np.uint32)
    differ = np.argwhere(bits != np.ascontiguousarray(wanted).view(np.uint32))
    told = [(row, column, found[row][column], wanted[row, column]) for row, column in differ[:10]]
    assert not len(differ), f"{len(differ)} of {bits.size} numbers differ: (row, column, served, trained) {told}"


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_predictors_are_given_the_bits_that_they_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    agents, lengths = predictors()
    workflows = random_workflows(agents.vocabulary.agents, seed=int(ahead))
    given, begun = Given(), dict[int, Any]()
    move = LengthWorkflow.begun

    def moved(workflow: LengthWorkflow, step: Any) -> Any:
        begun[id(workflow)] = move(workflow, step)
        return begun[id(workflow)]

    monkeypatch.setattr(LengthWorkflow, "begun", moved)
    asked = VersionedForecaster(Watched(given, begun, agents, lengths=lengths, budget=PATIENT))
    kind = hooked(WorkflowScheduler if ahead else SyncWorkflowScheduler, asked)
    kind.forecasts = lambda self, config: Forecasts(asked, asked)
    scheduler = build(tmp_path / "m", kind, blocks=100, presage={}, seqs=12, tokens=192, connector=ALONE)
    steps: dict[str, Step] = {}
    engine = Model(scheduler, ahead, steps)
    serve(engine, workflows, steps, seed=int(ahead))

    status = scheduler.presage_status()
    assert all(status["on"].values())
    assert any(preempted for _, _, preempted in engine.log)
    assert {name for name in status["counts"] if "late" in name or "Error" in name} == set()

    table = trace_of(workflows)
    shown = masked(table, PROFILES["engine"])
    prefixes = prefixes_of(shown, agents.vocabulary, agents.horizon).with_states(agents.source.states(shown))
    assert len(prefixes.states) == len(MOMENTS)
    rows = unrolled(prefixes, project_all(prefixes, agents.parts.projections))
    for moment, wanted in zip(MOMENTS, rows, strict=True):
        same_bits([row for key in sorted(workflows) for row in given.inputs[moment][key]], wanted)

    of_lengths = length_rows(shown, lengths.encoder)
    found = [row for key in sorted(workflows) for row in given.lengths[key]]
    for place, column in enumerate((of_lengths.workflow_type, of_lengths.agent, of_lengths.model)):
        assert [row[place] for row in found] == column.tolist()
    same_bits([row[3] for row in found], of_lengths.numbers)
