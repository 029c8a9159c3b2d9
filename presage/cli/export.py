"""`presage export`: what other servers read of our traces and measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import Boundary, Output, table

_SHOWN_THOUSANDS: Final = 32

app = typer.Typer(cls=Boundary, no_args_is_help=True, help="Export forecasts for other servers.")


@app.command(
    "router-profile",
    epilog="Example:\n\n"
    "presage export router-profile traces/ --to profile.json --engine engine.toml --settings settings.json\n\n"
    "vllm-router --worker-urls http://127.0.0.1:8000 --enable-program-scheduling "
    '--program-scheduling-config-json "$(cat settings.json)"\n\n'
    "docs/gateway_dialects.md describes what the router does with it, and how requests name their workflow.",
)
def router_profile(
    traces: options.Traces,
    to: Annotated[Path, typer.Option(help="The profile to write: return times and output lengths by agent.")],
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Engine file (`presage calibrate-cost`), whose costs and cache the settings then hold."
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="Also write the router's program-scheduling settings, with the path of the profile."),
    ] = None,
    model_pool: Annotated[
        str, typer.Option(help="The router's name for the engines behind it, as in its /scheduling/diagnostics.")
    ] = "program:all",
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Write the prediction profile of vllm-router from traces, and its settings.

    The router keeps histograms of its own while it serves; a profile gives it those of your traces from the beginning.
    Its bucket bounds must be those of the settings, so start the router with these settings.
    """
    from presage.atomic_file import write_file
    from presage.gateway.exporters.router_costs import router_costs
    from presage.gateway.exporters.router_profile import profile_settings
    from presage.gateway.exporters.router_profile import router_profile as made_of
    from presage.serving_hooks.engine_file import read_engine

    out = Output(as_json)
    with out.working() as report:
        costs = router_costs(read_engine(engine)) if engine else {}
        steps = options.read(traces, skip_bad, out, report)
        report("counting", None)
        profile = made_of(steps, model_pool)
        write_file(to, json.dumps(profile.file, ensure_ascii=False, allow_nan=False).encode())
        wanted = {"prediction_profile": profile_settings(str(to.absolute())), **costs}
        if settings is not None:
            write_file(settings, json.dumps(wanted, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    if profile.left_out:
        out.note(f"left out the {profile.left_out} rarest keys: the router takes 4096 of each kind")
    data = {
        "kind": "router-profile",
        "return_times": profile.return_times,
        "output_lengths": profile.output_lengths,
        "keys": {name: len(profile.file[f"{name}_profiles"]) for name in ("return_time", "output_length")},
        "left_out": profile.left_out,
        "settings": wanted,
        "to": str(to),
    }
    out.result(data, *(_render(data) if not as_json else ()))


def _render(data: Mapping[str, Any]) -> list[Any]:
    keys = data["keys"]
    rows = [
        ["return times", str(data["return_times"]), str(keys["return_time"])],
        ["output lengths", str(data["output_lengths"]), str(keys["output_length"])],
    ]
    said = [table("Profile", ["", "observed", "keys"], rows), f"\nWritten to {data['to']}."]
    prefill = data["settings"].get("prefill_cost_model")
    if prefill:
        seconds = (
            prefill["intercept_seconds"]
            + prefill["linear_seconds_per_1k_tokens"] * _SHOWN_THOUSANDS
            + prefill["quadratic_seconds_per_1k_tokens_squared"] * _SHOWN_THOUSANDS**2
        )
        said.append(f"By these costs, a cold prefill of {_SHOWN_THOUSANDS},000 tokens takes {seconds:.3g} s.")
    return said
