"""A scheduler whose admission also holds requests on demand: those of the agent `hold_SECONDS`, for so long.

For `--scheduler-cls`, in servers without asynchronous scheduling (a CPU's).
"""

from __future__ import annotations

import time
from typing import ClassVar

from presage.serving_hooks.modes import Switch
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows import RunningStep
from presage.serving_hooks.workflows.choices import LeftStep

AGENT = "hold_"


class Holding(AdmissionController):
    """Admission that holds on demand, whatever the policy decides."""

    until: ClassVar[dict[str, float]] = {}

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        if step is not None and step.step.agent.startswith(AGENT):
            self.until[request.request_id] = time.monotonic() + float(step.step.agent.removeprefix(AGENT))
        super().request_arrived(request, step)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        self.until.pop(request.request_id, None)
        super().request_finished(request, step, left)

    def holds(self, request_id: str) -> bool:
        return request_id in self.until or super().holds(request_id)

    def decide(self, idle: bool) -> list[str]:
        due = [request_id for request_id, until in self.until.items() if until <= time.monotonic()]
        for request_id in due:
            del self.until[request_id]
        return [*super().decide(idle), *due]


class HoldingScheduler(SyncWorkflowScheduler):
    """The scheduler."""

    def make_admission(self, config: PresageConfig, switch: Switch) -> AdmissionController:
        made = super().make_admission(config, switch)
        made.__class__ = Holding
        return made
