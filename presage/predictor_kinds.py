"""The kinds of predictor, each described once: what artefacts, registry, report, commands and Python API look up."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, Final, Literal

ServedKind = Literal["next-agent", "remaining-length", "context-growth", "return-time"]
"""The kinds whose forecasts an engine serves and counts; a profile stands in for the first two."""


@dataclass(frozen=True)
class Lazy:
    """The function `module:name`, imported by its first call: whoever looks up a kind imports none of its parts."""

    name: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the function returns."""
        return resolve_name(self.name)(*arguments, **named)


def _no_types(_: Any) -> Collection[str]:
    return ()


@dataclass(frozen=True, eq=False)  # each is itself, so it can be a key
class Kind:
    """One kind of predictor.

    Attributes:
        name: in artefacts, and as a subcommand of `train-predictor`.
        load: artefact folder -> the predictor.
        evaluate: (predictor, data it was not trained on, seed) -> an object with `evaluation` and `latency_us`;
            of some kinds also `profile`, the only input profile to judge under.
        gates: (candidate, champion or None, data, seed, input profile) -> gates.
        report: metrics -> the report page.
        headline: figures of a registered version -> the most important ones, by title.
        legend: explains the figures of `headline`.
        command: its `KindCommand`, as `module:name`: only the commands import it.
        family: the `Family` that trains and judges it, as `module:name`; None unless it forecasts quantiles of steps.
        tags: tags of a version's run, from the metrics of its training.
        types: the workflow types that a predictor knows; none of a router.
        prediction: MLflow's type of `prediction` in the table that MLflow serves.
        reads_prompts: its data are outcomes of prompts instead of traces, and MLflow serves it on a table of prompts.
        held_out: (data, *predictors) -> the part that none of them was trained on, and the number of units left out.
        digest: SHA-256 of the content of data, independent of the files.
        example: the MLflow input example: a few rows of the data, without any text of a user; states are zeros.
        panels: what `Report.plot` draws, by label: a figure of its metrics, and its key there.
        replayed: the option of `presage replay` that names its model; None if no policy uses it.
        counted: how an engine's status counts its forecasts, with a place for their source; None if none serves it.
        trial: tries it for an engine or a gateway: (predictor, texts of a step or none) -> nothing; it raises.
        forecaster: makes the source of its forecasts: (predictor, version, ...); None if others share one.
        in_gateway: a gateway serves it too.
        most_bytes: a larger artefact is not read; far above the promotion gate, a bound for the memory of readers.
    """

    name: str
    load: Callable[..., Any]
    evaluate: Callable[..., Any]
    gates: Callable[..., Any]
    report: Callable[[Mapping[str, Any]], Any]
    headline: Callable[[Mapping[str, float]], Any]
    legend: str
    command: str
    family: str | None = None
    tags: Callable[[Mapping[str, Any]], dict[str, str]] = lambda _: {}
    types: Callable[[Any], Collection[str]] = _no_types
    prediction: str = "string"
    reads_prompts: bool = False
    held_out: Callable[..., Any] = Lazy("presage.training.sets:held_out")
    digest: Callable[[Any], str] = Lazy("presage.datasets.schema:digest")
    example: Callable[[Any], Any] = Lazy("presage.kinds.registration:example_steps")
    panels: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    replayed: str | None = None
    counted: str | None = None
    trial: Callable[[Any, Mapping[str, str]], None] | None = None
    forecaster: Callable[..., Any] | None = None
    in_gateway: bool = False
    most_bytes: int = 256 << 20

    @property
    def unit(self) -> str:
        """What its data consist of: workflows or prompts."""
        return "prompt" if self.reads_prompts else "workflow"


