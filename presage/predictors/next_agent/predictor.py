"""The next-agent predictor: the agents of the next K steps, and whether the workflow ends.

A mixture of a network (PBKV §4.1 with the changes that `network.py` lists), trees with vector leaves on the same
inputs, and a back-off n-gram. For agents with little training data the forecast backs off to trees and n-gram; for such
workflow types, to the n-gram alone. Unknown names are what training is prepared for: it sees some workflows a second
time with names of agents, and of their workflow type, unknown.

One model serves steps with and without token counts and states (`features/input_profiles.py`), each combination with
its own mixture weights. Training, evaluation and serving all forecast with `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.datasets.schema.names import NameMapping
from presage.features.agent_fingerprint import masked_prompt
from presage.features.agent_names import AgentNames, as_files, from_files, recognised_as
from presage.features.input_profiles import ANSWERS, STATES, TEXT, TOKENS, Sources
from presage.features.inputs import inputs_size, known, sizes_at, sums_size
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes, join
from presage.features.projection import columns_of, project_state
from presage.features.served_steps import TOOLS_CALLED
from presage.features.states import StateSource
from presage.features.vocabulary import Vocabulary, tools_of
from presage.predictors.common import Progress
from presage.predictors.common.artefact import nested, read_artefact, rebuilding, under, write_artefact
from presage.predictors.common.forecast import Forecast, Source
from presage.predictors.common.probabilities import FLOOR, softmax
from presage.predictors.common.steps import check_steps, has_output, log_tokens
from presage.predictors.engine import Engine, build_engine, with_shares
from presage.predictors.next_agent.kernels import completed, forecast_trace, opened, prefilled
from presage.predictors.next_agent.parts import (
    COMPONENTS,
    PATTERNS,
    NextAgentConfig,
    NextAgentParts,
    project_all,
    unrolled,
    with_presence,
)

if TYPE_CHECKING:
    from presage.predictors.next_agent.boosting import TreeEnsemble
    from presage.predictors.next_agent.continued import Start
    from presage.predictors.next_agent.learning import Projected

KIND: Final = "next-agent"
PRIOR_WEIGHTS: Final = (0.45, 0.6, 0.05)
"""Prior mixture weights, close to those of the real traces."""
_LEAST_SHARE: Final = 1e-3
"""Prior weight of a component that an earlier training gave none."""


Workflow = NDArray[np.float32]
"""State of a running workflow: one row of floats that `NextAgentPredictor` updates at each step."""


class NextAgentPredictor:
    """Forecasts the next K agents; create one with `fit` or `load`.

    `curves` are the losses of each epoch of `fit`, by name, before the final fit on all tasks; a loaded one has none.
    """

    curves: Mapping[str, Sequence[float]] = MappingProxyType({})
    vocabulary: Vocabulary
    horizon: int
    source: StateSource
    trained_on: NDArray[np.uint64]
    agent_names: AgentNames | None = None
    """By the system prompts of the training traces."""

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
        whole: Prefixes | None = None,
        grown: tuple[Projected, Mapping[str, TreeEnsemble] | None] | None = None,
        start: Start | None = None,
        trained_on: NDArray[np.uint64] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Fit on `train`; `validation` (other tasks) decides early stopping and mixture weights.

        Args:
            train, validation: prefixes over one vocabulary, with states from `source`, which is stored for serving.
            whole: both parts together with states from `source` fitted on both; None joins the two.
            grown: results of `project`, and optionally of `grow`, for exactly these prefixes.
            start: what to train further, over the vocabulary of the prefixes.
            trained_on: keys of the tasks of both parts.
        """
        report = progress or (lambda _, __: None)
        self.vocabulary, self.horizon = train.vocabulary, train.horizon
        self.source = source or StateSource("none")
        self.trained_on = np.unique(trained_on) if trained_on is not None else np.zeros(0, np.uint64)
        from presage.predictors.next_agent.learning import learn, project  # torch learns; it does not forecast

        projected, trees = grown or (project(train, validation, self.config, self.seed, start), None)
        parts, stopping = learn(
            projected,
            self.config,
            self.seed,
            trees=trees,
            start=start,
            progress=lambda share: report("learning", share),
        )
        self.curves = stopping.curves
        both = validation if start is None else join(validation, start.extension.twins(validation))
        shares = self._weigh(parts, both, None if start is None else start.parts.shares)
        if self.config.refit:
            everything = whole if whole is not None else join(train, validation)
            projected = project(everything, None, self.config, self.seed, start)
            parts, _ = learn(
                projected,
                self.config,
                self.seed,
                stopping=stopping,
                start=start,
                progress=lambda share: report("learning again on all", share),
            )
        self._hold(replace(parts, shares=shares))
        return self

    def _weigh(
        self, parts: NextAgentParts, validation: Prefixes, before: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Mixture weights float32 [PATTERNS, 2, 3, K], from forecasts of each component alone on held-out prefixes.

        A pattern without held-out steps keeps the weights `before`, or gets those of the one without its lowest bit.
        """
        self._hold(parts)
        usual = [weight * (name in self.config.mixture) for name, weight in zip(COMPONENTS, PRIOR_WEIGHTS, strict=True)]
        shares = np.empty_like(parts.shares)
        renamed = validation.with_unknown_names(np.random.default_rng(self.seed))
        for pattern in range(PATTERNS):
            bare = renamed if pattern & 8 else validation
            bare = bare if pattern & 1 else bare.without_tokens()
            bare = bare if pattern & 2 else bare.with_states({})
            bare = bare if pattern & 4 else bare.without_answers()
            patterns = self._patterns(bare)
            alone = []
            if pattern == 0 or any((by_row == pattern).any() for by_row in patterns):
                for component in range(len(COMPONENTS)):
                    alone_shares = np.zeros_like(parts.shares)
                    alone_shares[:, :, component] = 1.0
                    alone.append(self._run(bare, with_shares(self._engine, alone_shares, 0)))
            for moment, by_row in enumerate(patterns):
                rows = by_row == pattern
                if rows.any() or pattern == 0:
                    components = [p[moment][rows] for p in alone]
                    prior = usual if before is None else np.maximum(before[pattern, moment], _LEAST_SHARE)
                    shares[pattern, moment] = fit_weights(components, bare.outcomes[rows], prior)
                else:
                    same = shares[pattern & (pattern - 1), moment]
                    shares[pattern, moment] = same if before is None else before[pattern, moment]
        return shares

    def _patterns(self, prefixes: Prefixes) -> list[NDArray[np.int64]]:
        """The pattern of inputs of each step (`parts.PATTERNS`) at each moment, int64 [n] each."""
        inputs = unrolled(prefixes, project_all(prefixes, self.parts.projections))
        unknown = 8 * (prefixes.agent == self.vocabulary.unknown)
        return [
            np.array([1, 2, 4]) @ known(row, moment, *self.parts.widths) + unknown for moment, row in enumerate(inputs)
        ]

    def _hold(self, parts: NextAgentParts) -> None:
        self.parts = parts
        self._engine = build_engine(
            parts.network,
            parts.trees,
            parts.ngram.table,
            parts.shares,
            parts.evidence,
            self.config.min_evidence,
            len(self.vocabulary.tools),
            parts.widths,
        )
        size = inputs_size(len(self.vocabulary.agents), len(self.vocabulary.tools), *parts.widths)
        self._type_at = sizes_at(np.empty(size, np.float32), *parts.widths) - 1
        self._weights = {moment: (p.weights(), p.bias) for moment, p in parts.projections.items()}
        self._columns = {moment: (columns_of(weights), bias) for moment, (weights, bias) in self._weights.items()}

    # --- forecasting ---

    @property
    def names(self) -> NameMapping:
        """How names of workflow types and agents are folded before they are looked up."""
        return self.vocabulary.names

    @property
    def reads(self) -> Sources:
        """The optional inputs that its forecasts use."""
        sources: Sources = frozenset({TOKENS})
        if self.source.kind != "none":
            sources |= {TEXT if self.source.reads_text else STATES}
        return sources | {ANSWERS} if self.vocabulary.tools else sources

    def observed(self, prefixes: Prefixes, sources: Sources) -> Prefixes:
        """The prefixes without the inputs of all other sources."""
        seen = prefixes if TOKENS in sources else prefixes.without_tokens()
        seen = seen if ANSWERS in sources else seen.without_answers()
        return seen if self.reads & {TEXT, STATES} <= sources else seen.with_states({})

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1] at this moment of every step."""
        return self.predict_both(prefixes)[moment]

    def predict_both(self, prefixes: Prefixes) -> dict[Moment, NDArray[np.float32]]:
        """Both moments in one pass."""
        return dict(zip(MOMENTS, self._run(prefixes, self._engine), strict=True))

    def _run(self, prefixes: Prefixes, engine: Engine) -> NDArray[np.float32]:
        """Forecasts of both moments, float32 [2, n, K, V+1]."""
        projected = project_all(prefixes, self.parts.projections)
        out = np.empty((2, prefixes.steps, self.horizon, self.vocabulary.outcomes), np.float32)
        forecast_trace(
            prefixes.offsets,
            prefixes.workflow_type,
            prefixes.agent,
            prefixes.sizes,
            prefixes.called,
            *with_presence(prefixes, projected, PREFILL),
            *with_presence(prefixes, projected, COMPLETION),
            engine,
            out,
        )
        return out

    def open(self, workflow_type: str) -> Workflow:
        """The state of a new workflow of this type."""
        widths = self.parts.widths
        width = inputs_size(len(self.vocabulary.agents), len(self.vocabulary.tools), *widths) + sums_size(*widths)
        workflow = np.empty(width + self.parts.network.prefix_size, np.float32)
        opened(workflow, self.vocabulary.workflow_type(workflow_type), self._engine)
        return workflow

    def project(self, moment: Moment, state: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """The projection of a raw state float32 [d], float32 [p] or [c]; empty if there is none."""
        if state is None or moment not in self._columns:
            return _NOTHING
        columns, bias = self._columns[moment]
        out = np.empty(len(bias), np.float32)
        project_state(state, columns, bias, out)
        return out

    def projection(self, moment: Moment) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """W float32 [d, p] and b [p], for workers that project; None: no states."""
        return self._weights.get(moment)

    def prefilled(
        self,
        workflow: Workflow,
        agent: int,
        tokens: float,
        state: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> int:
        """A step begins; see `kernels.prefilled`."""
        return prefilled(workflow, agent, tokens, state, self._engine, out)

    def completed(
        self,
        workflow: Workflow,
        tokens: float,
        state: NDArray[np.float32],
        out: NDArray[np.float32],
        called: Sequence[str] | None = None,
    ) -> int:
        """The step's output is complete; `called` are the tools that it calls; see `kernels.completed`."""
        return completed(workflow, tokens, state, tools_of(called, self.vocabulary.tools), self._engine, out)

    def standing(self, workflow: Workflow, evidence: int) -> Source:
        """What the latest forecast of a workflow with so much evidence counts as: a type that training never saw may be
        another application whose agents have the same names."""
        sure = evidence >= self.config.min_evidence and workflow[self._type_at] < len(self.vocabulary.workflow_types)
        return "champion" if sure else "back-off"

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> Forecast:
        """Forecast one workflow after the given steps.

        The steps are in order, keyed by column names of traces; `workflow_type` and `agent` are required. The forecast
        is made at the completion of the last step if it has any output, else at its prefill. An unknown agent with a
        known `system_prompt` is the agent with this prompt. Raises InputError for no step, steps of different
        workflows, an invalid agent, or a state of another width.
        """
        steps = check_steps(steps)
        workflow = self.open(steps[0]["workflow_type"])
        out = np.empty((self.horizon, self.vocabulary.outcomes), np.float32)
        moment: Moment = PREFILL
        evidence = 0
        new: tuple[str, ...] | None = () if self.vocabulary.numbers(steps[0]["workflow_type"]) else None
        for step in steps:
            tokens = log_tokens(step, "input")
            state = self.project(PREFILL, self.source.of_step(step, PREFILL))
            agent, new = self.vocabulary.call(self._known_as(step), new)
            evidence = self.prefilled(workflow, agent, tokens, state, out)
            moment = PREFILL
            if has_output(step):
                tokens = log_tokens(step, "output")
                state = self.project(COMPLETION, self.source.of_step(step, COMPLETION))
                evidence = self.completed(workflow, tokens, state, out, step.get(TOOLS_CALLED))
                moment = COMPLETION
        return Forecast(
            source=self.standing(workflow, evidence),
            evidence=evidence,
            moment=moment,
            agents=[dict(zip(self.vocabulary.called_by(new), row[:-1].tolist(), strict=True)) for row in out],
            end=out[:, -1].tolist(),
        )

    def _known_as(self, step: Mapping[str, Any]) -> str:
        """The name of a step's agent; of one with an unknown name, that of the agent with its system prompt."""
        sent, prompt = str(step["agent"]), step.get("system_prompt")
        if self.vocabulary.knows_agent(sent) or self.agent_names is None or not isinstance(prompt, str) or not prompt:
            return sent
        recalled = self.agent_names.find_reworded(masked_prompt(prompt, {}).fingerprint())
        return recognised_as((step["workflow_type"], sent), recalled and recalled[0], (self.vocabulary,)) or sent

    # --- keeping ---

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Write an artefact folder."""
        write_artefact(
            Path(folder),
            kind=KIND,
            config={
                "predictor": asdict(self.config),
                "vocabulary": self.vocabulary.to_dict(),
                "horizon": self.horizon,
                "seed": self.seed,
                "states": self.source.to_config(),
            },
            tensors={
                **self.parts.to_tensors(),
                **nested({"training": {"tasks": self.trained_on}, "states": self.source.to_tensors()}),
            },
            training_data=training_data or {},
            files=as_files(self.agent_names),
        )

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load an artefact folder; raises ArtefactError unless it is a valid artefact of this kind."""
        artefact = read_artefact(Path(folder), kind=KIND)
        config, tensors = artefact.config, artefact.tensors
        with rebuilding(folder, KIND):
            predictor = cls(NextAgentConfig.from_dict(config["predictor"]), config["seed"])
            predictor.vocabulary = Vocabulary.from_dict(config["vocabulary"])
            predictor.horizon = config["horizon"]
            predictor.source = StateSource.from_artefact(config["states"], under(tensors, "states/"))
            parts = NextAgentParts.from_tensors(tensors, predictor.vocabulary, predictor.horizon)
            for moment, projection in parts.projections.items():
                if predictor.source.sizes.get(moment, projection.state_size) != projection.state_size:
                    raise ValueError(
                        f"a projection of {projection.state_size} numbers at {moment} does not match the states"
                    )
            predictor.trained_on = tensors["training/tasks"].astype(np.uint64)
            predictor._hold(parts)
        predictor.agent_names = from_files(artefact.files, folder)
        return predictor


_NOTHING: Final = np.empty(0, np.float32)


PRIOR_STRENGTH: Final = 50.0
"""Penalty on the squared distance to the prior weights, nats."""


def fit_weights(
    components: Sequence[NDArray[np.float32]], outcomes: NDArray[np.int32], prior: ArrayLike
) -> NDArray[np.float32]:
    """Weights float32 [M, K], none negative, of M components (each float32 [n, K, V+1]) on labels int32 [n, K].

    The logarithmic pool p ∝ Π_m p_m^w_m (Genest and Zidek 1986), fitted for each horizon by multinomial logistic
    regression with one coefficient a component. The linear mixture Σ_m w_m p_m of calibrated parts is underconfident
    (Ranjan and Gneiting 2010).

    `prior` are the weights without labels, M, or M at each horizon; a component whose prior is 0 is left out.
    """
    from scipy.optimize import minimize  # late: serving needs it never, and it takes a fifth of a second

    weights = np.empty((len(components), outcomes.shape[1]), np.float32)
    given = np.broadcast_to(np.asarray(prior, float).reshape(len(weights), -1), weights.shape)
    for k in range(outcomes.shape[1]):
        start = given[:, k]
        bounds = [(0.0, None if weight > 0 else 0.0) for weight in start]
        rows = np.flatnonzero((outcomes[:, k] >= 0) & (outcomes[:, k] < components[0].shape[2]))
        logarithms = np.stack([np.log(np.maximum(p[rows, k].astype(float), FLOOR)) for p in components])
        labels = (np.arange(len(rows)), outcomes[rows, k])

        def loss(w: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            p = softmax(np.tensordot(w, logarithms, 1))  # noqa: B023  (called within this turn of the loop)
            value = -np.log(np.maximum(p[labels], FLOOR)).sum()  # noqa: B023
            expected = (p * logarithms).sum(axis=(1, 2))  # noqa: B023
            gradient = expected - logarithms[:, *labels].sum(axis=1)  # noqa: B023
            away = w - start  # noqa: B023
            return float(value + PRIOR_STRENGTH * away @ away / 2), gradient + PRIOR_STRENGTH * away

        fitted = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
        weights[:, k] = fitted.x
    return weights
