"""`presage calibrate-cost`: from step times measured on an engine to the engine file of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output, table


def calibrate_cost(
    steps: Annotated[
        list[Path],
        typer.Argument(
            metavar="STEPS", help="Step-time files written by an engine with the setting `step_times_file`."
        ),
    ],
    to: Annotated[Path, typer.Option(help="The engine file to write, such as engine.toml.")],
    source: Annotated[str, typer.Option(help="Where the times were measured: machine, date.")] = "",
    as_json: options.Json = False,
) -> None:
    """Fit a cost model to step times and write it, with cache size and limits as an engine file (`presage replay`)."""
    from presage.atomic_file import write_file
    from presage.replay.calibrate import calibrate, read_step_times
    from presage.serving_hooks.engine_file import checked, engine_text

    out = Output(as_json)
    with out.working() as report:
        report("fitting", None)
        times = read_step_times(steps)
        calibrated = asdict(calibrate(times, source))
        engine = checked({**times.engine.limits(), "cost": calibrated.pop("cost")}, str(steps[0]))
        write_file(to, engine_text(engine).encode())
    data = {"kind": "cost", "engine": engine.model_dump(), **calibrated, "to": str(to)}
    out.result(data, *(_render(data) if not as_json else ()))


def _render(data: Mapping[str, Any]) -> list[Any]:
    cost = data["engine"]["cost"]
    rows = [
        ["each iteration", f"{1e3 * cost['iteration_s']:.4g} ms"],
        ["each token prefilled", f"{1e6 * cost['prefill_token_s']:.4g} µs"],
        ["each token decoded", f"{1e6 * cost['decode_token_s']:.4g} µs"],
        ["each token attended to", f"{1e9 * cost['context_token_s']:.4g} ns"],
        ["each token prefilled, for each token up to it", f"{1e9 * cost['attention_pair_s']:.4g} ns"],
    ]
    return [
        table(f"Fitted to {data['fitted_to']} iterations", ["", "costs"], rows),
        f"\nOn {data['held_out']} others: median error {data['median_error']:.1%}, 90th percentile "
        f"{data['p90_error']:.1%}, error of the total {data['total_error']:+.1%}.",
        f"Written to {data['to']}.",
    ]