_REMAINING_LENGTH: Final = Kind(
    "remaining-length",
    load=Lazy("presage.predictors.length.predictor:RemainingLengthPredictor.load"),
    evaluate=Lazy("presage.training.length.train:evaluate_lengths"),
    gates=Lazy("presage.kinds.quantiles:gates"),
    report=Lazy("presage.report.lengths:document"),
    headline=Lazy("presage.kinds.headlines:lengths"),
    legend="tau distance in an engine, of all steps and at arrival (0 best, .5 none), pinball loss in tokens",
    command="presage.cli.remaining_length:REMAINING_LENGTH",
    family="presage.training.length.train:LENGTHS",
    tags=lambda metrics: {
        "presage.target": str(metrics["target"]),
        "presage.states": str(metrics["data"]["texts"]),
    },
    types=attrgetter("vocabulary.workflow_types"),
    prediction="double",
    panels={"tau distance (pairs of steps in the wrong order)": ("tau_distance", "all")},
    replayed="lengths",
    counted="forecast of lengths: {}",
    trial=Lazy("presage.serving_hooks.forecasting.trials:try_lengths"),
    in_gateway=True,
)
_ALL: Final = (
    Kind(
        "next-agent",
        load=Lazy("presage.predictors.next_agent.predictor:NextAgentPredictor.load"),
        evaluate=Lazy("presage.training.next_agent.train:evaluate_model"),
        gates=Lazy("presage.kinds.next_agent:gates"),
        report=Lazy("presage.report.next_agent:document"),
        headline=Lazy("presage.kinds.headlines:next_agent"),
        legend="accuracy 1, 2, … steps ahead in an engine",
        command="presage.cli.next_agent:NEXT_AGENT",
        tags=lambda metrics: {"presage.states": str(metrics["data"]["states"])},
        types=attrgetter("vocabulary.workflow_types"),
        replayed="forecasts",
        counted="forecast: {}",
        trial=Lazy("presage.serving_hooks.forecasting.trials:try_next_agent"),
        in_gateway=True,
    ),
    _REMAINING_LENGTH,
    replace(
        _REMAINING_LENGTH,
        name="context-growth",
        load=Lazy("presage.predictors.length.context:ContextGrowthPredictor.load"),
        command="presage.cli.context_growth:CONTEXT_GROWTH",
        family=None,  # that of lengths, with another target
        replayed="contexts",
        counted="forecast of contexts: {}",
        forecaster=Lazy("presage.serving_hooks.forecasting.context_growth:ContextForecaster"),
        in_gateway=False,  # it is for admission
    ),
    Kind(
        "return-time",
        load=Lazy("presage.predictors.return_time.predictor:ReturnTimePredictor.load"),
        evaluate=Lazy("presage.training.return_time.train:evaluate_return_times"),
        gates=Lazy("presage.kinds.quantiles:gates"),
        report=Lazy("presage.report.return_times:document"),
        headline=Lazy("presage.kinds.headlines:returns"),
        legend=(
            "in an engine, pinball loss of the median in log seconds, share within the .9 quantile, Brier score of END"
        ),
        command="presage.cli.return_time:RETURN_TIME",
        family="presage.training.return_time.train:RETURNS",
        types=attrgetter("vocabulary.workflow_types"),
        prediction="double",
        panels={"pinball loss of the median, log seconds": ("pinball", "0.5")},
        replayed="returns",
        counted="forecast of return times: {}",
        trial=Lazy("presage.serving_hooks.forecasting.return_times:try_return_times"),
        forecaster=Lazy("presage.serving_hooks.forecasting.return_times:ReturnTimeForecaster"),
        in_gateway=True,
    ),
    Kind(
        "profile",
        load=Lazy("presage.predictors.profile.predictor:ProfilePredictor.load"),
        evaluate=Lazy("presage.training.profile.train:evaluate_profiles"),
        gates=Lazy("presage.kinds.profile:gates"),
        report=Lazy("presage.report.profile:document"),
        headline=Lazy("presage.kinds.headlines:profile"),
        legend="share of whole workflows that the expression covers, accuracy and recall of two of the next step",
        command="presage.cli.profile:PROFILE",
        tags=lambda metrics: {
            "presage.confident": str(all(of["confident"] for of in metrics["by_workflow_type"].values()))
        },
        types=attrgetter("profiles"),
        replayed="profile",
        panels={"whole workflows covered": ("coverage", None), "accuracy of the next step": ("accuracy", None)},
        trial=Lazy("presage.serving_hooks.forecasting.trials:try_profile"),
        in_gateway=True,
    ),
    Kind(
        "router",
        load=Lazy("presage.predictors.router.predictor:RouterPredictor.load"),
        evaluate=Lazy("presage.training.router.train:evaluate_router"),
        gates=Lazy("presage.kinds.router:gates"),
        report=Lazy("presage.report.router:document"),
        headline=Lazy("presage.kinds.headlines:router"),
        legend=(
            "mean average precision over models, calibration error, accuracy of the picks and of the best single model"
        ),
        command="presage.cli.router:ROUTER",
        tags=lambda metrics: {"presage.head": str(metrics["config"]["head"])},
        reads_prompts=True,
        held_out=Lazy("presage.training.router.evaluate:held_out"),
        digest=Lazy("presage.datasets.outcomes:outcomes_digest"),
        example=lambda _: [{"prompt": "Which of these numbers is prime: 21, 23, 25?"}],  # those of the data are private
        panels={"macro mAP": ("macro_map", None)},
        trial=Lazy("presage.serving_hooks.forecasting.trials:try_router"),
        most_bytes=4 << 30,  # with a transformer
    ),
)
KINDS: Final = {kind.name: kind for kind in _ALL}
"""All kinds of predictor, by the name in artefacts and commands. Whatever depends on the kind is found here."""
