"""The next-agent predictor: who is called in the next K steps, or whether the workflow ends.

Three components answer and are mixed by weights found on held-out traces: a network (GraphSAGE agents, ordered
prefix, projected states: PBKV §4.1 with the changes `network.py` names), trees with vector leaves on the same input
vector, and a back-off n-gram. The n-gram is also the floor: it answers alone where an agent was hardly seen.

`fit` learns on training prefixes, stops and weighs on validation prefixes, then learns again on both with what it
found. Every forecast, in training, evaluation and serving, is made by the kernels of `running.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, InputError
from presage.features.call_graph import transition_matrix
from presage.features.history import history_size
from presage.features.inputs import SIZE_COUNT, inputs_size, sums_size, unroll
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes, join
from presage.features.projection import Projection, fit_projection
from presage.features.states import StateSource
from presage.features.vocabulary import Vocabulary
from presage.predictors.artefact import read_artefact, write_artefact
from presage.predictors.boosting import BoostingConfig, TreeEnsemble, fit_trees
from presage.predictors.engine import Engine, build_engine, with_shares
from presage.predictors.forecast import Forecast
from presage.predictors.mixture import fit_weights
from presage.predictors.network_weights import NetworkConfig, NetworkWeights
from presage.predictors.ngram import BackoffNgram
from presage.predictors.running import completed, forecast_trace, opened, prefilled, prefilled_many

if TYPE_CHECKING:
    from presage.predictors.network import Examples

KIND: Final = "next-agent"
COMPONENTS: Final = ("network", "trees", "n-gram")
PRIOR_WEIGHTS: Final = (0.45, 0.6, 0.05)
"""Mixture weights before any evidence, about what the real traces settled on."""

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is done, 0..1."""


@dataclass(frozen=True)
class NextAgentConfig:
    """What a fit needs to know.

    Attributes:
        components: principal components of the states to keep.
        discriminants: directions that tell outcomes apart to keep.
        min_evidence: training steps of an agent in a workflow type below which the n-gram answers alone.
        refit: learn again on training and validation prefixes together once rounds, epochs and weights are known.
        network: sizes and schedule of the network.
        boosting: how trees are grown; 0 rounds leave them out.
    """

    components: int = 20
    discriminants: int = 12
    min_evidence: int = 10
    refit: bool = True
    network: NetworkConfig = field(default_factory=NetworkConfig)
    boosting: BoostingConfig = field(default_factory=BoostingConfig)


@dataclass(frozen=True)
class _Parts:
    """What is learnt, as the artefact keeps it."""

    projections: Mapping[Moment, Projection]
    network: NetworkWeights
    trees: tuple[TreeEnsemble, TreeEnsemble]
    ngram: BackoffNgram
    evidence: NDArray[np.int32]


Workflow = NDArray[np.float32]
"""A running workflow: one row of floats that `NextAgentPredictor` moves step by step."""


