"""The events of requests and workflows, and the ordered list of the parts that hear them.

An engine, a replay and the gateway tell the same events, each of the requests that it serves. Whatever follows them is
a listener: identity, recorder, eviction, forecasts, queues, admission, prefetch, lifecycle events. It gets the record
of the workflow and the step, acts at events, and has one error boundary: its switch. What a listener raises switches it
off, with those that depend on it; the others go on, and so does what serves the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from presage.serving_hooks.modes import Switch
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import LeftStep

Request = TypeVar("Request", contravariant=True)
"""A request, as what serves it knows it: vLLM's `Request`, the gateway's `GatewayDecision`."""


class Found(NamedTuple):
    """What a request found in the cache when it was selected for the first time, by a connector too.

    Attributes:
        blocks: their ids.
        tokens: of its prompt.
    """

    blocks: Sequence[int]
    tokens: int


class Listener(Generic[Request]):
    """A part that follows requests. It overrides the events that it acts on; the others do nothing.

    `step` is None for a request without a workflow.

    Attributes:
        switch: off once an event has raised; the listener then hears nothing more.
    """

    switch: Switch

    def request_arrived(self, request: Request, step: RunningStep | None) -> None:
        """A request is about to be queued."""

    def request_scheduled(self, request: Request, step: RunningStep | None, found: Found) -> None:
        """A request is selected for the first time. Told while the model runs, like the three that follow."""

    def request_preempted(self, step: RunningStep) -> None:
        """A step has lost its blocks, some of which may still be cached when it resumes."""

    def request_resumed(self, step: RunningStep) -> None:
        """A preempted step is selected again."""

    def iteration(self, output: Any, began_at: float) -> None:
        """An iteration of an engine was scheduled, from `began_at`; its requests have been told."""

    def request_finished(self, request: Request, step: RunningStep | None, left: LeftStep | None) -> None:
        """A request has completed or was aborted, and the step with it (`left`) unless another choice of it runs."""

    def answer_parsed(self, workflow: Workflow, finish_reason: str | None, tools: Sequence[str] | None) -> None:
        """The answer of the workflow's latest step was parsed: its finish reason, and the tools that it calls."""

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended; its remaining requests are served as requests without one."""


EVENTS: Final = tuple(name for name in vars(Listener) if not name.startswith("_"))


class Listeners(Listener[Request]):
    """Passes each event to the listeners, in their order."""

    def __init__(self) -> None:
        self._listeners: list[Listener[Any]] = []
        self._arrange()

    def add(self, listener: Listener[Any], first: bool = False) -> None:
        """Adds a listener behind the others, or before them."""
        self._listeners.insert(0 if first else len(self._listeners), listener)
        self._arrange()

    def remove(self, listener: Listener[Any]) -> None:
        """Removes a listener; one that is not there is ignored."""
        self._listeners = [one for one in self._listeners if one is not listener]
        self._arrange()

    def _arrange(self) -> None:
        for event in EVENTS:
            ignores = getattr(Listener, event)
            hear = [one for one in self._listeners if getattr(type(one), event) is not ignores]
            setattr(self, event, _to_all(event, hear))


def _to_all(event: str, hear: list[Listener[Any]]) -> Callable[..., None]:
    def tell(*what: Any) -> None:
        for listener in hear:
            if listener.switch.on:  # as `Switch.attempt`, without a call more for each listener
                try:
                    getattr(listener, event)(*what)
                except Exception as error:
                    listener.switch.off(error)

    return tell
