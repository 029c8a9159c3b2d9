"""The documentation names only files, modules, options, arguments and make targets that exist, and no retired terms."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import presage as package
from presage.cli import presage, train_predictor

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PASSES_OPTIONS_ON = {"serve"}
"""Commands that hand options they do not know to another program."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/~.-])(?:presage(?!/auto\b)|docs|tests|benchmarks|notebooks|tools)/[\w./-]*\w")
FILE = re.compile(r"`(\w+\.py)`")
MODULE = re.compile(
    r"(?<![\w/.-])presage\.(?:datasets|features|predictors|training|registry|serving_hooks|gateway|replay|tool_service|cli)[\w.]*\w"
)
TEST = re.compile(r"`(\w+\.py|…)::(\w+)`")
RETIRED = re.compile(
    r"\b(?:GoesAsFar|NextAgentChampion|learnt_as|tapes?|worthless|foretells?|foretold|known laws?|the law|leaps?"
    r"|at (?:prefill|completion)|the circle|fallen silent)\b",
    re.IGNORECASE,
)


def prose(text: str) -> str:
    """The page without code and without the help texts of metrics, which quote names as they are."""
    text = re.sub(r"^\| `presage_.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$|`[^`\n]*`", "", text, flags=re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """What a page shows to be typed: indented lines, shell blocks, continued lines joined, code in backticks."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^ {4}(.*)$", joined, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", joined)
    lines += [line for block in blocks(joined, "sh") + blocks(joined, "text") for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines]


@cache
def programs() -> dict[str, Any]:
    return {
        "presage": typer.main.get_command(presage.app),
        "train-predictor": typer.main.get_command(train_predictor.app),
    }


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quotation mark: the line goes on below
        return line.split()


def unknown_options(line: str) -> list[str]:
    """Options of a `presage` or `train-predictor` line that its command lacks; the command, if there is none."""
    words = words_of(line)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    name = words[0].removeprefix(".venv-vllm/bin/") if words else ""
    if name not in programs():
        return []
    command, rest = programs()[name], words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [f"{name} {rest[0]}"] if re.fullmatch(r"[a-z][a-z-]+", rest[0]) else []
        command, rest = command.commands[rest[0]], rest[1:]
    if command.name in PASSES_OPTIONS_ON or hasattr(command, "commands"):
        return []
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.split("=")[0] for word in rest if word.startswith("--")}
    return sorted(given - known - {"--help"})


def defined(path: Path) -> set[str]:
    """Names at the top of a module, those it imports among them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # names of what a module loads when it is asked for
    return names


def resolves(dotted: str) -> bool:
    """Whether `presage.package.module` or `presage.package.module.name` is there."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                rest = parts[length:]
                return not rest or rest[0] in defined(file)
    return False


@cache
def parameters() -> dict[str, set[str] | None]:
    """Every function, method and class of the package with the arguments it takes; None: any."""
    found: dict[str, set[str] | None] = {}

    def take(name: str, names: set[str] | None) -> None:
        known = found.get(name, set())
        found[name] = None if names is None or known is None else known | names

    def of(function: ast.FunctionDef) -> set[str] | None:
        taken = function.args
        return None if taken.kwarg else {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}

    for path in (ROOT / "presage").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                take(node.name, of(node))
            elif isinstance(node, ast.ClassDef):
                take(node.name, {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)})
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                        take(node.name, of(one))
    return found


def unknown_names(code: str) -> set[str]:
    """Imports from the package, classes, called functions and arguments of an example that do not exist.

    Lower-case names that are not called are the reader's own.
    """
    tree, missing, imported = ast.parse(code), [], set[str]()
    own = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    own |= {of.name for of in ast.walk(tree) if isinstance(of, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "presage":
            missing += [of.name for of in node.names if not resolves(f"{node.module}.{of.name}")]
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(of.asname or of.name).split(".")[0] for of in node.names}
    own |= imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "presage":
            missing += [] if hasattr(package, node.attr) else [f"presage.{node.attr}"]
        if isinstance(node, ast.Name) and node.id[0].isupper() and node.id not in {*own, *dir(builtins), *parameters()}:
            missing.append(node.id)
        if not isinstance(node, ast.Call) or any(isinstance(of, ast.Constant) and of.value is ... for of in node.args):
            continue  # `search(...)` stands for the reader's own
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and called not in {*own, *dir(builtins), *parameters()}:
            missing.append(called)
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        elsewhere = isinstance(root, ast.Name) and root.id in imported - {"presage"}  # such as mlflow.models.evaluate
        if called not in own and not elsewhere and (takes := parameters().get(called)) is not None:
            missing += [f"{called}({of.arg})" for of in node.keywords if of.arg and of.arg not in takes]
    return set(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_compile_and_use_names_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for block in blocks(text, "python") for name in unknown_names(block)] == []


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import presage\npresage.NextAgent(horizon=3).fit(traces)", []),
        ("presage.NextAgents()", ["presage.NextAgents"]),
        ("presage.split(traces, test_share=0.1)", ["split(test_share)"]),
        ("from presage.datasets.read import read_trace", ["read_trace"]),
        ("order = FreeOrders(blocks)", ["FreeOrders"]),
        ("search(...)\nno_such_function(1)", ["no_such_function"]),
    ],
)
def test_a_name_that_does_not_exist_is_found(code: str, missing: list[str]) -> None:
    assert unknown_names(code) == set(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [target for target in LINK.findall(text) if "://" not in target]
    missing = [target for target in links if not (page.parent / target.split("#")[0]).exists()]
    paths = [path.removesuffix("/KIND") for path in PATH.findall(text)]
    missing += [path for path in paths if not (ROOT / path).exists()]
    missing += [file for file in FILE.findall(text) if not any(ROOT.glob(f"[!.]*/**/{file}"))]
    missing += [dotted for dotted in MODULE.findall(text) if not resolves(dotted)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    lines = command_lines(page.read_text(encoding="utf-8"))
    missing = [(line, option) for line in lines for option in unknown_options(line)]
    for line in lines:
        for script in re.findall(r"(?:benchmarks|tools)/\w+\.py", line):
            source = (ROOT / script).read_text(encoding="utf-8")
            given = re.findall(r"(?<=\s)--[a-z][a-z-]+", line.split(script, 1)[1])
            missing += [(line, option) for option in given if f'"{option}"' not in source]
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in lines:
        if (called := re.match(r"make ([a-z][a-z-]*)", line)) and called[1] not in targets:
            missing.append((line, called[1]))
    assert missing == []


def test_the_tests_that_security_names_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    file, missing = "", []
    for named, test in TEST.findall(text):
        file = file if named == "…" else named
        source = next(ROOT.glob(f"tests/**/{file}"), None)
        if source is None or f"def {test}(" not in source.read_text(encoding="utf-8"):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_the_messages_of_the_troubleshooting_table_exist() -> None:
    """Each part of a quoted message, between its placeholders, stands in a string of the package."""
    table = (
        (ROOT / "docs" / "serving_troubleshooting.md")
        .read_text(encoding="utf-8")
        .split("| message | what to do |")[1]
        .split("\n\n")[0]
    )
    quoted = [message for row in table.splitlines()[2:] for message in re.findall(r"`([^`]+)`", row.split("|")[1])]
    messages = [message for message in quoted if not re.fullmatch(r"\w+: \w+", message)]  # those are counters
    parts = [part.strip() for message in messages for part in re.split(r"…|NAME|presage;", message)]
    strings = [
        node.value
        for path in (ROOT / "presage").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    text = "\n".join(strings)
    assert [part for part in parts if len(part) > 8 and part not in text] == []


def test_the_site_can_be_searched_without_a_server_and_loads_nothing_of_others() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"search", "offline"} <= {name for name in site["plugins"] if isinstance(name, str)}
    scripts = site["extra"]["polyfills"]
    assert all((ROOT / "docs" / script).is_file() for script in scripts)
    assert any("iframe-worker" in script for script in scripts), "else the plugin links one of another server"
    assert site["theme"]["font"] is False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_retired_terms(page: Path) -> None:
    assert RETIRED.findall(prose(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("presage promote next-agent --version 3 --profile engine", []),
        ("PYTHONPATH=benchmarks train-predictor next-agent traces --nope", ["--nope"]),
        ("presage promot next-agent", ["presage promot"]),
        ("presage serve MODEL --any-option-of-vllm", []),
    ],
)
def test_an_option_or_command_that_does_not_exist_is_found(line: str, missing: list[str]) -> None:
    assert unknown_options(line) == missing
