"""Where compiled code is kept, and what a command loads and says before it forecasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from registry_database import new_database
from tiny_model import Tiny
from typer.testing import CliRunner

from presage.cli.presage import app
from presage.compiled import CACHE, choose_cache
from presage.registry.connect import open_registry
from presage.registry.package import register

NOWHERE = Path("/dev/null/presage")
STEP = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}


def test_numba_chooses_where_it_may_write(tmp_path: Path) -> None:
    for sources, environment in (
        (tmp_path, {"XDG_CACHE_HOME": "/dev/null/cache"}),
        (NOWHERE, {"XDG_CACHE_HOME": str(tmp_path / "cache")}),
        (NOWHERE, {"HOME": str(tmp_path)}),
        (NOWHERE, {CACHE: "/dev/null/chosen"}),
    ):
        before = dict(environment)
        choose_cache(sources, environment)
        assert environment == before


def test_where_nothing_may_be_written_code_is_kept_in_a_private_folder() -> None:
    environment = {"XDG_CACHE_HOME": "/dev/null/cache"}
    choose_cache(NOWHERE, environment)
    folder = Path(environment[CACHE])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def _forecast(*arguments: object, cwd: Path, environment: dict[str, str] | None = None) -> tuple[list[str], str]:
    """The modules that `presage forecast --json` loads, and its standard error."""
    code = (
        "import sys, json\nfrom presage.cli.presage import app\n"
        f"try:\n    app(['forecast', *{[str(one) for one in arguments]!r}, '--json'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\nprint(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_forecast_of_a_registered_version_loads_neither_mlflow_nor_pandas(tmp_path: Path, tiny: Tiny) -> None:
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    register(registry, tiny.folder, name="tiny", metrics={}, params={}, tags={}, summary="", input_example=[STEP])
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEP))
    for _ in range(2):  # the first time compiles, on a new machine
        loaded, said = _forecast("models:/tiny/1", "steps.jsonl", cwd=tmp_path)
    heavy = ("torch", "mlflow", "sqlalchemy", "pandas", "sklearn", "lightgbm", "scipy.optimize", "matplotlib", "httpx")
    assert [name for name in heavy if name in loaded] == []
    assert said == "loading the model …\n", "the compiled code comes from the cache"


def test_a_forecast_announces_that_it_compiles(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[bool] = []
    monkeypatch.setattr("presage.progress.say_when_compiling", lambda: announced.append(True))
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEP))
    assert CliRunner().invoke(app, ["forecast", str(tiny.folder), str(tmp_path / "steps.jsonl")]).exit_code == 0
    assert announced


@pytest.mark.slow
def test_the_first_call_says_that_it_compiles_and_where_the_code_stays(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("import numba\n\n\n@numba.njit(cache=True)\ndef f(x):\n    return x + 1\n")
    code = "import small, presage.progress as p\np.say_when_compiling()\nsmall.f(1), small.f(1.0)"
    cache = tmp_path / "cache"
    for times in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, CACHE: str(cache)},
        )  # fmt: skip
        assert done.stderr.count("compiling for this processor, once") == times
        assert (f"it is kept in {cache}" in done.stderr) == bool(times)
