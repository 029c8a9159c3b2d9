"""`train-predictor return-time`, and how its forecasts look."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from presage.cli.kinds import KindCommand
from presage.cli.quantiles import Estimator, forecast_table, train_quantiles
from presage.cli.training import TrainingJob, training_command
from presage.report.blocks import number


@training_command("return-time")
def return_time(
    job: TrainingJob,
    estimator: Estimator = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Quantiles to predict, ascending. Default: 0.05,0.1,0.25,0.5,0.75,0.9,0.95,0.99."),
    ] = None,
) -> None:
    """Train the predictor of return times, compare it with baselines, and register it.

    The return time of a step is the time from its end to the workflow's next request. The traces need started_at and
    ended_at on their LLM steps; finish_reason and tool calls make forecasts better.
    """
    from presage.predictors.return_time.baselines import RETURN_BASELINES
    from presage.predictors.return_time.predictor import ReturnTimeConfig
    from presage.training.return_time.train import train_return_times

    train_quantiles(
        job,
        ReturnTimeConfig,
        RETURN_BASELINES,
        train_return_times,
        estimator=estimator,
        quantiles=quantiles,
    )


def seconds(value: float) -> str:
    """A duration as people read it: 12 s, 3 min, 1.5 h, 2 d."""
    for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min")):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    last = next(row for row in reversed(rows) if row.get("kind", "llm") == "llm")

    def beyond(value: float) -> str:
        most = data["largest_s"]
        over = round(value, 3) > round(most, 3)
        return f"extrapolated: no calibration step took longer than {seconds(most)}" if over else ""

    shown, source = forecast_table(
        f"Next request of {last['workflow_id']} after step {last.get('step', rows.index(last))} ({last['agent']})",
        data,
        called,
        unit="time",
        within="within",
        shown=seconds,
        beyond=beyond,
    )
    end = f"It has ended with this step with probability {number(data['end'])}; the times assume that it has not."
    hint = data["retention"]
    kept = f"Caches should keep it for {seconds(hint['ttl_s'])} (target {100 * hint['target']:g} %)."
    return [shown, f"\n{end}", kept, source]


RETURN_TIME = KindCommand(
    train=return_time,
    examples="train-predictor return-time traces/\n\ntrain-predictor return-time traces/ --test later/ --out model/",
    advice="more workflows, finish_reason and tool calls in the traces, or --estimator forest or boosted",
    forecast=_forecast,
)
