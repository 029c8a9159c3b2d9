"""`presage agents`: list the agents of a server or of traces, and give them names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import Boundary, Output, table
from presage.cli.server import ApiKey
from presage.errors import InputError
from presage.wording import counted

app = typer.Typer(
    cls=Boundary,
    no_args_is_help=True,
    help="Names of agents, which are recognised by their system prompts and tools.",
)


_SHOWN: Final = 60
"""Characters of a system prompt."""


@app.command(
    "list",
    epilog="Examples:\n\npresage agents list http://127.0.0.1:8100\n\npresage agents list traces/",
)
def list_agents(
    source: Annotated[
        str,
        typer.Argument(metavar="URL|TRACES", help="A server, such as http://127.0.0.1:8100, or a trace store or file."),
    ],
    api_key: ApiKey = None,
    skip_bad: options.SkipBad = False,
    as_json: options.Json = False,
) -> None:
    """List agents: name, workflow type, steps, model, and of traces with texts how the system prompt begins.

    A server keeps no texts: which agent an id such as agent-9c9f8a62 is, traces say that were recorded with `text =
    "on"`. A key sees the agents of its own requests.
    """
    from presage.features.agent_names import ID

    out = Output(as_json)
    if "://" in source or (":" in source and not Path(source).exists()):
        from presage.cli.status import ask_engines

        agents = [
            agent for engine in ask_engines(source, "/v1/workflows/agents", api_key) for agent in engine["agents"]
        ]
    else:
        from presage.datasets.describe import agents_of

        with out.working() as report:
            agents = agents_of(options.read([Path(source)], skip_bad, out, report))
    head = {"agent": "agent", "workflow_type": "type", "steps": "steps", "model": "model", "system_prompt": "begins"}
    shown = [name for name in head if any(agent.get(name) not in (None, "") for agent in agents)]
    rows = [[_cell(agent.get(name)) for name in shown] for agent in agents]
    left = [place for place, name in enumerate(shown) if name != "steps"]
    lines: list[Any] = [table("", [head[name] for name in shown], rows, left=left)] if rows else ["no agents yet"]
    unnamed = next((agent["agent"] for agent in agents if ID.fullmatch(agent["agent"])), None)
    if unnamed is not None:
        lines.append(f"\nto name them:  presage agents name {unnamed}=NAME … --workflow-type TYPE --in agents.json")
    out.result({"agents": agents}, *lines)


def _cell(value: object) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


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
    """Give agents names, or other names, once for what was recorded and for what will be.

    `presage gateway` (`agent_names` in its file) and `presage serve` read them when they start. `presage traces ingest
    OLD --names agents.json --to NEW` gives them to traces, and the workflow type of an agent that began workflows.
    """
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
