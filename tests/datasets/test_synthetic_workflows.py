"""Known laws: the forecast is what enumeration gives, it is calibrated, and it cannot be beaten."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray

from presage.datasets.schema import digest, state_sizes, trace_schema
from presage.datasets.schema.validate import validate
from presage.datasets.synthetic.processes import END, PROCESSES, Branch, SyntheticProcess
from presage.datasets.synthetic.workflows import Generated, generate, state_basis
from presage.errors import ConfigurationError

TINY = SyntheticProcess(
    name="tiny",
    start="a",
    intents=(0.6, 0.4),
    max_retries=2,
    signal=0.9,
    next_signal=0.7,
    graph={
        "a": (
            Branch("b", 1.0, (3.0, 1.0)),
            Branch("a", 0.6, after={"b": 0.2}, retry=0.5, counts=True),
            Branch(END, 0.3),
        ),
        "b": (Branch("a", 1.0, (0.5, 2.0), after={"a": 1.5}), Branch(END, 0.7, retry=2.0)),
    },
    tokens={"a": (10, 20), "b": (30, 5)},
)


def outcomes(made: Generated, horizon: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Agent and step of each row, and the outcomes ahead, int64 [steps, horizon]; -1 past END or past a cut."""
    agents = np.asarray([made.agents.index(name) for name in made.table["agent"].to_pylist()])
    step = made.table["step"].to_numpy()
    complete = made.table["complete"].to_numpy()
    ahead = np.full((len(agents), horizon), -1)
    ends = np.flatnonzero(np.r_[step[1:] == 0, True])
    last = ends[np.searchsorted(ends, np.arange(len(agents)))]
    for k in range(1, horizon + 1):
        at = np.arange(len(agents)) + k
        ahead[at <= last, k - 1] = agents[at[at <= last]]
        ahead[(at == last + 1) & complete, k - 1] = len(made.agents)
    return agents, step, ahead


def accuracy(forecast: NDArray[np.float64], ahead: NDArray[np.int64]) -> list[float]:
    return [
        float((forecast[ahead[:, k] >= 0, k].argmax(axis=1) == ahead[ahead[:, k] >= 0, k]).mean())
        for k in range(ahead.shape[1])
    ]


def contexts(agents: NDArray[np.int64], step: NDArray[np.int64], order: int) -> list[tuple[int, ...]]:
    return [tuple(agents[i - k] if k <= step[i] else -1 for k in range(order)) for i in range(len(agents))]


def ngram(train: Generated, test: Generated, order: int) -> NDArray[np.float64]:
    """P(next) by counting the last `order` agents, with add-one smoothing towards the shorter context."""
    counts: list[defaultdict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order + 1)]
    agents, step, ahead = outcomes(train, 1)
    for context, following in zip(contexts(agents, step, order), ahead[:, 0], strict=True):
        for length in range(order + 1):
            counts[length][context[:length]][int(following)] += 1
    agents, step, _ = outcomes(test, 1)
    size = len(test.agents) + 1
    made: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def predict(context: tuple[int, ...]) -> NDArray[np.float64]:
        if context not in made:
            shorter = predict(context[:-1]) if context else np.full(size, 1 / size)
            found = counts[len(context)][context]
            seen = np.asarray([found[o] for o in range(size)], float)
            made[context] = (seen + 2 * shorter) / (seen.sum() + 2)
        return made[context]

    return np.stack([predict(context) for context in contexts(agents, step, order)])


def test_a_generated_trace_is_valid_canonical_and_reproducible() -> None:
    made = generate("retry", 30, 7, state_size=24, censored=0.5)
    assert made.table.schema.equals(trace_schema(24, 24), check_metadata=True)
    assert state_sizes(made.table.schema) == (24, 24)
    assert validate(made.table, "generated") is made.table
    assert digest(generate("retry", 30, 7, state_size=24, censored=0.5).table) == digest(made.table)
    assert digest(generate("retry", 30, 8, state_size=24, censored=0.5).table) != digest(made.table)
    assert 0 < sum(not c for c in made.table["complete"].to_pylist()) < made.table.num_rows
    assert made.agents == tuple(sorted(made.agents))
    assert set(made.table["agent"].to_pylist()) <= set(made.agents)
    for forecast in made.forecasts.values():
        assert forecast.shape == (made.table.num_rows, 3, len(made.agents) + 1)
        np.testing.assert_allclose(forecast.sum(axis=-1), 1.0)


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_a_law_names_only_its_own_agents(process: str) -> None:
    graph = PROCESSES[process].graph
    assert 5 <= len(graph) <= 9
    assert {branch.next for branches in graph.values() for branch in branches} | {PROCESSES[process].start} == {
        *graph,
        END,
    }
    assert set(PROCESSES[process].tokens) == set(graph)
    np.testing.assert_allclose(PROCESSES[process].transition.sum(axis=-1), 1.0)


