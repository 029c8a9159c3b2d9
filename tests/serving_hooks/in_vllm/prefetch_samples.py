"""A scheduler that prefetches, with forecasts a test says and a clock that moves with each step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from vllm_samples import HASHER, NAMED, Engine, Request, ask, build

from presage.features.moment import COMPLETION, Moment
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.live import LiveForecast, LiveReturn

AGENTS = ("planner", "coder")


class Clock:
    """Rises by a millisecond with each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Says:
    """How likely each agent of a workflow is next; the planner for certain where nothing is said."""

    def __init__(self, chances: Mapping[str, tuple[float, ...]]) -> None:
        self.chances = dict(chances)

    def on_prefill(self, workflow: Workflow, agent: str, **more: Any) -> LiveForecast:
        row = np.array([self.chances.get(workflow.step.workflow_id, (1.0, 0.0, 0.0))], np.float32)
        return LiveForecast("champion", 9, self.moment, row, AGENTS, 1)

    moment: Moment = COMPLETION

    def on_completion(self, workflow: Workflow, **more: Any) -> LiveForecast:
        return self.on_prefill(workflow, "")

    def close(self, workflow: Workflow) -> None:
        pass


class Returns:
    """A tenth of all workflows are back after so many seconds, half of them after twice as long."""

    def __init__(self, seconds: float) -> None:
        self.made = LiveReturn("champion", 9, 0.0, (0.1, 0.5, 0.9), (seconds, 2 * seconds, 4 * seconds), 1)

    def arrived(self, *_: object) -> None:
        pass

    def completed(self, *_: object) -> LiveReturn:
        return self.made

    def answered(self, *_: object) -> None:
        pass

    def away(self, workflow: Workflow) -> None:
        pass

    def ended(self, *_: object) -> None:
        pass


class Knows:
    """Goes before a scheduler."""

    says: ClassVar[Says]
    returns: ClassVar[Returns | None] = None

    def forecasts(self, config: PresageConfig) -> Forecasts:
        return Forecasts(self.says, returns=self.returns)


class KnowsSync(Knows, SyncWorkflowScheduler):
    pass


class KnowsAsync(Knows, WorkflowScheduler):
    pass


class Idling(Engine):
    """An engine that goes on while its scheduler says that there is something to do, as vLLM's does."""

    def settle(self, most: int = 300) -> int:
        """Until it would sleep; iterations."""
        for steps in range(most):
            if not self.scheduler.has_requests():
                self.drain()
                if not self.scheduler.has_requests():
                    return steps
            self.step()
        raise AssertionError("the engine does not come to rest")


def prefetching(
    folder: Path,
    *,
    ahead: bool = False,
    chances: Mapping[str, tuple[float, ...]] | None = None,
    back_s: float | None = None,
    **more: Any,
) -> Idling:
    knows = {"says": Says(chances or {}), "returns": None if back_s is None else Returns(back_s), "clock": Clock()}
    kind = type("Kind", (KnowsAsync if ahead else KnowsSync,), knows)
    presage = {"prefetch": True, **NAMED, **more.pop("presage", {})}
    return Idling(build(folder, kind, **{"blocks": 90, "presage": presage, **more}), ahead)


def prompt(start: int, tokens: int) -> list[int]:
    return [(start + i) % 500 for i in range(tokens)]


def asked(
    engine: Engine,
    name: str,
    tokens: list[int],
    *,
    agent: str = "planner",
    output: int = 2,
    salt: str | None = None,
    adapter: Any = None,
    **sent: object,
) -> None:
    """A step of the workflow that its name begins with comes."""
    made = ask(name, tokens, output, workflow_type="t", workflow_id=name[0], agent=agent, **sent)
    request = Request(
        name, tokens, made.sampling_params, None, cache_salt=salt, lora_request=adapter, block_hasher=HASHER
    )
    engine.scheduler.add_request(request)


def served(engine: Engine, name: str, tokens: list[int], **more: Any) -> int:
    """The same, and it is answered at once; prompt tokens it found in the cache."""
    asked(engine, name, tokens, **more)
    while name not in engine.ended:
        engine.step()
    return engine.hits[name]


def status(engine: Engine) -> dict[str, Any]:
    return engine.scheduler.presage_status()["prefetch"]
