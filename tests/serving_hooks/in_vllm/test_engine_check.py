"""A vLLM that is not the one the hooks know is refused, and the refusal says what differs."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from presage.errors import EngineError
from presage.serving_hooks.vllm import engine_check, engine_worker


def made_up() -> dict[str, ModuleType]:
    """Modules that are what the tables say, and nothing else."""
    modules: dict[str, ModuleType] = {}

    def place(name: str) -> tuple[Any, str]:
        module, path = name.split(":")
        holder: Any = modules.setdefault(module, ModuleType(module))
        *outer, last = path.split(".")
        for part in outer:
            if not hasattr(holder, part):
                setattr(holder, part, type(part, (), {}))
            holder = getattr(holder, part)
        return holder, last

    for signature in engine_check.SIGNATURES.strip().split("\n"):
        name, parameters = signature.rstrip(")").split("(")
        holder, last = place(name)
        setattr(holder, last, eval(f"lambda {parameters}, more=None: None"))
    for name, methods in engine_check.METHODS.items():
        holder, last = place(name)
        setattr(holder, last, type(last, (), {method: lambda self: None for method in methods.split()}))
    return modules


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the installed vLLM by modules of a version."""

    def put(modules: dict[str, ModuleType], version: str = "0.32.0") -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        package = ModuleType("vllm")
        package.__version__ = version  # type: ignore[attr-defined]
        for name, module in {**modules, "vllm": package}.items():
            monkeypatch.setitem(sys.modules, name, module)

    return put


def test_what_the_tables_say_is_accepted(install: Install) -> None:
    for version in ("0.32.0", "0.32.4", "0.32.0+cpu", "0.33.0", "0.33.1rc1"):
        install(made_up(), version)
        engine_check.check()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.320.1", "0.32", "1.0"])
def test_another_version_is_refused_even_if_it_looks_the_same(install: Install, version: str) -> None:
    install(made_up(), version)
    with pytest.raises(EngineError, match=rf"version {version} is outside 0\.32\.\* and 0\.33"):
        engine_check.check()


def test_all_differences_are_listed_at_once(install: Install) -> None:
    modules = made_up()
    modules["vllm.v1.core.sched.scheduler"].Scheduler.schedule = lambda self, budget: None  # type: ignore[attr-defined]
    del modules["vllm.v1.core.block_pool"].BlockPool.evict_blocks  # type: ignore[attr-defined]
    queue = modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue
    queue.rotate = lambda self: None
    del queue.popleft_n
    del modules["vllm.v1.core.sched.async_scheduler"]
    install(modules)
    with pytest.raises(EngineError) as refused:
        engine_check.check()
    said = str(refused.value)
    for line in (
        "Scheduler.schedule takes (self, budget), not (self, throttle_prefills)",
        "BlockPool.evict_blocks is missing",
        "FreeKVCacheBlockQueue has rotate, which is unknown",
        "FreeKVCacheBlockQueue has no popleft_n",
        "AsyncScheduler.schedule is missing",
        "install vllm 0.32",
    ):
        assert line in said
    assert said.count("\n") == 5


def test_private_methods_and_later_parameters_may_change(install: Install) -> None:
    modules = made_up()
    modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue._tidy = lambda self: None
    free = modules["vllm.v1.core.sched.scheduler"].Scheduler
    free.schedule = lambda self, throttle_prefills, another=1: None
    install(modules, "0.32.1")
    assert engine_check.differences() == []


def test_a_scheduler_without_what_is_reached_for_is_refused() -> None:
    with pytest.raises(EngineError, match=r"no kv_holding_waiting") as refused:
        engine_check.check_scheduler(SimpleNamespace(requests={}, running=[], waiting=[]))
    assert "no waiting" not in str(refused.value)


def test_workers_that_differ_are_refused_where_hidden_states_are_read(install: Install) -> None:
    install(made_up())
    engine_check.check()
    with pytest.raises(EngineError, match=r"GPUModelRunner\.sample is missing") as refused:
        engine_worker.check()
    assert str(refused.value).count("is missing") == engine_worker.SIGNATURES.count("(")


@pytest.mark.vllm
def test_the_installed_vllm_is_the_one_we_know() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    assert engine_check.differences() == []
