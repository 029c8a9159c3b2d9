"""Workflows of a synthetic process, and the Bayes-optimal forecasts of their steps: an upper bound on accuracy.

Each workflow draws a hidden intent. Each step draws its outcome from the process, and two hidden states:

    prefill state     U · (signal · e[intent] + noise)                              + a little isotropic noise
    completion state  U · (signal · e[intent] + next_signal · e[outcome] + noise)   + a little isotropic noise

U has orthonormal columns in random directions of the state space, one for each intent and each outcome, the same for
every seed. Noise is standard normal and independent between steps, so evidence of the intent grows along the prefix.
Texts are generated only from a noisy reading of the same states. Given the states they add no information, so the
bound also holds for a predictor that reads texts.

The forecast is exact: a filter over the few intents, with the likelihood of the states as they are stored (float16),
then the process's own tables K steps ahead. Step k is conditional on the workflow not having ended before it, which
matches a loss that masks everything after END, and `Score(c)` of the eviction policy; if END is certain before step k,
END is certain at step k. Cuts (`censored`) are independent of the workflow's continuation, so the forecasts hold for
cut workflows too.

Accuracy at 1/2/3 steps, 4,000 workflows, n-grams with back-off counted on 1,000 others:

    process    mean length   Bayes, prefill    Bayes, completion   order 1 / 2 / 3 at one step
    retry             10.6   .769/.636/.570    .859/.700/.603      .696/.703/.709
    research          10.9   .713/.556/.456    .824/.623/.498      .575/.630/.654
    triage             8.3   .737/.607/.521    .827/.647/.555      .541/.631/.646
    mean              10.0   .739/.600/.516    .837/.656/.552      .604/.655/.670
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.special import softmax

from presage.datasets.read import Traces
from presage.datasets.schema import STATE_COLUMNS, conform
from presage.datasets.synthetic.processes import PROCESSES, SyntheticProcess
from presage.errors import ConfigurationError

_ISOTROPIC: Final = 0.05
_CHUNK_VALUES: Final = 2**24
_EPOCH_US: Final = 1_750_000_000_000_000
_CHUNK_STEPS: Final = 2**14
_MAX_STEPS: Final = 2_000
# Words of the texts: words for each intent as read from a state, and words without information.
_TOPICS: Final = (
    ("failing", "regression", "stack", "broken"),
    ("evidence", "source", "quote", "history"),
    ("unclear", "compare", "open", "options"),
    ("urgent", "policy", "escalate", "exception"),
)
_FILLER: Final = ("please", "the", "next", "part", "with", "given", "so", "far")


@dataclass(frozen=True)
class Generated:
    """A conforming trace in canonical order with both states, its agents in sorted order, and its optimal forecasts.

    The forecasts of the moments "prefill" and "completion" are float64 [steps, horizon, agents + 1]: the probability of
    each outcome 1..horizon steps after each row of the table, END last, given that the workflow has not ended before.
    """

    table: pa.Table
    agents: tuple[str, ...]
    forecasts: Mapping[str, NDArray[np.float64]]


def generate(
    process: str | SyntheticProcess,
    workflows: int,
    seed: int,
    *,
    state_size: int = 64,
    horizon: int = 3,
    censored: float = 0.0,
) -> Generated:
    """Draw workflows of a synthetic process; the trace is a function of the arguments.

    Args:
        process: a process, or the name of one of `PROCESSES`.
        workflows, seed: their number, and the seed of all draws.
        state_size: width of both states; at least intents + agents + 1.
        horizon: K, number of forecast steps.
        censored: share of the workflows with a cut at a random step; workflows that end before their cut stay complete.

    Raises ConfigurationError for an unknown process, or a number out of its range.
    """
    if isinstance(process, str) and process not in PROCESSES:
        raise ConfigurationError(f"unknown process {process!r}; known: {', '.join(PROCESSES)}")
    described = PROCESSES[process] if isinstance(process, str) else process
    directions = len(described.intents) + len(described.agents) + 1
    for name, value, least in (
        ("workflows", workflows, 1),
        ("seed", seed, 0),
        ("horizon", horizon, 1),
        ("state_size", state_size, directions),
    ):
        if value < least:
            raise ConfigurationError(f"{name} is {value}; expected at least {least} for process {described.name!r}")
    if not 0 <= censored <= 1:
        raise ConfigurationError(f"censored is {censored}; expected a share between 0 and 1")
    rng = np.random.default_rng([seed, zlib.crc32(described.name.encode())])
    walks = _walk(described, workflows, censored, rng)
    states, seen = _draw_states(described, walks, state_size, rng)
    return Generated(
        _table(described, walks, states, seen, seed, rng), described.agents, _forecast(described, walks, *seen, horizon)
    )


def generate_traces(process: str, workflows: int, *, random_state: int = 0) -> Traces:
    """Generate traces of a synthetic process: agents with loops, retries and a hidden intent.

    Args:
        process: "retry", "research" or "triage".
        workflows: their number.
        random_state: seed; another one draws other workflows.

    Raises:
        ConfigurationError: an unknown process, or a number out of range.
    """
    return Traces(generate(process, workflows, random_state).table, {})


@dataclass(frozen=True)
class _Walks:
    """Workflows one after the other, one entry a step."""

    offsets: NDArray[np.int64]  # [workflows + 1], the start of each, and the number of steps
    intents: NDArray[np.int64]  # [workflows]
    complete: NDArray[np.bool_]  # [workflows]
    step: NDArray[np.int64]  # [steps], as all below
    state: NDArray[np.int64]  # of the process
    outcome: NDArray[np.int64]  # the next, END included; defined also at a cut, where the trace does not show it

    @property
    def workflow(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.intents)), np.diff(self.offsets))


def _walk(process: SyntheticProcess, workflows: int, censored: float, rng: np.random.Generator) -> _Walks:
    intents = rng.choice(len(process.intents), workflows, p=np.asarray(process.intents) / sum(process.intents))
    cumulative = process.transition.cumsum(axis=-1)
    cumulative[cumulative > 1 - 1e-12] = 1.0  # a sum rounded below 1 must not permit an impossible outcome
    alive = np.arange(workflows)
    state = np.full(workflows, process.start_state)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    while len(alive) and len(steps) < _MAX_STEPS:
        draw = rng.random(len(alive))[:, None]
        outcome = (draw >= cumulative[intents[alive], state, :-1]).sum(axis=1)
        steps.append((alive, state, outcome))
        state = process.next_state[state, outcome]
        going = outcome < len(process.agents)
        alive, state = alive[going], state[going]
    if len(alive):
        raise ConfigurationError(
            f"process {process.name!r} has workflows of more than {_MAX_STEPS} steps: make its loops end"
        )
    workflow = np.concatenate([active for active, _, _ in steps])
    step = np.repeat(np.arange(len(steps)), [len(active) for active, _, _ in steps])
    order = np.lexsort((step, workflow))
    lengths = np.bincount(workflow, minlength=workflows)
    cut = np.where(rng.random(workflows) < censored, rng.geometric(1 / lengths.mean(), workflows), lengths)
    shown = np.minimum(lengths, cut)
    keep = order[step[order] < shown[workflow[order]]]
    offsets = np.r_[0, np.cumsum(shown)]
    every_state = np.concatenate([s for _, s, _ in steps])
    every_outcome = np.concatenate([o for _, _, o in steps])
    return _Walks(offsets, intents, shown == lengths, step[keep], every_state[keep], every_outcome[keep])


def state_basis(process: SyntheticProcess, state_size: int) -> NDArray[np.float32]:
    """Orthonormal directions of the intents, then of the outcomes, float32 [intents + agents + 1, state_size]."""
    rng = np.random.default_rng([zlib.crc32(process.name.encode()), state_size])
    directions = len(process.intents) + len(process.agents) + 1
    basis: NDArray[np.float32] = np.linalg.qr(rng.standard_normal((state_size, directions)))[0].T.astype(np.float32)
    return basis


def _draw_states(
    process: SyntheticProcess, walks: _Walks, state_size: int, rng: np.random.Generator
) -> tuple[tuple[NDArray[np.float16], NDArray[np.float16]], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Prefill and completion states, float16 [steps, state_size], and their components along the basis.

    The latter, float64 [steps, intents + agents + 1], carry all information: the other directions are pure noise.
    """
    basis = state_basis(process, state_size)
    steps, directions = len(walks.step), len(basis)
    means = np.zeros((steps, directions), np.float32)
    means[np.arange(steps), walks.intents[walks.workflow]] = process.signal
    after = means.copy()
    after[np.arange(steps), len(process.intents) + walks.outcome] = process.next_signal
    states, seen = [], []
    for mean in (means, after):
        stored = np.empty((steps, state_size), np.float16)
        read = np.empty((steps, directions))
        rows = max(1, _CHUNK_VALUES // state_size)
        for start in range(0, steps, rows):
            part = slice(start, start + rows)
            noisy = mean[part] + rng.standard_normal(mean[part].shape, np.float32)
            full = rng.standard_normal((len(noisy), state_size), np.float32)
            full *= _ISOTROPIC
            full += noisy @ basis
            stored[part] = full
            read[part] = stored[part].astype(np.float32) @ basis.T
        states.append(stored)
        seen.append(read)
    return (states[0], states[1]), (seen[0], seen[1])


def _forecast(
    process: SyntheticProcess,
    walks: _Walks,
    prefill: NDArray[np.float64],
    completion: NDArray[np.float64],
    horizon: int,
) -> dict[str, NDArray[np.float64]]:
    """The Bayes-optimal forecasts of both moments.

    Directions are orthonormal and the noise along each is independent with variance 1 + isotropic², so of |y − m|² only
    y·m matters, and in a completion state the log-likelihoods of intent and outcome are additive.
    """
    scale, intents = 1 / (1 + _ISOTROPIC**2), len(process.intents)
    from_prefill, from_completion = (y[:, :intents] * (process.signal * scale) for y in (prefill, completion))
    of_outcome = completion[:, intents:] * (process.next_signal * scale)
    with np.errstate(divide="ignore"):  # log 0: an impossible outcome excludes the intent
        moved = np.log(process.transition[:, walks.state, walks.outcome].T)
    at_prefill = _intent_scores(process, walks, from_prefill, from_completion + moved)
    ahead = process.ahead(horizon)
    after_outcome = ahead[:, :, process.next_state, :]  # [horizon, intents, S + 1, outcome, outcome]
    outcomes = len(process.agents) + 1
    result = {moment: np.empty((len(walks.step), horizon, outcomes)) for moment in ("prefill", "completion")}
    for start in range(0, len(walks.step), _CHUNK_STEPS):
        part = slice(start, start + _CHUNK_STEPS)
        state = walks.state[part]
        posterior = softmax(at_prefill[part], axis=-1)
        result["prefill"][part] = np.einsum("nz,hzno->nho", posterior, ahead[:, :, state, :])
        # The completion state is evidence of intent and next outcome jointly.
        both = softmax(at_prefill[part] + from_completion[part], axis=-1)[:, :, None]
        both = both * process.transition[:, state, :].transpose(1, 0, 2)
        both *= np.exp(of_outcome[part] - of_outcome[part].max(axis=1, keepdims=True))[:, None, :]
        both /= both.sum(axis=(1, 2), keepdims=True)
        result["completion"][part, 0] = both.sum(axis=1)
        for k in range(1, horizon):
            result["completion"][part, k] = np.einsum("nzo,znop->np", both, after_outcome[k - 1][:, state])
    return {moment: _while_alive(absorbing) for moment, absorbing in result.items()}


def _intent_scores(
    process: SyntheticProcess, walks: _Walks, at_prefill: NDArray[np.float64], later: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log posterior of the intents up to a constant at each prefill, float64 [steps, intents].

    Given the intent, observations are independent, so evidence adds up: `at_prefill` of a step counts from its own
    prefill on, `later` (its completion state and outcome) from the next step on.
    """
    scores = np.empty_like(at_prefill)
    running = np.tile(np.log(np.asarray(process.intents)), (len(walks.intents), 1))
    workflow = walks.workflow
    order = np.argsort(walks.step, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(walks.step[order])) + 1):
        active = workflow[rows]
        running[active] += at_prefill[rows]
        scores[rows] = running[active]
        running[active] += later[rows]
    return scores


def _while_alive(absorbing: NDArray[np.float64]) -> NDArray[np.float64]:
    """From "END stays END", float64 [steps, horizon, agents + 1], to "given that it has not ended before"."""
    ended = np.concatenate([np.zeros_like(absorbing[:, :1, -1]), absorbing[:, :-1, -1]], axis=1)
    conditional = absorbing.copy()
    conditional[:, :, -1] = np.maximum(absorbing[:, :, -1] - ended, 0.0)
    total = conditional.sum(axis=-1, keepdims=True)
    certain = total[..., 0] < 1e-12
    conditional /= np.where(certain[..., None], 1.0, total)
    conditional[certain] = 0.0
    conditional[certain, -1] = 1.0
    return conditional


def _table(
    process: SyntheticProcess,
    walks: _Walks,
    states: tuple[NDArray[np.float16], NDArray[np.float16]],
    seen: tuple[NDArray[np.float64], NDArray[np.float64]],
    seed: int,
    rng: np.random.Generator,
) -> pa.Table:
    """The trace. Tokens and times depend on the agents alone, so they carry no information on the intent."""
    steps, workflows, workflow = len(walks.step), len(walks.intents), walks.workflow
    # A process state is (previous × agents + agent) × (retries + 1) + retries: see SyntheticProcess.state.
    agent = walks.state // (process.max_retries + 1) % len(process.agents)
    names = [f"{process.name}-{seed}-{i:07d}" for i in range(workflows)]
    mean = np.asarray([process.tokens[name] for name in process.agents])[agent]
    outputs = np.maximum(1, rng.gamma(4.0, mean[:, 1] / 4.0)).astype(np.int32)
    own = np.maximum(1, rng.gamma(8.0, mean[:, 0] / 8.0)).astype(np.int32)
    # Every prompt is the history plus the step's own part; a cache can serve the history.
    grown = own + outputs
    before = np.cumsum(grown) - grown
    history = (before - np.repeat(before[walks.offsets[:-1]], np.diff(walks.offsets))).astype(np.int32)
    spent = (200_000 + 20_000 * outputs.astype(np.int64)) + rng.integers(0, 50_000, steps)
    pause = rng.exponential(300_000, steps).astype(np.int64)
    elapsed = np.cumsum(spent + pause) - (spent + pause)
    elapsed -= np.repeat(elapsed[walks.offsets[:-1]], np.diff(walks.offsets))
    started = _EPOCH_US + np.cumsum(rng.exponential(4e6, workflows)).astype(np.int64)[workflow] + elapsed
    success = rng.random(workflows) < 0.8
    topics, filler = np.asarray(_TOPICS), np.asarray(_FILLER)
    called = np.asarray([f"call {name}" for name in process.agents] + ["done"])[
        seen[1][:, len(process.intents) :].argmax(axis=1)
    ]

    def words(read: NDArray[np.float64]) -> NDArray[np.str_]:
        topic = read[:, : len(process.intents)].argmax(axis=1) % len(topics)
        return np.stack(
            [
                topics[topic, rng.integers(0, topics.shape[1], steps)],
                *filler[rng.integers(0, len(filler), (3, steps))],
                topics[topic, rng.integers(0, topics.shape[1], steps)],
            ]
        )

    columns = {
        "workflow_type": pa.array([process.name] * steps),
        "workflow_id": pa.array(names).take(pa.array(workflow)),
        "step": walks.step.astype(np.int32),
        "agent": pa.array(process.agents).take(pa.array(agent)),
        "task": pa.array([f"task-{name}" for name in names]).take(pa.array(workflow)),
        "parent_steps": _parents(walks.step),
        "kind": pa.array(["llm"] * steps),
        "model": pa.array(["synthetic"] * steps),
        "input_tokens": history + own,
        "output_tokens": outputs,
        "cached_input_tokens": history,
        "started_at": pa.array(started).cast(pa.timestamp("us", "UTC")),
        "ended_at": pa.array(started + spent).cast(pa.timestamp("us", "UTC")),
        "input_text": _joined(words(seen[0])),
        "output_text": _joined(np.concatenate([words(seen[1]), called[None]])),
        "success": pa.array(success[workflow], mask=~walks.complete[workflow]),
        "complete": pa.array(walks.complete[workflow]),
        **{
            name: pa.FixedSizeListArray.from_arrays(pa.array(states_of_moment.reshape(-1)), states_of_moment.shape[1])
            for name, states_of_moment in zip(STATE_COLUMNS, states, strict=True)
        },
    }
    return conform(pa.table(columns), "generated workflows")


def _parents(step: NDArray[np.int64]) -> pa.ListArray:
    """Each step waited for the previous one; the first step has no parent."""
    follows = step > 0
    offsets = np.r_[0, np.cumsum(follows)].astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array((step[follows] - 1).astype(np.int32)))


def _joined(words: NDArray[np.str_]) -> pa.Array:
    """One text a column of `words`, [words, steps]."""
    return pc.binary_join_element_wise(
        *(pa.array(row, pa.large_string()) for row in words), pa.scalar(" ", pa.large_string())
    )
