"""The house of DESIGN.md stands: imports point one way, and what is heavy is loaded where it is used."""

import ast
import json
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

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
    ],
)
def test_serving_and_gates_load_neither_torch_nor_mlflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'mlflow', 'vllm', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_says_what_it_knows() -> None:
    for path in (ROOT / "presage").rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith(('"""', '"""')), f"{path} has no docstring"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("presage")
    TopologicalSorter(
        {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    ).prepare()  # else CycleError


def test_a_public_class_name_is_defined_once() -> None:
    names = Counter(
        node.name
        for path in (ROOT / "presage").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
