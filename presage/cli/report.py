"""`presage report`: find the report page of a training."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated

import typer

from presage.cli import options
from presage.cli.output import Output
from presage.errors import ConfigurationError
from presage.registry.connect import open_existing

app = typer.Typer(no_args_is_help=True, help="The report page of a training, a study or a replay.")


@app.callback()
def group() -> None:
    """Find report pages."""


@app.command(
    "open", epilog="Examples:\n\npresage report open models:/next-agent@champion\n\npresage report open model/"
)
def open_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|FOLDER",
            help="models:/NAME@ALIAS, models:/NAME/VERSION, or a folder of --out or --report. Default: the version "
            "registered last.",
        ),
    ] = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Open the report page in a browser; print its path, and nothing more where there is no display."""
    from presage.registry.promote import list_models
    from presage.registry.resolve import kept_file

    out = Output(as_json)
    with out.working() as report:
        report("looking for the report", None)
        if what is None:
            listed = list_models(open_existing(tracking_uri))
            if not listed:
                raise ConfigurationError("no model is registered; name the folder of --out or --report")
            last = max(listed, key=lambda entry: entry["registered_at"])
            what = f"models:/{last['name']}/{last['version']}"
        page = kept_file(what, "report.html", lambda: open_existing(tracking_uri)).absolute()
        display = sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
        opened = display and webbrowser.open(page.as_uri())
    out.result({"model": what, "page": str(page), "opened": opened}, str(page))
