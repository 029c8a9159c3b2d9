"""`presage replay`: hit rate and completion time of recorded workflows under each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import INTERRUPTED, Output, report_lines
from presage.predictor_kinds import KINDS
from presage.progress import Progress
from presage.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.replay.fleet_file import FleetMember
    from presage.replay.policies import Policy
    from presage.replay.runs import Done, Setting
    from presage.replay.workload import PromptConvention, Workload

_CONCURRENCY: Final = 16
"""Concurrent workflows, unless --concurrency, --rate or --as-recorded is given."""

_ENGINE: Final = "invented"

_POLICIES: Final = "stock,lifecycle,next-use,oracle"


def replay(
    traces: options.Traces,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help=f"Policies, separated by commas. Default: {_POLICIES}. An unknown name lists them."
        ),
    ] = None,
    forecasts: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Forecast source of the policies: oracle, noise:0.2, counts (learnt during the replay), a model's "
            "folder or models:/NAME@ALIAS.",
        ),
    ] = "counts",
    lengths: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Remaining-length model beside a next-agent model or counts."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Workflow profile behind a next-agent model or counts, as in serving."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Context-growth model, for admission. Default: counts."),
    ] = None,
    returns: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Source of return times: oracle, noise:0.2, counts or a return-time model. Default: as --forecasts if "
            "that is oracle or noise, else counts.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Queue orders, each combined with each policy (default: stock): fcfs, sjf, stjf, stjf-oracle.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Number of concurrent workflows. Default: {_CONCURRENCY}."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Mean arrivals of workflows per second.")] = None,
    cv: Annotated[
        float, typer.Option(help="With --rate: coefficient of variation of the gaps; 1 is Poisson, above 1 is bursty.")
    ] = 1.0,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Workflows arrive at their recorded times.")
    ] = False,
    prompts: Annotated[
        str,
        typer.Option(
            help="recorded: as prefix_blocks of the trace say, else history-first. history-first: all agents share one "
            "history. own-conversation: each agent has its own."
        ),
    ] = "recorded",
    opening_tokens: Annotated[
        int,
        typer.Option(
            help="First tokens of a prompt, shared by all workflows of a type (own-conversation: calls of an agent)."
        ),
    ] = 0,
    closing_tokens: Annotated[
        int, typer.Option(help="Last tokens of a prompt that no later prompt repeats, such as an agent's instruction.")
    ] = 0,
    pause_s: Annotated[
        float | None,
        typer.Option(help="Mean of random pauses between steps. Default: pauses as recorded."),
    ] = None,
    with_pauses: Annotated[
        bool,
        typer.Option(
            "--with-pauses",
            help="Count pauses in completion times. Default: only the time in which a workflow has a request in the "
            "engine, waiting or running, since no policy can shorten a pause.",
        ),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help=f"TOML file of an engine, or a built-in name. Default: {_ENGINE}.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of several engines (docs/fleet.md): --policy then names routing policies, all by default."
        ),
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Cache size in tokens; overrides the file.")] = None,
    host_cache_tokens: Annotated[
        int | None,
        typer.Option(help="Host cache size in tokens; overrides the file."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy, with seeds 0, 1, …", min=1)] = 3,
    processes: Annotated[int | None, typer.Option(help="Parallel runs. Default: one per core.", min=1)] = None,
    report_folder: Annotated[
        Path | None,
        typer.Option("--report", help="Folder for metrics.json, report.html and report.md."),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Run recorded workflows through vLLM's own scheduler in virtual time, once for each policy; needs no GPU.

    With --fleet, through the schedulers of several engines under one clock, behind each routing policy.

    Prints each run as it ends, a row for each policy, and a verdict in one sentence. Completion times leave out pauses
    between the steps of a workflow.
    """
    from presage.replay.fleet_file import FleetPlan, read_fleet
    from presage.replay.runs import Setting, check_vllm, run_all
    from presage.replay.workload import Arrivals, PromptConvention, check_fits
    from presage.report.files import check_folder, document, write_metrics, write_report
    from presage.serving_hooks.engine_file import read_engine

    if concurrency is None and rate is None and not as_recorded:
        concurrency = _CONCURRENCY
    plan = FleetPlan() if fleet is None else read_fleet(fleet)
    members = plan.engines
    of_an_engine = {"--engine": engine, "--cache-tokens": cache_tokens, "--host-cache-tokens": host_cache_tokens}
    policies = _fleet_policies(policy, of_an_engine, scheduler) if members else _engine_policies(policy, scheduler)
    users = [*policies, *(member.policy for member in members)]
    arrivals = Arrivals(concurrency, rate, cv, as_recorded)
    convention = PromptConvention(prompts, opening_tokens, closing_tokens)  # type: ignore[arg-type]  # it checks the name
    machine = members[0].engine if members else read_engine(engine or _ENGINE, cache_tokens, host_cache_tokens)
    if report_folder is not None:
        check_folder(report_folder, "--report")
    check_vllm()
    out = Output(as_json)
    with out.working() as report:
        wanted = {
            "forecasts": forecasts,
            "lengths": lengths,
            "profile": profile,
            "contexts": contexts,
            "returns": returns,
        }
        plain = are_requests(traces)
        if plain:
            of_workflows = {
                "--opening-tokens": opening_tokens,
                "--closing-tokens": closing_tokens,
                "--pause-s": pause_s,
                **{f"--{name}": source for name, source in wanted.items() if name != "forecasts"},
                "--scheduler": scheduler,
            }
            held, rule = read_plain_requests(traces, of_workflows, forecasts, out, report), None
            sources: dict[str, Any] = {"forecasts": forecasts}
        else:
            table = options.read(traces, skip_bad, out, report)
            table, sources, rule = _held_out(table, users, wanted, tracking_uri, out, report)
            held = _read_workflows(table, convention, pause_s, out)
            if prompts == "recorded" and not held.recorded:
                convention = replace(convention, prompts="history-first")
        setting = Setting(
            *(held.jobs, convention, arrivals, machine),
            **sources,
            with_pauses=with_pauses,
            fleet=members,
            models=plan.agents,
            scaling=plan.scaling,
        )
        for member_engine in (*(member.engine for member in members), machine):
            check_fits(held.jobs, member_engine)
        if as_recorded and seeds > 1:
            out.note("recorded arrivals do not depend on the seed: one run of each policy")
            seeds = 1
        done, interrupted = run_all(
            setting, policies, range(seeds), processes, report, lambda run: out.note(_row(run, policies))
        )
        forecasting = not plain and any("asked" in user.sources for user in users)
        shown = {**wanted, "returns": setting.returns} if forecasting else dict.fromkeys(wanted)
        metrics = {
            "kind": "replay",
            "workload": _workload_figures(held, setting, plain),
            "engine": machine.model_dump(),
            **shown,
            "replayed": rule,
            "seeds": seeds,
            "interrupted": interrupted,
            **_run_figures(done, policies, setting),
        }
        if members:
            metrics |= {"engines": len(members), "fleet": [described(member) for member in members]}
        if report_folder is not None:
            write_metrics(report_folder, metrics)
            write_report(report_folder, metrics)
    out.result(metrics, *report_lines(document(metrics)))
    if interrupted:
        out.note(f"interrupted: {len(done)} of {len(policies) * seeds} runs finished; the figures cover these only")
        raise typer.Exit(INTERRUPTED)


