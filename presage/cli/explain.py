"""`presage explain`: an engine's forecasts for one workflow, its decisions, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.cli.server import ApiKey, Url, ask
from presage.cli.status import ask_engines
from presage.errors import ConfigurationError, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
_FORECASTS_SHOWN = 10
_END = "end of workflow"
_OTHERS = "others"


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
                f"{group['score']:.3f}",
                _number(group["before"]),
            ]
            for group in blocks["groups"]
        ]
        head = ["blocks used by", "blocks", "free", "workflows", "score", "evicted earlier"]
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


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def draw(one: Mapping[str, Any], file: Path) -> None:
    """Draw an engine's view of a workflow into a file; raises OutputError if it cannot be written."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "presage", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(10, 8), layout="constrained")
        FigureCanvasAgg(figure)
        nearest, left, cache = figure.subplots(3, 1, height_ratios=(3, 2, 2))
        figure.suptitle(f"{one['workflow_id']}  ({one['workflow_type'] or 'no type'})")
        _draw_next(nearest, one["forecasts"])
        _draw_left(left, one["forecasts"])
        _draw_cache(cache, one["blocks"])
        try:
            figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise OutputError(f"{file}: {error.strerror or error}; give another place") from error


def _draw_next(axes: Axes, forecasts: list[Mapping[str, Any]]) -> None:
    rows: list[Mapping[str, Any]] = [
        made["horizons"][0] if made["horizons"] else {"agents": {}, "end": 0.0} for made in forecasts
    ]
    names = sorted({name for row in rows for name in row["agents"]})
    parts = {name: [float(row["agents"].get(name, 0.0)) for row in rows] for name in names}
    parts[_END] = [float(row["end"]) for row in rows]
    parts[_OTHERS] = [
        max(0.0, 1.0 - sum(heights[index] for heights in parts.values())) if row["agents"] else 0.0
        for index, row in enumerate(rows)
    ]
    floor = [0.0] * len(rows)
    for name, shares in parts.items():
        if any(share > 0.005 for share in shares):
            axes.bar(range(len(rows)), shares, bottom=floor, label=name, width=0.9)
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axes.set_xticks(range(len(rows)), [_when(made) for made in forecasts], rotation=45, ha="right", fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_ylabel("next agent")
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    else:
        _nothing(axes, "no recent forecast")


def _draw_left(axes: Axes, forecasts: list[Mapping[str, Any]]) -> None:
    quantiles = sorted({q for made in forecasts for q in made["remaining"]["quantiles"]}, key=float)
    for q in quantiles:
        tokens = [made["remaining"]["quantiles"].get(q, float("nan")) for made in forecasts]
        axes.plot(range(len(forecasts)), tokens, marker="o", markersize=3, label=f"p{100 * float(q):g}")
    axes.set_ylabel("output tokens left")
    if quantiles:
        axes.set_xlim(-0.5, len(forecasts) - 0.5)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    else:
        _nothing(axes, "no forecast of remaining tokens")


def _draw_cache(axes: Axes, blocks: Mapping[str, Any] | None) -> None:
    free = [group for group in blocks["groups"] if group["before"] is not None] if blocks is not None else []
    if blocks is None or not free:
        _nothing(axes, "no free block of this workflow")
        return
    axes.broken_barh([(0, blocks["all_free"])], (0, 1), facecolors="#dddddd")
    for group in free:
        axes.broken_barh([(group["before"], group["free"])], (0, 1), facecolors="#1f77b4")
    axes.set_xlim(0, max(1, blocks["all_free"]))
    axes.set_yticks([])
    axes.set_xlabel("free blocks in eviction order, next on the left; this workflow's are dark")


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _when(made: Mapping[str, Any]) -> str:
    step = "" if made["step"] is None else f" {made['step']}"
    return f"{made['agent']}{step}, {made['moment']}"
