"""`presage traces`: ingest and describe traces, or generate synthetic ones."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.datasets.adapters import READERS
from presage.datasets.adapters.spans.tree import ROOT_MISSING
from presage.datasets.schema.names import NameMapping
from presage.errors import ConfigurationError
from presage.report.blocks import number
from presage.wording import counted

if TYPE_CHECKING:
    from presage.datasets.ingest import Feed

app = typer.Typer(no_args_is_help=True, help="Ingest traces into a store, describe them, or generate synthetic ones.")

_To = Annotated[Path, typer.Option("--to", help="Folder of the store; created if missing, else appended to.")]


@app.command(
    epilog="Example:  presage traces ingest runs/*.jsonl.gz --to traces/\n\n"
    "Names with ids in them:  presage traces ingest runs/ --to traces/ --agent-pattern 'researcher-.*=researcher'\n\n"
    "Logs of requests, without workflows:  presage traces ingest requests.jsonl.gz --infer-workflows --to traces/\n\n"
    "A .csv or .parquet file has the columns of docs/traces.md, as pandas writes it.\n\n"
    "Ingesting a file twice adds nothing. To resume an interrupted ingestion, repeat the command.",
)
def ingest(
    to: _To,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SOURCE", help=f"Trace stores, and files or folders of these formats: {', '.join(READERS)}."
        ),
    ] = None,
    source_format: Annotated[
        str,
        typer.Option(
            "--format", help=f"auto detects by name and content; or the format of all sources: {', '.join(READERS)}."
        ),
    ] = "auto",
    mlflow_experiment: Annotated[
        str | None,
        typer.Option(help="Also ingest the traces of this MLflow experiment."),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="With --mlflow-experiment: its MLflow server or database.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only workflows that started at this time or later: ISO 8601 with a zone, or epoch seconds."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Only workflows that started before this time, as --since: what came later is held out."),
    ] = None,
    agent_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=NAME",
            help="Fold the agents whose whole name matches the pattern into one. The store keeps it, and so do "
            "predictors. Repeat for more.",
        ),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            help="TOML or JSON file of such patterns, for agents and for workflow types: see docs/traces.md; or the "
            "file of `presage agents name`."
        ),
    ] = None,
    infer_workflows: Annotated[
        bool,
        typer.Option(
            "--infer-workflows",
            help="The sources are logs of requests, each with a prompt, an answer and a time (JSONL, CSV, Parquet, or "
            "vLLM's own log): infer from these which requests are one workflow.",
        ),
    ] = False,
    workflow_type: Annotated[
        str | None,
        typer.Option(help="With --infer-workflows: the type of all inferred workflows."),
    ] = None,
    min_identity_confidence: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Leave out workflows with a step that is less certain to be theirs, where no names tell.",
        ),
    ] = None,
    skip_bad: options.SkipBad = False,
    strict: Annotated[
        bool,
        typer.Option(
            help="Fail, with exit code 2, if anything in spans was not read, was lost or dropped, or is doubtful."
        ),
    ] = False,
    parents_elsewhere: Annotated[
        bool,
        typer.Option(
            help="The callers export their spans elsewhere: a trace that lacks only the parent of its first spans is "
            "complete."
        ),
    ] = False,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Read files on a Ray cluster (RAY_ADDRESS, else one on this machine); needs the extra distributed.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Validate traces and add them to a store, all or nothing, in bounded memory."""
    from presage.datasets.ingest import ingest as bring_in
    from presage.datasets.ingest import request_logs

    out = Output(as_json)
    mapping = NameMapping.read(agent_pattern or (), names)
    moment = None if since is None else parse_moment(since, "--since")
    end = None if until is None else parse_moment(until, "--until")
    if moment is not None and end is not None and end <= moment:
        raise ConfigurationError(f"--until {until} is not after --since {since}: no workflow is left; correct one")
    if not infer_workflows and workflow_type is not None:
        raise ConfigurationError(
            "--workflow-type is of inferred workflows: give --infer-workflows too, or leave it out"
        )
    if infer_workflows and mlflow_experiment is not None:
        raise ConfigurationError("--mlflow-experiment has workflows: ingest it by itself, without --infer-workflows")
    given: list[Path | Feed] = [*(sources or ())]
    if infer_workflows:
        given = [request_logs(sources or [], workflow_type, skip_bad)]
    if mlflow_experiment is not None:
        given.append(_experiment(mlflow_experiment, tracking_uri, moment, skip_bad))
    with out.working() as report:
        done = bring_in(
            given,
            to,
            since=moment,
            until=end,
            skip_bad=skip_bad,
            strict=strict,
            source_format=source_format,
            parents_elsewhere=parents_elsewhere,
            on_ray=on_ray,
            names=mapping,
            min_identity_confidence=min_identity_confidence,
            progress=report,
        )
    data = {"store": str(to), **asdict(done)}
    notes = {
        "there already": done.already_present,
        "extended": done.extended,
        "given more than once": done.repeated,
    }
    noted = "".join(f"; {counted(count, 'workflow')} {what}" for what, count in notes.items() if count)
    lines = [f"{to}: {counted(done.workflows, 'workflow')}, {counted(done.steps, 'step')} added{noted}"]
    if done.resumed:
        lines.append(f"{counted(done.resumed, 'source')} read before the last attempt was stopped")
    lines += [f"skipped {count} × {reason}" for reason, count in done.skipped.items()]
    lines += notice_lines(done.notices)
    out.result(data, *lines)


