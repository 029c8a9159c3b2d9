"""The command `train-predictor`: one subcommand a kind of predictor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.boundary import Boundary
from presage.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.package import RegisteredVersion
    from presage.training.next_agent import Training

app = typer.Typer(
    cls=Boundary,
    name="train-predictor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def group() -> None:
    """Train a predictor on traces, compare it with baselines on held-out workflows, and register it."""


@app.command(
    "next-agent",
    epilog="Examples:\n\n"
    "train-predictor next-agent traces/\n\n"
    "train-predictor next-agent traces/ --test later/ --out runs/a --no-register\n\n"
    "train-predictor next-agent traces/ --report evidence/        # a page to read in two minutes\n\n"
    "train-predictor next-agent traces/ --set network.epochs=10 --set boosting.rounds=0\n\n"
    "A wrong --set names every key there is.",
)
def next_agent(
    traces: options.Traces,
    test: Annotated[
        list[Path] | None,
        typer.Option(
            help="Traces to judge on; repeat for more. Without: a fifth of the tasks, later ones if times permit."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; goes before the file.")
    ] = None,
    horizon: Annotated[int, typer.Option(help="How many steps ahead.", min=1)] = 3,
    seed: options.Seed = 0,
    states: Annotated[
        str,
        typer.Option(help="Semantic states: captured (hidden states), text, none, or auto: the first there is."),
    ] = "auto",
    text_encoder: Annotated[
        str, typer.Option(help="For --states text: sketch (seconds), or a folder or hub name of a transformer.")
    ] = "sketch",
    baselines: Annotated[
        str,
        typer.Option(
            help="What to compare with, separated by commas: default (counting, trees, the published predictor), all "
            "(every family of the paper as well, minutes), none, or names; a wrong name lists them.",
            metavar="NAMES",
        ),
    ] = "default",
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for artefact, metrics.json and report.", show_default=False),
    ] = None,
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for the full report: adds the learning curve and the figures without states, which take "
            "further trainings.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "next-agent",
    register: Annotated[
        bool, typer.Option("--register/--no-register", help="Register the version with MLflow.")
    ] = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the next-agent predictor, judge it beside every baseline, and register it."""
    from presage.predictors.parts import NextAgentConfig
    from presage.registry.package import check_name
    from presage.training.baselines import choose
    from presage.training.configuration import read_configuration
    from presage.training.next_agent import LIMITS, SHARED_TASKS, train
    from presage.training.report.files import check_folder, write_metrics, write_report

    out = Output(as_json)
    with out.working() as report, tempfile.TemporaryDirectory() as scratch:
        # Everything that can be refused is refused before minutes are spent on training.
        configuration = read_configuration(NextAgentConfig, config, settings or (), LIMITS)
        wanted = choose(baselines)
        folder = out_folder if out_folder is not None else Path(scratch) / "model"
        _check_folder(folder)
        if report_folder is not None:
            check_folder(report_folder, "--report")
        registry = None
        if register:
            check_name(name)
            report("asking the registry", None)
            registry = options.open_registry(tracking_uri)
        table = options.read(traces, skip_bad, out, report)
        test_table = options.read(test, skip_bad, out, report) if test else None
        training = train(
            table,
            test_table,
            configuration,
            horizon=horizon,
            seed=seed,
            states=options.states(states),
            text_encoder=text_encoder,
            baselines=wanted,
            name=name,
            progress=report,
        )
        if report_folder is not None:
            from presage.training.evidence import further_evidence
            from presage.training.recipe import Recipe

            recipe = Recipe(configuration, horizon, seed, options.states(states), text_encoder)
            training.metrics.update(further_evidence(training, table, test_table, recipe, report))
        report("writing the artefact", None)
        training.save(folder)
        made = None
        if registry is not None:
            report("registering", None)
            made = _register(registry, folder, training, name, table)
            training.metrics["version"] = made.version
            if out_folder is not None:
                training.save(folder)
        if report_folder is not None:
            write_metrics(report_folder, training.metrics)
            write_report(report_folder, training.metrics)
    if shared := training.metrics["data"][SHARED_TASKS]:
        out.note(f"{shared} test workflows run a task that is in the training traces: the figures may be too good")
    places = {
        "folder": str(out_folder) if out_folder is not None else None,
        "registered": made.uri if made is not None else None,
        "report": str(report_folder) if report_folder is not None else None,
    }
    out.result({**training.metrics, **places}, *(_summary(training, places) if not as_json else ()))


def _check_folder(folder: Path) -> None:
    """Whether the artefact will find room there, asked before the training."""
    from presage.errors import OutputError
    from presage.predictors.artefact import CONFIG_FILE
    from presage.training.report.files import check_folder

    check_folder(folder, "--out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise OutputError(f"--out {folder}: holds other files and no artefact: choose a new or an empty folder")


def _register(registry: Any, folder: Path, training: Training, name: str, table: pa.Table) -> RegisteredVersion:
    from presage.registry.package import register
    from presage.training.report.files import report_files

    metrics = training.metrics
    return register(
        registry,
        folder,
        name=name,
        metrics=metrics,
        params={
            "seed": training.predictor.seed,
            "horizon": training.predictor.horizon,
            **{f"data.{key}": value for key, value in training.training_data.items()},
            **dict(_flat(metrics["config"])),
        },
        tags={"presage.states": str(metrics["data"]["states"])},
        input_example=_input_example(table),
        report=report_files(folder),
    )


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in config.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return flat


def _input_example(table: pa.Table) -> list[dict[str, Any]]:
    """The first steps of one workflow as an example of the input: names and numbers, no text, and states of zeros."""
    import pyarrow.compute as pc

    first = table.filter(pc.equal(table["workflow_id"], table["workflow_id"][0])).slice(0, 3)
    kept = ("workflow_type", "step", "agent", "kind", "input_tokens", "output_tokens")
    example = []
    for row in first.select(kept).to_pylist():
        row["workflow_id"] = "example"
        for state in ("prefill_state", "completion_state"):
            if state in table.column_names:
                row[state] = [0.0] * table.schema.field(state).type.list_size
        example.append(row)
    return example


def _summary(training: Training, places: dict[str, str | None]) -> list[Any]:
    from presage.cli.tables import accuracies

    metrics = training.metrics
    lines = [f"{key}: {value}" for key, value in metrics["data"].items()]
    lines.append(
        f"fitted in {metrics['fit_seconds']:.1f} s; one forecast takes {metrics['latency_us']:.1f} µs; "
        f"artefact of {metrics['size_bytes'] / 1e6:.2f} MB"
    )
    if places["folder"]:
        lines.append(f"artefact, metrics.json and report.html: {places['folder']}")
    if places["report"]:
        lines.append(f"the full report: {places['report']}/report.html")
    if places["registered"]:
        lines.append(f"registered as {places['registered']}")
    elif not places["folder"] and not places["report"]:
        lines.append("nothing was kept: --no-register, no --out and no --report")
    return [*accuracies(metrics, metrics["model"]), "", *lines]


def main() -> None:
    """Entry point."""
    app()
