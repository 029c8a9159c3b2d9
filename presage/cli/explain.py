"""`presage explain`: what an engine forecasts of one workflow, what it does about it, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from presage.cli import options
from presage.cli.output import Output
from presage.cli.server import ApiKey, Url, ask
from presage.errors import ConfigurationError

FORMATS = (".svg", ".png")
_FORECASTS_SHOWN = 10


def explain(
    url: Url,
    workflow_id: Annotated[str, typer.Argument(metavar="WORKFLOW_ID", show_default=False)],
    workflow_type: Annotated[
        str | None, typer.Option("--type", help="As its requests give it.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it, into an .svg or a .png file.", show_default=False)
    ] = None,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """Explain one workflow: its last forecasts, where its requests stand, its blocks in the cache, and the reasons.

    Where the server tells API keys apart, only workflows of the key that asks.
    """
    if picture is not None and picture.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--picture {picture}: give a file that ends in {' or '.join(FORMATS)}")
    path = f"/v1/workflows/{quote(workflow_id, safe='')}/explain"
    if workflow_type is not None:
        path += "?" + urlencode({"workflow_type": workflow_type})
    refusals = {
        404: "no engine there knows this workflow; give --type as its requests give workflow_type, or look whether "
        "the server has our routes: presage status",
        422: "that is no name of a workflow: at most 256 characters",
    }
    engines = ask(url, path, api_key, refusals=refusals)["engines"]
    out = Output(as_json)
    if picture is not None:
        from presage.cli.explain_picture import draw

        draw(engines[0], picture)
        out.note(f"drawn: {picture}")
    out.result({"engines": engines}, *(part for one in engines for part in (_told(one) if not as_json else ())))


def _told(one: Mapping[str, Any]) -> Iterator[Any]:
    from presage.cli.tables import table

    yield f"workflow {one['workflow_id']!r} of type {one['workflow_type']!r}"
    yield "\n".join(f"  {reason}" for reason in one["reasons"])
    if one["forecasts"]:
        rows = [_forecast(made) for made in one["forecasts"][-_FORECASTS_SHOWN:]]
        head = ["after", "moment", "made", "by", "evidence", "next", "end", "tokens left"]
        yield table("\nForecasts, the last one last", head, rows)
    if one["requests"]:
        rows = [_request(request) for request in one["requests"]]
        yield table("\nRequests", ["agent", "state", "place", "level", "tokens left", "prompt", "output"], rows)
    blocks = one["blocks"]
    if blocks is not None and blocks["groups"]:
        rows = [
            [
                ", ".join(group["agents"]),
                *(_number(group[name]) for name in ("blocks", "free", "users")),
                f"{group['score']:.3f}",
                _number(group["before"]),
            ]
            for group in blocks["groups"]
        ]
        head = ["blocks that these touch", "blocks", "free", "workflows", "score", "given up before them"]
        yield table(f"\nCache, {blocks['all_free']} free blocks in all", head, rows)


def _forecast(made: Mapping[str, Any]) -> list[str]:
    by = made["source"] if made["version"] is None else f"{made['source']} {made['version']}"
    nearest = made["horizons"][0] if made["horizons"] else None
    agents = ", ".join(f"{name} {share:.2f}" for name, share in list(nearest["agents"].items())[:3]) if nearest else "–"
    left = made["remaining"]["quantiles"]
    return [
        made["agent"] if made["step"] is None else f"{made['agent']}, step {made['step']}",
        made["moment"],
        f"{made['ago_s']:.1f} s ago",
        by,
        str(made["evidence"]),
        agents,
        f"{nearest['end']:.2f}" if nearest else "–",
        ", ".join(f"{tokens:.0f} (p{100 * float(q):g})" for q, tokens in left.items()) or "–",
    ]


def _request(request: Mapping[str, Any]) -> list[str]:
    key = request["key"] or {}
    state = f"{request['state'].lower()}, held" if request["held"] else request["state"].lower()
    place = "–" if request["place"] is None else f"{request['place']} of {request['waiting']}"
    left = key.get("remaining_tokens")
    return [
        request["agent"],
        state,
        place,
        _number(key.get("level")),
        "–" if left is None else f"{left:.0f}",
        str(request["prompt_tokens"]),
        str(request["output_tokens"]),
    ]


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)
