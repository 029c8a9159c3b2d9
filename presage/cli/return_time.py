"""`train-predictor return-time`, and the description of this kind for the other commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.kinds import TRACES, Kind, Loaded, lazily
from presage.cli.output import Output, Progress, table
from presage.cli.remaining_length import length_counts, quantiles_of
from presage.cli.training import TrainingJob, carry_out
from presage.report.blocks import number

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.evidence import LengthEvidence
    from presage.registry.gates import Gate
    from presage.training.return_time.train import ReturnTraining


def return_time(
    traces: options.Traces,
    estimator: Annotated[
        str | None,
        typer.Option(help="forest, boosted, ridge, or auto: lowest loss on the selection part."),
    ] = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Quantiles to predict, ascending. Default: 0.05,0.1,0.25,0.5,0.75,0.9,0.95,0.99."),
    ] = None,
    test: options.Test = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    baselines: options.Baselines = "default",
    out_folder: options.OutFolder = None,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    name: Annotated[str, typer.Option(help="Name of the registered model.")] = "return-time",
    register: options.Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the predictor of return times, compare it with baselines, and register it.

    The return time of a step is the time from its end to the workflow's next request. The traces need started_at and
    ended_at on their LLM steps; finish_reason and tool calls make forecasts better.
    """
    from dataclasses import replace

    from presage.predictors.return_time.baselines import RETURN_BASELINES
    from presage.predictors.return_time.predictor import ReturnTimeConfig
    from presage.training.baselines import choose_names
    from presage.training.configuration import read_configuration
    from presage.training.length.train import LIMITS
    from presage.training.return_time.train import train_return_times

    own: dict[str, Any] = {"estimator": estimator} if estimator is not None else {}
    own |= {"quantiles": quantiles_of(quantiles)} if quantiles is not None else {}
    configuration = replace(read_configuration(ReturnTimeConfig, config, settings or (), LIMITS), **own)
    configuration.check()
    wanted = choose_names(baselines, RETURN_BASELINES)

    def fit(table: pa.Table, test_table: pa.Table | None, report: Progress) -> ReturnTraining:
        return train_return_times(
            table, test_table, configuration, seed=seed, baselines=wanted, name=name, progress=report
        )

    carry_out(
        TrainingJob(
            RETURN_TIME, traces, test or [], skip_bad, out_folder, report_folder, force, name, register, tracking_uri
        ),
        fit,
        Output(as_json),
    )


def _gates(candidate: Loaded, champion: Loaded | None, table: pa.Table, seed: int, profile: str) -> list[Gate]:
    from presage.registry.evidence import LengthBudget, judge_lengths

    mine = _evidence(candidate, table, seed, profile)
    its = None if champion is None else _evidence(champion, table, seed, profile)
    return judge_lengths(mine, its, LengthBudget(unit="log seconds"), seed=seed)


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> LengthEvidence:
    from presage.predictors.common.artefact import FORMAT_VERSION
    from presage.registry.evidence import LengthEvidence
    from presage.registry.gates import Interface
    from presage.training.return_time.train import FLOOR, evaluate_return_times

    predictor = loaded.predictor
    judged = evaluate_return_times(predictor, table, seed, profile=profile)
    evaluation = judged.evaluation
    return LengthEvidence(
        loaded.artefact_evidence(judged.latency_us, Interface({"format version": FORMAT_VERSION})),
        tuple(predictor.quantiles),
        judged.workflows,
        evaluation.type_of,
        length_counts(evaluation.figures),
        floor=length_counts(evaluation.baselines[FLOOR]),
    )


def seconds(value: float) -> str:
    """A duration as people read it: 12 s, 3 min, 1.5 h, 2 d."""
    for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min")):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    last = next(row for row in reversed(rows) if row.get("kind", "llm") == "llm")
    lines = [
        [f"{100 * float(q):g} % of such steps: within", seconds(value), _beyond(data, value)]
        for q, value in data["quantiles"].items()
    ]
    title = f"Next request of {last['workflow_id']} after step {last.get('step', rows.index(last))} ({last['agent']})"
    source = f"source {data['source']}, {data['evidence']} training steps behind it"
    if not data["calibrated"]:
        source += "; NOT CALIBRATED: the upper quantiles have no coverage guarantee here"
    end = f"It has ended with this step with probability {number(data['end'])}; the times assume that it has not."
    hint = data["retention"]
    kept = f"Caches should keep it for {seconds(hint['ttl_s'])} (target {100 * hint['target']:g} %)."
    shown = table(title, ["", "time", ""], lines, left=(0, 2))
    return [shown, f"\n{end}", kept, f"{called}; {source}"]


def _beyond(data: dict[str, Any], value: float) -> str:
    """What is to be said of a quantile that no calibration step reached."""
    if not data["beyond_calibration"] or round(value, 3) <= round(data["largest_s"], 3):
        return ""
    return f"extrapolated: no calibration step took longer than {seconds(data['largest_s'])}"


def _headline(figures: Mapping[str, float]) -> dict[str, str]:
    return {
        "pinball 0.5": number(figures.get("pinball_0.5")),
        "within 0.9": number(figures.get("coverage_0.9")),
        "END Brier": number(figures.get("end_brier")),
    }


RETURN_TIME = Kind(
    name="return-time",
    legend="in an engine, pinball loss of the median in log seconds, share within the .9 quantile, Brier score of END",
    advice="more workflows, finish_reason and tool calls in the traces, or --estimator forest or boosted",
    data=TRACES,
    train=return_time,
    examples="train-predictor return-time traces/\n\ntrain-predictor return-time traces/ --test later/ --out model/",
    evaluate=lazily("presage.training.return_time.train:evaluate_return_times"),
    gates=_gates,
    forecast=_forecast,
    headline=_headline,
    tags=lambda metrics: {},
    types=lambda predictor: predictor.encoder.course.vocabulary.workflow_types,
)
