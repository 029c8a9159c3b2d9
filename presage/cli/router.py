"""`train-predictor router`, and how its forecasts look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import outcomes
from presage.cli.kinds import KindCommand
from presage.cli.output import table
from presage.cli.training import TrainingJob, carry_out, training_command
from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.progress import Progress
from presage.registry.connect import open_existing
from presage.report.blocks import number

if TYPE_CHECKING:
    from presage.datasets.outcomes import Outcomes
    from presage.predictors.router.transformer import TransformerScorer
    from presage.training.router.train import FitScorer, RouterTraining

_TRANSFORMER: Final = "Head transformer:"


@training_command("router", traces=outcomes.Files, report_folder=None)
def router(
    job: TrainingJob,
    head: Annotated[
        str | None,
        typer.Option(
            help="linear: terms of the prompt, seconds on a CPU. transformer: an encoder fine-tuned, for a GPU; the "
            "default where --encoder or --start-from is given."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="A hub name or a folder. Head transformer: what is fine-tuned (answerdotai/ModernBERT-large unless "
            "given). Head linear: a sentence encoder to read beside the terms."
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"{_TRANSFORMER} a router to train further; known models keep their heads."),
    ] = None,
    epochs: Annotated[int, typer.Option(help=f"{_TRANSFORMER} passes over the prompts.", min=1)] = 5,
    lr: Annotated[float, typer.Option("--lr", "--learning-rate", help=f"{_TRANSFORMER} learning rate.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help=f"{_TRANSFORMER} prompts per step and device.", min=1)] = 16,
    head_tokens: Annotated[
        int | None, typer.Option(help=f"{_TRANSFORMER} tokens kept of a long prompt's beginning.", min=1)
    ] = None,
    tail_tokens: Annotated[int | None, typer.Option(help=f"{_TRANSFORMER} and of its end.", min=0)] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help=f"{_TRANSFORMER} less memory, more time.")
    ] = False,
    checkpoints: Annotated[
        Path, typer.Option(help=f"{_TRANSFORMER} working folder of the training, deleted at the end.")
    ] = Path("router-checkpoints"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help=f"{_TRANSFORMER} resume from the last checkpoint of an interrupted training."),
    ] = False,
) -> None:
    """Train the router on outcomes, compare it with baselines, and register it."""
    from dataclasses import replace

    from presage.predictors.router.predictor import RouterConfig
    from presage.training.baselines import choose_names
    from presage.training.configuration import read_configuration
    from presage.training.router.baselines import BASELINES
    from presage.training.router.train import LIMITS, train_router

    configuration = read_configuration(RouterConfig, job.config, job.settings or (), LIMITS)
    if head is None and (encoder is not None or start_from is not None):
        head = "transformer"
    if head is not None:
        configuration = replace(configuration, head=head)  # type: ignore[arg-type]  # checked below
    if encoder is not None and configuration.head == "linear":
        configuration = replace(configuration, encoder=encoder)
    configuration.check()
    wanted = choose_names(job.baselines, BASELINES)
    if start_from is not None and (encoder, head_tokens, tail_tokens) != (None, None, None):
        raise ConfigurationError(
            "--start-from keeps the router's encoder and prompt limits: omit --encoder, --head-tokens and --tail-tokens"
        )

    curves: dict[str, list[float | None]] = {}

    def learner(report: Progress) -> FitScorer | None:
        if configuration.head != "transformer":
            return None
        from presage.predictors.router.transformer import DEFAULT_ENCODER, HEAD_TOKENS, TAIL_TOKENS, TransformerScorer
        from presage.training.router.finetune import FinetuneConfig, Labelled, finetune

        trained = None if start_from is None else _scorer_of(start_from, job.tracking_uri)
        how = FinetuneConfig(epochs, lr, batch_size, gradient_checkpointing=gradient_checkpointing, seed=job.seed)
        how.check()

        def learn(learnt: Outcomes, validation: Outcomes) -> TransformerScorer:
            if trained is not None:
                scorer = trained.with_models(learnt.models, job.seed)
            else:
                scorer = TransformerScorer.from_encoder(
                    encoder or DEFAULT_ENCODER,
                    models=learnt.models,
                    head_tokens=HEAD_TOKENS if head_tokens is None else head_tokens,
                    tail_tokens=TAIL_TOKENS if tail_tokens is None else tail_tokens,
                    seed=job.seed,
                )
            train, held_out = (Labelled(part.prompts, part.correct) for part in (learnt, validation))
            done = finetune(scorer, train, held_out, how, checkpoints=checkpoints, resume=resume, progress=report)
            if not done.main_process:  # under `accelerate launch` one process saves and registers
                raise typer.Exit
            curves.update({f"validation_{key}": [epoch[key] for epoch in done.history] for key in ("loss", "macro_ap")})
            return done.scorer

        return learn

    def fit(learnt: Outcomes, test_set: Outcomes | None, report: Progress) -> RouterTraining:
        training = train_router(
            learnt,
            test_set,
            configuration,
            seed=job.seed,
            baselines=wanted,
            name=job.name,
            fit_scorer=learner(report),
            progress=report,
        )
        training.metrics["curves"] = curves
        return training

    carry_out(job, fit)


def _scorer_of(reference: str, tracking_uri: str | None) -> TransformerScorer:
    """The transformer of a router; raises ArtefactError if there is none."""
    from presage.predictors.router.transformer import TransformerScorer
    from presage.registry.resolve import resolve
    from presage.registry.table import load_predictor

    resolved = resolve(reference, lambda: open_existing(tracking_uri))
    scorer = getattr(load_predictor(resolved.folder), "scorer", None)
    if not isinstance(scorer, TransformerScorer):
        raise ArtefactError(f"--start-from {reference}: wanted a router with the head transformer")
    return scorer


def _ask(predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    prompt = rows[-1].get("input_text")
    if prompt is None:
        raise InputError(
            'the last step has no input_text, the input of a router; add it, or use `presage route MODEL "prompt"`'
        )
    forecast: dict[str, Any] = predictor.forecast(prompt).to_dict()
    return forecast


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    likely = sorted(data["probabilities"].items(), key=lambda item: -item[1])
    lines = [[name, number(p), "← pick" if name == data["pick"] else ""] for name, p in likely]
    title = f"Step {len(rows) - 1} ({rows[-1]['agent']}) of {rows[-1]['workflow_id']}"
    return [table(title, ["model", "solves it", ""], lines), f"\n{called}; source {data['source']}"]


ROUTER = KindCommand(
    advice="more labelled prompts of your own traffic, --encoder with a sentence encoder, or --head transformer",
    train=router,
    examples="train-predictor router outcomes.jsonl.gz\n\n"
    "train-predictor router outcomes/ --encoder answerdotai/ModernBERT-large --checkpoints run-1\n\n"
    "train-predictor router outcomes/ --encoder ./ModernBERT-base --checkpoints run-1 --resume\n\n"
    "train-predictor router newer/ --start-from models:/router@champion      # new models beside the old ones",
    forecast=_forecast,
    ask=_ask,
)
