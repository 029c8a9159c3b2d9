"""`presage batch`: one plan over many rows: what the plan shares, and running it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.options import Json
from presage.cli.output import FAILED, Output, needing
from presage.errors import ConfigurationError, OutputError
from presage.wording import counted

if TYPE_CHECKING:
    from presage.batch.plan import Plan
    from presage.batch.prefix_tree import PromptNode
    from presage.batch.rows import RowFile

app = typer.Typer(help="Batches of workflows: one plan over many rows, with shared work done once.")

_PLAN = typer.Argument(
    metavar="FILE[:NAME]",
    help="Python file, and its variable that holds a plan or a compiled graph of LangGraph. Default: plan.",
)
_INPUTS = typer.Argument(help="Rows, one JSON object a line, with the fields that the plan reads; id names a row.")
_OUTPUTS = typer.Option("--outputs", metavar="NAMES", help="Outputs to compute, separated by commas. Default: all.")
_MB = 1_000_000
_ROWS_AT_A_TIME = 1000


@app.command(
    epilog="Examples:\n\npresage batch run plan.py questions.jsonl --engine http://127.0.0.1:8000 --to answers\n\n"
    "presage batch run graph.py:graph questions.jsonl --engine http://127.0.0.1:8000 --to answers"
)
def run(
    plan: Annotated[str, _PLAN],
    inputs: Annotated[Path, _INPUTS],
    to: Annotated[Path, typer.Option(help="Folder of the run. The same command again goes on where it stopped.")],
    engine: Annotated[
        list[str], typer.Option(help="Address of an OpenAI-compatible server; repeat for more. Rows are shared out.")
    ],
    outputs: Annotated[str, _OUTPUTS] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at each engine at a time.")] = 256,
    open_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows under way at each engine. Default: as many as its cache holds; else 1,000."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="File of answers at temperature 0 that runs share; it holds answers as text.")
    ] = None,
    cache_mb: Annotated[int, typer.Option(min=1, help="Size of that file's answers, at most.")] = 1000,
    tenant: Annotated[str, typer.Option(help="Whose answers the cache may serve.")] = "",
    model: Annotated[
        str, typer.Option(help="Model of calls that name none. Default: the only one that the engine serves.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest wait for one answer.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a plan, or a graph of LangGraph, over the rows of a file, and write results.jsonl and results.parquet.

    The chat completions of a graph's models go to the engines, whatever their base_url is.

    Every answer is kept before it is used: after a kill, a crash or a full disk the same command goes on, and asks for
    nothing twice. Rows that fail say why in the column error, and are tried again by the same command. The key in
    OPENAI_API_KEY, if there is one, is sent to the engines.
    """
    with needing("batch", "presage batch run"):
        from presage.batch.run import BatchRun, RunSettings
    from presage.batch.answers import Answers
    from presage.batch.prefix_tree import field_tokens, tree_of
    from presage.batch.rows import RowFile
    from presage.batch.schedule import soft_order

    out = Output(as_json)
    rows = RowFile(inputs)
    chosen = _plan(plan, outputs, rows)
    order = soft_order(chosen, tree_of(chosen, field_tokens(chosen, rows)), rows, workers=len(engine))
    settings = RunSettings(
        concurrency=concurrency,
        open_rows=open_rows,
        timeout_s=timeout_s,
        model=model,
        tenant=tenant,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
    )
    kept = Answers(cache, cache_mb * _MB) if cache is not None else None
    begun = time.monotonic()
    with out.working() as progress, closing(rows):
        running = BatchRun(chosen, rows, engine, to, order=order, settings=settings, cache=kept)
        try:
            report = asyncio.run(running.run(progress))
            _write(to, running.results, list(chosen.outputs))
        finally:
            running.close()
            if kept is not None:
                kept.close()
    seconds = time.monotonic() - begun
    lines = [
        f"{counted(report.rows, 'row')} in {seconds:.1f} s: {report.kept} were there, {report.failed} failed",
        *(f"  failed {count:,}: {kind}" for kind, count in sorted(report.failures.items(), key=lambda item: -item[1])),
        f"{counted(report.asked, 'answer')} from engines: {report.prompt_tokens:,} prompt tokens, "
        f"{report.cached_tokens:,} of them from prefix caches; {report.output_tokens:,} output tokens",
        *([f"{counted(report.truncated, 'answer')} reached max_tokens"] if report.truncated else []),
        *([f"{counted(report.empty, 'answer')} {'is' if report.empty == 1 else 'are'} empty"] if report.empty else []),
        f"{counted(report.known, 'answer')} known before: {report.tokens_saved:,} tokens saved",
        *(
            [f"answers of this run did not fit into the cache: {report.evicted:,}; raise --cache-mb"]
            if report.evicted
            else []
        ),
        f"results: {to / 'results.jsonl'}, {to / 'results.parquet'}",
    ]
    out.result({**asdict(report), "seconds": seconds, "to": str(to)}, "\n".join(lines))
    if report.failed:
        raise typer.Exit(FAILED)