def test_the_forecast_is_what_enumeration_of_every_future_gives() -> None:
    """No tables of the process are used here: intents, branches and densities are written out one by one."""
    horizon, made = 3, generate(TINY, 12, 3, state_size=16)
    states = [np.stack(made.table[name].to_numpy()).astype(float) for name in ("prefill_state", "completion_state")]
    basis = state_basis(TINY, 16).astype(float)
    agents, step, _ = outcomes(made, 1)
    names = [*TINY.agents, END]

    def branch_probabilities(intent: int, path: list[int]) -> NDArray[np.float64]:
        current, before = names[path[-1]], names[path[-2]] if len(path) > 1 else ""
        retries = sum(
            any(b.counts and b.next == names[y] for b in TINY.graph[names[x]]) for x, y in itertools.pairwise(path)
        )
        weights = np.zeros(len(names))
        for b in TINY.graph[current]:
            factor = b.intents[intent] if b.intents else 1.0
            weights[names.index(b.next)] += b.weight * factor * b.after.get(before, 1.0) * b.retry ** min(retries, 2)
        return weights / weights.sum()

    def density(state: NDArray[np.float64], intent: int, outcome: int | None) -> float:
        mean = TINY.signal * basis[intent]
        if outcome is not None:
            mean = mean + TINY.next_signal * basis[2 + outcome]
        covariance = basis.T @ basis + 0.05**2 * np.eye(16)
        off = state - mean
        return float(np.exp(-0.5 * off @ np.linalg.solve(covariance, off)))

    for at in range(len(agents)):
        first = at - step[at]
        path = list(agents[first : at + 1])
        for moment in ("prefill", "completion"):
            weight: dict[tuple[int, ...], float] = Counter()
            for intent, prior in enumerate(TINY.intents):
                evidence = prior
                for i in range(len(path)):
                    evidence *= density(states[0][first + i], intent, None)
                    if i < len(path) - 1:
                        evidence *= branch_probabilities(intent, path[: i + 1])[path[i + 1]]
                        evidence *= density(states[1][first + i], intent, path[i + 1])
                for future in itertools.product(range(3), repeat=horizon):
                    chance, walked = evidence, list(path)
                    for k, following in enumerate(future):
                        ended = k > 0 and future[k - 1] == 2
                        chance *= float(following == 2) if ended else branch_probabilities(intent, walked)[following]
                        walked.append(following)
                        if chance == 0:
                            break
                    if moment == "completion" and chance:
                        chance *= density(states[1][at], intent, future[0])
                    weight[future] += chance
            for k in range(horizon):
                alive = {future: w for future, w in weight.items() if 2 not in future[:k]}
                wanted = [sum(w for future, w in alive.items() if future[k] == o) for o in range(3)]
                np.testing.assert_allclose(made.forecasts[moment][at, k], np.asarray(wanted) / sum(wanted), rtol=2e-3)


def test_after_a_certain_end_the_forecast_is_end() -> None:
    process = SyntheticProcess(
        "line",
        {"a": (Branch("b", 1.0),), "b": (Branch(END, 1.0),)},
        "a",
        (1.0,),
        0,
        1.0,
        1.0,
        {"a": (1, 1), "b": (1, 1)},
    )
    forecast = generate(process, 1, 0, state_size=8).forecasts["prefill"]
    np.testing.assert_array_equal(forecast.argmax(axis=-1), [[1, 2, 2], [2, 2, 2]])
    assert forecast.max(axis=-1).min() == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"process": "none"}, "unknown process 'none'; known: "),
        ({"workflows": 0}, "workflows is 0"),
        ({"state_size": 4}, "state_size is 4; expected at least"),
        ({"seed": -1}, "seed is -1"),
        ({"censored": 1.5}, "censored is 1.5"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        generate(**({"process": "retry", "workflows": 1, "seed": 0} | arguments))  # type: ignore[arg-type]


def test_a_law_that_never_ends_is_refused() -> None:
    process = SyntheticProcess("loop", {"a": (Branch("a", 1.0),)}, "a", (1.0,), 0, 1.0, 1.0, {"a": (1, 1)})
    with pytest.raises(ConfigurationError, match="make its loops end"):
        generate(process, 2, 0, state_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("process", sorted(PROCESSES))
@pytest.mark.parametrize("censored", [0.0, 0.5])
def test_the_forecast_is_calibrated_and_beats_counting(process: str, censored: float) -> None:
    made, train = (generate(process, n, seed, state_size=32, censored=censored) for n, seed in ((8000, 1), (4000, 2)))
    _, _, ahead = outcomes(made, 3)
    for moment, forecast in made.forecasts.items():
        for k in range(3):
            known = ahead[:, k] >= 0
            chosen, truth = forecast[known, k], ahead[known, k]
            confidence, hit = chosen.max(axis=1), chosen.argmax(axis=1) == truth
            bins = (confidence * 15).astype(int)
            gap = np.bincount(bins, confidence, 16) - np.bincount(bins, hit, 16)
            assert np.abs(gap).sum() / len(hit) < 0.01, (moment, k)
    known = np.flatnonzero(ahead[:, 0] >= 0)
    nll = {name: -np.log(f[known, ahead[known, 0]]).mean() for name, f in _next(made, train)}
    assert nll["completion"] < nll["prefill"] < min(nll["1"], nll["2"], nll["3"]) - 0.05


def _next(made: Generated, train: Generated) -> list[tuple[str, NDArray[np.float64]]]:
    counted = [(str(order), ngram(train, made, order)) for order in (1, 2, 3)]
    return [*((moment, forecast[:, 0]) for moment, forecast in made.forecasts.items()), *counted]


@pytest.mark.slow
def test_the_laws_keep_the_difficulty_they_were_tuned_to() -> None:
    """The figures of the design's synthetic laws, mean of three: see the module's docstring."""
    bayes, markov, lengths = [], [], []
    for process in PROCESSES:
        made, train = generate(process, 4000, 1, state_size=32), generate(process, 1000, 2, state_size=32)
        _, _, ahead = outcomes(made, 3)
        bayes.append(accuracy(made.forecasts["prefill"], ahead))
        markov.append([accuracy(ngram(train, made, order)[:, None], ahead[:, :1])[0] for order in (1, 3)])
        lengths.append(made.table.num_rows / 4000)
    np.testing.assert_allclose(np.mean(bayes, axis=0), [0.74, 0.60, 0.50], atol=0.025)
    np.testing.assert_allclose(np.mean(markov, axis=0), [0.60, 0.66], atol=0.025)
    np.testing.assert_allclose(np.mean(lengths), 10.0, atol=0.7)
