"""`presage traces`: bring traces in, look at them, make some from a known law."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output

app = typer.Typer(no_args_is_help=True, help="Bring traces into a store, describe them, or generate some.")

_To = Annotated[Path, typer.Option("--to", help="Folder of the store; made if new, appended to if not.")]


@app.command(
    epilog="Example:  presage traces ingest runs/*.jsonl.gz --to traces/\n\nIngesting a file twice adds nothing.",
)
def ingest(
    sources: options.Traces,
    to: _To,
    source_format: Annotated[
        str, typer.Option("--format", help="auto goes by the file name; or the format of every source: jsonl.")
    ] = "auto",
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Check traces and add them to a store, all or nothing."""
    from presage.datasets.read import read_traces
    from presage.datasets.store import append

    out = Output(as_json)
    with out.working() as report:
        report("reading traces", None)
        found = read_traces(sources, skip_bad=skip_bad, source_format=source_format)
        report("writing the store", None)
        added = append(found.table, to)
    data = {
        "store": str(to),
        "workflows": added.workflows,
        "steps": added.steps,
        "already_present": added.already_present,
        "skipped": dict(found.skipped),
    }
    present = f"; {added.already_present} workflows were there already" if added.already_present else ""
    lines = [f"{to}: {added.workflows} workflows, {added.steps} steps added{present}"]
    lines += [f"skipped {count} × {reason}" for reason, count in found.skipped.items()]
    out.result(data, *lines)


@app.command(epilog="Example:  presage traces describe traces/ --json")
def describe(store: options.Traces, skip_bad: options.SkipBad = False, as_json: options.Json = False) -> None:
    """Show workflow types, agents, lengths, tokens, the share that was cut, and the call graph."""
    from presage.datasets.describe import describe as describe_table

    out = Output(as_json)
    with out.working() as report:
        table = options.read(store, skip_bad, out, report)
        report("describing", None)
        data = describe_table(table)
    out.result(data, *(_description(data) if not as_json else ()))


@app.command(epilog="Example:  presage traces generate --law retry --workflows 1000 --seed 0 --to known/")
def generate(
    law: Annotated[str, typer.Option(help="retry, research or triage.")],
    to: _To,
    workflows: Annotated[int, typer.Option(help="How many.", min=1)] = 1000,
    seed: options.Seed = 0,
    state_size: Annotated[int, typer.Option(help="Width of the hidden states.", min=1)] = 64,
    censored: Annotated[float, typer.Option(help="Share of the workflows that may be cut.", min=0, max=1)] = 0.0,
    as_json: options.Json = False,
) -> None:
    """Draw workflows from a law whose best possible forecast is known, and add them to a store."""
    from presage.datasets.law import generate as draw
    from presage.datasets.store import append

    out = Output(as_json)
    with out.working() as report:
        report("drawing workflows", None)
        drawn = draw(law, workflows, seed, state_size=state_size, censored=censored)
        added = append(drawn.table, to)
    data = {"store": str(to), "law": law, "seed": seed, "workflows": added.workflows, "steps": added.steps}
    out.result(data, f"{to}: {added.workflows} workflows, {added.steps} steps of law {law!r} added")


def _description(data: dict[str, Any]) -> list[Any]:
    from presage.cli.tables import number, table

    parts: list[Any] = [f"{data['workflows']} workflows, {data['steps']} steps"]
    for name, of in data["workflow_types"].items():
        length, spans = of["length"], (of["started_at"] or ["unknown", "unknown"])
        facts = [
            ["workflows", str(of["workflows"])],
            ["tasks", str(of["tasks"]) if of["tasks"] else "none given"],
            [
                "steps a workflow",
                f"median {length['p50']:.0f}, 90 % within {length['p90']:.0f}, most {length['max']:.0f}",
            ],
            *(
                [column.replace("_", " "), f"median {of[column]['p50']:.0f}, 99 % within {of[column]['p99']:.0f}"]
                for column in ("input_tokens", "output_tokens", "cached_input_tokens")
                if of[column]
            ),
            ["cut before their end", f"{of['censored_share']:.1%}"],
            ["successful", "unknown" if of["success_share"] is None else f"{of['success_share']:.1%}"],
            ["steps with text", f"{of['text_share']:.1%}"],
            ["steps in a fan-out", f"{of['fan_out_share']:.1%}"],
            *([state, f"{s['size']} numbers, {s['share']:.1%} of the steps"] for state, s in of["states"].items()),
            ["first and last start", " to ".join(spans)],
        ]
        parts.append(table(f"\n{name}", ["", ""], facts))
        rows = [
            [
                agent,
                str(of["agents"][agent]),
                ", ".join(f"{to} {number(edge['probability'], 2)}" for to, edge in list(after.items())[:6]),
            ]
            for agent, after in of["call_graph"].items()
        ]
        parts.append(table(f"\n{name}: call graph", ["agent", "steps", "what follows"], rows))
    return parts