def notice_lines(notices: Mapping[str, int]) -> list[str]:
    """What was not read of spans, a line each, and what to do about a missing root."""
    lines = [f"read with {count} × {what}" for what, count in notices.items()]
    if notices.get(ROOT_MISSING):
        lines.append(
            "a root is missing where a trace was cut, or where its caller exports spans elsewhere: then give "
            "--parents-elsewhere"
        )
    return lines


def _experiment(name: str, tracking_uri: str | None, since: dt.datetime | None, skip_bad: bool) -> Feed:
    from presage.datasets.adapters.spans.mlflow_store import read_mlflow_experiment
    from presage.datasets.ingest import Feed

    begin = partial(read_mlflow_experiment, name, tracking_uri=tracking_uri, since=since, skip_bad=skip_bad)
    return Feed(f"MLflow experiment {name!r}", begin)


@app.command(
    epilog="Examples:\n\npresage traces describe traces/ --json\n\npresage traces describe traces/ --html traces.html"
)
def describe(
    store: options.Traces,
    page: Annotated[Path | None, typer.Option("--html", help="Also write the description as an HTML page.")] = None,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Show workflow types, agents, lengths, tokens, the share of truncated workflows, and the call graph."""
    from presage.datasets.describe import describe as describe_table
    from presage.datasets.describe import generated_names_warning, missing_counts_warning

    out = Output(as_json)
    with out.working() as report:
        traces = options.read_traces(store, skip_bad, out, report)
        report("describing", None)
        data = {**describe_table(traces.table), "notices": dict(traces.notices)}
        if page is not None:
            from presage.atomic_file import write_file
            from presage.report.files import page as rendered
            from presage.report.traces import document

            write_file(page, rendered(document(data)).encode())
    out.result(data, *(_description(data) if not as_json else ()))
    for warning in filter(None, (missing_counts_warning(data), generated_names_warning(data))):
        out.note(f"warning: {warning}")


@app.command(epilog="Example:  presage traces agents traces/ --to agents.json   # then agent_names in the gateway file")
def agents(
    store: options.Traces,
    to: Annotated[Path, typer.Option("--to", help="JSON file of names and hashes, without texts.")],
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Learn by which system prompts `presage gateway` recognises your agents; traces need the column system_prompt."""
    from presage.features.agent_names import AgentNames

    out = Output(as_json)
    with out.working() as report:
        names = AgentNames.learn(options.read(store, skip_bad, out, report))
        names.save(to)
    data = {"system_prompts": len(names), "file": str(to)}
    out.result(data, f"{counted(len(names), 'system prompt')} of agents: {to}")


@app.command(epilog="Example:  presage traces generate --process retry --workflows 1000 --seed 0 --to known/")
def generate(
    to: _To,
    process: Annotated[
        str | None,
        typer.Option(help="retry, research or triage (sequences of agents), or lengths (output lengths)."),
    ] = None,
    law: Annotated[str | None, typer.Option(hidden=True)] = None,
    workflows: Annotated[int, typer.Option(help="Number of workflows.", min=1)] = 1000,
    seed: options.Seed = 0,
    state_size: Annotated[int, typer.Option(help="Width of the hidden states.", min=1)] = 64,
    censored: Annotated[float, typer.Option(help="Share of the workflows that may be truncated.", min=0, max=1)] = 0.0,
    as_json: options.Json = False,
) -> None:
    """Generate workflows of a synthetic process with a known optimal forecast and add them to a store."""
    from presage.datasets.ingest import append
    from presage.datasets.synthetic.lengths import generate_lengths
    from presage.datasets.synthetic.processes import PROCESSES
    from presage.datasets.synthetic.workflows import generate as draw

    out = Output(as_json)
    if law is not None:
        typer.echo("warning: --law is deprecated; use --process", err=True)
        process = process or law
    processes = (*PROCESSES, "lengths")
    if process not in processes:
        raise ConfigurationError(f"--process {process or 'is missing'}: choose one of {', '.join(processes)}")
    with out.working() as report:
        report("generating workflows", None)
        if process == "lengths":  # lengths have no hidden states
            table = generate_lengths(workflows, seed, censored=censored).table
        else:
            table = draw(process, workflows, seed, state_size=state_size, censored=censored).table
        added = append(table, to)
    data = {"store": str(to), "law": process, "seed": seed, "workflows": added.workflows, "steps": added.steps}
    out.result(
        data,
        f"{to}: {counted(added.workflows, 'workflow')}, {counted(added.steps, 'step')} of process {process!r} added",
    )


def _description(data: dict[str, Any]) -> list[Any]:
    names = NameMapping.from_dict(data["names"])
    parts: list[Any] = [f"{counted(data['workflows'], 'workflow')}, {counted(data['steps'], 'step')}"]
    parts += [f"names folded by {names}"] if names else []
    for name, figures in data["workflow_types"].items():
        length, spans = figures["length"], (figures["started_at"] or ["unknown", "unknown"])
        facts = [
            ["workflows", str(figures["workflows"])],
            ["tasks", str(figures["tasks"]) if figures["tasks"] else "none given"],
            [
                "steps a workflow",
                f"median {length['p50']:.0f}, 90 % within {length['p90']:.0f}, most {length['max']:.0f}",
            ],
            *(
                [
                    column.replace("_", " "),
                    f"median {figures[column]['p50']:.0f}, 99 % within {figures[column]['p99']:.0f}",
                ]
                for column in ("input_tokens", "output_tokens", "cached_input_tokens")
                if figures[column]
            ),
            *([["finish reasons", _reasons(figures["finish_reasons"])]] if figures["finish_reasons"] else []),
            ["truncated", f"{figures['censored_share']:.1%}"],
            ["successful", "unknown" if figures["success_share"] is None else f"{figures['success_share']:.1%}"],
            ["steps with text", f"{figures['text_share']:.1%}"],
            ["steps in a fan-out", f"{figures['fan_out_share']:.1%}"],
            *([state, f"{s['size']} numbers, {s['share']:.1%} of the steps"] for state, s in figures["states"].items()),
            ["first and last start", " to ".join(spans)],
            *([[what, ", ".join(figures[what][:6])] for what in ("appeared", "vanished") if figures[what]]),
        ]
        parts.append(table(f"\n{name}", ["", ""], facts))
        rows = [
            [
                agent,
                str(figures["agents"][agent]),
                ", ".join(f"{to} {number(edge['probability'], 2)}" for to, edge in list(after.items())[:6]),
            ]
            for agent, after in figures["call_graph"].items()
        ]
        parts.append(table(f"\n{name}: call graph", ["agent", "steps", "what follows"], rows))
    return parts


def _reasons(shares: dict[str, float]) -> str:
    return ", ".join(f"{reason} {share:.1%}" for reason, share in list(shares.items())[:6])


def parse_moment(text: str, name: str) -> dt.datetime:
    """A time in ISO 8601 with a zone, or in epoch seconds; raises ConfigurationError for the option `name`."""
    wanted = (
        "a date and time in ISO 8601 with a zone (2026-01-31T00:00:00Z, 2026-01-31T09:30+02:00) or epoch seconds is "
        "wanted"
    )
    try:
        seconds = float(text)
    except ValueError:
        seconds = None
    try:
        moment = dt.datetime.fromisoformat(text) if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        hint = "" if seconds is None else " (milliseconds?)"
        raise ConfigurationError(f"{name} {text!r}: no such time{hint}; {wanted}") from None
    if moment.tzinfo is None:
        raise ConfigurationError(f"{name} {text!r}: no zone; {wanted}: add Z for UTC")
    return moment
