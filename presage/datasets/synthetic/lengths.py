"""Synthetic output lengths, and the true quantiles of the tokens that remain at each step.

A workflow draws a type, a model, a topic and a prompt; its stages run in order and each may repeat. A step's output is

    weight[type, stage, model] · topic factor · (prompt tokens / 400)^exponent[type] · exp(spread[stage] · N(0, 1))

and some steps are many times as long (a runaway generation), so lengths are heavy-tailed. Only the words of the prompt
reveal the topic. The remaining tokens at a step are a known factor (topic and prompt) times a random sum whose
distribution depends on (type, stage, model) only, because repeats and step lengths are drawn independently. So the
oracle is a table of simulated sums a cell, exact up to the error of 40,000 draws and rounding to tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema import conform
from presage.errors import ConfigurationError

_EPOCH_US: Final = 1_750_000_000_000_000
_MODELS: Final = ("model-1b", "model-7b", "model-14b")
_MODEL_FACTOR: Final = np.array([1.6, 1.0, 0.8])
_TOPICS: Final = (
    ("algebra", "equation", "proof", "integer"),
    ("string", "parse", "token", "regex"),
    ("graph", "path", "node", "tree"),
    ("list", "sort", "index", "array"),
    ("date", "format", "currency", "table"),
    ("poem", "story", "tone", "reader"),
)
_TOPIC_FACTOR: Final = np.array([2.2, 0.8, 1.5, 0.6, 0.4, 1.1])
_FILLER: Final = ("please", "the", "next", "part", "with", "given", "so", "far", "and", "then", "write", "check")
_RUNAWAY_SHARE, _RUNAWAY_FACTOR = 0.02, 6.0
_DRAWS: Final = 40_000
_MOST_REPEATS: Final = 12


@dataclass(frozen=True)
class _Stage:
    """An agent of an application: mean output, spread, and probability of another call."""

    agent: str
    tokens: float
    spread: float
    again: float


@dataclass(frozen=True)
class _Application:
    name: str
    share: float
    exponent: float
    system_tokens: int
    stages: tuple[_Stage, ...]


_APPLICATIONS: Final = (
    _Application("code-repair", 0.30, 0.5, 600, (
        _Stage("planner", 180, 0.5, 0.0), _Stage("coder", 420, 0.6, 0.35), _Stage("tester", 120, 0.7, 0.2),
        _Stage("reviewer", 90, 0.4, 0.1),
    )),
    _Application("research", 0.25, 0.3, 900, (
        _Stage("planner", 150, 0.4, 0.0), _Stage("searcher", 60, 0.5, 0.5), _Stage("reader", 300, 0.7, 0.3),
        _Stage("writer", 700, 0.5, 0.05),
    )),
    _Application("triage", 0.25, 0.2, 200, (
        _Stage("classifier", 20, 0.3, 0.0), _Stage("responder", 160, 0.6, 0.15),
    )),
    _Application("math", 0.15, 0.6, 350, (
        _Stage("solver", 900, 0.7, 0.1), _Stage("verifier", 350, 0.6, 0.25), _Stage("writer", 120, 0.3, 0.0),
    )),
    _Application("translation", 0.05, 0.9, 120, (
        _Stage("translator", 400, 0.25, 0.0), _Stage("reviewer", 80, 0.4, 0.1),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class GeneratedLengths:
    """A conforming trace in canonical order, and its oracle.

    The oracle maps quantiles in (0, 1) to the true quantiles of the output tokens of this and all later steps, given
    everything known before a step's output, float64 [rows, quantiles].
    """

    table: pa.Table
    oracle: Callable[[Sequence[float]], NDArray[np.float64]]


def generate_lengths(workflows: int, seed: int, *, censored: float = 0.0) -> GeneratedLengths:
    """Draw workflows; a share `censored` of them is cut after a random step, possibly the last.

    Raises ConfigurationError for fewer than one workflow, or a share outside 0..1.
    """
    if workflows < 1:
        raise ConfigurationError(f"workflows is {workflows}; expected at least 1")
    if not 0 <= censored <= 1:
        raise ConfigurationError(f"censored is {censored}; expected a share between 0 and 1")
    rng = np.random.default_rng([seed, 0x1E46])
    kind = rng.choice(len(_APPLICATIONS), workflows, p=[a.share for a in _APPLICATIONS])
    order = np.argsort([_APPLICATIONS[k].name for k in kind], kind="stable")  # canonical order: by type, then id
    kind = kind[order]
    model, topic = rng.integers(0, len(_MODELS), workflows), rng.integers(0, len(_TOPICS), workflows)
    prompt = np.exp(rng.normal(np.log(400.0), 0.8, workflows)).clip(20, 8000).astype(np.int64)
    exponent = np.array([a.exponent for a in _APPLICATIONS])[kind]
    factor = _TOPIC_FACTOR[topic] * (prompt / 400.0) ** exponent
    stages = [_stages(_APPLICATIONS[k], rng) for k in kind]  # of each step of a workflow
    cut = [int(rng.integers(1, len(s) + 1)) if rng.random() < censored else len(s) for s in stages]
    complete = np.array([c == len(s) for c, s in zip(cut, stages, strict=True)])
    stage = np.concatenate([s[:c] for s, c in zip(stages, cut, strict=True)])
    workflow = np.repeat(np.arange(workflows), cut)
    length = _length(kind[workflow], stage, model[workflow], rng) * factor[workflow]
    table = _table(seed, kind, model, topic, prompt, complete, workflow, stage, length, rng)

    def oracle(quantiles: Sequence[float]) -> NDArray[np.float64]:
        cell = np.stack([kind[workflow], stage, model[workflow]], axis=1)
        cells, index = np.unique(cell, axis=0, return_inverse=True)
        by_cell = np.stack([np.quantile(_sums(*c), quantiles) for c in cells.tolist()])
        return np.asarray(by_cell[index.reshape(-1)] * factor[workflow][:, None])

    return GeneratedLengths(table, oracle)


def _stages(application: _Application, rng: np.random.Generator) -> NDArray[np.int64]:
    again = np.array([stage.again for stage in application.stages])
    return np.repeat(np.arange(len(again)), _repeats(again, rng, 1)[0])


def _repeats(again: NDArray[np.float64], rng: np.random.Generator, draws: int) -> NDArray[np.int64]:
    """Number of calls of each stage, int64 [draws, stages]: at least one, each repeat with its probability."""
    return np.minimum(rng.geometric(1.0 - again, (draws, len(again))), _MOST_REPEATS)


def _length(
    kind: NDArray[np.int64], stage: NDArray[np.int64], model: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Lengths before the factor of topic and prompt, float64 [n]."""
    tokens, spread = (
        np.array([[getattr(s, name) for s in a.stages] + [0.0] * (4 - len(a.stages)) for a in _APPLICATIONS])
        for name in ("tokens", "spread")
    )
    runaway = np.where(rng.random(len(stage)) < _RUNAWAY_SHARE, _RUNAWAY_FACTOR, 1.0)
    noise = np.exp(spread[kind, stage] * rng.standard_normal(len(stage)))
    return np.asarray(tokens[kind, stage] * _MODEL_FACTOR[model] * noise * runaway)


