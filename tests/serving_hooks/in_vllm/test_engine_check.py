"""A vLLM that is not the one the hooks know is refused, and the refusal says what differs."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from presage.errors import EngineError
from presage.serving_hooks.vllm import engine_worker
from presage.serving_hooks.vllm.start import engine_check


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

    for signature in "".join((engine_check.SIGNATURES, *(of for of, _ in engine_check.SEAMS.values()))).split("\n"):
        if signature:
            name, parameters = signature.rstrip(")").split("(")
            holder, last = place(name)
            setattr(holder, last, eval(f"lambda {parameters.replace('...', 'needed')}, more=None: None"))
    for _, methods in engine_check.SEAMS.values():
        for name, listed in methods.items():
            holder, last = place(name)
            own = re.findall(r"(\w+)\((\w*)\)", listed)
            setattr(holder, last, type(last, (), {method: eval(f"lambda self, {of}: None") for method, of in own}))
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
    scheduler: Any = modules["vllm.v1.core.sched.scheduler"].Scheduler  # type: ignore[attr-defined]
    scheduler.update_from_output = lambda self, output: None
    scheduler.add_request = property(lambda self: None)
    scheduler.finish_requests = lambda self, request_ids, finished_status, why: None
    del modules["vllm.v1.core.sched.async_scheduler"]
    install(modules)
    with pytest.raises(EngineError) as refused:
        engine_check.check()
    said = str(refused.value)
    for line in (
        "Scheduler.update_from_output takes (self, output), not (self, scheduler_output, model_runner_output, ...)",
        "Scheduler.add_request does not show its parameters, as functions in C or Rust",
        "Scheduler.finish_requests also takes why, which Presage cannot pass on",
        "AsyncScheduler.schedule is missing",
        "install vllm 0.32",
    ):
        assert line in said
    assert said.count("\n") == 4


def test_what_single_policies_lack_is_told_of_them(install: Install) -> None:
    modules = made_up()
    del modules["vllm.v1.core.block_pool"].BlockPool.evict_blocks  # type: ignore[attr-defined]
    queue: Any = modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue  # type: ignore[attr-defined]
    queue.rotate = lambda self: None
    queue.append_n = lambda self, blocks, front=False: None
    del queue.popleft_n
    waiting: Any = modules["vllm.v1.core.sched.request_queue"].RequestQueue  # type: ignore[attr-defined]
    waiting.add_request = dict.pop
    install(modules)
    assert engine_check.differences() == []
    lacking = engine_check.lacking()
    assert lacking.keys() == {"eviction", "queues"}
    for line in (
        "BlockPool.evict_blocks is missing",
        "FreeKVCacheBlockQueue has rotate, which is unknown",
        "FreeKVCacheBlockQueue has no popleft_n",
        "FreeKVCacheBlockQueue.append_n also takes front, which Presage cannot pass on",
    ):
        assert line in lacking["eviction"]
    assert lacking["queues"].endswith(
        "RequestQueue.add_request does not show its parameters, as functions in C or Rust"
    )


def test_private_methods_and_later_parameters_may_change(install: Install) -> None:
    modules = made_up()
    modules["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue._tidy = lambda self: None  # type: ignore[attr-defined]
    scheduler: Any = modules["vllm.v1.core.sched.scheduler"].Scheduler  # type: ignore[attr-defined]
    scheduler.schedule = lambda self, throttle_prefills, another, last=1, *more, **named: None
    scheduler.finish_requests = lambda self, request_ids, finished_status, why=None: None
    install(modules, "0.32.1")
    assert engine_check.differences() == []
    assert engine_check.lacking() == {}


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
    assert engine_check.lacking() == {}


@pytest.mark.vllm
def test_whatever_vllm_passes_is_passed_on(tmp_path: Path) -> None:
    """A patch release whose calls of all that we override have one more argument, and one more by name."""
    samples = pytest.importorskip("vllm_samples", reason="vLLM is not installed")
    from presage.serving_hooks.vllm.scheduler import Policies

    passed: dict[str, tuple[Any, ...]] = {}
    names = ("add_request", "schedule", "get_grammar_bitmask", "update_from_output", "has_requests", "make_stats")

    def newer(name: str) -> Callable[..., Any]:
        whole = getattr(samples.Scheduler, name)

        def taking_more(self: Any, *args: Any, more: Any = None, **kwargs: Any) -> Any:
            passed[name] = (args[-1:], more)
            return whole(self, *args[:-1], **kwargs)

        return taking_more

    kind = type("Ours", (Policies, type("Newer", (samples.Scheduler,), {name: newer(name) for name in names})), {})
    scheduler = samples.build(tmp_path, kind, blocks=90)
    for name in names:
        setattr(scheduler, name, partial(_with_more, getattr(scheduler, name)))
    engine = samples.Engine(scheduler)
    scheduler.add_request(samples.ask("a", list(range(40)), 2, workflow_id="w", agent="a", workflow_type="t"))
    engine.run()
    scheduler.get_grammar_bitmask(scheduler.schedule())
    scheduler.make_stats()
    scheduler.has_requests()
    assert engine.ended == ["a"]
    assert passed == dict.fromkeys(names, (("later",), 1))
    assert not [count for count in scheduler.presage_status()["counts"] if count.endswith("Error")]


def _with_more(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, "later", more=1, **kwargs)


@pytest.mark.vllm
def test_all_that_is_laid_over_vllm_takes_whatever_vllm_passes(tmp_path: Path) -> None:
    samples = pytest.importorskip("vllm_samples", reason="vLLM is not installed")
    from presage.serving_hooks.vllm.hidden_states.connector import StatesConnector
    from presage.serving_hooks.vllm.hidden_states.worker import StatesWorker
    from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler

    pool = type(samples.build(tmp_path, SyncWorkflowScheduler, blocks=90).kv_cache_manager.block_pool)
    seen = set()
    for kind in (WorkflowScheduler, SyncWorkflowScheduler, pool, StatesConnector, StatesWorker):
        ours = [one for one in kind.__mro__ if one.__module__.startswith("presage.")]
        theirs = [one for one in kind.__mro__ if one.__module__.startswith("vllm.")]
        for one in ours:
            for name, method in vars(one).items():
                if inspect.isfunction(method) and any(name in vars(base) for base in theirs):
                    kinds = [parameter.kind.name for parameter in inspect.signature(method).parameters.values()]
                    assert {"VAR_POSITIONAL", "VAR_KEYWORD"} <= {*kinds}, f"{one.__name__}.{name}"
                    seen.add(name)
    assert {"schedule", "evict_blocks", "build_connector_meta", "load_model"} <= seen


@pytest.mark.vllm
def test_an_engine_starts_without_the_policies_for_which_vllm_cannot_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = pytest.importorskip("vllm_samples", reason="vLLM is not installed")
    from vllm.v1.core import kv_cache_coordinator

    from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

    class Closed(kv_cache_coordinator.BlockPool):  # type: ignore[misc,name-defined]
        """As a class with slots, or one in C."""

        def __setattr__(self, name: str, value: object) -> None:
            if name in ("__class__", "presage_order"):
                raise TypeError
            super().__setattr__(name, value)

    monkeypatch.setattr(kv_cache_coordinator, "BlockPool", Closed)
    scheduler = samples.build(tmp_path / "pool", SyncWorkflowScheduler, blocks=90, presage={"prefetch": True})
    engine = samples.Engine(scheduler)
    scheduler.add_request(samples.ask("a", list(range(40)), 2, workflow_id="w"))
    engine.run()
    assert engine.ended == ["a"]
    assert scheduler.presage_status()["on"] == {"priority": True, "eviction": False, "admission": True}
    assert "starts without the policies of eviction: vLLM lets nobody change its eviction: TypeError" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("presage.serving_hooks.vllm.engine.lacking", lambda: {"queues": "RequestQueue has more"})
    scheduler = samples.build(tmp_path / "queue", SyncWorkflowScheduler, blocks=90)
    assert scheduler.presage_status()["on"] == {"priority": False, "eviction": True, "admission": False}
    assert type(scheduler.waiting) is type(samples.build(tmp_path / "stock", samples.Scheduler, blocks=90).waiting)
    assert scheduler.presage_status()["off"] == {"queues": "RequestQueue has more"}
