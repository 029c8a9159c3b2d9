"""Lists what changed between two versions of vLLM in everything that Presage uses of it.

    python tools/vllm_changes.py .venv-vllm .venv-vllm-0.33 --diff

A version is an environment, a folder that contains `vllm/`, or a source archive (.tar.gz). Nothing of it is imported.
Compared are the functions and classes that `engine_check.py` and `engine_worker.py` name or the package imports, and
base classes of vLLM: each function and method (without comments and docstrings), each attribute that a class sets, and
which names a module has.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from presage.serving_hooks.vllm import engine_worker  # noqa: E402
from presage.serving_hooks.vllm.start import engine_check  # noqa: E402

Read = Callable[[str], str | None]
"""The source of a module of vLLM; None if there is none."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def used() -> dict[str, set[str]]:
    """The names that Presage uses, by module of vLLM; a method counts as its class."""
    found: dict[str, set[str]] = defaultdict(set)
    seams = [name for signatures, methods in engine_check.SEAMS.values() for name in (*signatures.split(), *methods)]
    for line in (*engine_check.SIGNATURES.split(), *engine_worker.SIGNATURES.split(), *seams):
        module, colon, name = line.partition(":")
        if colon and module.startswith("vllm."):
            found[module].add(name.partition("(")[0].partition(".")[0])
    for file in (ROOT / "presage").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                found[str(node.module)].update(alias.name for alias in node.names)
    return found


def reader(version: Path) -> Read:
    """Reads modules of a version. Exits with a message if there is no vLLM."""
    if version.is_file():
        with tarfile.open(version) as archive:
            files = {
                member.name.partition("/")[2]: archive.extractfile(member).read().decode("utf-8")  # type: ignore[union-attr]
                for member in archive
                if member.isfile() and "/vllm/" in member.name and member.name.endswith(".py")
            }
        if files:
            return lambda module: files.get(f"{_path(module)}.py", files.get(f"{_path(module)}/__init__.py"))
    for folder in (version, *version.glob("lib/python*/site-packages")):
        if (folder / "vllm").is_dir():

            def read(module: str, folder: Path = folder) -> str | None:
                places = (folder / f"{_path(module)}.py", folder / _path(module) / "__init__.py")
                return next((place.read_text(encoding="utf-8") for place in places if place.is_file()), None)

            return read
    sys.exit(f"{version}: no vllm in it; give an environment, a folder that contains vllm/, or vLLM's source archive")


def changes(old: Read, new: Read, names: Mapping[str, set[str]]) -> Iterator[tuple[str, str, str]]:
    """Names with what changed, and the diff of its source, empty if it is gone or new."""
    names = _with_bases(names, new)
    for module in sorted(names):
        sources = old(module), new(module)
        if sources[0] is None or sources[1] is None:
            if sources != (None, None):
                yield module, "gone" if sources[1] is None else "new", ""
            continue
        before, after = (_members(source) for source in sources if source is not None)
        for name in [*before, *(name for name in after if name not in before)]:
            if "." in name and name.partition(".")[0] not in names[module]:
                continue
            if name not in after or name not in before:
                yield f"{module}:{name}", "gone" if name not in after else "new", ""
            elif name.partition(".")[0] in names[module] and before[name] != after[name]:
                heads = [source.partition("\n")[0] for source in (before[name], after[name])]
                what = "source" if heads[0] == heads[1] else f"now {heads[1]}"
                lines = difflib.unified_diff(before[name].splitlines(), after[name].splitlines(), "old", "new", n=2)
                yield f"{module}:{name}", what, "\n".join(line.rstrip("\n") for line in lines)


def _with_bases(names: Mapping[str, set[str]], read: Read) -> dict[str, set[str]]:
    """Adds the base classes of the classes, and theirs, as far as they are vLLM's."""
    found = {module: set(of) for module, of in names.items()}
    left = [(module, name) for module, of in names.items() for name in of]
    while left:
        module, name = left.pop()
        body = ast.parse(read(module) or "").body
        imports = [
            node for node in body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        ]
        places = {alias.name: str(node.module) for node in imports for alias in node.names}
        for node in body:
            if isinstance(node, ast.ClassDef):
                places[node.name] = module
        for node in body:
            for base in node.bases if isinstance(node, ast.ClassDef) and node.name == name else ():
                of = places.get(base := ast.unparse(base))
                if of is not None and base not in found.setdefault(of, set()):
                    found[of].add(base)
                    left.append((of, base))
    return found


def _path(module: str) -> str:
    return module.replace(".", "/")


def _members(source: str) -> dict[str, str]:
    """Functions, classes, methods and attributes by name, with their sources; those of attributes are empty."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, Function):
            found[node.name] = _text(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
            for part in node.body:
                if isinstance(part, Function):
                    found[f"{node.name}.{part.name}"] = _text(part)
                elif isinstance(part, ast.AnnAssign):
                    found[f"{node.name}.{ast.unparse(part.target)}"] = ast.unparse(part)
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    of, _, attribute = ast.unparse(part).partition(".")
                    if of == "self" and "." not in attribute:
                        found.setdefault(f"{node.name}.{attribute}", "")
    return found


def _text(node: Function) -> str:
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    decorators, node.decorator_list = node.decorator_list, []
    return ast.unparse(node) + "".join(f"\n@{ast.unparse(decorator)}" for decorator in decorators)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="an environment, a folder that contains vllm/, or a source archive")
    parser.add_argument("new", type=Path)
    parser.add_argument("--diff", action="store_true", help="also show the diff of each changed function")
    arguments = parser.parse_args()
    for name, what, diff in changes(reader(arguments.old), reader(arguments.new), used()):
        print(f"{name}: {what}")
        if arguments.diff and diff:
            print(diff)


if __name__ == "__main__":
    main()
