"""Policies are plain: an engine loads them without a training library, a registry or an engine of another kind."""

import subprocess
import sys
from pathlib import Path

import presage.serving_hooks.policies as policies

HEAVY = {"torch", "vllm", "mlflow", "pandas", "numba", "pyarrow", "scipy", "sklearn"}


def test_the_policies_load_nothing_but_numpy() -> None:
    names = sorted(path.stem for path in Path(policies.__path__[0]).glob("*.py") if path.stem != "__init__")
    assert "eviction" in names
    loads = "; ".join(f"import {policies.__name__}.{name}" for name in names)
    code = f"import sys; {loads}; print(sorted(set(sys.modules) & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