def _engine_policies(names: str | None, orders: str | None) -> list[Policy]:
    """The policies of one engine, each with each order of its queue."""
    from presage.replay.policies import STOCK, crossed, named

    policies = named(names or (_POLICIES if orders is None else STOCK))
    return policies if orders is None else crossed(policies, orders)


def _fleet_policies(names: str | None, of_an_engine: Mapping[str, object], orders: str | None) -> list[Policy]:
    """The routing policies of a fleet; raises ConfigurationError if an option of one engine is given."""
    from presage.errors import ConfigurationError
    from presage.replay.policies import ROUTING, routing_named

    for option, value in {**of_an_engine, "--scheduler": orders}.items():
        if value is not None:
            raise ConfigurationError(f"{option} applies to one engine: omit it, or say it in the file of --fleet")
    return routing_named(names or ",".join(ROUTING))


def _read_workflows(table: pa.Table, convention: PromptConvention, pause_s: float | None, out: Output) -> Workload:
    """The jobs of traces; notes what of them is estimated."""
    from presage.replay.workload import workload

    held = workload(table, convention, pause_s)
    if held.estimated_sizes:
        out.note(
            f"token counts of {held.estimated_sizes} of {counted(len(held.jobs), 'workflow')} were not all "
            "recorded: the missing ones are estimated"
        )
    if held.estimated_ends:
        out.note(f"{held.estimated_ends} requests without ended_at: their ends are estimated by their outputs")
    if held.recorded:
        out.note(f"prompts of {held.recorded} of {len(held.jobs)} workflows are as prefix_blocks recorded them")
    return held


def _workload_figures(held: Workload, setting: Setting, plain: bool) -> dict[str, Any]:
    from presage.replay.promotion_gate import load_of

    arrivals = setting.arrivals
    return {
        "workflows": 0 if plain else len(held.jobs),
        "left_out": held.left_out,
        "recorded_prompts": held.recorded,
        "estimated_sizes": held.estimated_sizes,
        "estimated_ends": held.estimated_ends,
        "cut": sum(not job.complete for job in held.jobs),
        **load_of(setting),
        "cv": arrivals.cv if arrivals.rate is not None else None,
        "as_recorded": arrivals.as_recorded,
        "with_pauses": setting.with_pauses,
        **({"prompts": "hash-ids" if hashed(held) else "nothing-shared"} if plain else {}),
    }


