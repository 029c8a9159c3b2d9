"""The package structure: imports point one way, and heavy libraries are loaded only where they are used."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import grimp
import pytest

from presage.cli.kinds import KindCommand
from presage.predictor_kinds import KINDS, Lazy

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "mlflow", "vllm", "transformers", "lightgbm", "sklearn", "matplotlib", "pandas", "jinja2")


def test_imports_keep_the_rule() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "doing",
    [
        "import presage",
        "from presage.cli.presage import app; app(['--help'])",
        "from presage.cli.presage import app; app(['promote', '--help'])",
        "from presage.cli.presage import app; app(['traces', 'ingest', '--help'])",
        "from presage.cli.presage import app; app(['study', 'learning-curve', '--help'])",
        "from presage.cli.train_predictor import app; app(['--help'])",
        "from presage.cli.train_predictor import app; app(['next-agent', '--help'])",
        "from presage.cli.train_predictor import app; app(['remaining-length', '--help'])",
    ],
)
def test_nothing_heavy_is_loaded_for(doing: str) -> None:
    code = (
        f"import sys, json\ntry:\n    {doing}\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    "module",
    [
        "presage.serving_hooks.forecasting.forecaster",
        "presage.serving_hooks.forecasting.sources",
        "presage.registry.gates",
        "presage.registry.evidence",
        "presage.training.length.train",
    ],
)
def test_what_needs_neither_torch_nor_mlflow_loads_neither(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'mlflow', 'vllm', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_says_what_it_knows() -> None:
    for path in (ROOT / "presage").rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith(('"""', '"""')), f"{path} has no docstring"


def test_the_parts_that_the_kinds_import_late_exist() -> None:
    for kind in KINDS.values():
        assert isinstance(resolve_name(kind.command), KindCommand)
        for part in vars(kind).values():
            assert not isinstance(part, Lazy) or callable(resolve_name(part.name))


SERVED_KIND = {
    "__init__.py": "the name of its estimator",
    "api.py": "its estimator",
    "predictor_kinds.py": "its description",
    "serving_hooks/forecasting/champions.py": "its forecaster beside the others",
    "serving_hooks/settings.py": "the setting that names its model",
    "serving_hooks/vllm/step_forecasts.py": "its forecasts of steps",
}
"""What a further kind that engines serve touches besides its own folders and modules, and with what."""


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        # vllm-router, which cli/export.py writes for, has profiles of that name.
        ("return-time", r"return_time|return_counts|cli/export"),
        ("context-growth", r"context_growth|/length/"),  # it is of the folders of lengths
    ],
)
def test_at_most_six_files_name_a_served_kind(kind: str, own: str) -> None:
    """In code; sentences for people may."""
    found, words = set(), kind.title().replace("-", "")
    names = {kind, kind.replace("-", "_"), words, f"{words}Predictor", f"{words}Config"}
    for path in (ROOT / "presage").rglob("*.py"):
        name = path.relative_to(ROOT / "presage").as_posix()
        for node in () if re.search(own, name) else ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            values = {str(value) for _, value in ast.iter_fields(node) if isinstance(value, str)}
            if names & {part for value in values for part in re.split(r"[.:]", value)}:
                found.add(name)
    assert found == SERVED_KIND.keys()
    assert len(found) <= 6


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("presage")
    TopologicalSorter(
        {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    ).prepare()  # else CycleError


def test_only_commands_import_commands() -> None:
    """Everything else, the Python API too, is used where there is no terminal."""
    graph = grimp.build_graph("presage")
    commands = graph.find_descendants("presage.cli") | {"presage.cli"}
    assert {m for c in commands for m in graph.find_modules_that_directly_import(c)} <= commands


ENGINE = ROOT / "presage/serving_hooks/vllm"
MAY_IMPORT_VLLM = {
    "serving_hooks/vllm/hidden_states/connector.py": {"vllm.distributed.kv_transfer.kv_connector.v1.base"},
    "serving_hooks/vllm/scheduler.py": {"vllm.v1.core.sched.async_scheduler", "vllm.v1.core.sched.scheduler"},
    "replay/host_tier.py": {"vllm.config", "vllm.distributed.kv_transfer.kv_connector.v1.base"},
    "replay/block_fast_path.py": {
        "vllm.v1.core.block_pool",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.single_type_kv_cache_manager",
    },
    "replay/decode_fast_path.py": {
        "vllm.v1.core.sched.output",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.outputs",
    },
    "replay/vllm_scheduler.py": {
        "vllm.config",
        "vllm.sampling_params",
        "vllm.utils.hashing",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.request",
        "vllm.v1.structured_output",
    },
}
"""Files beside the port that import vLLM: classes that ours derive from, and what a replay constructs."""

NOT_OF_VLLM = {"_exit", "_processes"}
"""Private names of the standard library."""


def _modules_of_hooks() -> list[tuple[str, ast.Module]]:
    """All modules that may know vLLM, without the port, by their path in the package."""
    package = ROOT / "presage"
    paths = [*ENGINE.rglob("*.py"), *(package / "replay").rglob("*.py")]
    port = {ENGINE / "engine.py", ENGINE / "engine_worker.py", ENGINE / "start" / "engine_check.py"}
    return [
        (path.relative_to(package).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in paths
        if path not in port
    ]


def test_only_the_port_names_private_attributes_of_vllm() -> None:
    for path, tree in _modules_of_hooks():
        nodes = list(ast.walk(tree))
        of_self = {"self", "cls"}
        private = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
        own = {node.attr for node in private if isinstance(node.value, ast.Name) and node.value.id in of_self}
        own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        foreign = {node.attr for node in private if not node.attr.startswith("__")} - own - NOT_OF_VLLM
        assert not foreign, f"{path} reads {foreign}: give vllm/engine.py a method for it"


def test_only_the_port_and_a_few_others_import_vllm() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in _modules_of_hooks():
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            vllm = {name for name in names if name.partition(".")[0] == "vllm"}
            if vllm:
                found.setdefault(path, set()).update(vllm)
    assert found == MAY_IMPORT_VLLM


def test_a_public_class_name_is_defined_once() -> None:
    names = Counter(
        node.name
        for path in (ROOT / "presage").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_and_benchmarks_import_nothing_of_each_other() -> None:
    """What both need is in `presage.testing`; a benchmark's own tests are in `benchmarks/tests`."""
    files = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("tests", "benchmarks")}
    modules = {
        folder: {path.parent.name if path.stem == "__init__" else path.stem for path in paths}
        for folder, paths in files.items()
    }
    for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests")):
        for path in files[folder]:
            imported = set()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported |= {name.partition(".")[0] for name in names}
            assert not imported & (modules[other] - modules[folder]), path


def test_tests_read_no_private_name_of_another_module() -> None:
    """Ours or vLLM's: a test that does blocks every change of what is behind it."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
                names = [] if own or ast.unparse(node.value) == "super()" else [node.attr]
            else:
                continue
            found += [
                f"{path}:{node.lineno} {name}" for name in names if name.startswith("_") and not name.startswith("__")
            ]
    assert found == []


def test_fewer_names_say_nothing() -> None:
    """The limit only falls: a variable says what it holds."""
    stored = [
        name.id
        for path in (ROOT / "presage").rglob("*.py")
        for name in ast.walk(ast.parse(path.read_text()))
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
    assert sum(stored.count(word) for word in ("found", "of", "one", "known", "at")) <= 170


def test_a_room_that_moved_answers_to_its_former_path() -> None:
    from presage.gateway.models import model_choice

    with pytest.warns(FutureWarning, match=r"presage\.serving_hooks\.gateway is now presage\.gateway"):
        former = importlib.import_module("presage.serving_hooks.gateway.models.model_choice")
    assert former is model_choice
