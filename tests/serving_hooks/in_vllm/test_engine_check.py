"""A vLLM that is not the one the hooks know is refused, and the refusal says what differs."""

import importlib
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

    for name, parameters in engine_check.SIGNATURES.items():
        holder, last = place(name)
        setattr(holder, last, eval(f"lambda {', '.join(parameters)}, more=None: None"))
    for name, methods in engine_check.METHODS.items():
        holder, last = place(name)
        setattr(holder, last, type(last, (), {method: lambda self: None for method in methods}))
    return modules


def loader(modules: dict[str, ModuleType]) -> Any:
    def load(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    return load


def test_what_the_tables_say_is_accepted() -> None:
    for version in ("0.32.0", "0.32.4", "0.32.0+cpu"):
        engine_check.check(version, loader(made_up()))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.1", "1.0"])
def test_another_version_is_refused_even_if_it_looks_the_same(version: str) -> None:
    with pytest.raises(EngineError, match=f"version {version} is outside 0.32"):
        engine_check.check(version, loader(made_up()))


def test_all_differences_are_listed_at_once() -> None:
    modules = made_up()
    modules["vllm.v1.core.sched.scheduler"].Scheduler.schedule = lambda self, budget: None  # type: ignore[attr-defined]
    del modules["vllm.v1.core.block_pool"].BlockPool.evict_blocks  # type: ignore[attr-defined]
    queue = modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue
    queue.rotate = lambda self: None
    del queue.popleft_n
    del modules["vllm.v1.core.sched.async_scheduler"]
    with pytest.raises(EngineError) as refused:
        engine_check.check("0.32.0", loader(modules))
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


def test_private_methods_and_later_parameters_may_change() -> None:
    modules = made_up()
    modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue._tidy = lambda self: None
    free = modules["vllm.v1.core.sched.scheduler"].Scheduler
    free.schedule = lambda self, throttle_prefills, another=1: None
    assert engine_check.differences("0.32.1", loader(modules)) == []


def test_a_scheduler_without_what_is_reached_for_is_refused() -> None:
    with pytest.raises(EngineError, match=r"no kv_holding_waiting") as refused:
        engine_check.check_scheduler(SimpleNamespace(requests={}, running=[], waiting=[]))
    assert "no waiting" not in str(refused.value)


def test_workers_that_differ_are_refused_where_the_tap_is_asked_for() -> None:
    engine_check.check("0.32.0", loader(made_up()))
    with pytest.raises(EngineError, match=r"GPUModelRunner\.sample is missing") as refused:
        engine_worker.check("0.32.0", loader(made_up()))
    assert str(refused.value).count("is missing") == len(engine_worker.SIGNATURES)


@pytest.mark.vllm
def test_the_installed_vllm_is_the_one_we_know() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    assert engine_check.differences(load=importlib.import_module) == []
