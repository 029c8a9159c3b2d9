"""`presage calibrate-cost`: from step times measured on an engine to the engine file of a replay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output, table

if TYPE_CHECKING:
    from presage.serving_hooks.replay.calibrate import Calibrated


def calibrate_cost(
    steps: Annotated[
        list[Path],
        typer.Argument(
            metavar="STEPS",
            help="Step-time files written by an engine with the setting `step_times_file`.",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option(help="The engine file to write, such as engine.toml.", show_default=False)],
    source: Annotated[str, typer.Option(help="Where the times were measured: machine, date.")] = "",
    as_json: options.Json = False,
) -> None:
    """Fit a cost model to step times and write it, with cache size and limits as an engine file (`presage replay`)."""
    from presage.serving_hooks.replay.calibrate import calibrate, read_step_times
    from presage.serving_hooks.replay.engine_file import checked, engine_text
    from presage.training.report.files import write_file

    out = Output(as_json)
    with out.working() as report:
        report("fitting", None)
        times = read_step_times(steps)
        found = calibrate(times, source)
        engine = checked({**times.engine.limits(), "cost": asdict(found.cost)}, str(steps[0]))
        write_file(to, engine_text(engine).encode())
    data: dict[str, Any] = {
        "kind": "cost",
        "engine": engine.model_dump(),
        "fitted_to": found.fitted_to,
        "held_out": found.held_out,
        "median_error": found.median_error,
        "p90_error": found.p90_error,
        "total_error": found.total_error,
        "to": str(to),
    }
    out.result(data, *(_render(found, to) if not as_json else ()))


def _render(found: Calibrated, to: Path) -> list[Any]:
    cost = found.cost
    rows = [
        ["each iteration", f"{1e3 * cost.iteration_s:.4g} ms"],
        ["each token prefilled", f"{1e6 * cost.prefill_token_s:.4g} µs"],
        ["each token decoded", f"{1e6 * cost.decode_token_s:.4g} µs"],
        ["each token attended to", f"{1e9 * cost.context_token_s:.4g} ns"],
    ]
    return [
        table(f"Fitted to {found.fitted_to} iterations", ["", "costs"], rows),
        f"\nOn {found.held_out} others: median error {found.median_error:.1%}, 90th percentile "
        f"{found.p90_error:.1%}, error of the total {found.total_error:+.1%}.",
        f"Written to {to}.",
    ]
