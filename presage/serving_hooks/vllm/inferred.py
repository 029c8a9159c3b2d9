"""Infers the workflow of requests whose clients name none; see `identity/inference.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import intern
from typing import Final

from presage.datasets.schema.names import NameMapping
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.inference import Candidate, Inference
from presage.serving_hooks.listeners import Listener
from presage.serving_hooks.modes import Retry, Switch
from presage.serving_hooks.status import IdentityStatus
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import BY_ID, Step, scoped
from presage.serving_hooks.workflows.metadata import sent_tenant
from presage.serving_hooks.workflows.observed import Observed, observed, request_name

_MOST_UNREAD: Final = 256
"""Answers that are read at once before the next iteration, if the model does not run."""


class InferredIdentity(Listener[EngineRequest]):
    """Passes prompts and answers of requests to the inference.

    Answers are read while the model runs, or before the next prompt is looked up.

    Args:
        key: of the hashes of prompts; secret.
    """

    def __init__(
        self,
        port: EnginePort,
        table: WorkflowTable,
        counts: EventCounts,
        clock: Callable[[], float],
        key: bytes,
        retry_s: float = Retry.retry_s,
    ) -> None:
        self.switch = Switch("identity", counts, retry=Retry(clock, retry_s))
        self._table, self._counts = table, counts
        self._new_inference = partial(Inference, key, port.hash_tokens, clock)
        self.begin()

    def begin(self) -> None:
        """Forgets all prompts."""
        self._inference = self._new_inference()
        self._unread: list[tuple[Candidate, EngineRequest, str]] = []
        for workflow in self._table:
            workflow.prompted = None

    def step(self, request: EngineRequest, named: Step | None, names: NameMapping) -> Step | None:
        """The step that a request is: as named by its client, else as inferred; None if it is none (yet)."""
        inferred: Step | None = self.switch.attempt(self._step, request, named, names)
        return named if inferred is None else inferred

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        """Records which running workflow the request is a step of."""
        if step is not None:
            self._inference.runs(request.request_id, step.workflow)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """Keeps the answer of a completed request, to be read later."""
        sent = request.sampling_params.extra_args if request.sampling_params is not None else None
        candidate = self._inference.leaves(request.request_id, engine.completed(request), request_name(sent))
        if candidate is not None:
            self._unread.append((candidate, request, sent_tenant(sent) or ""))
            if len(self._unread) > _MOST_UNREAD:
                self._read_answers()

    def catch_up(self) -> None:
        """Reads the answers of requests that have left."""
        if self._unread:
            self.switch.attempt(self._read_answers)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Forgets the prompts of a workflow."""
        self._inference.ended(workflow, reason is not EndReason.EXPIRED)

    def answered_last(self, name: str) -> Workflow | None:
        """The running workflow whose latest step this completed request was, by the HTTP server's name or vLLM's id."""
        key = self._inference.answered_last(name)
        return self._table.get(key) if key is not None else None

    def recorded(self, request_id: str) -> dict[str, int]:
        """What is recorded of a request's place in its workflow."""
        number, goes_on_from = self._inference.place(request_id)
        return {"number": number, "goes_on_from": goes_on_from}

    def status(self) -> IdentityStatus:
        """How workflows were identified, and how often the inference finds a named one."""
        inference = self._inference
        return IdentityStatus(self.switch.on, inference.running, inference.by_source(), inference.checks())

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks; what waits to be read is read first."""
        self.catch_up()
        return {**self._inference.debug_state(), "unread answers": len(self._unread)}

    def _step(self, request: EngineRequest, named: Step | None, names: NameMapping) -> Step | None:
        sent = request.sampling_params.extra_args if request.sampling_params is not None else None
        tenant = sent_tenant(sent)
        if tenant is None or request.sampling_params is None:
            return None
        prompt = engine.prompt_of(request, tenant)
        if prompt is None:
            return None
        self._read_answers()
        sources = observed(sent, self._counts)
        if named is None and sources.session is not None:
            named = _of_session(sources, sources.session, tenant, names)
        if named is not None:
            self._inference.named(request.request_id, prompt, named, self._table.get(named.workflow))
            return named
        return self._inference.arrives(request.request_id, prompt, tenant, sources, names)

    def _read_answers(self) -> None:
        unread, self._unread = self._unread, []
        for candidate, request, tenant in unread:
            both = engine.prompt_of(request, tenant)
            if both is not None:
                self._inference.answered(candidate, both, request.num_prompt_tokens, request.request_id)


def _of_session(found: Observed, session: str, tenant: str, names: NameMapping) -> Step:
    return Step(
        workflow_type=intern(names.workflow_type(found.workflow_type)),
        workflow_id=scoped(tenant, session),
        agent=intern(names.agent(found.agent)),
        sent=(found.workflow_type, found.agent),
        source="session",
        confidence=BY_ID["session"],
    )
