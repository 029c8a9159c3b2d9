"""`presage study`: learning curves, the value of states and horizons, and shifts to new benchmark families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options, outcomes
from presage.cli.output import Output, report_lines
from presage.cli.output import table as text_table
from presage.errors import ConfigurationError
from presage.report.blocks import interval, number

if TYPE_CHECKING:
    from presage.training.next_agent.study import Recipe

app = typer.Typer(
    no_args_is_help=True,
    help="Study your traces: effect of more traces, value of hidden states, useful forecast horizon.",
)

_States = Annotated[
    options.States,
    typer.Option(help="Semantic states: captured, text, none, or auto: the first of these in the traces."),
]
_Baselines = Annotated[
    str, typer.Option(help="Baselines to train as well: names or sets, as for train-predictor.", metavar="NAMES")
]
_BASELINES = "markov-3,boosted-trees,published-graphsage"
_QUICK = 100


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
    baselines: _Baselines = _BASELINES,
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

    study = partial(
        study_learning_curve,
        sizes=_sizes(sizes),
        largest=_QUICK if quick else LARGEST,
        draws=1 if quick else draws,
        baselines=choose(baselines),
    )
    _study(study, traces, test, _recipe(settings, horizon, seed, states), report_folder, force, skip_bad, as_json)


@app.command(
    "states",
    epilog="Example:  presage study states traces/ --report states/\n\n"
    "One training for each source of states that the traces have, and one without any.",
)
def states_(
    traces: options.Traces,
    test: options.Test = None,
    horizon: options.Horizon = 3,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Accuracy with hidden states, with texts and with neither, and after against before the output."""
    from presage.training.next_agent.study import study_states

    _study(
        study_states, traces, test, _recipe(settings, horizon, seed, "auto"), report_folder, force, skip_bad, as_json
    )


@app.command(epilog="Example:  presage study horizon traces/ --horizon 6 --report horizon/")
def horizon(
    traces: options.Traces,
    test: options.Test = None,
    horizon: options.Horizon = 6,
    baselines: _Baselines = _BASELINES,
    states: _States = "auto",
    settings: options.Settings = None,
    seed: options.Seed = 0,
    report_folder: options.ReportFolder = None,
    force: options.Force = False,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Accuracy at each step ahead, beside baselines: how far is a forecast worth acting on?"""
    from presage.training.baselines import choose
    from presage.training.next_agent.study import study_horizon

    study = partial(study_horizon, baselines=choose(baselines))
    _study(study, traces, test, _recipe(settings, horizon, seed, states), report_folder, force, skip_bad, as_json)


@app.command(
    "shift",
    epilog="Examples:\n\n"
    "presage study shift outcomes.jsonl.gz\n\n"
    "presage study shift outcomes/ --family '^[^_]+' --set rank=4 --json\n\n"
    "Trains once for each family left out, and once more.",
)
def shift(
    data: outcomes.Files,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Regular expression for the family in a task's name: its first group, or the whole match. Default: "
            "the name up to the first / (or the whole name, if that leaves one family), without _train or _test.",
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="Maximum number of families to leave out, largest first.", min=2)] = 12,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Accuracy of a router on benchmark families left out of its training."""
    from presage.predictors.router.predictor import RouterConfig
    from presage.training.configuration import read_configuration
    from presage.training.router.shift import study_shift
    from presage.training.router.train import LIMITS

    configuration = read_configuration(RouterConfig, None, settings or (), LIMITS)
    out = Output(as_json)
    with out.working() as report:
        judged = outcomes.read(data, skip_bad, out, report).outcomes
        found = study_shift(judged, configuration, pattern=family, most=most, seed=seed, share=report)
    out.result(found, *(_shift_tables(found) if not as_json else ()))


def _study(
    study: Callable[..., dict[str, Any]],
    traces: list[Path],
    test: list[Path] | None,
    recipe: Recipe,
    report_folder: Path | None,
    force: bool,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Run a study(training table, test table or None, recipe, share=progress): read, compute, write and print."""
    from presage.report.files import check_folder, write_metrics, write_report

    if report_folder is not None:
        check_folder(report_folder, "--report", force)
    out = Output(as_json)
    with out.working() as report:
        table = options.read(traces, skip_bad, out, report)
        test_table = options.read(test, skip_bad, out, report) if test else None
        found = study(table, test_table, recipe, share=report)
        if report_folder is not None:
            report("writing the report", None)
            write_metrics(report_folder, found)
            write_report(report_folder, found)
    place = {"report": str(report_folder) if report_folder is not None else None}
    out.result({**found, **place}, *(_render(found, report_folder) if not as_json else ()))


def _render(found: dict[str, Any], report_folder: Path | None) -> list[Any]:
    from presage.report.study import document

    lines = list(report_lines(document(found)))
    return lines if report_folder is None else [*lines, f"\nthe page: {report_folder}/report.html"]


def _recipe(settings: list[str] | None, horizon: int, seed: int, states: options.States) -> Recipe:
    from presage.predictors.next_agent.parts import NextAgentConfig
    from presage.training.configuration import read_configuration
    from presage.training.next_agent.study import Recipe
    from presage.training.next_agent.train import LIMITS

    configuration = read_configuration(NextAgentConfig, None, settings or (), LIMITS)
    return Recipe(configuration, horizon, seed, states)


def _sizes(sizes: str | None) -> list[int] | None:
    if sizes is None:
        return None
    parts = [part.strip() for part in sizes.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigurationError(f"--sizes {sizes}: wanted whole numbers separated by commas, such as 50,200,800")
    return [int(part) for part in parts]


def _shift_tables(found: dict[str, Any]) -> list[Any]:
    """Figures of each family left out, and of all families pooled, left out and known."""
    routers = list(found["pooled"]["left_out"]["routers"])
    baselines = routers[1:]
    head = ["family left out", "prompts", "macro mAP", "ECE", "picked accuracy", "flagged"]
    rows = [[name, *_shift_row(of["left_out"], routers)] for name, of in found["families"].items()]
    pooled = found["pooled"]
    rows.append(["all of them", *_shift_row(pooled["left_out"], routers)])
    rows.append(["with all families known", *_shift_row(pooled["known"], routers)])
    shown: list[Any] = [
        text_table(f"\nThe router on families left out of training: router / {' / '.join(baselines)}", head, rows),
        "\nflagged: share of prompts that the router marks as having too little evidence",
    ]
    intervals = []
    for called, key in (("left out", "left_out"), ("known", "known")):
        for name, of in pooled[key]["differences"].items():
            intervals.append(
                [f"{called}, router minus {name}", *(interval(by["difference"], by["ci95"]) for by in of.values())]
            )
    first = pooled["left_out"]["differences"][baselines[0]]
    shown.append(text_table("\nDifferences over all families, with paired 95 % intervals", ["", *first], intervals))
    behind = pooled["left_out"]["behind"]
    shown += [f"\nLOST: {one['baseline']} is better {one['at']} by {one['by']:.4f} on new families" for one in behind]
    return shown


def _shift_row(of: dict[str, Any] | None, routers: list[str]) -> list[str]:
    if of is None:
        return ["0", "–", "–", "–", "–"]
    figures = [
        " / ".join(number(of["routers"][name][key]) for name in routers)
        for key in ("macro_map", "ece", "picked_accuracy")
    ]
    return [str(of["prompts"]), *figures, number(of["flagged"], 2)]
