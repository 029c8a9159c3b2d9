"""Listeners hear each event in their order, and one that fails hears no more; the recorder's tells it who answered."""

from collections.abc import Sequence

from serving_samples import Clock

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import Found, Listener, Listeners
from presage.serving_hooks.listeners.recording import Recording
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.recorder import NoRecorder
from presage.serving_hooks.workflows import RunningStep, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step


class Noting(Listener[str]):
    """Notes its name at each arrival, and fails at the requests that it is told to."""

    def __init__(self, name: str, heard: list[str], fails_at: str = "") -> None:
        self.switch = Switch("recorder", EventCounts())
        self._name, self._heard, self._fails_at = name, heard, fails_at

    def request_arrived(self, request: str, step: RunningStep | None) -> None:
        self._heard.append(self._name)
        if request == self._fails_at:
            raise RuntimeError


def test_each_hears_in_its_order_and_one_that_fails_hears_no_more() -> None:
    heard, listeners = list[str](), Listeners[str]()
    second, third = Noting("second", heard, fails_at="r1"), Noting("third", heard)
    for listener in (second, third):
        listeners.add(listener)
    listeners.add(Noting("first", heard), first=True)
    for request in ("r0", "r1", "r2"):
        listeners.request_arrived(request, None)
    listeners.request_scheduled("r2", None, Found([], 0))  # which nobody acts on
    assert heard == ["first", "second", "third"] * 2 + ["first", "third"]
    assert (second.switch.reason, third.switch.on) == ("RuntimeError", True)
    listeners.remove(third)
    listeners.request_arrived("r3", None)
    assert heard[8:] == ["first"]


class Answered(NoRecorder):
    """A recorder that keeps the tools it is told of."""

    def __init__(self) -> None:
        self.tools: list[tuple[str, list[str]]] = []

    def answered(self, request_id: str, tools: Sequence[str]) -> None:
        self.tools.append((request_id, list(tools)))


def test_the_tools_of_an_answer_are_told_once_and_of_the_step_that_completed() -> None:
    recorder, table = Answered(), WorkflowTable(10.0, Clock())
    listener = Recording[str](recorder, table.choices, EventCounts(), lambda *_: {}, lambda *_: {})
    for request, completed in (("r0", True), ("aborted", False), ("r2", True)):
        step = table.arrived(request, Step("t", "w", "a"))
        assert step is not None
        listener.request_finished(request, table.finished(request), LeftStep(request, completed, 1, None))
        for tools in (None, [request], ["of whom?"]):
            listener.answer_parsed(step.workflow, "stop", tools)
    assert recorder.tools == [("r0", ["r0"]), ("r2", ["r2"])]