class NextAgentPredictor:
    """Ours. `fit` or `load` makes one that answers."""

    name = "presage"

    vocabulary: Vocabulary
    horizon: int
    shares: NDArray[np.float32]
    source: StateSource

    def __init__(self, config: NextAgentConfig | None = None, seed: int = 0) -> None:
        self.config = config or NextAgentConfig()
        self.seed = seed

    # --- learning ---

    def fit(
        self,
        train: Prefixes,
        validation: Prefixes,
        *,
        source: StateSource | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Learns from `train`; `validation` (other tasks) decides when to stop and how to mix.

        Args:
            train, validation: prefixes over one vocabulary, with states from `source`.
            source: where the states come from; kept with the model so that serving makes the same ones.
            progress: told what is being done.
        """
        report = progress or (lambda _, __: None)
        self.vocabulary, self.horizon = train.vocabulary, train.horizon
        self.source = source or StateSource.none()
        stopping = _Stopping()
        self._hold(self._learn(train, validation, stopping, report), np.full((2, 3, self.horizon), 1 / 3, np.float32))
        shares = np.stack([self._weigh(validation, moment) for moment in MOMENTS])
        if self.config.refit:
            self._hold(self._learn(join(train, validation), None, stopping, report), shares)
        else:
            self._hold(self._parts, shares)
        return self

    def _learn(self, train: Prefixes, validation: Prefixes | None, stopping: _Stopping, report: Progress) -> _Parts:
        """One round of learning. With `validation`, `stopping` is filled in; without, it is obeyed."""
        from presage.predictors.network import fit_network

        doing = "learning" if validation is not None else "learning again on all"
        projections, projected = {}, {}
        for moment in train.states:
            projections[moment], projected[moment] = fit_projection(
                train,
                moment,
                components=self.config.components,
                discriminants=self.config.discriminants,
                seed=self.seed,
            )
        examples = self._examples(train, projected)
        held_out = examples
        if validation is not None:
            held_out = self._examples(validation, _projected(validation, projections))

        def grow(index: int) -> TreeEnsemble:
            return fit_trees(
                examples.inputs[index],
                examples.outcomes,
                held_out.inputs[index],
                held_out.outcomes,
                self.vocabulary.outcomes,
                self.config.boosting,
                self.seed,
                always=history_size(len(self.vocabulary.agents)) + 1 + SIZE_COUNT,
                rounds=stopping.rounds[index] if validation is None else None,
            )

        # Growing releases the interpreter, so that the trees of both moments grow beside the network.
        with ThreadPoolExecutor(max_workers=2) as pool:
            growing = [pool.submit(grow, index) for index in range(len(MOMENTS))]
            network, epoch = fit_network(
                examples,
                held_out,
                transition_matrix(train),
                len(self.vocabulary.workflow_types),
                sum(projection.size for projection in projections.values()),
                self.config.network,
                self.seed,
                epochs=stopping.epochs if validation is None else None,
                progress=lambda done, _: report(doing, done / self.config.network.epochs),
            )
            trees = [future.result() for future in growing]
        if validation is not None:
            stopping.epochs, stopping.rounds = epoch, [len(tree.roots) for tree in trees]
        return _Parts(projections, network, (trees[0], trees[1]), BackoffNgram(3).fit(train, train), _evidence(train))

    def _weigh(self, validation: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Mixture weights at one moment, float32 [3, K]."""
        alone = []
        for component in range(len(COMPONENTS)):
            shares = np.zeros((2, 3, self.horizon), np.float32)
            shares[:, component] = 1.0
            alone.append(self._run(validation, with_shares(self._engine, shares, 0))[MOMENTS.index(moment)])
        return fit_weights(alone, validation.outcomes, PRIOR_WEIGHTS)

    def _hold(self, parts: _Parts, shares: NDArray[np.float32]) -> None:
        self._parts, self.shares = parts, shares
        p, c = (parts.projections[m].size if m in parts.projections else 0 for m in MOMENTS)
        self._widths = (p, c)
        self._engine = build_engine(
            parts.network,
            parts.trees,
            parts.ngram.table,
            shares,
            parts.evidence,
            self.config.min_evidence,
            self._widths,
        )
        self._projection = {m: (p.weights(), p.bias) for m, p in parts.projections.items()}

    def _examples(self, prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]]) -> Examples:
        from presage.predictors.network import Examples

        inputs = unroll(
            prefixes.offsets,
            prefixes.workflow_type,
            prefixes.agent,
            prefixes.sizes,
            *_with_presence(prefixes, projected, PREFILL),
            *_with_presence(prefixes, projected, COMPLETION),
            len(self.vocabulary.agents),
        )
        return Examples(prefixes.offsets, inputs, prefixes.outcomes)

    # --- forecasting ---

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1] at this moment of every step."""
        return self.predict_both(prefixes)[moment]

    def predict_both(self, prefixes: Prefixes) -> dict[Moment, NDArray[np.float32]]:
        """Both moments in one pass."""
        return dict(zip(MOMENTS, self._run(prefixes, self._engine), strict=True))

    def _run(self, prefixes: Prefixes, engine: Engine) -> NDArray[np.float32]:
        """Forecasts of both moments, float32 [2, n, K, V+1]."""
        projected = _projected(prefixes, self._parts.projections)
        out = np.empty((2, prefixes.steps, self.horizon, self.vocabulary.outcomes), np.float32)
        forecast_trace(
            prefixes.offsets,
            prefixes.workflow_type,
            prefixes.agent,
            prefixes.sizes,
            *_with_presence(prefixes, projected, PREFILL),
            *_with_presence(prefixes, projected, COMPLETION),
            engine,
            out,
        )
        return out

    def open(self, workflow_type: str) -> Workflow:
        """A workflow of this type before its first step."""
        workflow: Workflow = self.open_many([workflow_type])[0]
        return workflow

    def open_many(self, workflow_types: Sequence[str]) -> NDArray[np.float32]:
        """Workflows before their first step, one a row: float32 [B, row]."""
        width = inputs_size(len(self.vocabulary.agents), *self._widths) + sums_size(*self._widths)
        rows = np.empty((len(workflow_types), width + self._parts.network.prefix_size), np.float32)
        for row, name in zip(rows, workflow_types, strict=True):
            opened(row, self.vocabulary.workflow_type(name), self._engine)
        return rows

    def project(self, moment: Moment, state: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """A raw state float32 [d] as the kernels take it, float32 [p] or [c]; empty for none."""
        if state is None or moment not in self._projection:
            return _NOTHING
        weights, bias = self._projection[moment]
        return state @ weights + bias

    def prefilled(
        self,
        workflow: Workflow,
        agent: int,
        tokens: float,
        chars: float,
        state: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> int:
        """A step begins; see `running.prefilled`."""
        return prefilled(workflow, agent, tokens, chars, state, self._engine, out)

    def completed(
        self, workflow: Workflow, tokens: float, chars: float, state: NDArray[np.float32], out: NDArray[np.float32]
    ) -> int:
        """The step's output is complete; see `running.completed`."""
        return completed(workflow, tokens, chars, state, self._engine, out)

    def prefilled_many(
        self,
        workflows: NDArray[np.float32],
        agent: NDArray[np.int32],
        tokens: NDArray[np.float32],
        chars: NDArray[np.float32],
        states: NDArray[np.float32],
        out: NDArray[np.float32],
        evidence: NDArray[np.int32],
    ) -> None:
        """A step begins in each of B workflows; see `running.prefilled_many`."""
        prefilled_many(workflows, agent, tokens, chars, states, self._engine, out, evidence)

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> Forecast:
        """What comes after the given steps of one workflow.

        Args:
            steps: in order, with the names of the trace's columns; `workflow_type` and `agent` are required. If the
                last one has any sign of an output the forecast is of its completion, else of its prefill.

        Raises:
            InputError: no step, steps of different workflows, an agent that is no name, a state of another width.
        """
        _check_steps(steps)
        workflow = self.open(steps[0]["workflow_type"])
        out = np.empty((self.horizon, self.vocabulary.outcomes), np.float32)
        moment: Moment = PREFILL
        evidence = 0
        for step in steps:
            tokens, chars = _size(step, "input")
            state = self.project(PREFILL, self.source.of_step(step, PREFILL))
            evidence = self.prefilled(workflow, self.vocabulary.agent(step["agent"]), tokens, chars, state, out)
            moment = PREFILL
            if any(step.get(name) is not None for name in _SIGNS_OF_OUTPUT):
                tokens, chars = _size(step, "output")
                state = self.project(COMPLETION, self.source.of_step(step, COMPLETION))
                evidence = self.completed(workflow, tokens, chars, state, out)
                moment = COMPLETION
        return Forecast(
            source="back-off" if evidence < self.config.min_evidence else "champion",
            evidence=evidence,
            moment=moment,
            agents=[dict(zip(self.vocabulary.agents, row[:-1].tolist(), strict=True)) for row in out],
            end=out[:, -1].tolist(),
        )

    # --- keeping ---

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Writes the artefact: config.json and model.safetensors, nothing executable."""
        parts = {
            "network": self._parts.network.to_tensors(),
            "trees.prefill": self._parts.trees[0].to_tensors(),
            "trees.completion": self._parts.trees[1].to_tensors(),
            "n-gram": self._parts.ngram.to_tensors(),
            **{f"projection.{m}": p.to_tensors() for m, p in self._parts.projections.items()},
            "states": self.source.to_tensors(),
            "mixture": {"shares": self.shares, "evidence": self._parts.evidence},
        }
        write_artefact(
            Path(folder),
            kind=KIND,
            config={
                "predictor": asdict(self.config),
                "vocabulary": self.vocabulary.to_dict(),
                "horizon": self.horizon,
                "seed": self.seed,
                "states": self.source.to_config(),
                "projections": [moment for moment in MOMENTS if moment in self._parts.projections],
            },
            tensors={f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()},
            training_data=training_data or {},
        )

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads an artefact.

        Raises:
            ArtefactError: the folder is not a sound artefact of this kind.
        """
        artefact = read_artefact(Path(folder), kind=KIND)
        parts: dict[str, dict[str, NDArray[Any]]] = {}
        for name, array in artefact.tensors.items():
            part, _, inner = name.rpartition("/")
            parts.setdefault(part, {})[inner] = array
        try:
            config = artefact.config
            predictor = cls(_config_from(config["predictor"]), config["seed"])
            predictor.vocabulary = Vocabulary.from_dict(config["vocabulary"])
            predictor.horizon = config["horizon"]
            predictor.source = StateSource.from_artefact(config["states"], parts.get("states", {}))
            predictor._hold(
                _Parts(
                    {m: Projection.from_tensors(parts[f"projection.{m}"]) for m in config["projections"]},
                    NetworkWeights.from_tensors(parts["network"]),
                    (
                        TreeEnsemble.from_tensors(parts["trees.prefill"]),
                        TreeEnsemble.from_tensors(parts["trees.completion"]),
                    ),
                    BackoffNgram.from_tensors(parts["n-gram"], predictor.vocabulary, predictor.horizon),
                    parts["mixture"]["evidence"],
                ),
                parts["mixture"]["shares"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(
                f"{folder}: not a complete {KIND} artefact ({type(error).__name__}: {error}); "
                "train or download it again"
            ) from error
        return predictor


@dataclass
class _Stopping:
    """When learning stopped on held-out traces."""

    epochs: int = 0
    rounds: Sequence[int] = (0, 0)


_NOTHING: Final = np.empty(0, np.float32)
_SIGNS_OF_OUTPUT: Final = ("output_tokens", "output_text", "completion_state", "ended_at")


def _projected(prefixes: Prefixes, projections: Mapping[Moment, Projection]) -> dict[Moment, NDArray[np.float32]]:
    """The states of each moment that the model projects, float32 [n, m]; zeros where these prefixes have none."""
    return {
        moment: projection(prefixes.states[moment])
        if moment in prefixes.states
        else np.zeros((prefixes.steps, projection.size), np.float32)
        for moment, projection in projections.items()
    }


def _with_presence(
    prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]], moment: Moment
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Projected states of a moment, float32 [n, m] (m = 0 if the model has none), and which steps have one."""
    if moment not in projected:
        return np.zeros((prefixes.steps, 0), np.float32), np.zeros(prefixes.steps, bool)
    raw = prefixes.states.get(moment)
    present = np.zeros(prefixes.steps, bool) if raw is None else ~np.isnan(raw[:, 0])
    return np.ascontiguousarray(projected[moment]), present


def _evidence(prefixes: Prefixes) -> NDArray[np.int32]:
    """Training steps of each agent in each workflow type, int32 [T+1, V+1]; the unknown have none."""
    vocabulary = prefixes.vocabulary
    counts = np.zeros((len(vocabulary.workflow_types) + 1, len(vocabulary.agents) + 1), np.int32)
    np.add.at(counts, (prefixes.workflow_type[prefixes.workflow], prefixes.agent), 1)
    counts[-1], counts[:, -1] = 0, 0
    return counts


def _config_from(data: Mapping[str, Any]) -> NextAgentConfig:
    return NextAgentConfig(
        **{**data, "network": NetworkConfig(**data["network"]), "boosting": BoostingConfig(**data["boosting"])}
    )


def _check_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    if not steps:
        raise InputError("no steps came; a forecast needs at least the step that is running now")
    for index, step in enumerate(steps):
        for name in ("workflow_type", "agent"):
            if not isinstance(step.get(name), str) or not step[name]:
                raise InputError(f'step {index}: "{name}" is {step.get(name)!r}; wanted a name')
        if step["workflow_type"] != steps[0]["workflow_type"] or step.get("workflow_id") != steps[0].get("workflow_id"):
            raise InputError(f"step {index} belongs to another workflow; a forecast takes the steps of one")


def _size(step: Mapping[str, Any], side: str) -> tuple[float, float]:
    """log(1 + x) of a side's tokens and characters, 0 where unknown: as `Prefixes.sizes`."""
    tokens, text = step.get(f"{side}_tokens"), step.get(f"{side}_text")
    return (
        float(np.log1p(np.float32(tokens))) if tokens is not None else 0.0,
        float(np.log1p(np.float32(len(text)))) if text is not None else 0.0,
    )
