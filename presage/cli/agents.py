"""`presage agents`: give names to agents that are recognised while serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from presage.cli import options
from presage.cli.output import Boundary, Output
from presage.errors import InputError
from presage.wording import counted

app = typer.Typer(
    cls=Boundary,
    no_args_is_help=True,
    help="Names of agents, which are recognised by their system prompts and tools.",
)


@app.command(epilog="Example:  presage agents name agent-9c9f8a62=planner --workflow-type travel --in agents.json")
def name(
    given: Annotated[
        list[str],
        typer.Argument(metavar="AGENT=NAME", help="An id, as agent-9c9f8a62, or the name so far."),
    ],
    file: Annotated[
        Path, typer.Option("--in", help="JSON file of names; a file that does not exist is begun, for ids alone.")
    ],
    workflow_type: Annotated[
        str | None, typer.Option(help="Application of the agents given by ids; of the others, rename only those of it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Give agents names, or other names; `presage serve` and `presage gateway` read them when they start."""
    from presage.features.agent_names import AgentNames

    out = Output(as_json)
    with out.working():
        pairs = [assignment.partition("=") for assignment in given]
        wrong = next(("".join(pair) for pair in pairs if not (pair[0] and pair[2])), None)
        if wrong is not None:
            raise InputError(f"{wrong}: give AGENT=NAME, as in agent-9c9f8a62=planner")
        names = AgentNames.load(file) if file.exists() else AgentNames(())
        names.renamed({agent: new for agent, _, new in pairs}, workflow_type).save(file)
    out.result({"named": len(pairs), "file": str(file)}, f"{counted(len(pairs), 'agent')} named: {file}")
