"""`presage explain`: an engine's forecasts for one workflow, its decisions, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.cli.picture import draw
from presage.cli.server import ApiKey, Url, ask
from presage.cli.status import ask_engines
from presage.errors import ConfigurationError

FORMATS = (".svg", ".png")
_FORECASTS_SHOWN = 10


def explain(
    url: Url,
    workflow_id: Annotated[str, typer.Argument(metavar="WORKFLOW_ID")],
    workflow_type: Annotated[
        str | None,
        typer.Option("--type", help="The workflow_type of its requests. Default: the only one with this workflow."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the result into an .svg or .png file.")] = None,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """Explain one workflow: its latest forecasts, the queue positions of its requests, its cache blocks, and reasons.

    If the server separates API keys, only workflows of the key used are visible.
    """
    if picture is not None and picture.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--picture {picture}: give a file that ends in {' or '.join(FORMATS)}")
    path = f"/v1/workflows/{quote(workflow_id, safe='')}/explain"
    if workflow_type is None:
        workflow_type = _type_of(url, workflow_id, api_key)
    if workflow_type:
        path += "?" + urlencode({"workflow_type": workflow_type})
    engines = ask(url, path, api_key)["engines"]
    out = Output(as_json)
    if picture is not None:
        draw(engines[0], picture)
        out.note(f"drawn: {picture}")
    out.result({"engines": engines}, *(part for engine in engines for part in (_render(engine) if not as_json else ())))


def _type_of(url: str, workflow_id: str, api_key: str | None) -> str:
    """The type of the workflows of this id that run or have ended lately; "" if there are none, or their type is none.

    Raises ConfigurationError: they have several types.
    """
    from presage.serving_hooks.listeners.overview import MOST_ON_PAGE

    types: set[str] = set()
    first, more = 0, True
    while more:
        engines = ask_engines(url, f"/v1/workflows?first={first}&most={MOST_ON_PAGE}", api_key)
        first += MOST_ON_PAGE
        listed = (workflow for engine in engines for workflow in engine.get("workflows", ()))
        types |= {workflow["workflow_type"] for workflow in listed if workflow["workflow_id"] == workflow_id}
        more = any(first < engine.get("running", 0) + engine.get("ended", 0) for engine in engines)
    if len(types) > 1:
        there = ", ".join(repr(name) for name in sorted(types))
        raise ConfigurationError(f"several types have a workflow {workflow_id!r}: {there}; name one with --type")
    return "".join(types)


def _render(engine: Mapping[str, Any]) -> Iterator[Any]:
    yield f"workflow {engine['workflow_id']!r} of type {engine['workflow_type']!r}"
    yield "\n".join(f"  {reason}" for reason in engine["reasons"])
    if engine["forecasts"]:
        rows = [_forecast(made) for made in engine["forecasts"][-_FORECASTS_SHOWN:]]
        head = ["after", "moment", "made", "by", "evidence", "next", "end", "tokens left"]
        yield table("\nForecasts, oldest first", head, rows)
    if engine.get("decisions"):
        head = ["decided", "model", "because", "server", "because", "priority", "workflow by", "agent by"]
        yield table("\nDecisions of the gateway, oldest first", head, [_decision(made) for made in engine["decisions"]])
    if engine["requests"]:
        rows = [_request(request) for request in engine["requests"]]
        yield table("\nRequests", ["agent", "state", "place", "level", "tokens left", "prompt", "output"], rows)
    blocks = engine["blocks"]
    if blocks is not None and blocks["groups"]:
        rows = [
            [
                ", ".join(group["agents"]),
                *(_number(group[name]) for name in ("blocks", "free", "users")),
                f"{group['score']:.3f}" if "score" in group else _seconds(group["wait_s"]),
                _number(group["before"]),
            ]
            for group in blocks["groups"]
        ]
        expected = "score" if "score" in blocks["groups"][0] else "next use in"
        head = ["blocks used by", "blocks", "free", "workflows", expected, "evicted earlier"]
        yield table(f"\nCache, {blocks['all_free']} free blocks in total", head, rows)


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


def _decision(made: Mapping[str, Any]) -> list[str]:
    names = ("model", "model_reason", "upstream", "placement_reason", "rank", "workflow_from", "agent_from")
    values = [made.get(name) for name in names]
    ago = f"{made['ago_s']:.1f} s ago"
    return [
        ago,
        *("–" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value) for value in values),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)
