"""`presage batch`: one plan over many rows: what the plan shares, and running it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.options import Json
from presage.cli.output import FAILED, Output
from presage.errors import ConfigurationError, OutputError, PresageError, TraceError
from presage.wording import counted, install

if TYPE_CHECKING:
    from presage.batch.plan import Plan
    from presage.batch.prefix_tree import PromptNode

app = typer.Typer(help="Batches of workflows: one plan over many rows, with shared work done once.")

_PLAN = typer.Argument(help="Python file that makes the plan, as a variable named plan; docs/batch.md.")
_INPUTS = typer.Argument(help="Rows, one JSON object a line, with the fields that the plan reads; id names a row.")
_OUTPUTS = typer.Option("--outputs", metavar="NAMES", help="Outputs to compute, separated by commas. Default: all.")
_MB = 1_000_000
_MODULE = "presage_batch_plan"


@app.command(epilog="Example:  presage batch run plan.py questions.jsonl --engine http://127.0.0.1:8000 --to answers")
def run(
    plan: Annotated[Path, _PLAN],
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
    """Run a plan over the rows of a file, and write results.jsonl and results.parquet.

    Every answer is kept before it is used: after a kill, a crash or a full disk the same command goes on, and asks for
    nothing twice. Rows that fail say why in the column error, and are tried again by the same command. The key in
    OPENAI_API_KEY, if there is one, is sent to the engines.
    """
    try:
        from presage.batch.run import BatchRun, RunSettings
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "presage":
            raise
        raise ConfigurationError(f"presage batch run needs the extra gateway: {install('gateway')}") from None
    from presage.batch.answers import Answers
    from presage.batch.prefix_tree import field_tokens, tree_of
    from presage.batch.schedule import soft_order

    out = Output(as_json)
    chosen = _plan(plan, outputs)
    rows = _rows(inputs, chosen)
    order = soft_order(chosen, tree_of(chosen, field_tokens(chosen, rows[:1000])), rows)
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
    with out.working() as progress:
        running = BatchRun(chosen, rows, engine, to, order=order, settings=settings, cache=kept)
        try:
            report = asyncio.run(running.run(progress))
            _write(to, running.results(), list(chosen.outputs))
        finally:
            running.close()
            if kept is not None:
                kept.close()
    seconds = time.monotonic() - begun
    lines = [
        f"{counted(report.rows, 'row')} in {seconds:.1f} s: {report.kept} were there, {report.failed} failed",
        f"{counted(report.asked, 'answer')} from engines: {report.prompt_tokens:,} prompt tokens, "
        f"{report.cached_tokens:,} of them from prefix caches; {report.output_tokens:,} output tokens",
        *([f"{counted(report.truncated, 'answer')} reached max_tokens"] if report.truncated else []),
        f"{counted(report.known, 'answer')} known before: {report.tokens_saved:,} tokens saved",
        f"results: {to / 'results.jsonl'}, {to / 'results.parquet'}",
    ]
    out.result({**asdict(report), "seconds": seconds, "to": str(to)}, "\n".join(lines))
    if report.failed:
        raise typer.Exit(FAILED)


@app.command(epilog="Example:  presage batch explain plan.py questions.jsonl")
def explain(
    plan: Annotated[Path, _PLAN],
    inputs: Annotated[Path | None, _INPUTS] = None,
    outputs: Annotated[str, _OUTPUTS] = "",
    as_json: Json = False,
) -> None:
    """Show what a plan shares: operators left out or merged, the tree of its prompts, and the order of its calls.

    Tokens are estimates: four characters each, and half of max_tokens for an answer.
    """
    from presage.batch.operators import Call
    from presage.batch.prefix_tree import field_tokens, tree_of
    from presage.batch.schedule import soft_order

    chosen = _plan(plan, outputs)
    expected = field_tokens(chosen, _rows(inputs, chosen)) if inputs is not None else {}
    tree = tree_of(chosen, expected)
    places = soft_order(chosen, tree, []).places
    agents = {node.key: node.operator.agent for node in chosen.calls if isinstance(node.operator, Call)}
    order = [
        {"agent": agents[key], "sequence": sequence, "place": place}
        for key, (sequence, place) in sorted(places.items(), key=lambda item: item[1])
    ]
    of = chosen.optimised
    lines = [
        f"{chosen.name}: {counted(of.written, 'operator')}; {of.pruned} left out, {of.shared} merged, "
        f"{of.folded} computed now; {counted(len(chosen.calls), 'call')} a row",
        "",
        "prompts (static tokens, or tokens that each row fills in):",
        *_branches(tree, agents, 1),
        "",
        "order of calls; those of one sequence run row by row, sequences one after the other over all rows:",
        *(f"  {one['sequence']}.{one['place']}  {one['agent']}" for one in order),
    ]
    data = {"plan": chosen.name, **asdict(of), "calls": len(chosen.calls), "order": order, "tree": _data(tree, agents)}
    Output(as_json).result(data, "\n".join(lines))


def _plan(path: Path, outputs: str) -> Plan:
    """The plan that a Python file makes."""
    from presage.batch.plan import Plan

    spec = importlib.util.spec_from_file_location(_MODULE, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path}: no such Python file; one that makes a plan is wanted, such as plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.parent))  # as for a script: what lies beside it can be imported
    try:
        spec.loader.exec_module(module)
    except PresageError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except Exception as error:
        raise ConfigurationError(f"{path}: it raised {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(str(path.parent))
    made = getattr(module, "plan", None)
    if not isinstance(made, Plan):
        raise ConfigurationError(f'{path}: no variable plan that holds a Plan; write plan = Plan("name", answer=...)')
    return made.only(name.strip() for name in outputs.split(",")) if outputs else made


def _rows(path: Path, plan: Plan) -> list[dict[str, Any]]:
    """The rows of a file, with every field that the plan reads."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: it splits within texts
    except (OSError, UnicodeDecodeError) as error:
        why = type(error).__name__
        raise TraceError(f"{path}: it cannot be read ({why}); JSON lines in UTF-8 are wanted") from None
    rows: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise TraceError(f"{path}, line {number}: no JSON; one object a line is wanted") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {number}: a {type(row).__name__}; a JSON object is wanted")
        if missing := [name for name in plan.fields if name not in row]:
            raise TraceError(f"{path}, line {number}: no field {missing[0]!r}, which the plan reads")
        name = str(row.get("id", len(rows)))
        if name in names:
            raise TraceError(f"{path}, line {number}: id {name!r} is that of line {names[name]} too; ids are unique")
        names[name] = number
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: no rows; one JSON object a line is wanted")
    return rows


def _write(folder: Path, results: list[dict[str, Any]], outputs: list[str]) -> None:
    """Write the results beside the run's file; values that are no text are JSON in the Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from presage.batch.plan import as_text

    text = {
        name: [None if row[name] is None else as_text(row[name]) for row in results]
        for name in ("id", *outputs, "error")
    }
    table = pa.table(text, schema=pa.schema([(name, pa.string()) for name in text]))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in results)
    try:
        fresh = folder / "results.jsonl.part"
        fresh.write_text(lines, encoding="utf-8")
        fresh.replace(folder / "results.jsonl")
        fresh = folder / "results.parquet.part"
        pq.write_table(table, fresh)
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