def _run_figures(done: Sequence[Done], policies: Sequence[Policy], setting: Setting) -> dict[str, Any]:
    from presage.replay.runs import by_policy, result
    from presage.replay.verdict import verdict

    bounds = {policy.name for policy in policies if policy.is_bound}
    longest = max(step.prompt_tokens for job in setting.jobs for step in job.steps)
    return {
        "policies": result(done),
        "verdict": verdict(by_policy(done), bounds, setting.engine.block_tokens, longest),
    }


def _row(run: Done, policies: Sequence[Policy]) -> str:
    """A finished run in a line."""
    limit = f", {run.at_once} at once" if run.at_once is not None else ""
    width = max(len(policy.name) for policy in policies)
    return (
        f"{run.policy:{width}}  seed {run.seed}{limit}: hit rate {run.figures['hit_rate']:.3f}, "
        f"mean completion {run.figures['completion_mean_s']:.1f} s, queueing {run.figures['queueing_mean_s']:.2f} s"
    )


def described(member: FleetMember) -> dict[str, Any]:
    """An engine of a fleet, as a report shows it."""
    return {
        "name": member.name,
        "cache_tokens": member.engine.cache_tokens,
        "host_cache_tokens": member.engine.host_cache_tokens,
        "policy": member.policy.name,
        "model": member.model or None,
        "opens_s": member.opens_s,
        "closes_s": member.closes_s if math.isfinite(member.closes_s) else None,
    }


def _held_out(
    table: pa.Table,
    policies: Sequence[Policy],
    wanted: Mapping[str, str | None],
    tracking_uri: str | None,
    out: Output,
    report: Progress,
) -> tuple[pa.Table, dict[str, Any], str | None]:
    """The workflows that no model was trained on, the sources of forecasts of a `Setting`, and a note if any is left
    out. Models that no policy uses are not loaded."""
    from presage.replay.forecasts import COUNTS, check_beside, known

    forecasts, returns = wanted["forecasts"] or COUNTS, wanted["returns"]
    check_beside(forecasts, wanted["lengths"], wanted["profile"])
    if returns is None:
        returns = forecasts if known(forecasts) else COUNTS
    sources = {**wanted, "returns": returns}
    models_named = [name for name in sources.values() if name is not None and not known(name)]
    if not models_named or not any("asked" in policy.sources for policy in policies):
        return table, {"forecasts": forecasts, "returns": returns}, None

    from presage.registry.database import resolve_at
    from presage.training.sets import LearntFrom, held_out

    report("loading the models", None)
    models: list[LearntFrom] = []
    for kind in KINDS.values():
        name = sources.get(kind.replayed or "")
        if kind.replayed and name is not None and not known(name):
            folder = resolve_at(name, tracking_uri).folder
            models.append(kind.load(folder))
            sources[kind.replayed] = str(folder)
    table, left_out = held_out(table, *models)
    rule = f"{left_out} workflows left out: a model was trained on them" if left_out else None
    if rule is not None:
        out.note(rule)
    return table, sources, rule


def are_requests(paths: Sequence[Path]) -> bool:
    """Whether the traces are plain requests rather than steps of workflows.

    Raises:
        TraceError: the files mix both.
    """
    from presage.datasets.requests import holds_requests
    from presage.errors import TraceError

    plain = [path for path in paths if path.exists() and holds_requests(path)]
    if plain and len(plain) < len(paths):
        raise TraceError(
            f"{plain[0]} holds plain requests and other files hold steps of workflows: replay them one after the other"
        )
    return bool(plain)


def read_plain_requests(
    paths: Sequence[Path], of_workflows: Mapping[str, object], forecasts: str, out: Output, report: Progress
) -> Workload:
    """Read plain requests as jobs; note what a replay of them cannot show.

    Raises:
        ConfigurationError: one of the options `of_workflows`, which apply to workflows only, is given.
    """
    from presage.datasets.requests import HASH_TOKENS, read_requests
    from presage.errors import ConfigurationError
    from presage.replay.forecasts import known
    from presage.replay.workload import requests_workload

    for option, value in of_workflows.items():
        if value:
            raise ConfigurationError(
                f"{option} applies to workflows only, and these traces hold plain requests: omit it"
            )
    if not known(forecasts):
        raise ConfigurationError(
            f"--forecasts {forecasts}: it forecasts workflows, and these traces hold plain requests: omit it"
        )
    report("reading requests", None)
    workload = requests_workload(read_requests(paths), HASH_TOKENS)
    shared = "" if hashed(workload) else ", and without block hashes there are no cache hits"
    out.note(
        "these traces hold plain requests: without workflows there are no forecasts and workflow policies have no "
        f"effect{shared}"
    )
    return workload


def hashed(of: Workload) -> bool:
    """Whether the requests carry hashes of shared prompt blocks."""
    return any(job.steps[0].hashed for job in of.jobs)
