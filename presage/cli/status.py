"""`presage status`: what the hooks in a running engine do, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output
from presage.cli.server import ApiKey, Url, get
from presage.errors import EngineError

PATH = "/v1/workflows/status"


def status(
    url: Url,
    watch: Annotated[
        float | None,
        typer.Option(metavar="S", help="Ask again every S seconds until interrupted.", min=0.1, show_default=False),
    ] = None,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """Show what the hooks in a running engine do: policies, models, forecasts, hits, who is held back, and errors.

    With --watch and --json one object a line.
    """
    out = Output(as_json)
    while True:
        engines = _engines(get(url, PATH, api_key), url)
        if watch is not None and not as_json:
            _clear()
        out.result({"engines": engines}, *(_told(engines) if not as_json else ()))
        if watch is None:
            return
        time.sleep(watch)


def _clear() -> None:
    """Of a terminal; in a file or a pipe one status follows the other."""
    from rich.console import Console

    Console().clear()


def _engines(said: Any, url: str) -> list[Mapping[str, Any]]:
    engines = said.get("engines") if isinstance(said, Mapping) else None
    if not isinstance(engines, list) or not all(isinstance(one, Mapping) for one in engines):
        raise EngineError(f"{url} answers with something else than a status; correct the URL")
    return engines


def _told(engines: list[Mapping[str, Any]]) -> Iterator[Any]:
    for number, engine in enumerate(engines):
        name = f"Engine {number}" if len(engines) > 1 else "Engine"
        if not engine:
            yield f"{name}: its scheduler is another; start it with `presage serve`, or name --scheduler-cls"
            continue
        from presage.cli.status_tables import tables

        yield from tables(name, engine)
