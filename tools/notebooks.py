"""Executes the notebooks and writes the executed copies.

    python tools/notebooks.py                                    # all of them, into build/notebooks
    python tools/notebooks.py router --to figures                # one, elsewhere
    python tools/notebooks.py router --set OUTCOMES=outcomes/    # with a parameter of its first cell set
    python tools/notebooks.py replay --vllm-python ~/vllm/bin/python

A notebook that says it needs vLLM runs in this Python if that has vLLM, else in the one that `make vllm-cpu` sets up;
where there is neither it counts as failed, and says why.

The notebooks themselves stay as they are, without outputs. A copy is written when its notebook has run to the end, and
then whole; one that fails leaves what was there before. Paths in parameters are seen from where you stand.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from presage.errors import OutputError
from presage.training.report.files import check_folder, write_file

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PARAMETERS = "parameters"
"""Tag of the cell that the parameters stand in."""

VLLM_PYTHON = NOTEBOOKS.parent / ".venv-vllm" / "bin" / "python"
"""What `make vllm-cpu` sets up."""

KERNEL = "presage-notebook"

STARTUP_S = 300
"""A kernel has so long to begin: on a busy machine a minute may be too little."""


class NotebookError(Exception):
    """A notebook did not run to its end; the message names the cell and tells what it raised."""


def parameters_of(notebook: NotebookNode) -> dict[str, Any]:
    """The parameters of a notebook and their values: the plain assignments of its tagged cell."""
    source = notebook.cells[_tagged(notebook)].source
    return {
        target.id: ast.literal_eval(line.value)
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }


def with_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """A copy with a cell behind the parameters that sets some of them anew."""
    copy = nbformat.from_dict(notebook)
    if values:
        source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        cell = nbformat.v4.new_code_cell(source, id="injected", metadata={"tags": ["injected-parameters"]})
        copy.cells.insert(_tagged(notebook) + 1, cell)
    return copy


def python_of(notebook: NotebookNode, vllm_python: Path = VLLM_PYTHON) -> str:
    """The Python that a notebook runs in: this one, or where it lacks what the notebook says it needs, that of vLLM.

    Raises:
        NotebookError: there is none that has it.
    """
    needs = notebook.metadata.get("presage", {}).get("needs")
    if needs is None or importlib.util.find_spec(needs) is not None:
        return sys.executable
    if not vllm_python.exists():
        raise NotebookError(
            f"needs {needs}, which this Python does not have, and {vllm_python} is not there: `make vllm-cpu` sets it "
            "up; or say with --vllm-python which Python has it. Not run"
        )
    return str(vllm_python)


def execute(notebook: NotebookNode, folder: Path, tell: Any = None, python: str = sys.executable) -> NotebookNode:
    """Runs a notebook in a fresh kernel.

    Args:
        notebook: is given its outputs.
        folder: where the kernel stands.
        tell: called with the number of cells that have run and how many there are.
        python: whose kernel; it needs ipykernel.

    Raises:
        NotebookError: a cell raised, or the kernel died.
    """
    # On so little data threads wait for each other by spinning; and with one, sums add up in one order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def done(cell: NotebookNode, cell_index: int, **_: Any) -> None:
        if tell is not None and cell_index in code:
            tell(code.index(cell_index) + 1, len(code))

    # Sockets in a folder of their own: no port that others on this machine could reach, and no file left behind.
    with tempfile.TemporaryDirectory(prefix="presage-") as sockets:
        kernel = AsyncKernelManager(
            kernel_name=KERNEL,
            kernel_spec_manager=_only(python, Path(sockets) / "kernels"),
            transport="ipc",
            connection_file=str(Path(sockets) / "kernel.json"),
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=None,
            startup_timeout=STARTUP_S,
            coalesce_streams=True,  # else it depends on the moment where what a cell printed is cut
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=done,
        )
        try:
            return client.execute(cleanup_kc=True)  # also on an error, no kernel is left running
        except CellExecutionError as error:
            at = next(index for index, cell in enumerate(notebook.cells) if _raised(cell))
            source = notebook.cells[at].source.strip().splitlines()
            raise NotebookError(f"cell {at + 1} ({source[0]}): {error.ename}: {error.evalue}") from error
        except RuntimeError as error:  # it died while a cell ran, or did not begin
            raise NotebookError(f"the kernel died: {error}; is there memory enough?") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which, without the ending; all unless some are named")
    parser.add_argument("--to", type=Path, default=Path("build/notebooks"), help="folder of the executed copies")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a parameter")
    parser.add_argument(
        "--vllm-python", type=Path, default=VLLM_PYTHON, help="for notebooks that need vLLM, where this one lacks it"
    )
    chosen = parser.parse_args(arguments)
    known = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"no notebook {unknown[0]!r}; there are: {', '.join(known)}")
    notebooks = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in chosen.names or known}
    values = dict(_setting(text, parser) for text in chosen.settings)
    taken = {name: parameters_of(notebook) for name, notebook in notebooks.items()}
    for name in values:
        if not any(name in of for of in taken.values()):
            there = ", ".join(sorted({one for of in taken.values() for one in of}))
            parser.error(f"--set {name}: no such parameter; there are: {there}")
    try:
        check_folder(chosen.to, "--to")
    except OutputError as error:
        parser.error(str(error))
    failed = 0
    for name, notebook in notebooks.items():
        begun = time.perf_counter()
        prepared = with_parameters(notebook, {key: value for key, value in values.items() if key in taken[name]})
        try:
            python = python_of(notebook, chosen.vllm_python)
            executed = execute(
                prepared, Path.cwd(), lambda at, of, name=name: _say(f"{name}: cell {at} of {of}"), python
            )
            path = write_file(chosen.to / f"{name}.ipynb", nbformat.writes(executed).encode())
        except (NotebookError, OutputError) as error:
            failed += 1
            print(f"\n{name}: {error}", file=sys.stderr)
            continue
        _say(f"{name}: {time.perf_counter() - begun:.0f} s, written to {path}\n")
    return 1 if failed else 0


def _only(python: str, folder: Path) -> KernelSpecManager:
    """Knows the kernel of this Python and no other: a "python3" of the user's own may be one without Presage."""
    spec = KernelSpec(
        argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name=KERNEL, language="python"
    )
    (folder / KERNEL).mkdir(parents=True)
    (folder / KERNEL / "kernel.json").write_text(spec.to_json(), encoding="utf-8")
    return KernelSpecManager(kernel_dirs=[str(folder)])


def _tagged(notebook: NotebookNode) -> int:
    return next(i for i, cell in enumerate(notebook.cells) if PARAMETERS in cell.metadata.get("tags", ()))


def _raised(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", ()))


def _setting(text: str, parser: argparse.ArgumentParser) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        parser.error(f"--set {text!r}: wanted NAME=VALUE, such as --set SEED=1")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a bare word or a path


def _say(text: str) -> None:
    """One line that is written over on a terminal, and one line a time elsewhere."""
    ending = "" if sys.stderr.isatty() else "\n"
    print(f"\r\033[K{text}" if sys.stderr.isatty() else text.rstrip("\n"), end=ending, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
