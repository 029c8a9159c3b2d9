"""`presage outcomes`: describe outcomes, take them from traces, or generate synthetic ones with known probabilities."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Boundary, Output, table
from presage.errors import ConfigurationError
from presage.progress import Progress
from presage.report.blocks import number
from presage.wording import counted

if TYPE_CHECKING:
    from presage.datasets.outcomes.files import OutcomesRead

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="OUTCOMES",
        help=".jsonl, .jsonl.gz, .csv or .parquet files, or folders of them: prompt, model, correct; optionally "
        "task, output_tokens, cost and group.",
    ),
]

ToFile = Annotated[Path, typer.Option("--to", help="The .jsonl file to write.")]

app = typer.Typer(
    cls=Boundary, no_args_is_help=True, help="Outcomes: which model solved which prompt; what a router learns from."
)


def read(paths: list[Path], skip_bad: bool, out: Output, report: Progress) -> OutcomesRead:
    """Read outcomes; report rows that were skipped, averaged or contradictory."""
    from presage.datasets.outcomes.files import read_outcomes

    outcomes_read = read_outcomes(paths, skip_bad, lambda _: report("reading outcomes", None))
    for reason, count in outcomes_read.skipped.items():
        out.note(f"skipped {count} × {reason}")
    if outcomes_read.duplicates:
        out.note(
            f"averaged {counted(outcomes_read.duplicates, 'row')} that repeat a prompt and a model, "
            f"of them contradictory: {outcomes_read.contradictions}"
        )
    return outcomes_read


@app.command(epilog="Example:  presage outcomes describe outcomes.jsonl.gz")
def describe(outcomes: Files, skip_bad: options.SkipBad = False, as_json: options.Json = False) -> None:
    """Show models with labels, base rates and costs, tasks, duplicates and contradictions."""
    out = Output(as_json)
    with out.working() as report:
        data = _description(read(outcomes, skip_bad, out, report))
    out.result(data, *(_render(data) if not as_json else ()))


@app.command("from-traces", epilog="Example:  presage outcomes from-traces traces/ --to outcomes.jsonl")
def from_traces(
    traces: options.Traces,
    to: ToFile,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """Take outcomes from traces: of each LLM step with a text, a model, and its own score or its workflow's success.

    The prompt is what a gateway's router reads: the input without the system prompt.
    """
    from presage.datasets.outcomes.files import write_outcomes
    from presage.datasets.outcomes.traced import outcomes_of

    out = Output(as_json)
    _check_jsonl(to)
    with out.working() as report:
        table = options.read(traces, skip_bad, out, report)
        report("taking outcomes", None)
        traced = outcomes_of(table)
        for reason, count in traced.skipped.items():
            out.note(f"skipped {count} × {reason}")
        data = {"file": str(to), **_description(traced), "skipped": dict(traced.skipped)}
        write_outcomes(traced.outcomes, to)
    out.result(data, f"{to}:", *(_render(data) if not as_json else ()))


@app.command(epilog="Example:  presage outcomes generate --prompts 2000 --to outcomes.jsonl")
def generate(
    to: ToFile,
    prompts: Annotated[int, typer.Option(help="How many.", min=1)] = 2000,
    seed: options.Seed = 0,
    missing: Annotated[float, typer.Option(help="Share of missing labels.", min=0, max=0.99)] = 0.1,
    as_json: options.Json = False,
) -> None:
    """Generate prompts and outcomes with known probabilities."""
    from presage.datasets.outcomes.files import write_outcomes
    from presage.datasets.synthetic.outcomes import generate_outcomes

    out = Output(as_json)
    _check_jsonl(to)
    with out.working() as report:
        report("drawing prompts", None)
        rows = write_outcomes(generate_outcomes(prompts, seed, missing=missing).outcomes, to)
    out.result(
        {"file": str(to), "seed": seed, "prompts": prompts, "rows": rows},
        f"{to}: {counted(prompts, 'prompt')}, {counted(rows, 'row')}",
    )


def _check_jsonl(to: Path) -> None:
    if to.suffix != ".jsonl":
        raise ConfigurationError(f"--to {to}: wanted a .jsonl file")


def _description(outcomes_read: OutcomesRead) -> dict[str, Any]:
    import numpy as np

    outcomes = outcomes_read.outcomes
    labelled = ~np.isnan(outcomes.correct)

    def mean(values: Any, column: int) -> float | None:
        there = values[~np.isnan(values[:, column]), column]
        return float(there.mean()) if len(there) else None

    return {
        "prompts": len(outcomes),
        "rows": outcomes_read.rows,
        "duplicates": outcomes_read.duplicates,
        "contradictions": outcomes_read.contradictions,
        "tasks": dict(Counter(task for task in outcomes.task if task is not None).most_common()),
        "models": {
            name: {
                "labels": int(labelled[:, column].sum()),
                "solved": mean(outcomes.correct, column),
                "output_tokens": mean(outcomes.output_tokens, column),
                "cost": mean(outcomes.cost, column),
            }
            for column, name in enumerate(outcomes.models)
        },
    }


def _render(data: dict[str, Any]) -> list[Any]:
    rows = [
        [
            name,
            str(figures["labels"]),
            number(figures["solved"]),
            number(figures["output_tokens"], 0),
            "–" if figures["cost"] is None else f"{figures['cost']:.4g}",
        ]
        for name, figures in sorted(data["models"].items(), key=lambda item: -(item[1]["solved"] or 0.0))
    ]
    tasks = ", ".join(f"{task} {count}" for task, count in list(data["tasks"].items())[:8])
    shown: list[Any] = [
        f"{counted(data['prompts'], 'prompt')}, {counted(data['rows'], 'row')} with a label, "
        f"{data['duplicates']} repeated, {data['contradictions']} contradictory",
        table("", ["model", "labels", "solved", "output tokens, mean", "cost, mean"], rows),
    ]
    return shown + ([f"\ntasks: {tasks}{', …' if len(data['tasks']) > 8 else ''}"] if tasks else [])
