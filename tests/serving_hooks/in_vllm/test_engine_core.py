"""vLLM's own loop, in any order of what clients and operators do, beside stock vLLM: the same tokens, and nothing left.

Driven here: `EngineCore.step` and `step_with_batch_queue` (which defers the grammar of an answer whose last token is
under way), `add_request`, `abort_requests` between steps and while the model runs, `pause_scheduler`,
`resume_scheduler`, `sleep`, `wake_up`, `reset_prefix_cache` (also of running requests), structured answers, children of
parallel sampling, streamed input, LoRA adapters, drafted tokens (`post_step`, `update_draft_token_ids`), a KV connector
that loads asynchronously; and Presage's own calls of operators.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from core_samples import AnyWord, Core, structured, token_at
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from vllm.config import LoRAConfig, SpeculativeConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm_samples import TIER, AsyncScheduler, Scheduler, ask, build, everything_is_free

from presage.serving_hooks.vllm.prefetch.scheduler import Prefetching
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows import EndReason

pytestmark = pytest.mark.vllm

PROMPTS = st.tuples(st.integers(0, 3), st.sampled_from([1, 15, 16, 40, 130, 290]))
NAMES = st.sampled_from(["review", "search"])

KEPT = {
    "recent forecasts",
    "ageing heap",
    "admission accounts to drop",
    "groups of blocks",
    "eviction heap",
    "sharing types",
    "stages to come",
}
"""What ends with no request or workflow: it is kept for `explain`, dropped at the next turn, or describes the cache."""


OPERATORS = [
    "pause",
    "resume",
    "resume",
    "sleep_and_wake",
    "reset_prefix_cache",
    "start_all_over",
    "set_mode",
    "ask_for_status",
    "end_a_workflow",
]


def drafts(method: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=2, prompt_lookup_max=4, prompt_lookup_min=2)


class Loop(RuleBasedStateMachine):
    """Stock vLLM and ours, which get the same calls."""

    stock: ClassVar[type[Any]] = Scheduler
    ours: ClassVar[type[Any]] = SyncWorkflowScheduler
    connector: ClassVar[Any] = None
    policy: ClassVar[str] = "fcfs"
    config: ClassVar[dict[str, Any]] = {}
    adapters: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.compiling: dict[str, list[Future[Any]]] = {}
        self.streams: dict[str, int] = {}
        self.number = 0

    @initialize()
    def begin(self) -> None:
        self.added: Counter[str] = Counter()
        given = {"blocks": 60, "seqs": 5, "tokens": 96, "policy": self.policy, "connector": self.connector}
        given |= self.config
        presage = {"quantum": 2, "starved_after": 3, "time_to_live_s": 1000.0}
        with tempfile.TemporaryDirectory() as folder:
            self.cores = [
                Core(build(Path(folder), self.stock, **given)),
                Core(build(Path(folder), self.ours, presage=presage, **given)),
            ]
        for core in self.cores:
            if self.connector is not None:
                core.scheduler.connector.takes = (0, 1, 3)

    @property
    def hooked(self) -> Any:
        return self.cores[1].scheduler

    def new(self, prompt: tuple[int, int], output: int, name: str | None = None, **sent: Any) -> list[Any]:
        """The same request for each of the two."""
        if name is None:
            name, self.number = f"r{self.number}", self.number + 1
        start, tokens = prompt
        ids = [(start * 37 + place) % 500 for place in range(tokens)]
        requests = [ask(name, ids, output, arrival=float(self.number), **sent) for _ in self.cores]
        adapter = start % (1 + self.adapters)
        for request in requests:
            request.lora_request = LoRARequest(f"adapter-{adapter}", adapter, "nowhere") if adapter else None
        return requests

    def add(self, requests: list[Any]) -> None:
        for core, request in zip(self.cores, requests, strict=True):
            core.core.add_request(request)
        self.asked[requests[0].request_id] = requests[0].max_tokens

    @rule(prompt=PROMPTS, output=st.integers(1, 9), workflow=st.integers(0, 4), name=NAMES, end=st.booleans())
    def step_of_a_workflow(self, prompt: tuple[int, int], output: int, workflow: int, name: str, end: bool) -> None:
        sent = {"workflow_type": name, "workflow_id": f"w{workflow}", "agent": f"a{prompt[0]}", "workflow_end": end}
        self.add(self.new(prompt, output, priority=workflow - 2, **sent))

    @rule(prompt=PROMPTS, output=st.integers(1, 9))
    def request_without_a_name(self, prompt: tuple[int, int], output: int) -> None:
        self.add(self.new(prompt, output))

    @rule(prompt=PROMPTS, output=st.integers(2, 40), workflow=st.integers(0, 4), late=st.booleans())
    def structured_answer(self, prompt: tuple[int, int], output: int, workflow: int, late: bool) -> None:
        requests = self.new(prompt, output, workflow_type="review", workflow_id=f"w{workflow}", agent="a")
        waits: list[Future[Any]] = [Future() for _ in requests]
        self.add([structured(one, wait if late else None) for one, wait in zip(requests, waits, strict=True)])
        if late:
            self.compiling[requests[0].request_id] = waits

    @rule(prompt=PROMPTS, output=st.integers(1, 9), workflow=st.integers(0, 4))
    def two_answers_to_one_prompt(self, prompt: tuple[int, int], output: int, workflow: int) -> None:
        parent, self.number = f"r{self.number}", self.number + 1
        for child in range(2):
            sent = {"workflow_type": "review", "workflow_id": f"w{workflow}", "agent": "a"}
            self.add(self.new(prompt, output + child, f"{child}_{parent}", **sent))

    @rule(prompt=PROMPTS, output=st.integers(1, 4), workflow=st.integers(0, 4))
    def streamed_input(self, prompt: tuple[int, int], output: int, workflow: int) -> None:
        requests = self.new(prompt, output, workflow_type="review", workflow_id=f"w{workflow}", agent="listener")
        for request in requests:
            request.resumable = True
        self.add(requests)
        self.streams[requests[0].request_id] = workflow
        self.asked.pop(requests[0].request_id)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), prompt=PROMPTS, last=st.booleans())
    def more_input(self, data: st.DataObject, prompt: tuple[int, int], last: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.streams)))
        if self.added[name] + prompt[1] > 400:  # vLLM alone never serves what its cache cannot hold
            prompt = prompt[0], 1
        self.added[name] += prompt[1]
        requests = self.new(prompt, 2, name, workflow_type="review", workflow_id="w0", agent="listener")
        for core, request in zip(self.cores, requests, strict=True):
            request.resumable = not last
            if name in core.scheduler.requests:
                core.core.add_request(request)
        if last:
            del self.streams[name]

    @precondition(lambda self: self.compiling)
    @rule()
    def grammars_are_compiled(self) -> None:
        for waits in self.compiling.values():
            for wait in waits:
                wait.set_result(AnyWord())
        self.compiling.clear()

    @rule(times=st.sampled_from([1, 1, 2, 3, 6]))
    def steps(self, times: int) -> None:
        for core in self.cores:
            for _ in range(times):
                if core.works:
                    core.step()

    def leaves(self, data: st.DataObject) -> str:
        name = f"r{data.draw(st.integers(max(0, self.number - 6), max(0, self.number - 1)))}"
        both = {name, f"0_{name}", f"1_{name}"}
        name = data.draw(st.sampled_from(sorted(both & ({*self.asked, *self.streams} or both)) or [name]))
        self.aborted.add(name)
        self.streams.pop(name, None)
        return name

    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        name = self.leaves(data)
        for core in self.cores:
            core.core.abort_requests([name])

    @rule(data=st.data())
    def a_client_leaves_while_the_model_runs(self, data: st.DataObject) -> None:
        name = self.leaves(data)
        for core in self.cores:
            core.executor.aborts.append(name)
            if core.works:
                core.step()

    @rule(prompt=PROMPTS, output=st.integers(1, 9), workflow=st.integers(0, 4))
    def a_client_leaves_in_its_first_iteration(self, prompt: tuple[int, int], output: int, workflow: int) -> None:
        requests = self.new(prompt, output, workflow_type="review", workflow_id=f"w{workflow}", agent="a")
        self.add(requests)
        self.aborted.add(requests[0].request_id)
        for core in self.cores:
            core.executor.aborts.append(requests[0].request_id)
            core.step()

    # One rule for all that operators do, so that most of what happens is requests.

    @rule(data=st.data(), action=st.sampled_from(OPERATORS))
    def operators(self, data: st.DataObject, action: str) -> None:
        getattr(self, action)(data)

    def abort_all(self) -> None:
        self.aborted |= {*self.asked, *self.streams}
        self.streams.clear()

    def pause(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)):
            for core in self.cores:
                core.core.pause_scheduler("keep", clear_cache=False)
            return
        self.abort_all()
        clear = self.connector is None and data.draw(st.booleans())  # vLLM cannot clear while a connector loads
        for core in self.cores:
            core.core.pause_scheduler("abort", clear_cache=clear)

    def resume(self, data: st.DataObject | None = None) -> None:
        for core in self.cores:
            core.core.resume_scheduler()

    def sleep_and_wake(self, data: st.DataObject) -> None:
        if self.connector is not None or data.draw(st.integers(0, 3)):
            return
        self.abort_all()
        for core in self.cores:
            core.core.sleep(1, "abort")
            core.core.wake_up()

    def reset_prefix_cache(self, data: st.DataObject) -> None:
        for core in self.cores:
            core.core.reset_prefix_cache()

    def start_all_over(self, data: st.DataObject) -> None:
        """As after new weights: running requests are preempted and computed again."""
        for core in self.cores:
            with suppress(RuntimeError):  # vLLM's own, while a connector loads or a stream holds blocks and waits
                core.core.reset_prefix_cache(reset_running_requests=True)

    def set_mode(self, data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(["on", "on", "off", "shadow"]))
        self.hooked.set_mode(mode, data.draw(st.sampled_from([None, "eviction", "priority", "admission"])), None)

    def ask_for_status(self, data: st.DataObject) -> None:
        self.hooked.presage_status()
        self.hooked.explain(data.draw(NAMES), f"w{data.draw(st.integers(0, 4))}")

    def end_a_workflow(self, data: st.DataObject) -> None:
        self.hooked.workflow_ended(data.draw(NAMES), f"w{data.draw(st.integers(0, 4))}")

    def teardown(self) -> None:
        if not hasattr(self, "cores"):
            return
        if self.compiling:
            self.grammars_are_compiled()
        self.resume()
        for core in self.cores:
            core.core.abort_requests([*self.streams, *core.executor.aborts])  # no model ran while these left
            core.run()
        for name, tokens in self.asked.items():
            if name not in self.aborted:
                answers = [core.said.get(name) for core in self.cores]
                due = [token_at(name, place) for place in range(tokens)]
                assert answers == [due, due], (name, answers, due)
                assert [core.reasons[name] for core in self.cores] == [["length"]] * 2
        for core in self.cores:
            assert not core.scheduler.requests
            assert everything_is_free(core.scheduler)
        status = self.hooked.presage_status()
        assert not status["counted"].get("presage_errors_total")
        for workflow in list(self.hooked.workflow_table):  # inferred ones too
            self.hooked.workflow_table.end(workflow.key, EndReason.FINISHED)
        self.hooked.schedule()
        left = {of: entries for of, entries in self.hooked.debug_state().items() if entries and of not in KEPT}
        assert not left, left


class AheadLoop(Loop):
    stock, ours = AsyncScheduler, WorkflowScheduler


class PriorityLoop(Loop):
    """With more adapters than fit a batch."""

    policy = "priority"
    config: ClassVar[dict[str, Any]] = {"lora_config": LoRAConfig(max_loras=2, max_cpu_loras=3)}
    adapters = 3


class AheadPriorityLoop(PriorityLoop, AheadLoop):
    pass


class LoadingLoop(Loop):
    connector = TIER


class LoadingAheadLoop(AheadLoop):
    connector = TIER


class DraftingLoop(Loop):
    config: ClassVar[dict[str, Any]] = {"speculative_config": drafts("ngram")}


class DraftingAheadLoop(AheadLoop):
    config: ClassVar[dict[str, Any]] = {"speculative_config": drafts("ngram_gpu")}


MACHINES = [
    Loop,
    AheadLoop,
    PriorityLoop,
    AheadPriorityLoop,
    LoadingLoop,
    LoadingAheadLoop,
    DraftingLoop,
    DraftingAheadLoop,
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_random_orders_of_calls_beside_stock_vllm(machine: type[Loop]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))  # type: ignore[no-untyped-call]


def ours(folder: Path, **given: Any) -> Core:
    return Core(build(folder, WorkflowScheduler, blocks=300, **{"presage": {}, **given}))


def well(core: Core) -> dict[str, Any]:
    status: dict[str, Any] = core.scheduler.presage_status()
    assert status["on"] == {"priority": True, "eviction": True, "admission": True}
    assert not status["counted"].get("presage_errors_total")
    return status


def test_a_client_leaves_after_schedule_and_before_anything_of_ours_is_called(tmp_path: Path) -> None:
    """While a structured answer decodes, vLLM asks for the grammar only after it has processed aborts and an output."""
    core = ours(tmp_path)
    core.core.add_request(structured(ask("r1", list(range(40)), 30, workflow_id="w1", agent="a")))
    for _ in range(3):
        core.step()
    core.core.add_request(ask("r2", list(range(100, 148)), 30, workflow_id="w2", agent="a"))
    core.executor.aborts.append("r2")
    core.step()
    assert "r2" not in core.scheduler.requests
    status = well(core)
    assert status["prompts"]["tokens"] == 40 + 48, "it began before it left"
    core.run()
    assert core.said["r1"] == [token_at("r1", place) for place in range(30)]
    assert everything_is_free(core.scheduler)


def test_a_client_leaves_in_a_chunk_of_its_prompt(tmp_path: Path) -> None:
    core = ours(tmp_path, tokens=256)
    core.core.add_request(structured(ask("r1", list(range(40)), 50, workflow_id="w1", agent="a")))
    core.step()
    core.core.add_request(ask("r2", [place % 500 for place in range(1500)], 50, workflow_id="w2", agent="a"))
    for _ in range(3):
        core.step()
    core.executor.aborts.append("r2")
    core.step()
    well(core)
    core.run()
    well(core)
    assert list(core.reasons) == ["r1"]


@pytest.mark.parametrize(
    "method", ["_comes", "_before_iteration", "_beside_model", "_before_update", "_leaves", "_wants"]
)
@pytest.mark.parametrize("after", [0, 7])
def test_whatever_of_ours_raises_vllm_goes_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: int
) -> None:
    kind = Prefetching if method == "_wants" else WorkflowScheduler
    whole, calls = getattr(kind, method), [0]

    def breaks(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise KeyError("what a prompt says")
        return whole(self, *args)

    monkeypatch.setattr(kind, method, breaks)
    core = ours(tmp_path, policy="priority", seqs=3, presage={"prefetch": kind is Prefetching})
    for number in range(20):
        core.core.add_request(
            ask(f"r{number}", list(range(number, number + 50)), 9, priority=number % 3, workflow_id=f"w{number % 4}")
        )
        core.step()
    core.run()
    assert core.said == {f"r{number}": [token_at(f"r{number}", place) for place in range(9)] for number in range(20)}
    assert everything_is_free(core.scheduler)
    if calls[0] > after:
        assert core.scheduler.presage_status()["on"] == {"priority": False, "eviction": False, "admission": False}
        core.scheduler.schedule()  # vLLM gets its own back before it schedules
        assert isinstance(core.scheduler.waiting, PriorityRequestQueue)
        assert isinstance(core.scheduler.kv_cache_manager.block_pool.free_block_queue, FreeKVCacheBlockQueue)
