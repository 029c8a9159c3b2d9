"""The Python API: estimators that train, forecast, evaluate and register, with scikit-learn's conventions.

    import presage

    train, test = presage.split(presage.read_traces("traces/"))
    model = presage.NextAgent(horizon=3).fit(train)
    report = model.evaluate(test)               # beside baselines; report.plot(), report.to_frame()
    model.register("next-agent", report)
    presage.promote("next-agent", 1, later)     # moves the alias champion if every gate passes
    presage.load("models:/next-agent@champion").forecast(steps)

The commands call the same functions. Traces are given as a path, a pandas data frame with one row a step, or `Traces`;
outcomes as a path or `Outcomes`. Forecasts of traces are data frames with one row a step, indexed by workflow type,
workflow id and step.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, overload

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from presage.datasets.outcomes import Outcomes
from presage.datasets.outcomes.files import OutcomesRead, read_outcomes
from presage.datasets.outcomes.split import choose_models, split_outcomes
from presage.datasets.read import Traces, read_traces
from presage.datasets.split import Split
from presage.datasets.split import split as split_table
from presage.errors import ConfigurationError
from presage.features.moment import COMPLETION, MOMENTS, Moment
from presage.features.prefixes import prefixes_of
from presage.features.rows import LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.features.states import SKETCH, States
from presage.kinds.loaded import kind_of
from presage.kinds.loaded import load as load_reference
from presage.kinds.registration import register_training
from presage.predictor_kinds import Kind
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import ProfileConfig
from presage.predictors.quantiles.choice import QuantileConfig
from presage.predictors.quantiles.predictor import QuantilePredictor
from presage.predictors.return_time.predictor import ReturnTimeConfig
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.progress import Progress, note, progress_lines, say_when_compiling
from presage.registry.connect import open_existing, open_registry
from presage.registry.package import headline_of_all
from presage.training.baselines import choose, choose_names
from presage.training.training import Training
from presage.wording import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from presage.registry.gates import Verdict
    from presage.registry.package import RegisteredVersion
    from presage.training.next_agent.train import OldModel
    from presage.training.quantile_trainings import Family

TraceLike: TypeAlias = str | Path | pd.DataFrame | Traces
OutcomeLike: TypeAlias = str | Path | Outcomes | OutcomesRead
END = "END"
"""The class for the end of a workflow."""


@overload
def split(
    data: Outcomes | OutcomesRead, test_size: float = 0.2, *, random_state: int = 0
) -> tuple[Outcomes, Outcomes]: ...
@overload
def split(data: TraceLike, test_size: float = 0.2, *, random_state: int = 0) -> tuple[Traces, Traces]: ...
def split(
    data: TraceLike | Outcomes | OutcomesRead, test_size: float = 0.2, *, random_state: int = 0
) -> tuple[Any, Any]:
    """Split traces or outcomes into a training and a test set, so that no task or prompt is in both.

    The test set of traces is the latest tasks if times are recorded, else a random choice.

    Raises:
        ConfigurationError: `test_size` is not between 0 and 1.
        TraceError: there are fewer than two tasks.
    """
    if isinstance(data, Outcomes | OutcomesRead):
        return split_outcomes(_outcomes(data), test_size, random_state)
    parts = split_table(_table(data), test_size, random_state)
    return Traces(parts.train, {}), Traces(parts.test, {})


def load(reference: str | Path, *, tracking_uri: str | None = None) -> Estimator:
    """Load `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder as a fitted estimator.

    Args:
        reference: of the version or folder.
        tracking_uri: of the registry; default: `MLFLOW_TRACKING_URI`, or `mlflow.db` in the working directory.

    Raises:
        RegistryError: no such model, version or alias.
        ArtefactError: not an artefact.
    """
    loaded = load_reference(str(reference), lambda: open_existing(tracking_uri))
    return _ESTIMATORS[loaded.kind.name].of(loaded.predictor)


def promote(
    name: str,
    version: int,
    data: TraceLike | OutcomeLike,
    *,
    alias: str = "champion",
    profile: Literal["engine", "gateway", "full"] | None = None,
    types: Collection[str] | None = None,
    dry_run: bool = False,
    tracking_uri: str | None = None,
) -> Verdict:
    """Judge a version on held-out data, and move the alias to it if every gate passes; as `presage promote`.

    Args:
        name: registered model.
        version: to judge, against the holder of the alias.
        data: traces, or outcomes for a router. What a version was trained on is left out.
        alias: to move.
        profile: the inputs that serving has; None: those of an engine. A router reads prompts and has none.
        types: the workflow types to judge on; others of the champion may be missing, with a warning. None: all.
        dry_run: change nothing.
        tracking_uri: of the registry.

    Returns:
        The verdict: `promoted`, and the gates with their figures.

    Raises:
        RegistryError: no such model or version, or the registry refuses the change.
        TraceError: every workflow or prompt was trained on.
        ConfigurationError: `profile` or `types` for a router.
        InputError: no held-out workflow has one of the `types`.
    """

    from presage.kinds.promotion import judge_version

    def held(kind: Kind, judged: list[Any]) -> tuple[Any, int]:
        held_out: tuple[Any, int] = kind.held_out(_read(data, kind), *judged)
        return held_out

    verdict, _ = judge_version(
        open_existing(tracking_uri),
        name,
        version,
        held,
        alias=alias,
        target=profile,
        types=types,
        dry_run=dry_run,
        note=note,
        report=lambda _, __: None,
    )
    return verdict


class Report:
    """Figures of a predictor beside baselines, on workflows or prompts that it was not trained on.

    Attributes:
        metrics: the content of `metrics.json`.
        training: the predictor with the description of its training data; None for a loaded predictor.
    """

    def __init__(self, metrics: dict[str, Any], training: Training[Any, Any] | None = None) -> None:
        self.metrics, self.training = metrics, training

    def to_frame(self) -> pd.DataFrame:
        """A row for Presage and each baseline, a column a figure, named as MLflow's metrics."""
        return pd.DataFrame.from_dict(headline_of_all(self.metrics), orient="index")

    def plot(self) -> Figure:
        """The headline figures of Presage and each baseline, with 95 % intervals, as a matplotlib figure."""
        from presage.report.figures import side_by_side

        return side_by_side(self.metrics)

    def save(self, folder: str | Path) -> None:
        """Write `metrics.json`, `report.html`, `report.md` and their pictures."""
        from presage.report.files import write_metrics, write_report

        write_metrics(Path(folder), self.metrics)
        write_report(Path(folder), self.metrics)

    def __repr__(self) -> str:
        return f"{self._lead()}\n\n{self._kind.legend}:\n{self._headlines().to_string()}"

    def _repr_html_(self) -> str:
        return f"<p>{self._lead()}</p><p>{self._kind.legend}:</p>{self._headlines().to_html()}"

    @property
    def _kind(self) -> Kind:
        return kind_of(self.metrics["kind"])

    def _headlines(self) -> pd.DataFrame:
        """The most important figures of Presage and each baseline, as `presage models` shows them."""
        rows = {name: self._kind.headline(figures) for name, figures in headline_of_all(self.metrics).items()}
        return pd.DataFrame.from_dict(rows, orient="index")

    def _lead(self) -> str:
        return str(self._kind.report(self.metrics).lead)


class Estimator(BaseEstimator):  # type: ignore[misc]  # untyped in scikit-learn
    """Common to the estimators. Create one of its subclasses, or a fitted one with `presage.load`.

    Attributes:
        predictor_: the fitted predictor, as engines load it.
    """

    kind: ClassVar[str]
    random_state: int
    verbose: bool
    predictor_: Any
    _fitted: Any = None  # the fit with its training data; a loaded estimator has none
    _table: pa.Table

    @classmethod
    def of(cls, predictor: Any) -> Self:
        """A fitted estimator around a loaded predictor."""
        return cls(config=predictor.config, random_state=predictor.seed)._hold(predictor)

    @abstractmethod
    def _hold(self, predictor: Any) -> Self:
        """Keep a fitted predictor, and what it tells of itself."""

    @abstractmethod
    def _assess(self, data: Any, baselines: str) -> Training[Any, Any]:
        """Evaluate beside baselines that are fitted on the same training data."""

    def _trained_on(self) -> Any:
        """The training data."""
        return self._table

    @contextmanager
    def _reporting(self) -> Iterator[Progress | None]:
        """The progress callback of a fit; None unless it is to be printed."""
        if not self.verbose:
            yield None
            return
        say_when_compiling()
        with progress_lines() as report:
            yield report

    def forecast(self, asked: Any) -> Any:
        """The forecast after the steps of one workflow, in order: mappings with the columns of a trace.

        A router takes a prompt instead.
        """
        check_is_fitted(self, "predictor_")
        return self.predictor_.forecast(asked)

    def evaluate(self, data: Any, *, baselines: str = "default") -> Report:
        """Evaluate on data that the predictor was not trained on, beside baselines.

        Args:
            data: traces, or outcomes for a router. What the predictor was trained on is left out.
            baselines: names separated by commas, "default" or "none". They are fitted on the training data; a loaded
                estimator has none, so it is compared with its own n-gram, constant or base rates instead.

        Raises:
            ConfigurationError: an unknown baseline.
            TraceError: the predictor was trained on all of the data, or knows none of its agents or models.
        """
        check_is_fitted(self, "predictor_")
        kind = kind_of(self.kind)
        unseen, _ = kind.held_out(_read(data, kind), self.predictor_)
        if self._fitted is not None:
            training = self._assess(unseen, baselines)
            return Report(training.metrics, training)
        judged = kind.evaluate(self.predictor_, unseen, self.random_state)
        about = {"model": None, "version": None, "latency_us": judged.latency_us}
        return Report({**judged.evaluation.to_dict(), **about})

    def save(self, folder: str | Path, report: Report | None = None) -> None:
        """Write the artefact folder that engines, commands and `presage.load` read; with the files of a report."""
        check_is_fitted(self, "predictor_")
        if report is not None and report.training is not None:
            report.training.save(Path(folder))
        else:
            self.predictor_.save(Path(folder))

    def register(self, name: str, report: Report, *, tracking_uri: str | None = None) -> RegisteredVersion:
        """Register in MLflow as a new version of a model, with the figures of a report.

        Args:
            name: registered model; created if new.
            report: from `evaluate` of this estimator.
            tracking_uri: of the registry; default: `MLFLOW_TRACKING_URI`, or `mlflow.db` in the working directory.

        Raises:
            ConfigurationError: the report is of another estimator, or of one that was loaded.
            RegistryError: the registry refused.
        """
        check_is_fitted(self, "predictor_")
        if report.training is None or report.training.predictor is not self.predictor_:
            raise ConfigurationError(
                "the report is not of this fitted estimator: give what its evaluate() returned. A loaded estimator is "
                "registered already."
            )
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            report.metrics["model"] = name
            report.training.save(folder)
            registry, kind = open_registry(tracking_uri), kind_of(self.kind)
            return register_training(registry, kind, report.training, folder, name, self._trained_on())


class NextAgent(Estimator):
    """Forecasts which agents the next K steps of a workflow call, and whether it ends.

    Args:
        horizon: K, steps to forecast.
        states: source of semantic states: "captured", "text", "none", or "auto", the one that forecasts best.
        text_encoder: for states from texts: "sketch", or a folder or hub name of a transformer.
        config: settings of network, trees and mixture.
        start_from: a predictor to train further on newer traces: `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an
            artefact folder. It keeps what it knows; its horizon, settings and states stay. `evaluate` shows it as the
            baseline "old model".
        random_state: seed of the validation split and of every fit.
        verbose: print what `fit` is doing, and how long it will take.

    Attributes:
        classes_: the agents, and END.
    """

    kind = "next-agent"
    _origin: OldModel | None = None

    def __init__(
        self,
        horizon: int = 3,
        *,
        states: States = "auto",
        text_encoder: str = SKETCH,
        config: NextAgentConfig | None = None,
        start_from: str | Path | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        self.horizon, self.states, self.text_encoder, self.config = horizon, states, text_encoder, config
        self.start_from, self.random_state, self.verbose = start_from, random_state, verbose

    @classmethod
    def of(cls, predictor: NextAgentPredictor) -> Self:
        """A fitted estimator around a loaded predictor."""
        made = cls(predictor.horizon, config=predictor.config, random_state=predictor.seed)
        return made._hold(predictor)

    def fit(self, traces: TraceLike, y: None = None) -> Self:
        """Learn from traces.

        Raises:
            TraceError: too few workflows, or fewer than two agents.
            ConfigurationError: settings or states are given beside `start_from`, or another horizon than it has.
        """
        from presage.training.next_agent.train import fit_predictor

        self._table, self._origin = served_steps(_table(traces)), None
        with self._reporting() as progress:
            if self.start_from is not None:
                return self._fit_further(str(self.start_from), progress)
            self._fitted = fit_predictor(
                self._table,
                self.config,
                horizon=self.horizon,
                seed=self.random_state,
                states=self.states,
                text_encoder=self.text_encoder,
                progress=progress,
            )
        return self._hold(self._fitted.predictor)

    def _fit_further(self, reference: str, progress: Progress | None) -> Self:
        from presage.kinds.next_agent import old_model
        from presage.training.next_agent.continual import continue_predictor

        if (self.states, self.text_encoder, self.config) != ("auto", SKETCH, None):
            raise ConfigurationError(
                "start_from keeps the settings and states of that model: omit config, states and text_encoder, or omit "
                "start_from to train anew"
            )
        origin = old_model(reference, lambda: open_existing(None))
        if self.horizon != origin.predictor.horizon:
            raise ConfigurationError(
                f"horizon is {self.horizon}; {reference} forecasts {counted(origin.predictor.horizon, 'step')}: give "
                "that horizon, or omit start_from to train anew"
            )
        self._origin = origin
        self._fitted = continue_predictor(origin.predictor, self._table, seed=self.random_state, progress=progress)
        return self._hold(self._fitted.predictor)

    def predict_proba(self, traces: TraceLike, *, steps_ahead: int = 1, moment: Moment = COMPLETION) -> pd.DataFrame:
        """Probabilities of `classes_` at every LLM step, given that the workflow has not ended before.

        Args:
            traces: any; agents that training did not see are forecast by the rest of the workflow.
            steps_ahead: 1 to `horizon`.
            moment: "completion", after the output of the step, or "prefill", before it.

        Raises:
            ConfigurationError: another `steps_ahead` or `moment`.
        """
        check_is_fitted(self, "predictor_")
        predictor: NextAgentPredictor = self.predictor_
        if not 1 <= steps_ahead <= predictor.horizon:
            raise ConfigurationError(f"steps_ahead is {steps_ahead}; the model forecasts 1 to {predictor.horizon}")
        if moment not in MOMENTS:
            raise ConfigurationError(f"moment is {moment!r}; expected one of {', '.join(MOMENTS)}")
        table, index = _served(traces)
        prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon)
        probabilities = predictor.predict(prefixes.with_states(predictor.source.states(table)), moment)
        return pd.DataFrame(probabilities[:, steps_ahead - 1], index=index, columns=list(self.classes_))

    def predict(self, traces: TraceLike, *, steps_ahead: int = 1, moment: Moment = COMPLETION) -> pd.Series:
        """The most likely of `classes_` at every LLM step; arguments as in `predict_proba`."""
        return self.predict_proba(traces, steps_ahead=steps_ahead, moment=moment).idxmax(axis=1)

    def _hold(self, predictor: NextAgentPredictor) -> Self:
        self.predictor_, self.classes_ = predictor, (*predictor.vocabulary.agents, END)
        return self

    def _assess(self, data: pa.Table, baselines: str) -> Training[Any, Any]:
        from presage.training.next_agent.train import assess

        parts = Split(self._table, data, _SEPARATE)
        return assess(self._fitted, parts, baselines=choose(baselines), origin=self._origin)


class _Quantiles(Estimator):
    """Common to the estimators of quantiles, which a `Family` (`module:name`) trains and evaluates."""

    _family: ClassVar[str]

    def _rows(self, traces: TraceLike) -> tuple[LabelledRows, pd.MultiIndex]:
        check_is_fitted(self, "predictor_")
        table, index = _served(traces)
        return self.predictor_.rows(table), index

    def _hold(self, predictor: QuantilePredictor) -> Self:
        self.predictor_, self.quantiles_ = predictor, tuple(predictor.quantiles)
        return self

    def _assess(self, data: pa.Table, baselines: str) -> Training[Any, Any]:
        family: Family[Any, Any] = resolve_name(self._family)
        chosen = choose_names(baselines, family.names(self.predictor_.target))
        return family.assess(self._fitted, Split(self._table, data, _SEPARATE), baselines=chosen)


class RemainingLength(_Quantiles):
    """Forecasts quantiles of the output tokens that a workflow still has to produce, this step included.

    Args:
        target: "remaining" tokens of this and all later steps, or those of this "step" alone.
        texts: "auto" uses texts if held-out tasks show that they help; "text" and "none" force the choice.
        config: estimator, quantiles and calibration.
        random_state: seed of the selection split and of every fit.
        verbose: print what `fit` is doing, and how long it will take.

    Attributes:
        quantiles_: the levels.
    """

    kind = "remaining-length"
    _family = "presage.training.length.train:LENGTHS"

    def __init__(
        self,
        *,
        target: Target = "remaining",
        texts: Literal["auto", "text", "none"] = "auto",
        config: QuantileConfig | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        self.target, self.texts, self.config, self.random_state = target, texts, config, random_state
        self.verbose = verbose

    @classmethod
    def of(cls, predictor: RemainingLengthPredictor) -> Self:
        """A fitted estimator around a loaded predictor."""
        return cls(target=predictor.target, config=predictor.config, random_state=predictor.seed)._hold(predictor)

    def fit(self, traces: TraceLike, y: None = None) -> Self:
        """Learn from traces; raises TraceError for too few workflows, or without known output tokens."""
        from presage.training.length.train import fit_lengths

        self._table = served_steps(_table(traces))
        with self._reporting() as progress:
            self._fitted = fit_lengths(
                self._table,
                self.config,
                target=self.target,
                seed=self.random_state,
                texts=self.texts,
                progress=progress,
            )
        return self._hold(self._fitted.predictor)

    def predict(self, traces: TraceLike) -> pd.DataFrame:
        """Tokens at every LLM step before its output: a column a quantile."""
        rows, index = self._rows(traces)
        return pd.DataFrame(self.predictor_.predict(rows), index=index, columns=self.quantiles_)

    def beyond_calibration(self, traces: TraceLike) -> pd.DataFrame:
        """Whether each quantile of `predict`, in whole tokens, is above all that calibrated it, and so extrapolated.

        Raises ConfigurationError for a model that was trained before this was kept.
        """
        rows, index = self._rows(traces)
        if (largest := self.predictor_.estimator.largest_of(rows)) is None:
            raise ConfigurationError("the model does not tell the largest value that calibrated it; train it again")
        beyond = self.predictor_.predict(rows).round() > largest[:, None]
        return pd.DataFrame(beyond, index=index, columns=self.quantiles_)


class ContextGrowth(RemainingLength):
    """Forecasts quantiles of the tokens by which the context of a workflow will exceed a step's prompt.

    Args:
        target: "final-context", the largest of this and all later steps, which engines need, or "next-context".
        texts, config, random_state, verbose: as of `RemainingLength`.
    """

    kind = "context-growth"

    def __init__(
        self,
        *,
        target: Target = "final-context",
        texts: Literal["auto", "text", "none"] = "none",
        config: QuantileConfig | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        super().__init__(target=target, texts=texts, config=config, random_state=random_state, verbose=verbose)


class ReturnTime(_Quantiles):
    """Forecasts when the next request of a workflow arrives after a step, and whether there is one.

    Args:
        config: estimator, quantiles and calibration.
        random_state: seed of the selection split and of every fit.
        verbose: print what `fit` is doing, and how long it will take.

    Attributes:
        quantiles_: the levels.
    """

    kind = "return-time"
    _family = "presage.training.return_time.train:RETURNS"

    def __init__(self, *, config: ReturnTimeConfig | None = None, random_state: int = 0, verbose: bool = False) -> None:
        self.config, self.random_state, self.verbose = config, random_state, verbose

    def fit(self, traces: TraceLike, y: None = None) -> Self:
        """Learn from traces; raises TraceError for too few workflows, or without start and end times."""
        from presage.training.return_time.train import fit_return_times

        self._table = served_steps(_table(traces))
        with self._reporting() as progress:
            self._fitted = fit_return_times(self._table, self.config, seed=self.random_state, progress=progress)
        return self._hold(self._fitted.predictor)

    def predict(self, traces: TraceLike) -> pd.DataFrame:
        """Seconds from the end of every LLM step, given that the workflow returns: a column a quantile."""
        rows, index = self._rows(traces)
        return pd.DataFrame(self.predictor_.predict(rows) / 1e3, index=index, columns=self.quantiles_)

    def predict_end(self, traces: TraceLike) -> pd.Series:
        """The probability at every LLM step that the workflow has ended with it."""
        rows, index = self._rows(traces)
        return pd.Series(self.predictor_.predict_end(rows), index=index)


class Profile(Estimator):
    """Describes what an application does: its expression, automaton and agents, one profile a workflow type.

    Args:
        config: of the automaton and the expression.
        random_state: seed of the bootstrap.
        verbose: print what `fit` is doing, and how long it will take.

    Attributes:
        profiles_: by workflow type; `profiles_[name].text` is the expression.
    """

    kind = "profile"

    def __init__(self, *, config: ProfileConfig | None = None, random_state: int = 0, verbose: bool = False) -> None:
        self.config, self.random_state, self.verbose = config, random_state, verbose

    def fit(self, traces: TraceLike, y: None = None) -> Self:
        """Learn from traces."""
        from presage.training.profile.train import fit_profiles

        self._table = served_steps(_table(traces))
        with self._reporting() as progress:
            self._fitted = fit_profiles(self._table, self.config, seed=self.random_state, progress=progress)
        return self._hold(self._fitted.predictor)

    def _hold(self, predictor: ProfilePredictor) -> Self:
        self.predictor_, self.profiles_ = predictor, predictor.profiles
        return self

    def _assess(self, data: pa.Table, baselines: str) -> Training[Any, Any]:
        from presage.training.profile.evaluate import PROFILE_BASELINES
        from presage.training.profile.train import assess_profiles

        chosen = choose_names(baselines, PROFILE_BASELINES)
        return assess_profiles(self._fitted, Split(self._table, data, _SEPARATE), baselines=chosen)


class Router(Estimator):
    """Forecasts which models solve a prompt. The transformer head is fine-tuned by `train-predictor router`.

    Args:
        config: of the linear head, or of a sentence encoder beside it.
        random_state: seed of the calibration split.
        verbose: print what `fit` is doing, and how long it will take.

    Attributes:
        classes_: the models.
    """

    kind = "router"

    def __init__(self, *, config: RouterConfig | None = None, random_state: int = 0, verbose: bool = False) -> None:
        self.config, self.random_state, self.verbose = config, random_state, verbose

    def fit(self, outcomes: OutcomeLike, y: None = None) -> Self:
        """Learn from outcomes; raises TraceError for too few models, labels or prompts."""
        from presage.training.router.train import fit_router

        chosen = choose_models(_outcomes(outcomes))
        with self._reporting() as progress:
            self._fitted = fit_router(chosen, self.config, seed=self.random_state, progress=progress)
        return self._hold(self._fitted.predictor)

    def predict_proba(self, prompts: Sequence[str]) -> pd.DataFrame:
        """The probability that each model solves each prompt: a row a prompt, a column a model."""
        check_is_fitted(self, "predictor_")
        return pd.DataFrame(self.predictor_.probabilities(list(prompts)), columns=list(self.classes_))

    def predict(self, prompts: Sequence[str]) -> pd.Series:
        """The model to use for each prompt if only success counts."""
        picked = self.predictor_.picks(self.predict_proba(prompts).to_numpy())
        return pd.Series([self.classes_[model] for model in picked])

    def _hold(self, predictor: RouterPredictor) -> Self:
        self.predictor_, self.classes_ = predictor, predictor.models
        return self

    def _assess(self, data: Outcomes, baselines: str) -> Training[Any, Any]:
        from presage.training.router.baselines import BASELINES
        from presage.training.router.train import assess_router

        held = data.of_models(self.predictor_.models)
        return assess_router(self._fitted, held, baselines=choose_names(baselines, BASELINES))

    def _trained_on(self) -> Outcomes:
        outcomes: Outcomes = self._fitted.chosen.outcomes
        return outcomes


_ESTIMATORS: dict[str, type[Estimator]] = {
    estimator.kind: estimator for estimator in (NextAgent, RemainingLength, ContextGrowth, ReturnTime, Profile, Router)
}
_SEPARATE = "separate test traces"


def _read(data: Any, kind: Kind) -> Any:
    return _outcomes(data) if kind.reads_prompts else _table(data)


def _table(traces: TraceLike) -> pa.Table:
    return traces.table if isinstance(traces, Traces) else read_traces(traces).table


def _outcomes(outcomes: OutcomeLike) -> Outcomes:
    if isinstance(outcomes, Outcomes):
        return outcomes
    return (outcomes if isinstance(outcomes, OutcomesRead) else read_outcomes(outcomes)).outcomes


def _served(traces: TraceLike) -> tuple[pa.Table, pd.MultiIndex]:
    """The LLM steps of traces, and their names and numbers in the traces."""
    table, columns = _table(traces), ("workflow_type", "workflow_id", "step")
    steps = served_steps(table)
    llm = table.filter(pc.equal(table["kind"], "llm"))
    return steps, pd.MultiIndex.from_arrays([llm[column].to_pylist() for column in columns], names=columns)
