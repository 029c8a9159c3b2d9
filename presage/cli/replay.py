"""`presage replay`: what would each policy have done to hit rate and completion time on these workflows?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options, replay_requests
from presage.cli.boundary import INTERRUPTED
from presage.cli.output import Output
from presage.cli.replay_parts import divide

if TYPE_CHECKING:
    from presage.serving_hooks.replay.arrivals import Arrivals
    from presage.serving_hooks.replay.runs import Setting

_CONCURRENCY: Final = 16
"""Workflows under way at once, where nobody says how they come."""

_POLICIES: Final = "stock,lifecycle,hierarchical,oracle"

_SHOWN: Final = {
    "hit rate": ("hit_rate", 3),
    "completion s": ("completion_mean_s", 1),
    "its p95": ("completion_p95_s", 1),
    "first token s": ("ttft_mean_s", 2),
    "queueing s": ("queueing_mean_s", 2),
    "worst": ("longest_wait_s", 1),
    "makespan s": ("makespan_s", 0),
    "output tokens/s": ("throughput_tokens_per_s", 0),
    "preempted": ("preemptions", 0),
    "recomputed tokens": ("recomputed_tokens", 0),
}


def replay(
    traces: options.Traces,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"What to compare, separated by commas; {_POLICIES} where nothing is said. A wrong name lists them.",
            show_default=False,
        ),
    ] = None,
    forecasts: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Of policies that forecast: oracle, noise:0.2, counts (learnt on the way), markov-3, a model's folder "
            "or models:/NAME@ALIAS.",
        ),
    ] = "counts",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Remaining-length model beside a next-agent model or counts.", show_default=False
        ),
    ] = None,
    train_traces: Annotated[
        list[Path] | None,
        typer.Option(
            help="What markov-3 and static-graph learn from; without it half of the tasks, and the rest is replayed.",
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Who runs next, crossed with each policy (stock, if none is named): fcfs, sjf, stjf, stjf-oracle.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help=f"So many workflows under way at once; {_CONCURRENCY} where nothing is said.", show_default=False
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Workflows a second, at random.", show_default=False)] = None,
    cv: Annotated[float, typer.Option(help="With --rate: variation of the gaps; 1 is Poisson, more is bursts.")] = 1.0,
    as_recorded: Annotated[bool, typer.Option("--as-recorded", help="Workflows come when they came.")] = False,
    prompts: Annotated[
        str, typer.Option(help="history-first: all agents read one history. own-conversation: each its own.")
    ] = "history-first",
    opening_tokens: Annotated[
        int, typer.Option(help="First tokens that all workflows of a type share; or all calls of an agent.")
    ] = 0,
    closing_tokens: Annotated[
        int, typer.Option(help="Last tokens of a prompt that no later prompt repeats: an agent's instruction.")
    ] = 0,
    pause_s: Annotated[
        float | None,
        typer.Option(help="Mean pause between steps, drawn; without it pauses are as recorded.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option(help="TOML file of an engine, or the name of one that is known.")] = "invented",
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens the cache holds; goes before the file.", show_default=False)
    ] = None,
    host_cache_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens the host's memory holds behind it; goes before the file.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy, with seeds 0, 1, …", min=1)] = 3,
    processes: Annotated[
        int | None, typer.Option(help="Runs side by side; without it one a core.", min=1, show_default=False)
    ] = None,
    report_folder: Annotated[
        Path | None,
        typer.Option("--report", help="Folder for metrics.json, report.html and report.md.", show_default=False),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Run recorded workflows through vLLM's own scheduler in virtual time, once for each policy; needs no GPU."""
    from presage.serving_hooks.replay.arrivals import Arrivals
    from presage.serving_hooks.replay.engine import check_fits
    from presage.serving_hooks.replay.engine_file import read_engine
    from presage.serving_hooks.replay.policies import STOCK, check_switches, crossed, named
    from presage.serving_hooks.replay.runs import Setting, check_vllm, result, run_all, settings_of_hooks
    from presage.serving_hooks.replay.workload import Convention, workload
    from presage.training.report.files import check_folder, write_metrics, write_report

    if concurrency is None and rate is None and not as_recorded:
        concurrency = _CONCURRENCY
    policies = named(policy or (_POLICIES if scheduler is None else STOCK))
    if scheduler is not None:
        policies = crossed(policies, scheduler)
    arrivals = Arrivals(concurrency, rate, cv, as_recorded)
    convention = Convention(prompts, opening_tokens, closing_tokens)  # type: ignore[arg-type]  # it checks the name
    machine = read_engine(engine, cache_tokens, host_cache_tokens)
    if report_folder is not None:
        check_folder(report_folder, "--report")
    check_vllm()
    check_switches(policies, settings_of_hooks())
    out = Output(as_json)
    with out.working() as report:
        plain = replay_requests.are_requests(traces)
        if plain:
            given = {"--lengths": lengths, "--train-traces": train_traces, "--scheduler": scheduler}
            held = replay_requests.read(traces, convention, pause_s, forecasts, policies, given, out, report)
            setting, rule = Setting(held.jobs, convention, arrivals, machine, forecasts), None
        else:
            table = options.read(traces, skip_bad, out, report)
            parts = divide(
                table, policies, forecasts, lengths, train_traces, convention, skip_bad, tracking_uri, out, report
            )
            held, rule = workload(parts.table, convention, pause_s), parts.rule
            setting = Setting(held.jobs, convention, arrivals, machine, parts.forecasts, parts.lengths, parts.taught)
        foretold = not plain and any("asked" in one.foretellers for one in policies)
        check_fits(held.jobs, machine)
        if not arrivals.random and seeds > 1:
            out.note("arrivals as recorded do not depend on a seed: one run of each policy")
            seeds = 1
        done, interrupted = run_all(setting, policies, range(seeds), processes, report)
        found: dict[str, Any] = {
            "kind": "replay",
            "workload": _workload(setting, held.left_out, arrivals),
            "engine": machine.model_dump(),
            "forecasts": forecasts if foretold else None,
            "lengths": lengths if foretold else None,
            "replayed": rule,
            "seeds": seeds,
            "interrupted": interrupted,
            "policies": result(done),
        }
        if plain:
            found["workload"] |= replay_requests.told(held)
        if report_folder is not None:
            write_metrics(report_folder, found)
            write_report(report_folder, found)
    out.result(found, *(_told(found) if not as_json else ()))
    if interrupted:
        out.note(f"interrupted: {len(done)} of {len(policies) * seeds} runs were done, and only they are counted")
        raise typer.Exit(INTERRUPTED)