@app.command(epilog="Example:  presage batch explain plan.py questions.jsonl")
def explain(
    plan: Annotated[str, _PLAN],
    inputs: Annotated[Path | None, _INPUTS] = None,
    outputs: Annotated[str, _OUTPUTS] = "",
    as_json: Json = False,
) -> None:
    """Show what a plan shares: operators left out or merged, the tree of its prompts, and the order of its calls.

    Tokens are estimates: four characters each, and half of max_tokens for an answer. Of a graph of LangGraph nodes and
    edges are shown, since its calls are found as it runs.
    """
    from presage.batch.operators import Call, CallingProgram
    from presage.batch.prefix_tree import field_tokens, tree_of
    from presage.batch.rows import RowFile
    from presage.batch.schedule import soft_order

    rows = RowFile(inputs) if inputs is not None else None
    chosen = _plan(plan, outputs, rows)
    expected = field_tokens(chosen, rows) if rows is not None else {}
    tree = tree_of(chosen, expected)
    runs_in = soft_order(chosen, tree, rows or [])
    agents = {node.key: node.operator.agent for node in chosen.calls if isinstance(node.operator, Call)}
    order = [
        {"agent": agents[key], "sequence": sequence, "place": place}
        for key, (sequence, place) in sorted(runs_in.places.items(), key=lambda item: item[1])
    ]
    optimised = chosen.optimised
    graphs = [list(node.operator.known) for node in chosen.nodes if isinstance(node.operator, CallingProgram)]
    lines = [
        f"{chosen.name}: {counted(optimised.written, 'operator')}; {optimised.pruned} left out, "
        f"{optimised.shared} merged, {optimised.folded} computed now; {counted(len(chosen.calls), 'call')} a row",
        "",
        "prompts (static tokens, or tokens that each row fills in):",
        *_branches(tree, agents, 1),
        "",
        "order of calls; those of one sequence run row by row, sequences one after the other over all rows:",
        *(f"  {call['sequence']}.{call['place']}  {call['agent']}" for call in order),
        *(["  so few rows that their calls are ordered one by one"] if runs_in.positions else []),
        *(line for graph_lines in graphs for line in ("", *graph_lines)),
    ]
    shape = {"calls": len(chosen.calls), "order": order, "tree": _data(tree, agents), "graphs": graphs}
    data = {"plan": chosen.name, **asdict(optimised), **shape}
    Output(as_json).result(data, "\n".join(lines))


