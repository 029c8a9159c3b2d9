"""`train-predictor remaining-length`, and how its forecasts look."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from presage.cli.kinds import KindCommand
from presage.cli.quantiles import Estimator, forecast_table, train_quantiles
from presage.cli.training import TrainingJob, training_command


@training_command("remaining-length")
def remaining_length(
    job: TrainingJob,
    target: Annotated[
        Literal["remaining", "step"],
        typer.Option(help="remaining: output tokens of this and all later steps; step: of this step alone."),
    ] = "remaining",
    estimator: Estimator = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Quantiles to predict, ascending. Default: 0.5,0.9,0.99."),
    ] = None,
    states: Annotated[
        Literal["auto", "text", "none"],
        typer.Option(help="auto: prompts and answers are read where held-out tasks show that it helps; text; or none."),
    ] = "auto",
) -> None:
    """Train the predictor of remaining output tokens, compare it with baselines, and register it."""
    from presage.predictors.quantiles.choice import QuantileConfig
    from presage.training.length.train import baselines_of, train_lengths

    train_quantiles(
        job,
        QuantileConfig,
        baselines_of(target),
        train_lengths,
        estimator=estimator,
        quantiles=quantiles,
        target=target,
        texts=states,
    )


def forecast_tokens(what: str, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    """The quantiles of what is forecast at the last of these steps, and where they come from."""

    def beyond(tokens: float) -> str:
        most = data["largest"]
        return f"extrapolated: no calibration step had more than {most:,.0f}" if round(tokens) > most else ""

    shown, source = forecast_table(
        f"{what} at step {len(rows) - 1} ({rows[-1]['agent']}) of {rows[-1]['workflow_id']}",
        data,
        called,
        unit="tokens",
        within="at most",
        shown="{:,.0f}".format,
        beyond=beyond,
    )
    return [shown, f"\n{source}"]


REMAINING_LENGTH = KindCommand(
    train=remaining_length,
    examples="train-predictor remaining-length traces/\n\n"
    "train-predictor remaining-length traces/ --target step --quantiles 0.5,0.99 --name step-length",
    advice="more workflows, output_tokens on every LLM step, --estimator forest or boosted, recorded prompts, or "
    "--states none if texts merely identify workflows",
    forecast=lambda data, called, rows: forecast_tokens("Output tokens", data, called, rows),
)