def _workload(setting: Setting, left_out: int, arrivals: Arrivals) -> dict[str, Any]:
    jobs = setting.jobs
    steps = [step for job in jobs for step in job.steps]
    return {
        "workflows": len(jobs),
        "left_out": left_out,
        "cut": sum(not job.complete for job in jobs),
        "requests": len(steps),
        "prompt_tokens": sum(step.prompt_tokens for step in steps),
        "output_tokens": sum(step.output_tokens for step in steps),
        "prompts": setting.convention.prompts,
        "opening_tokens": setting.convention.opening_tokens,
        "closing_tokens": setting.convention.closing_tokens,
        "concurrency": arrivals.concurrency,
        "rate": arrivals.rate,
        "cv": arrivals.cv if arrivals.rate is not None else None,
        "as_recorded": arrivals.as_recorded,
    }


def _told(found: Mapping[str, Any]) -> list[Any]:
    """For people."""
    from presage.cli.replay_tables import evictions, figure, queueing, shares, tiers
    from presage.cli.tables import table

    held, engine = found["workload"], found["engine"]
    host = f" and {engine['host_cache_tokens']} in the host" if engine["host_cache_tokens"] else ""
    lines: list[Any] = [
        f"{held['workflows']} workflows, {held['requests']} requests, {_came(held)}; {held['prompts']} prompts; "
        f"a cache of {engine['cache_tokens']} tokens{host}; costs: {engine['cost']['source']}"
    ]
    if held["left_out"]:
        lines.append(f"{held['left_out']} workflows left out: sizes of their requests were not recorded")
    rows = [
        [name, *(figure(of[shown], digits) for shown, digits in _SHOWN.values())]
        for name, of in found["policies"].items()
    ]
    title = f"\nMean over {found['seeds']} seeds, ± half of its 95 % interval"
    lines.append(table(title, ["policy", *_SHOWN], rows))
    policies = found["policies"]
    for more in (shares(policies, _SHOWN), queueing(policies), tiers(policies), evictions(policies)):
        if more is not None:
            lines.append(table(*more))
    for name, of in found["policies"].items():
        if "at_once" in of:
            lines.append(f"{name}: {of['at_once']} workflows at once")
        if "switched_off" in of:
            lines.append(f"{name}: {', '.join(of['switched_off'])} failed and switched itself off")
    return lines


def _came(held: Mapping[str, Any]) -> str:
    if held["as_recorded"]:
        return "as recorded"
    if held["concurrency"] is not None:
        return f"{held['concurrency']} at once"
    return f"{held['rate']:g} a second with cv {held['cv']:g}"
