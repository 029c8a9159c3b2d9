"""vLLM's own scheduler, told by a forecaster of ours, and workflows of law "retry" that ask it."""

from typing import Any

from vllm_samples import Engine, ask

from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

AGENTS = ("planner", "coder", "tester")


def told(forecaster: Forecaster, **more: Any) -> type[SyncWorkflowScheduler]:
    """A scheduler of which both policies ask this one."""
    asked = VersionedForecaster(forecaster)
    return type("Told", (SyncWorkflowScheduler,), {"forecasts": lambda self, config: Forecasts(asked, asked), **more})


def send(engine: Engine, workflow: str, step: int, **sent: Any) -> str:
    """The next step of a workflow, whose prompt begins as the one before; the name of the request."""
    start = sum(workflow.encode()) % 97
    prompt = [(start + i) % 500 for i in range(30 + 25 * step)]
    name = f"{workflow}.{step}"
    said = {"workflow_type": "retry", "workflow_id": workflow, "agent": AGENTS[step % 3], "step": step, **sent}
    engine.scheduler.add_request(ask(name, prompt, 3, **said))
    return name


def serve(engine: Engine, workflows: int, steps: int = 3, *, first: int = 0, end: bool = True) -> list[str]:
    """So many workflows, eight at once; the requests."""
    sent = []
    for start in range(first, first + workflows, 8):
        for step in range(steps):
            for number in range(start, min(start + 8, first + workflows)):
                sent.append(send(engine, f"w{number}", step, workflow_end=end and step == steps - 1))
            engine.run()
    return sent


def whole(predictor: Any, **instead: Any) -> Any:
    """The predictor, but for these attributes."""

    class Instead:
        def __getattr__(self, name: str) -> Any:
            return instead[name] if name in instead else getattr(predictor, name)

    return Instead()


BOUNDED = ("recent forecasts", "sharing types", "groups of blocks", "eviction heap", "stages to come", "ageing heap")
"""Tables that are bounded by other things than running workflows."""


def left_behind(scheduler: Any) -> dict[str, int]:
    """How much is kept in each table that grows with requests and workflows."""
    state = scheduler.debug_state()
    state.pop("admission accounts to drop", None)
    return {name: count for name, count in state.items() if name not in BOUNDED}
