"""`presage mode`: show or set the modes of the policies in a running engine."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.cli.server import ApiKey, Url, ask
from presage.errors import ConfigurationError
from presage.serving_hooks.mode_names import (
    ADMIN_KEY_HEADER,
    ADMIN_KEY_VARIABLE,
    GatewayPolicyName,
    ModeName,
    PolicyName,
)

PATH = "/v1/workflows/mode"
NO_ROUTES = f"it has no admin routes; start it with {ADMIN_KEY_VARIABLE} set to a key of 16 characters or more"
REMEDIES = {
    401: f"set it in {ADMIN_KEY_VARIABLE}",
    403: f"set the one it was started with in {ADMIN_KEY_VARIABLE}",
    404: NO_ROUTES,
    405: NO_ROUTES,
}


def mode(
    url: Url,
    mode: Annotated[
        ModeName | None,
        typer.Argument(metavar="[off|shadow|on]", help="The mode to set; omit to show the current modes."),
    ] = None,
    policy: Annotated[Literal[PolicyName, GatewayPolicyName] | None, typer.Option(help="Only this policy.")] = None,
    workflow_type: Annotated[str | None, typer.Option(help="Only for this type.")] = None,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """Set policies of a running engine or gateway to off, shadow (decisions are computed and shown, not applied) or on.

    Without --policy and --workflow-type the mode applies to all, and replaces modes set for single policies or types.
    The admin key is read from the environment variable PRESAGE_ADMIN_KEY. A restart resets the modes.
    """
    if mode is None and (policy or workflow_type is not None):
        raise ConfigurationError("--policy and --workflow-type want a mode: off, shadow or on")
    body = {"mode": mode, "policy": policy, "workflow_type": workflow_type} if mode is not None else None
    key = os.environ.get(ADMIN_KEY_VARIABLE)
    headers = {ADMIN_KEY_HEADER: key} if key else {}
    engines = ask(url, PATH, api_key, body=body, headers=headers, remedies=REMEDIES)["engines"]
    out = Output(as_json)
    out.result({"engines": engines}, *(_render(engines) if not as_json else ()))


def _render(engines: list[dict[str, Any]]) -> list[Any]:
    shown: list[Any] = []
    for number, engine in enumerate(engines):
        if not engine:
            shown.append(f"Engine {number}: its scheduler is another")
            continue
        rows = [["all others", "all others", engine["default"]]]
        rows += [
            [rule["policy"] or "all", "all" if rule["workflow_type"] is None else rule["workflow_type"], rule["mode"]]
            for rule in engine["rules"]
        ]
        whole = ", ".join(f"{policy} {word}" for policy, word in engine["policies"].items())
        shown += [table(f"Engine {number}", ["policy", "workflow type", "mode"], rows), f"at most: {whole}"]
    return shown
