"""`train-predictor remaining-length`, and the description of this kind for the other commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from presage.cli import options
from presage.cli.kinds import TRACES, Kind, Loaded, lazily
from presage.cli.output import Output, Progress, table
from presage.cli.training import TrainingJob, carry_out
from presage.errors import ConfigurationError
from presage.features.input_profiles import ALL_INPUTS
from presage.report.blocks import number

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.features.rows import Target
    from presage.registry.evidence import LengthCounts, LengthEvidence
    from presage.registry.gates import Gate
    from presage.training.length.texts import Texts
    from presage.training.length.train import LengthTraining
    from presage.training.quantiles import QuantileFigures


def remaining_length(
    traces: options.Traces,
    target: Annotated[
        Literal["remaining", "step"],
        typer.Option(help="remaining: output tokens of this and all later steps; step: of this step alone."),
    ] = "remaining",
    estimator: Annotated[
        str | None,
        typer.Option(help="forest, boosted, ridge, or auto: lowest loss on the selection part."),
    ] = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Quantiles to predict, ascending. Default: 0.5,0.9,0.99."),
    ] = None,
    states: Annotated[
        Literal["auto", "text", "none"],
        typer.Option(help="auto: prompts and answers are read where held-out tasks show that it helps; text; or none."),
    ] = "auto",
    test: options.Test = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    baselines: options.Baselines = "default",
    out_folder: options.OutFolder = None,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    name: Annotated[str, typer.Option(help="Name of the registered model.")] = "remaining-length",
    register: options.Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the predictor of remaining output tokens, compare it with baselines, and register it."""
    job = TrainingJob(
        REMAINING_LENGTH, traces, test or [], skip_bad, out_folder, report_folder, force, name, register, tracking_uri
    )
    train_target(job, target, estimator, quantiles, config, settings, seed, states, baselines, Output(as_json))


def train_target(
    job: TrainingJob,
    target: Target,
    estimator: str | None,
    quantiles: str | None,
    config: Path | None,
    settings: list[str] | None,
    seed: int,
    texts: Texts,
    baselines: str,
    out: Output,
) -> None:
    """Carry out the training of a predictor with this label; arguments as the commands take them."""
    from dataclasses import replace

    from presage.predictor_kinds import KINDS
    from presage.training.baselines import choose_names
    from presage.training.configuration import read_configuration
    from presage.training.length.train import LIMITS, baselines_of, train_lengths

    own: dict[str, Any] = {"estimator": estimator} if estimator is not None else {}
    own |= {"quantiles": quantiles_of(quantiles)} if quantiles is not None else {}
    kind = resolve_name(KINDS[job.kind.name].predictor).settings
    configuration = replace(read_configuration(kind, config, settings or (), LIMITS), **own)
    configuration.check()
    wanted = choose_names(baselines, baselines_of(target))

    def fit(table: pa.Table, test_table: pa.Table | None, report: Progress) -> LengthTraining:
        return train_lengths(
            table,
            test_table,
            configuration,
            target=target,
            seed=seed,
            texts=texts,
            baselines=wanted,
            name=job.name,
            progress=report,
        )

    carry_out(job, fit, out)


def _gates(candidate: Loaded, champion: Loaded | None, table: pa.Table, seed: int, profile: str) -> list[Gate]:
    from presage.registry.evidence import LengthBudget, judge_lengths

    mine = _evidence(candidate, table, seed, profile)
    its = None if champion is None else _evidence(champion, table, seed, profile)
    return judge_lengths(mine, its, LengthBudget(), seed=seed)


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    return forecast_table("Output tokens", data, called, rows)


def forecast_table(what: str, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    """The quantiles of what is forecast at the last of these steps, and where they come from."""
    last = rows[-1]
    lines = [
        [f"{100 * float(q):g} % of such steps: at most", f"{tokens:,.0f}", _beyond(data, tokens)]
        for q, tokens in data["quantiles"].items()
    ]
    title = f"{what} at step {len(rows) - 1} ({last['agent']}) of {last['workflow_id']}"
    source = f"source {data['source']}, {data['evidence']} training steps behind it"
    if not data["calibrated"]:
        source += "; NOT CALIBRATED: the upper quantiles have no coverage guarantee here"
    return [table(title, ["", "tokens", ""], lines, left=(0, 2)), f"\n{called}; {source}"]


def _beyond(data: dict[str, Any], tokens: float) -> str:
    """What is to be said of a quantile that no calibration step reached."""
    if not data["beyond_calibration"] or round(tokens) <= data["largest"]:
        return ""
    return f"extrapolated: no calibration step had more than {data['largest']:,.0f}"


def _headline(figures: Mapping[str, float]) -> dict[str, str]:
    losses = sorted((float(name.removeprefix("pinball_")), name) for name in figures if name.startswith("pinball_"))
    return {
        "tau distance": " ".join(number(figures.get(f"tau_distance_{scope}")) for scope in ("all", "arrival"))
        + (f" (all inputs: {number(every)})" if (every := figures.get(f"{ALL_INPUTS}tau_distance_all")) else ""),
        "pinball": ", ".join(f"{q:g}: {number(figures[name], 1)}" for q, name in losses) or "–",
    }


def quantiles_of(text: str) -> tuple[float, ...]:
    """Numbers separated by commas; the configuration checks that they are quantiles."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise ConfigurationError(
            f"--quantiles {text}: wanted ascending numbers between 0 and 1, such as 0.5,0.9,0.99"
        ) from error


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> LengthEvidence:
    from presage.predictors.common.artefact import FORMAT_VERSION
    from presage.registry.evidence import LengthEvidence
    from presage.registry.gates import Interface
    from presage.training.length.train import FLOOR, evaluate_lengths

    predictor = loaded.predictor
    judged = evaluate_lengths(predictor, table, seed, profile=profile)
    evaluation = judged.evaluation
    fixed = {"target": evaluation.target, "format version": FORMAT_VERSION}
    return LengthEvidence(
        loaded.artefact_evidence(judged.latency_us, Interface(fixed)),
        tuple(predictor.quantiles),
        judged.workflows,
        evaluation.type_of,
        length_counts(evaluation.figures),
        floor=length_counts(evaluation.baselines[FLOOR]),
    )


def length_counts(of: QuantileFigures) -> LengthCounts:
    """What the gates judge."""
    from presage.registry.evidence import LengthCounts

    return LengthCounts(of.wrong, of.pairs, of.loss, of.covered, of.positions)


REMAINING_LENGTH = Kind(
    name="remaining-length",
    legend="tau distance in an engine, of all steps and at arrival (0 best, .5 none), pinball loss in tokens",
    advice=(
        "more workflows, output_tokens on every LLM step, --estimator forest or boosted, recorded prompts, or --states "
        "none if texts merely identify workflows"
    ),
    data=TRACES,
    train=remaining_length,
    examples="train-predictor remaining-length traces/\n\n"
    "train-predictor remaining-length traces/ --target step --quantiles 0.5,0.99 --name step-length",
    evaluate=lazily("presage.training.length.train:evaluate_lengths"),
    gates=_gates,
    forecast=_forecast,
    headline=_headline,
    tags=lambda metrics: {
        "presage.target": str(metrics["target"]),
        "presage.states": str(metrics["data"]["texts"]),
    },
    types=lambda predictor: predictor.encoder.vocabulary.workflow_types,
)