def _sums(kind: int, stage: int, model: int) -> NDArray[np.float64]:
    """Samples of the remaining tokens at a step, before the factor: the step, its repeats and all later stages.

    Whether a stage repeats does not depend on earlier repeats (except for the cap of _MOST_REPEATS, reached about once
    in 4,000 workflows), so the distribution is the same at its first call and at its third.
    """
    rng = np.random.default_rng([kind, stage, model])
    again = np.array([s.again for s in _APPLICATIONS[kind].stages[stage:]])
    repeats = _repeats(again, rng, _DRAWS)
    total = np.zeros(_DRAWS)
    for later in range(len(again)):
        for call in range(_MOST_REPEATS):
            going = np.flatnonzero(repeats[:, later] > call)
            same = np.full(len(going), kind), np.full(len(going), stage + later), np.full(len(going), model)
            total[going] += _length(*same, rng)
    return total


def _table(
    seed: int,
    kind: NDArray[np.int64],
    model: NDArray[np.int64],
    topic: NDArray[np.int64],
    prompt: NDArray[np.int64],
    complete: NDArray[np.bool_],
    workflow: NDArray[np.int64],
    stage: NDArray[np.int64],
    length: NDArray[np.float64],
    rng: np.random.Generator,
) -> pa.Table:
    steps = len(stage)
    first = np.r_[True, workflow[1:] != workflow[:-1]]
    start = np.flatnonzero(first)[workflow]
    outputs = np.maximum(1, np.rint(length)).astype(np.int64)
    before = np.cumsum(outputs) - outputs
    system = np.array([a.system_tokens for a in _APPLICATIONS])[kind]
    began = _EPOCH_US + np.cumsum(rng.exponential(4e6, len(kind))).astype(np.int64)
    started = began[workflow] + (before - before[start]) * 20_000
    topics, filler = np.asarray(_TOPICS), np.asarray(_FILLER)
    # Of the prompt's text a trace keeps an excerpt; its length in tokens stands in `input_tokens`.
    words = [
        " ".join([*topics[t, rng.integers(0, topics.shape[1], 4)], *filler[rng.integers(0, len(filler), 8)]])
        for t in topic
    ]
    agents = [[s.agent for s in a.stages] for a in _APPLICATIONS]
    columns = {
        "workflow_type": pa.array([_APPLICATIONS[k].name for k in kind]).take(pa.array(workflow)),
        "workflow_id": pa.array([f"lengths-{seed}-{i:07d}" for i in range(len(kind))]).take(pa.array(workflow)),
        "step": (np.arange(steps) - start).astype(np.int32),
        "agent": pa.array([agents[k][s] for k, s in zip(kind[workflow], stage, strict=True)]),
        "kind": pa.array(["llm"] * steps),
        "model": pa.array([_MODELS[m] for m in model]).take(pa.array(workflow)),
        "input_tokens": (system + prompt)[workflow].astype(np.int32),
        "output_tokens": outputs.astype(np.int32),
        "started_at": pa.array(started).cast(pa.timestamp("us", "UTC")),
        "input_text": pa.array(words, pa.large_string()).take(pa.array(workflow)),
        "complete": pa.array(complete[workflow]),
    }
    return conform(pa.table(columns), "generated lengths")
