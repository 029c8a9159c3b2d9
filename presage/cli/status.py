"""`presage status`: what the hooks in a running engine do, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.cli.server import ApiKey, Url, get
from presage.errors import EngineError
from presage.serving_hooks.vllm.metrics_read import (
    accuracies,
    each,
    errors,
    forecasts,
    left_out,
    missing_inputs,
    others,
    states,
)

if TYPE_CHECKING:
    from rich.table import Table

PATH = "/v1/workflows/status"

Engine = Mapping[str, Any]
Rows = list[Sequence[str]]
_WIDTH: Final = 22
"""Of the first column, so that the second begins at the same place in all tables."""


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
        yield from tables(name, engine)


def tables(name: str, engine: Engine) -> Iterator[Table]:
    """One engine, in the order in which one asks: is it on, does it know anything, what has come of it, what failed."""
    for title, rows in (
        (name, [*_policies(engine), *_models(engine), *_inputs(engine), *_workflows(engine)]),
        ("Forecasts", [*_forecasts(engine), *_accuracies(engine)]),
        ("Cache", [*_prompts(engine), *_given_up(engine), *_prefetch(engine)]),
        ("Order and admission", [*_ageing(engine), *_admission(engine)]),
        ("Not as it should be", _troubles(engine)),
    ):
        if rows:
            made = table(f"\n{title}", ["", ""], rows)
            made.show_header, made.columns[1].justify, made.columns[0].min_width = False, "left", _WIDTH
            yield made


def _policies(engine: Engine) -> Rows:
    on = {**engine.get("on", {}), "prefetch": (engine.get("prefetch") or {}).get("on", False)}
    return [["policies", ", ".join(f"{name} {_word(of)}" for name, of in on.items())]]


def _models(engine: Engine) -> Rows:
    rows: Rows = [[kind, told] for kind, told in engine.get("models", {}).items()]
    return [*rows, ["hidden states", str(engine["states"])]] if "states" in engine else rows


def _inputs(engine: Engine) -> Rows:
    """What came with the steps, and what a model was promoted with and does not get."""
    counts = (engine.get("inputs") or {}).get("counts", {})
    steps = counts.get("steps", 0)
    shares = [f"{name} {counts.get(name, 0) / steps:.0%}" for name in ("tokens", "text", "states")] if steps else []
    rows: Rows = [["steps with", ", ".join(shares)]] if shares else []
    for (kind, source), _ in missing_inputs(engine):
        rows.append([kind, f"was promoted with {source}, which this engine does not supply"])
    return rows


def _workflows(engine: Engine) -> Rows:
    alive, ended, silent = (engine.get(key, 0) for key in ("workflows", "ended", "expired"))
    return [["workflows", f"{alive} alive, {ended} have ended, {silent} fell silent"]]


def _forecasts(engine: Engine) -> Rows:
    by_kind: dict[str, list[str]] = {}
    for (kind, source), times in forecasts(engine):
        by_kind.setdefault(kind, []).append(f"{times:.0f} {source}")
    rows: Rows = [[kind, ", ".join(parts)] for kind, parts in by_kind.items()]
    for (moment, outcome), times in states(engine):
        rows.append([f"{moment} states", f"{times:.0f} {outcome}"])
    return rows


def _accuracies(engine: Engine) -> Rows:
    found: dict[str, list[str]] = {}
    for (workflow_type, model, moment, _), share in accuracies(engine):
        found.setdefault(f"{workflow_type or '(no type)'}, {model}, at {moment}", []).append(f"{share:.3f}")
    return [[f"right: {of}", " / ".join(shares)] for of, shares in found.items()]


def _prompts(engine: Engine) -> Rows:
    said = engine.get("prompts")
    if not said:
        return []
    rows: Rows = [["prompt tokens", f"{said['tokens']}"]]
    for name, key in (("found in the cache", "local_tokens"), ("loaded", "external_tokens")):
        share = said[key] / said["tokens"] if said["tokens"] else 0.0
        rows.append([name, f"{said[key]} ({share:.1%})"])
    return rows


def _given_up(engine: Engine) -> Rows:
    parts = [f"{times:.0f} {of}" for (of,), times in each("given_up")(engine)]
    return [["blocks given up", ", ".join(parts)]] if parts else []


def _prefetch(engine: Engine) -> Rows:
    said = engine.get("prefetch") or {}
    if "tokens" not in said:
        return []
    return [
        ["prefetched tokens", f"{said['tokens']}, {said['used_tokens']} used, {said['wasted_tokens']} wasted"],
        ["prefetches", f"{said['started']} started, {said['aborted']} aborted, {said['refused']} refused"],
    ]


def _ageing(engine: Engine) -> Rows:
    said = engine.get("ageing")
    return [["ageing", f"{said['promoted']} promoted, {said['demoted']} demoted"]] if said else []


def _admission(engine: Engine) -> Rows:
    said = engine.get("admission")
    if not said:
        return []
    held = f"{said['held']} held with {said['held_requests']} requests, {said['paused']} paused while their tools run"
    rows: Rows = [["held back now", held]]
    rows.append(["held back so far", f"{said['held_s']:.1f} s, one workflow at most {said['longest_held_s']:.1f} s"])
    if said.get("outlook"):
        chosen, everybody = said["outlook"]["chosen"], said["outlook"]["everybody"]
        rows.append(
            [
                "expected",
                f"{chosen['steps_per_s']:.2f} steps/s of {chosen['workflows']} workflows, "
                f"{everybody['steps_per_s']:.2f} of all {everybody['workflows']}",
            ]
        )
    return rows


def _troubles(engine: Engine) -> Rows:
    rows: Rows = [[f"{what}: {reason}", f"{times:.0f}"] for (what, reason), times in errors(engine)]
    rows += [[f"{field} left out: {reason}", f"{times:.0f}"] for (field, reason), times in left_out(engine)]
    rows += [[event, f"{times:.0f}"] for (event,), times in others(engine)]
    alarms = (engine.get("truth") or {}).get("alarms", {})
    return rows + [["drift", name or "(no type)"] for name in alarms]


def _word(on: object) -> str:
    return {True: "on", False: "off"}[on] if isinstance(on, bool) else str(on)
