"""`train-predictor context-growth`, and how its forecasts look."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from presage.cli.kinds import KindCommand
from presage.cli.quantiles import Estimator, train_quantiles
from presage.cli.remaining_length import forecast_tokens
from presage.cli.training import TrainingJob, training_command


@training_command("context-growth")
def context_growth(
    job: TrainingJob,
    target: Annotated[
        Literal["final-context", "next-context"],
        typer.Option(
            help="final-context: growth to the largest context of this and all later steps, which engines need; "
            "next-context: to that of the next step."
        ),
    ] = "final-context",
    estimator: Estimator = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Quantiles to predict, ascending. Default: 0.1,0.5,0.9,0.99."),
    ] = None,
) -> None:
    """Train the predictor of context growth, compare it with baselines, and register it.

    The context of a step is its prompt and its output; growth counts from the prompt of the step that begins. The
    traces need input_tokens and output_tokens on their LLM steps; texts are not read.
    """
    from presage.predictors.length.context import ContextGrowthConfig
    from presage.training.length.train import baselines_of, train_lengths

    train_quantiles(
        job,
        ContextGrowthConfig,
        baselines_of(target),
        train_lengths,
        estimator=estimator,
        quantiles=quantiles,
        target=target,
        texts="none",
    )


CONTEXT_GROWTH = KindCommand(
    train=context_growth,
    examples="train-predictor context-growth traces/\n\n"
    "train-predictor context-growth traces/ --target next-context --name next-context",
    advice="more workflows, input_tokens and output_tokens on every LLM step, or --estimator forest or boosted",
    forecast=lambda *arguments: forecast_tokens("Tokens by which the context will exceed the prompt", *arguments),
)
