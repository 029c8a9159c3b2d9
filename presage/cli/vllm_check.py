"""`presage vllm-check`: would `presage serve` start here, and with what?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.boundary import REFUSED
from presage.cli.output import Output
from presage.cli.serve import wanted_vllm

if TYPE_CHECKING:
    from presage.serving_hooks.vllm.installation import Finding


def vllm_check(
    registry: Annotated[
        str | None,
        typer.Option(
            help="The registry the engine would be given. Without: as the engine finds it.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings of the hooks instead; needs no vLLM.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Look whether this vLLM, its plugins, the device and the registry are what the hooks need.

    Exit code 3 if an engine with the hooks would not start, or not as it was told to.
    """
    out = Output(as_json)
    if settings:
        known = listed()
        out.result({"settings": known}, *(_table_of_settings(known) if not as_json else ()))
        return
    wanted_vllm()
    from presage.serving_hooks.vllm.installation import findings

    with out.working() as report:
        found = findings(registry, lambda doing: report(doing, None))
    ready = all(finding.state != "no" for finding in found)
    data = {"ready": ready, "findings": [vars(finding) for finding in found]}
    out.result(data, *(_told(found, ready) if not as_json else ()))
    if not ready:
        raise typer.Exit(REFUSED)


def listed() -> list[dict[str, Any]]:
    """Every setting with its default and what it does."""
    from presage.serving_hooks.vllm.config import PresageConfig

    return [
        {"name": name, "default": field.default, "description": field.description}
        for name, field in PresageConfig.model_fields.items()
    ]


def _table_of_settings(settings: list[dict[str, Any]]) -> list[Any]:
    import json

    from presage.cli.tables import table

    rows = [[one["name"], json.dumps(one["default"]), one["description"]] for one in settings]
    shown = table("", ["setting", "default", ""], rows)
    for column in shown.columns:
        column.justify = "left"
    return [shown, "\n--additional-config.presage.NAME VALUE, of `presage serve` and of `vllm serve`"]


def _told(found: list[Finding], ready: bool) -> list[Any]:
    from presage.cli.tables import table

    words = {"ok": "ok", "less": "less", "no": "NO"}
    shown = table("", ["", "what", "found"], [[words[one.state], one.what, one.found] for one in found])
    for column in shown.columns:
        column.justify = "left"
    end = "An engine with the hooks starts here." if ready else "What is marked NO stands in the way."
    return [shown, f"\n{end}"]