@app.command(
    name="plan",
    epilog="Examples:\n\npresage batch plan models:/profile@champion --type review --to plan.py\n\n"
    "presage batch explain plan.py",
)
def write_plan(
    which: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FOLDER", help="Profile: models:/NAME@ALIAS, models:/NAME/VERSION, or an artefact folder."
        ),
    ],
    to: Annotated[Path, typer.Option(help="Python file to write.")],
    workflow_type: Annotated[
        str | None, typer.Option("--type", help="Workflow type. Default: the only one of the profile.")
    ] = None,
    prompts: Annotated[
        bool,
        typer.Option(" /--without-prompts", help="Leave the prompts to write, where the profile has no texts of them."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    tracking_uri: options.TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Write a plan's file from a workflow profile, to be edited: calls, loops, branches, prompts and lengths.

    Prompts come from traces with texts, learnt with --set keep_stems=true. What traces do not show is a function marked
    EDIT: when a loop is over, which branch is taken, what fills the gaps of a prompt. The file loads as it is.
    """
    from presage.atomic_file import write_file
    from presage.batch.from_profile import plan_file
    from presage.cli.profile import chosen_types, load_profile

    out = Output(as_json)
    if to.exists() and not force:
        raise ConfigurationError(f"{to} is there already, and may have been edited; give another name, or --force")
    with out.working() as report:
        report("loading the profile", None)
        _, predictor = load_profile(which, tracking_uri)
    types = chosen_types(predictor, workflow_type, which)
    if len(types) > 1:
        raise ConfigurationError(f"{which} has the workflow types {', '.join(types)}; name one with --type")
    ((name, profile),) = types.items()
    written = plan_file(name, profile, predictor.templates.get(name), prompts=prompts)
    write_file(to, written.encode())
    edits = written.count("# EDIT")
    lines = [
        f"{to}: {name}, {profile.text}",
        f"{counted(edits, 'place')} to edit, marked EDIT",
        *(f"note: {doubt}" for doubt in profile.doubts),
        f"next: presage batch explain {to}",
    ]
    out.result({"to": str(to), "workflow_type": name, "edits": edits}, "\n".join(lines))


def _plan(where: str, outputs: str, rows: RowFile | None) -> Plan:
    """The plan of a file, of the outputs that are wanted; raises TraceError if rows lack what it reads."""
    from presage.batch.load import load_plan

    made = load_plan(where, rows.fields if rows is not None else None)
    chosen = made.only(name.strip() for name in outputs.split(",")) if outputs else made
    if rows is not None:
        rows.check(chosen.fields)
    return chosen


def _write(folder: Path, results: Callable[[], Iterator[dict[str, Any]]], outputs: list[str]) -> None:
    """Write the results beside the run's file; values that are no text are JSON in the Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from presage.batch.plan import text_columns

    names = ["id", *outputs, "error"]
    schema = pa.schema([(name, pa.string()) for name in names])
    try:
        fresh = folder / "results.jsonl.part"
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in results())
        fresh.replace(folder / "results.jsonl")
        fresh = folder / "results.parquet.part"
        with pq.ParquetWriter(fresh, schema) as writer:
            left = results()
            while some := list(islice(left, _ROWS_AT_A_TIME)):
                writer.write_table(pa.table(text_columns(some, names), schema=schema))
        fresh.replace(folder / "results.parquet")
    except OSError as error:
        raise OutputError(f"{folder}: results cannot be written ({error}); run the same command to try again") from None


def _branches(node: PromptNode, agents: dict[str, str], depth: int) -> list[str]:
    lines = []
    for child in node.children.values():
        if child.tokens < 1 and not child.calls:  # the mark of a role alone
            lines += _branches(child, agents, depth)
            continue
        filled = sum(piece.tokens for piece in child.pieces if piece.of_row)
        who = f": {', '.join(agents[key] for key in child.calls)}" if child.calls else ""
        lines.append(f"{'  ' * depth}{child.tokens - filled:.0f} static, {filled:.0f} filled in{who}")
        lines += _branches(child, agents, depth + 1)
    return lines


def _data(node: PromptNode, agents: dict[str, str]) -> dict[str, Any]:
    return {
        "tokens": node.tokens,
        "of_row": any(piece.of_row for piece in node.pieces),
        "calls": [agents[key] for key in node.calls],
        "children": [_data(child, agents) for child in node.children.values()],
    }
