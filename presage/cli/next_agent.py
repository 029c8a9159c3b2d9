"""`train-predictor next-agent`, and how its forecasts look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.kinds import KindCommand
from presage.cli.output import table
from presage.cli.training import TrainingJob, carry_out, training_command
from presage.errors import ConfigurationError
from presage.progress import Progress
from presage.registry.connect import open_existing
from presage.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.next_agent.predictor import NextAgentPredictor
    from presage.training.next_agent.evaluate import Evaluation
    from presage.training.next_agent.train import OldModel
    from presage.training.training import Training

_LIKELIEST: Final = 3

_BASELINES: Final = Annotated[
    str,
    typer.Option(
        help="Baselines, separated by commas: default (n-grams, trees, the published predictor), none, names (a wrong "
        "one lists them), or module:name for a baseline of your own.",
        metavar="NAMES",
    ),
]
_REPORT: Final = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Folder for the full report: adds the learning curve and an ablation of the parts, which take further "
        "trainings.",
    ),
]


@training_command("next-agent", baselines=_BASELINES, report_folder=_REPORT)
def next_agent(
    job: TrainingJob,
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A next-agent predictor to train further on newer traces: models:/NAME@ALIAS, models:/NAME/VERSION or "
            "a folder. It keeps what it knows of old agents and needs few traces of what is new. "
            "Settings, horizon and states stay.",
        ),
    ] = None,
    old_test: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --start-from: traces from before, which the model was not trained on; repeat for more. Shows "
            "what the new model has forgotten.",
        ),
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Number of steps to forecast. Default: 3, or that of --start-from.", min=1)
    ] = None,
    states: Annotated[
        options.States | None,
        typer.Option(
            help="Semantic states: captured (hidden states), text, none, or auto (the default): the one that forecasts "
            "best on validation tasks, or the simplest of equally good ones."
        ),
    ] = None,
    text_encoder: Annotated[
        str | None,
        typer.Option(
            help="For --states text: sketch (seconds; the default), or a folder or hub name of a transformer."
        ),
    ] = None,
) -> None:
    """Train the next-agent predictor, compare it with baselines, and register it."""
    from dataclasses import replace

    from presage.predictors.next_agent.parts import NextAgentConfig
    from presage.training.baselines import choose
    from presage.training.configuration import read_configuration
    from presage.training.next_agent.train import LIMITS, train

    configuration = read_configuration(NextAgentConfig, job.config, job.settings or (), LIMITS)
    wanted = choose(job.baselines)
    if start_from is None and old_test:
        raise ConfigurationError("--old-test judges what a model of --start-from keeps: give that model, or use --test")
    if (
        start_from is not None
        and (job.config, job.settings or None, states, text_encoder, job.report_folder) != (None,) * 5
    ):
        raise ConfigurationError(
            "--start-from keeps the settings and states of the model: omit --config, --set, --states and "
            "--text-encoder, and --report, which trains anew (--out has a report too)"
        )

    origin = None if start_from is None else _origin(start_from, horizon, job.tracking_uri)

    def fit(table: pa.Table, test_table: pa.Table | None, report: Progress) -> Training[NextAgentPredictor, Evaluation]:
        if origin is not None:
            from presage.training.next_agent.continual import train_further

            older = options.read(old_test, job.skip_bad, job.output, report) if old_test else None
            return train_further(
                table,
                test_table,
                replace(origin, test=older),
                seed=job.seed,
                baselines=wanted,
                name=job.name,
                progress=report,
            )
        how = horizon or 3, job.seed, states or "auto", text_encoder or "sketch"
        training = train(
            table,
            test_table,
            configuration,
            horizon=how[0],
            seed=job.seed,
            states=how[2],
            text_encoder=how[3],
            baselines=wanted,
            name=job.name,
            progress=report,
        )
        if job.report_folder is not None:
            from presage.training.next_agent.study import Recipe, further_evidence

            recipe = Recipe(configuration, *how)
            training.metrics.update(further_evidence(training, table, test_table, recipe, report))
        return training

    carry_out(job, fit)


def _origin(reference: str, horizon: int | None, tracking_uri: str | None) -> OldModel:
    """The predictor of --start-from; raises ConfigurationError if it forecasts another number of steps."""
    from presage.kinds.next_agent import old_model

    old = old_model(reference, lambda: open_existing(tracking_uri))
    if horizon not in (None, old.predictor.horizon):
        raise ConfigurationError(
            f"--horizon {horizon}: {reference} forecasts {counted(old.predictor.horizon, 'step')}; omit --horizon, "
            "or omit --start-from to train anew"
        )
    return old


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    lines = []
    for k, horizon in enumerate(data["horizons"], start=1):
        likeliest = sorted(horizon["agents"].items(), key=lambda item: -item[1])[:_LIKELIEST]
        lines.append([str(k), *(f"{agent} {p:.3f}" for agent, p in likeliest), f"{horizon['end']:.3f}"])
    shown = min(_LIKELIEST, len(data["horizons"][0]["agents"]))
    head = ["steps ahead", *(f"likeliest {n + 1}" for n in range(shown)), "END"]
    last = rows[-1]
    when = "Before" if data["moment"] == "prefill" else "After"
    title = f"{when} the output of step {len(rows) - 1} ({last['agent']}) of {last['workflow_id']}: probabilities"
    meaning = "\nEach row assumes that the workflow has not ended before it. END: the workflow ends there."
    source = f"source {data['source']}, {data['evidence']} training steps of this agent in this workflow type"
    return [table(title, head, lines), meaning, f"{called}; {source}"]


NEXT_AGENT = KindCommand(
    advice=(
        "more workflows (presage study learning-curve shows whether they help), agent names that distinguish roles, "
        "recorded texts or hidden states (compare --states none), or --set network.epochs and boosting.rounds"
    ),
    train=next_agent,
    examples="train-predictor next-agent traces/\n\n"
    "train-predictor next-agent traces/ --test later/ --out runs/a --no-register\n\n"
    "train-predictor next-agent traces/ --report evidence/        # a page to read in two minutes\n\n"
    "train-predictor next-agent newer/ --start-from models:/next-agent@champion --old-test kept/\n\n"
    "train-predictor next-agent traces/ --set network.epochs=10 --set boosting.rounds=0\n\n"
    "An unknown --set key lists all keys.",
    forecast=_forecast,
)
