"""`presage study`: would more traces help, and what is left of a forecast when the application changes?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output, report_lines
from presage.errors import ConfigurationError
from presage.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.training.next_agent.study import Recipe

app = typer.Typer(no_args_is_help=True, help="Study your traces: more of them, or a change of the application.")

_QUICK = 100

_Baselines = Annotated[
    str, typer.Option(help="Baselines to train as well: names or sets, as for train-predictor.", metavar="NAMES")
]
_States = Annotated[
    options.States,
    typer.Option(help="Semantic states: captured, text, none, or auto: the first of these in the traces."),
]


@app.command(
    "learning-curve",
    epilog="Examples:\n\n"
    "presage study learning-curve traces/ --report curve/\n\n"
    "presage study learning-curve traces/ --sizes 100,400,1600 --draws 1\n\n"
    "Training sets consist of whole tasks, so they may hold more workflows than requested. Each training costs as much "
    "as train-predictor on that many workflows.",
)
def learning_curve(
    traces: options.Traces,
    test: options.Test = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of training workflows, separated by commas. Default: 25, 50, 100, … up to 800."),
    ] = None,
    draws: Annotated[int, typer.Option(help="How often a small training set is drawn.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Up to 100 workflows, one draw: a first look.")] = False,
    baselines: _Baselines = "markov-3,boosted-trees,published-graphsage",
    horizon: options.Horizon = 3,
    states: _States = "auto",
    settings: options.Settings = None,
    seed: options.Seed = 0,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Accuracy against the number of training workflows, beside baselines: would more traces help?"""
    from presage.training.baselines import choose
    from presage.training.next_agent.study import LARGEST, study_learning_curve

    counts, wanted, recipe = _sizes(sizes), choose(baselines), _recipe(settings, horizon, seed, states)

    def studied(data: pa.Table, test_data: pa.Table | None, report: Progress) -> dict[str, Any]:
        return study_learning_curve(
            data,
            test_data,
            recipe,
            sizes=counts,
            largest=_QUICK if quick else LARGEST,
            draws=1 if quick else draws,
            baselines=wanted,
            share=report,
        )

    _study(studied, traces, test, skip_bad, report_folder, force, as_json)


@app.command(
    "change",
    epilog="Example:\n\n"
    "presage study change traces/ --report change/\n\n"
    "It trains on all workflows, without those of one agent, and for lengths and return times if the traces have any.",
)
def change(
    traces: options.Traces,
    test: options.Test = None,
    baselines: _Baselines = "markov-3,boosted-trees",
    horizon: options.Horizon = 3,
    states: _States = "auto",
    settings: options.Settings = None,
    seed: options.Seed = 0,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Accuracy after a release that renames, rewords, splits or adds agents, or renames or merges workflow types."""
    from presage.training.baselines import choose
    from presage.training.next_agent.change import study_change

    wanted, recipe = choose(baselines), _recipe(settings, horizon, seed, states)

    def studied(data: pa.Table, test_data: pa.Table | None, report: Progress) -> dict[str, Any]:
        return study_change(data, test_data, recipe, baselines=wanted, share=report)

    _study(studied, traces, test, skip_bad, report_folder, force, as_json)


def _recipe(settings: list[str] | None, horizon: int, seed: int, states: options.States) -> Recipe:
    from presage.predictors.next_agent.parts import NextAgentConfig
    from presage.training.configuration import read_configuration
    from presage.training.next_agent.study import Recipe
    from presage.training.next_agent.train import LIMITS

    return Recipe(read_configuration(NextAgentConfig, None, settings or (), LIMITS), horizon, seed, states)


def _study(
    studied: Callable[[pa.Table, pa.Table | None, Progress], dict[str, Any]],
    traces: list[Path],
    test: list[Path] | None,
    skip_bad: bool,
    report_folder: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Reads the traces, runs a study, prints it and writes its report."""
    from presage.report.files import check_folder, write_metrics, write_report
    from presage.report.study import document

    if report_folder is not None:
        check_folder(report_folder, "--report", force)
    out = Output(as_json)
    with out.working() as report:
        data = options.read(traces, skip_bad, out, report)
        test_data = options.read(test, skip_bad, out, report) if test else None
        figures = studied(data, test_data, report)
        if report_folder is not None:
            report("writing the report", None)
            write_metrics(report_folder, figures)
            write_report(report_folder, figures)
    lines = [] if as_json else list(report_lines(document(figures)))
    if report_folder is not None:
        lines.append(f"\nthe page: {report_folder}/report.html")
    out.result({**figures, "report": str(report_folder) if report_folder is not None else None}, *lines)


def _sizes(sizes: str | None) -> list[int] | None:
    if sizes is None:
        return None
    parts = [part.strip() for part in sizes.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigurationError(f"--sizes {sizes}: wanted whole numbers separated by commas, such as 50,200,800")
    return [int(part) for part in parts]
