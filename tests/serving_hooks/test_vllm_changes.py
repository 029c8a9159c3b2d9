"""The tool that lists what changed between two versions of vLLM."""

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

TOOL = Path(__file__).resolve().parents[2] / "tools" / "vllm_changes.py"

OLD = '''
class Interface:
    pass

class Scheduler(Interface):
    """The old one."""

    def __init__(self) -> None:
        self.block_size = 16

    def schedule(self, throttle_prefills=False):
        return 1

    def finish_requests(self, request_ids, finished_status):
        return 2

    def _update(self):
        pass

class Other:
    def schedule(self):
        return 1
'''

NEW = '''
class Interface:
    def has_request(self, request_id):
        """New."""

class Scheduler(Interface):
    """The new one."""

    def __init__(self) -> None:
        self.block_size = 16
        self.interval = 1

    def schedule(self, throttle_prefills=False):
        """Says more."""
        return 1  # and no more

    def finish_requests(self, request_ids, finished_status, why=None):
        return 3

class Other:
    def schedule(self):
        return 2
'''


def listed(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def made(folder: Path, source: str) -> Path:
    place = folder / "vllm" / "v1" / "core" / "sched"
    place.mkdir(parents=True)
    (place / "scheduler.py").write_text(source)
    return folder


def test_changes_in_what_is_used_are_listed_and_no_others(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", OLD), made(tmp_path / "new", NEW)
    module = "vllm.v1.core.sched.scheduler"
    assert listed(old, new).splitlines() == [
        f"{module}:Scheduler.__init__: source",
        f"{module}:Scheduler.finish_requests: now def finish_requests(self, request_ids, finished_status, why=None):",
        f"{module}:Scheduler._update: gone",
        f"{module}:Interface.has_request: new",
        f"{module}:Scheduler.interval: new",
    ]
    assert "\n+    return 3\n" in listed(old, new, "--diff")
    assert listed(old, old) == ""


def test_an_archive_and_an_environment_count_as_what_they_hold(tmp_path: Path) -> None:
    old = made(tmp_path / "env" / "lib" / "python3.11" / "site-packages", OLD)
    with tarfile.open(tmp_path / "new.tar.gz", "w:gz") as archive:
        archive.add(made(tmp_path / "new", NEW), arcname="vllm-1.0")
    assert listed(tmp_path / "env", tmp_path / "new.tar.gz") == listed(old, tmp_path / "new") != ""


def test_a_version_without_vllm_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL), tmp_path, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no vllm in it; give an environment" in done.stderr


def test_all_that_is_checked_at_start_is_compared() -> None:
    found: Any = importlib.util.spec_from_file_location("vllm_changes", TOOL)
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    used = tool.used()
    assert {"Scheduler", "RequestQueue", "GPUModelRunner"} <= set().union(*used.values())
    assert "KVCacheManager" in used["vllm.v1.core.kv_cache_manager"]  # of the replay
