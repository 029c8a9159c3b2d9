"""`presage status`: the status of the hooks in running engines, as tables or JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.cli.server import ApiKey, Url, ask
from presage.errors import ConfigurationError, EngineError
from presage.serving_hooks.counts import FORECASTS, HIDDEN_STATES
from presage.serving_hooks.metrics import accuracies, counted, missing_inputs, return_figures
from presage.serving_hooks.problems import against_counts, broken, problems
from presage.serving_hooks.status import EngineStatus, read_status
from presage.wording import counted as counted_of

if TYPE_CHECKING:
    from rich.table import Table

PATH = "/v1/workflows/status"
PAGE: Final = 50
"""Workflows that are listed at a time."""

Rows = list[Sequence[str]]
_WHEN: Final = {"prefill": "before the output", "completion": "after the output"}
_WIDTH: Final = 22
"""Width of the first column, so that all tables align."""


def status(
    url: Url,
    watch: Annotated[
        float | None,
        typer.Option(metavar="S", help="Refresh every S seconds until interrupted.", min=0.1),
    ] = None,
    workflows: Annotated[
        bool,
        typer.Option(
            "--workflows",
            help=f"List the workflows instead, {PAGE} at a time: those that run, then those that ended lately. A key "
            "sees its own. `presage explain` takes their ids.",
        ),
    ] = False,
    page: Annotated[int, typer.Option(help="With --workflows: which page.", min=1)] = 1,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """Show the status of a running engine's hooks: policies, models, forecasts, hits, held requests, and errors.

    With --watch and --json, prints one object per line.
    """
    out = Output(as_json)
    if workflows and watch is not None:
        raise ConfigurationError("--watch is of the status: give it without --workflows")
    if workflows:
        listed = ask_engines(url, f"/v1/workflows?first={PAGE * (page - 1)}&most={PAGE}", api_key)
        out.result({"engines": listed}, *(part for engine in listed for part in _workflows_of(engine, url, page)))
        return
    while True:
        engines = ask_engines(url, PATH, api_key)
        if watch is not None and not as_json:
            from rich.console import Console

            Console().clear()  # writes nothing to a file or a pipe
        out.result({"engines": engines}, *(_tables(engines) if not as_json else ()))
        if watch is None:
            return
        time.sleep(watch)


def ask_engines(url: str, path: str, api_key: str | None) -> list[Mapping[str, Any]]:
    """What each engine behind a URL answers to a GET; raises EngineError."""
    answer = ask(url, path, api_key)
    engines = answer.get("engines") if isinstance(answer, Mapping) else None
    if not isinstance(engines, list) or not all(isinstance(engine, Mapping) for engine in engines):
        raise EngineError(f"{url} did not answer with a status; correct the URL")
    return engines


def _workflows_of(engine: Mapping[str, Any], url: str, page: int) -> Iterator[Any]:
    shown, pages = engine["workflows"], -(-(engine["running"] + engine["ended"]) // PAGE)
    yield f"{counted_of(engine['running'], 'workflow')} running, {engine['ended']} ended lately"
    if not shown:
        return
    rows = [
        [
            *(str(workflow[name]) for name in ("workflow_id", "workflow_type", "agent", "state", "steps", "requests")),
            *(f"{workflow[name]:.0f} s ago" for name in ("arrived_ago_s", "active_ago_s")),
        ]
        for workflow in shown
    ]
    head = ["workflow", "type", "latest agent", "state", "steps", "requests", "began", "active"]
    yield table("", head, rows, left=range(4))
    if pages > 1:
        yield f"page {page} of {pages}; another one with --page"
    workflow_id, workflow_type = (shlex.quote(shown[0][name]) for name in ("workflow_id", "workflow_type"))
    yield f"why:  presage explain {url} {workflow_id} --type {workflow_type}"


def promised_and_live(url: str, api_key: str | None) -> tuple[list[dict[str, Any]], list[Table]]:
    """Of each engine behind a URL the models and how their promises hold, as JSON values and as tables."""
    engines, shown = [], []
    for number, reported in enumerate(ask_engines(url, PATH, api_key)):
        engine = _read(reported)
        if engine is None:
            continue
        monitor = reported.get("monitor") or {}
        kept = {key: monitor.get(key, {}) for key in ("promised", "against_counts", "profile_against_counts", "alarms")}
        engines.append({"engine": number, "models": dict(engine.models), **kept})
        rows = [*([kind, model] for kind, model in engine.models.items()), *promises(engine), *broken(engine)]
        made = table(f"\nLive on {url}" + (f", engine {number}" if number else ""), ["", ""], rows)
        made.show_header, made.columns[1].justify, made.columns[0].min_width = False, "left", _WIDTH
        shown.append(made)
    return engines, shown


def _read(engine: Mapping[str, Any]) -> EngineStatus | None:
    try:
        return read_status(engine)
    except ValueError as error:
        raise EngineError(f"the server's status cannot be read ({type(error).__name__}); see it with --json") from error


def _tables(engines: list[Mapping[str, Any]]) -> Iterator[Any]:
    for number, reported in enumerate(engines):
        name = str(reported.get("name") or (f"Engine {number}" if len(engines) > 1 else "Engine"))
        engine = _read(reported)
        if engine is None:
            yield f"{name} runs another scheduler; start it with `presage serve`, or set --scheduler-cls"
        else:
            yield from tables(name, engine)


def tables(name: str, engine: EngineStatus) -> Iterator[Table]:
    """One engine: modes, then models and forecasts, then effects, then errors."""
    for title, rows in (
        (name, [*_policies(engine), *_models(engine), *_inputs(engine), *_workflows(engine)]),
        ("Forecasts", [*_forecasts(engine), *promises(engine), *_accuracies(engine), *_returns(engine)]),
        ("Cache", [*_prompts(engine), *_evicted(engine), *_prefetch(engine)]),
        ("Order and admission", [*_ageing(engine), *_admission(engine)]),
        ("Problems", problems(engine)),
    ):
        if rows:
            made = table(f"\n{title}", ["", ""], rows)
            made.show_header, made.columns[1].justify, made.columns[0].min_width = False, "left", _WIDTH
            yield made


def _policies(engine: EngineStatus) -> Rows:
    on = {**(engine.on or {}), **({} if engine.prefetch is None else {"prefetch": engine.prefetch.on})}
    return [["policies", ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in on.items())]]


def _models(engine: EngineStatus) -> Rows:
    rows: Rows = [[kind, model] for kind, model in engine.models.items()]
    rows += [[kind, coming] for kind, coming in (engine.reload.loading if engine.reload is not None else {}).items()]
    return rows if engine.states is None else [*rows, ["hidden states", engine.states]]


def _inputs(engine: EngineStatus) -> Rows:
    counts = (engine.inputs and engine.inputs.counts) or {}
    steps = counts.get("steps", 0)
    shares = [f"{name} {counts.get(name, 0) / steps:.0%}" for name in ("tokens", "text", "states")] if steps else []
    rows: Rows = [["steps with", ", ".join(shares)]] if shares else []
    for (kind, source), _ in missing_inputs(engine):
        rows.append([kind, f"was promoted with {source}, which this engine does not supply"])
    return rows


def _workflows(engine: EngineStatus) -> Rows:
    ends = ", ".join(f"{count} {reason}" for reason, count in (engine.ended or {}).items() if count)
    rows: Rows = [["workflows", f"{engine.workflows or 0} running" + (f", {ends}" if ends else "")]]
    rows += _identity(engine)
    if (webhook := engine.webhook) is not None:
        rows.append(
            [
                "webhook",
                f"{webhook.sent} events sent, {webhook.failed} failed and tried again, {webhook.waiting} waiting",
            ]
        )
    if engine.data_parallel > 1:
        told = f"one of {engine.data_parallel}; send all requests of a workflow to the same one (session affinity)"
        rows.append(["data-parallel engine", told])
    return rows


def _identity(engine: EngineStatus) -> Rows:
    identity = engine.identity
    if identity is None or not (identity.sources or identity.checked):
        return []
    parts = ", ".join(
        f"{times} {source}"
        for source, times in sorted(identity.sources.items(), key=lambda source_and_times: -source_and_times[1])
    )
    rows: Rows = [["inferred workflows", f"{identity.inferred} running; requests: {parts}"]] if parts else []
    if identity.precision is not None:
        share = f"{identity.precision:.1%} of {identity.checked.get('right', 0) + identity.checked.get('wrong', 0)}"
        rows.append(
            [
                "inference checked",
                f"right for {share} requests that name a workflow; {identity.checked.get('missed', 0)} not found",
            ]
        )
    return rows


def _forecasts(engine: EngineStatus) -> Rows:
    by_kind: dict[str, list[str]] = {}
    for (kind, source), times in counted(FORECASTS, engine):
        by_kind.setdefault(kind, []).append(f"{times:.0f} {source}")
    rows: Rows = [[kind, ", ".join(parts)] for kind, parts in by_kind.items()]
    for (moment, outcome), times in counted(HIDDEN_STATES, engine):
        rows.append([f"{moment} states", f"{times:.0f} {outcome}"])
    return rows


def promises(engine: EngineStatus) -> Rows:
    """Promised accuracy and coverage beside the live one; model and profile beside online counts, by workflow type."""
    if engine.monitor is None:
        return []
    rows: Rows = []
    for name, promise in engine.monitor.promised.items():
        for figure, comparison in promise.figures.items():
            told = f"{_with_interval(comparison.promised)} promised, {_with_interval(comparison.live)} live"
            rows.append(
                [f"{figure}: {name or '(no type)'}", f"{told} of {counted_of(comparison.workflows, 'workflow')}"]
            )
    for who, by_type in against_counts(engine.monitor):
        for name, compared in by_type.items():
            told = f"{compared.model:.3f}, online counts {compared.counts:.3f} at its latest {compared.steps} steps"
            rows.append([f"{who}against counts: {name or '(no type)'}", told])
    return rows


def _with_interval(figure: tuple[float, float, float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*figure)


def _accuracies(engine: EngineStatus) -> Rows:
    shares_of: dict[str, list[str]] = {}
    for (workflow_type, model, moment, _), share in accuracies(engine):
        shares_of.setdefault(f"{workflow_type or '(no type)'}, {model}, {_WHEN[moment]}", []).append(f"{share:.3f}")
    return [[f"accuracy: {label}", " / ".join(shares)] for label, shares in shares_of.items()]


def _returns(engine: EngineStatus) -> Rows:
    return [
        [
            f"returns: {name or '(no type)'}, {source}",
            ", ".join(f"{returns.within[q] / judged:.3f} within {q}" for q, judged in returns.judged.items() if judged),
        ]
        for name, source, returns in return_figures(engine)
    ]


def _prompts(engine: EngineStatus) -> Rows:
    prompts = engine.prompts
    if prompts is None:
        return []
    rows: Rows = [["prompt tokens", f"{prompts.tokens}"]]
    for name, tokens in (("found in the cache", prompts.local_tokens), ("loaded", prompts.external_tokens)):
        rows.append([name, f"{tokens} ({tokens / prompts.tokens if prompts.tokens else 0.0:.1%})"])
    return rows


def _evicted(engine: EngineStatus) -> Rows:
    parts = [f"{times} {kind}" for kind, times in (engine.evicted or {}).items()]
    return [["evicted blocks", ", ".join(parts)]] if parts else []


def _prefetch(engine: EngineStatus) -> Rows:
    prefetch = engine.prefetch
    if prefetch is None or prefetch.memory_bytes is None:
        return []
    return [
        ["prefetched tokens", f"{prefetch.tokens}, {prefetch.used_tokens} used, {prefetch.wasted_tokens} wasted"],
        ["prefetches", f"{prefetch.started} started, {prefetch.aborted} aborted, {prefetch.refused} refused"],
    ]


def _ageing(engine: EngineStatus) -> Rows:
    ageing = engine.ageing
    return [["ageing", f"{ageing.promoted} promoted, {ageing.demoted} demoted"]] if ageing is not None else []


def _admission(engine: EngineStatus) -> Rows:
    admission = engine.admission
    if admission is None:
        return []
    rows: Rows = [
        [
            "held back now",
            f"{admission.held} held with {admission.held_requests} requests, "
            f"{admission.paused} paused while their tools run",
        ],
        ["held back so far", f"{admission.held_s:.1f} s, the longest workflow {admission.longest_held_s:.1f} s"],
    ]
    if admission.outlook:
        chosen, everyone = admission.outlook["chosen"], admission.outlook["everybody"]
        rows.append(
            [
                "expected",
                f"{chosen.steps_per_s:.2f} steps/s of {chosen.workflows} workflows, {chosen.miss_share:.0%} of their "
                f"contexts lost; all {everyone.workflows}: {everyone.steps_per_s:.2f}, {everyone.miss_share:.0%} lost",
            ]
        )
    rows.append(["time spent on lost contexts", f"{admission.recomputing_share:.0%}"])
    if admission.overdue:
        rows.append(
            [
                "held for longer than allowed",
                f"{admission.overdue} workflows: letting all in would lose more contexts still",
            ]
        )
    return rows
