"""`presage tools`: a service that prepares the tools of workflows ahead, and collects them at the end."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli.output import Output, needing
from presage.errors import ConfigurationError, EngineError
from presage.wording import counted

app = typer.Typer(help="Tools of workflows: sandboxes, containers and whatever takes time to prepare.")

_CONFIG = typer.Argument(help="File of the tool service (TOML); docs/programs.md.")


@app.command(epilog="Example:  PRESAGE_WEBHOOK_SECRET=whsec_... presage tools serve tools.toml")
def serve(
    config: Annotated[Path, _CONFIG],
    check: Annotated[
        bool, typer.Option("--check", help="Check the file and what it names, print it with all defaults, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
) -> None:
    """Prepare tools as the events of a gateway or an engine tell, and hand them to agents over HTTP.

    Tools outlive the service: after a restart those in use are used further, and all others are removed.
    """
    with needing("tools", "presage tools"):
        from presage.gateway.check import as_toml
        from presage.tool_service.app import serve as serve_tools
        from presage.tool_service.config import check_named, read_config
    made = read_config(config)
    if as_json and not check:
        raise ConfigurationError("--json is for --check")
    if check:
        for warning in check_named(made):
            Output.note(warning)
        settings = made.model_dump(mode="json")
        Output(as_json).result(settings, as_toml(settings))
        return
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    serve_tools(made)


@app.command(epilog="Example:  presage tools status http://127.0.0.1:8790")
def status(
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the tool service.")
    ] = "http://127.0.0.1:8790",
    url: Annotated[str | None, typer.Option(hidden=True, help="The former way to give it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each tool: how long preparing takes, how many there are, and how much of the waiting was hidden.

    The token, if the service asks for one, is read from PRESAGE_TOOLS_TOKEN.
    """
    import requests

    url = url or address
    token = os.environ.get("PRESAGE_TOOLS_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = requests.get(f"{url.rstrip('/')}/status", headers=headers, timeout=10)
        answer.raise_for_status()
        reported: dict[str, Any] = answer.json()
    except (requests.RequestException, ValueError) as error:
        raise EngineError(f"{url}: no tool service answers there ({type(error).__name__}); give its address") from None
    lines = [counted(reported["workflows"], "running workflow")]
    for name, usage in sorted(reported["tools"].items()):
        hidden = (
            "nothing was asked for yet" if usage["hidden"] is None else f"{usage['hidden']:.0%} of the waiting hidden"
        )
        states = ", ".join(f"{count} {state}" for state, count in sorted(usage["states"].items())) or "none there"
        lines.append(f"{name}: {states}; preparing takes {usage['setup_s']:.2f} s; {hidden}")
        lines.append("  " + ", ".join(f"{what} {count}" for what, count in usage["counts"].items()))
    Output(as_json=as_json).result(reported, "\n".join(line.rstrip() for line in lines))
