"""`train-predictor router`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli import options, outcomes
from presage.cli.output import Output, Report
from presage.cli.training import Job, carry_out

if TYPE_CHECKING:
    from presage.datasets.outcomes.schema import Outcomes
    from presage.predictors.routing.transformer import TransformerScorer
    from presage.training.router.train import FitScorer, RouterTraining

_TRANSFORMER = "Head transformer:"


def router(
    data: outcomes.Files,
    head: Annotated[
        str | None,
        typer.Option(
            help="linear: terms of the prompt, seconds on a CPU. transformer: an encoder fine-tuned, for a GPU; the "
            "default where --encoder or --start-from is given.",
            show_default=False,
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="A hub name or a folder. Head transformer: what is fine-tuned (answerdotai/ModernBERT-large unless "
            "given). Head linear: a sentence encoder to read beside the terms.",
            show_default=False,
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=f"{_TRANSFORMER} a router to train further; models it knows start where they stood.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help=f"{_TRANSFORMER} passes over the prompts.", min=1)] = 5,
    lr: Annotated[float, typer.Option("--lr", "--learning-rate", help=f"{_TRANSFORMER} learning rate.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help=f"{_TRANSFORMER} prompts a step and device.", min=1)] = 16,
    head_tokens: Annotated[
        int | None, typer.Option(help=f"{_TRANSFORMER} tokens kept of a long prompt's beginning.", min=1)
    ] = None,
    tail_tokens: Annotated[int | None, typer.Option(help=f"{_TRANSFORMER} and of its end.", min=0)] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help=f"{_TRANSFORMER} less memory, more time.")
    ] = False,
    checkpoints: Annotated[
        Path, typer.Option(help=f"{_TRANSFORMER} the training's working folder, deleted at the end.")
    ] = Path("router-checkpoints"),
    resume: Annotated[
        bool, typer.Option("--resume", help=f"{_TRANSFORMER} go on from the last checkpoint of a killed training.")
    ] = False,
    test: options.Test = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    baselines: options.Baselines = "default",
    out_folder: options.OutFolder = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "router",
    register: options.Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the router on outcomes, judge it beside every baseline, and register it."""
    from dataclasses import replace

    from presage.cli.router import Router
    from presage.errors import ConfigurationError
    from presage.predictors.router import RouterConfig
    from presage.training.configuration import read_configuration
    from presage.training.router.train import LIMITS, choose_baselines, train_router

    configuration = read_configuration(RouterConfig, config, settings or (), LIMITS)
    if head is None and (encoder is not None or start_from is not None):
        head = "transformer"
    if head is not None:
        configuration = replace(configuration, head=head)  # type: ignore[arg-type]  # checked below
    if encoder is not None and configuration.head == "linear":
        configuration = replace(configuration, encoder=encoder)
    configuration.check()
    wanted = choose_baselines(baselines)
    if start_from is not None and (encoder, head_tokens, tail_tokens) != (None, None, None):
        raise ConfigurationError(
            "--start-from brings its encoder and what it reads of a prompt: leave --encoder, --head-tokens and "
            "--tail-tokens out"
        )

    def learner(report: Report) -> FitScorer | None:
        if configuration.head != "transformer":
            return None
        from presage.predictors.routing.transformer import HEAD_TOKENS, TAIL_TOKENS
        from presage.training.router.finetune import Start
        from presage.training.router.finetune_trainer import FinetuneConfig

        start = Start(
            encoder,
            None if start_from is None else _scorer_of(start_from, tracking_uri),
            HEAD_TOKENS if head_tokens is None else head_tokens,
            TAIL_TOKENS if tail_tokens is None else tail_tokens,
            seed,
        )
        how = FinetuneConfig(epochs, lr, batch_size, gradient_checkpointing=gradient_checkpointing, seed=seed)
        how.check()

        def learn(learnt: Outcomes, validation: Outcomes) -> TransformerScorer:
            done = start.finetune(learnt, validation, how, checkpoints, resume, report)
            if not done.main_process:  # under `accelerate launch` one process saves and registers
                raise typer.Exit
            return done.scorer

        return learn

    def fit(learnt: Outcomes, test_set: Outcomes | None, report: Report) -> RouterTraining:
        return train_router(
            learnt,
            test_set,
            configuration,
            seed=seed,
            baselines=wanted,
            name=name,
            fit_scorer=learner(report),
            progress=report,
        )

    carry_out(
        Job(Router(), data, test or [], skip_bad, out_folder, None, name, register, tracking_uri),
        fit,
        Output(as_json),
        params={"seed": seed},
        tags=lambda metrics: {"presage.head": str(metrics["config"]["head"])},
    )


def _scorer_of(reference: str, tracking_uri: str | None) -> TransformerScorer:
    """The transformer inside a router.

    Raises:
        ArtefactError: it is no router, or one without a transformer.
    """
    from presage.cli.kinds import load
    from presage.errors import ArtefactError
    from presage.predictors.routing.transformer import TransformerScorer

    loaded = load(reference, lambda: options.open_registry(tracking_uri))
    scorer = getattr(loaded.predictor, "scorer", None)
    if not isinstance(scorer, TransformerScorer):
        raise ArtefactError(f"--start-from {reference}: a router with the head transformer is wanted")
    return scorer
