"""A scheduler whose admission also holds requests on demand: those of the agent `hold_SECONDS`, for so long.

For `--scheduler-cls`, in servers without asynchronous scheduling (a CPU's).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from presage.serving_hooks.modes import Switch
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.identity import Step

AGENT = "hold_"


class Holding(AdmissionController):
    """Admission that holds on demand, whatever the policy decides."""

    until: ClassVar[dict[str, float]] = {}

    def arrives(self, request_id: str, step: Step, prompt_tokens: int, hashes: Sequence[bytes]) -> None:
        if step.agent.startswith(AGENT):
            self.until[request_id] = time.monotonic() + float(step.agent.removeprefix(AGENT))
        super().arrives(request_id, step, prompt_tokens, hashes)

    def leaves(self, request_id: str, hashes: Sequence[bytes], completed: bool, output_tokens: int) -> None:
        self.until.pop(request_id, None)
        super().leaves(request_id, hashes, completed, output_tokens)

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
