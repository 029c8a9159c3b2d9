"""What eviction is told of a workflow, from its first request to its end."""

from typing import Any, ClassVar

import numpy as np
import pytest

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.listeners import Found
from presage.serving_hooks.modes import Modes
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import UNIT, UNKNOWN, Lookahead, ScoreConfig
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.workflows import EndReason, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast

AGENTS = ("coder", "tester")
CODER = Step("review", "r1", "coder")
TESTER = Step("review", "r1", "tester")
AHEAD = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]], np.float32)


class Source:
    """The same forecast at any moment."""

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        return LiveForecast("champion", 9, PREFILL, AHEAD, AGENTS, 1)

    def on_completion(self, *_: object, **__: object) -> LiveForecast:
        return LiveForecast("champion", 9, COMPLETION, AHEAD, AGENTS, 1)

    def close(self, workflow: Workflow) -> None:
        pass


class Heard:
    """Keeps what eviction is told: worths of both agents' blocks as shares of a certain touch."""

    pressed = True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.waits: list[Any] = []

    def forecast(
        self, step: Step, lookahead: Lookahead, curve: ReturnCurve | None, since: float, step_s: float
    ) -> None:
        self.waits.append((None if curve is None else round(curve.at(0.0).wait_s, 2), since, round(step_s, 2)))
        worth = tuple(round(lookahead.score((agent,)) / UNIT, 4) for agent in AGENTS)
        self.told.append("unknown" if lookahead is UNKNOWN else worth)


class Asked:
    """What forecasts read of a request of vLLM."""

    num_prompt_tokens, sampling_params = 10, None

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class Told:
    """Tells forecasts what the engine would tell them of requests, and flushes after every event unless it is late."""

    def __init__(self, of: StepForecasts, table: WorkflowTable, at_once: bool = True) -> None:
        self.of, self.table, self.at_once = of, table, at_once
        table.subscribe(of.workflow_ended)

    def _flushed(self) -> None:
        if self.at_once:
            self.of.flush()

    def arrived(self, name: str, step: Step) -> None:
        self.of.request_arrived(Asked(name), self.table.arrived(name, step))  # type: ignore[arg-type]
        self._flushed()

    def started(self, name: str) -> None:
        self.of.request_scheduled(Asked(name), self.table.step(name), Found([], 0))  # type: ignore[arg-type]
        self._flushed()

    def preempted(self, name: str) -> None:
        running = self.table.step(name)
        assert running is not None
        self.of.request_preempted(running)
        self._flushed()

    def resumed(self, name: str) -> None:
        running = self.table.step(name)
        assert running is not None
        self.of.request_resumed(running)
        self._flushed()

    def prefill_state(self, name: str, state: Any) -> None:
        self.of.prefill_state(name, state)
        self._flushed()

    def finished(self, name: str, completed: bool = True, tokens: int = 5) -> None:
        running, left = self.table.finished(name), LeftStep(name, completed, tokens, "stop")
        self.of.request_finished(Asked(name), running, left)  # type: ignore[arg-type]
        if running is not None and running.step.last:
            self.table.end(running.step.workflow, EndReason.FINISHED if completed else EndReason.ABORTED)
        self._flushed()


def made(
    forecasts: Forecasts, at_once: bool = True, clock: Any = lambda: 0.0, most: int = 100
) -> tuple[Told, Heard, WorkflowTable, EventCounts]:
    """γ = 0.5, so that the sums can be done by hand."""
    counts, table = EventCounts(), WorkflowTable(60.0, clock, most=most)
    of = StepForecasts(table, forecasts, ScoreConfig(3, 0.5), counts, Modes(), clock)
    of.retention = heard = Heard()
    told = Told(of, table, at_once)
    table.subscribe(lambda workflow, reason: heard.told.append("end"))
    return told, heard, table, counts


def watched(forecasts: Forecasts) -> tuple[Told, Heard]:
    return made(forecasts)[:2]


# Σ γ^(k−1) Π(1 − END) P^(k), by hand: weights 1, 0.5 · 0.75, 0.5² · 0.75 · 0.75
PLAIN = (round(0.5 + 0.375 * 0.25, 4), round(0.25 + 0.375 * 0.5 + 0.140625 * 0.5, 4))
# The tester is there: its row has no END, so weights 1, 0.5, 0.5² · 0.75
WAITS = (round(0.5 * 0.25, 4), round(1 + 0.5 * 0.5 + 0.1875 * 0.5, 4))
# The coder is computed again: rows certain, first, second; weights 1, 0.5, 0.5² · 0.75
AGAIN = (round(1 + 0.5 * 0.5 + 0.1875 * 0.25, 4), round(0.5 * 0.25 + 0.1875 * 0.5, 4))


def test_a_step_that_waits_is_certain_and_one_that_is_preempted_is_so_again() -> None:
    of, heard = watched(Forecasts(Source()))
    of.arrived("1", CODER)
    of.started("1")
    of.preempted("1")
    of.resumed("1")
    of.finished("1")
    of.arrived("2", TESTER)
    of.started("2")
    of.finished("2", False, 0)  # nothing new is known
    of.arrived("3", Step("review", "r1", "stranger"))
    assert heard.told == [PLAIN, AGAIN, PLAIN, PLAIN, WAITS, PLAIN, PLAIN, PLAIN]


def test_eviction_is_told_the_last_word_on_a_workflow_once() -> None:
    of, heard, table, _ = made(Forecasts(Source()), at_once=False)
    of.arrived("1", CODER)
    of.started("1")
    assert not heard.told, "what can wait waits"
    of.of.flush()
    of.finished("1")
    of.arrived("2", TESTER)
    of.of.flush()
    of.of.flush()
    assert heard.told == [PLAIN, WAITS]
    of.started("2")
    table.end(CODER.workflow, EndReason.FINISHED)
    of.of.flush()
    assert heard.told == [PLAIN, WAITS, "end"], "nothing is told of a workflow that has ended"


def test_the_last_step_completes_before_its_workflow_ends_and_how_it_ended_is_told() -> None:
    told: list[Any] = []

    class Listening(Source):
        def on_completion(self, *_: object, **sent: object) -> LiveForecast:
            told.append(("completed", sent["output_tokens"]))
            return super().on_completion()

        def close(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
            told.append((reason, workflow.step.workflow_id))

    class Now:
        now = 0.0

    of, heard, table, _ = made(Forecasts(Listening()), clock=lambda: Now.now)
    of.arrived("1", Step("review", "r1", "coder", last=True))
    of.started("1")
    of.finished("1")
    assert told == [("completed", 5), ("finished", "r1")]
    assert heard.told == [PLAIN, "end"], "what nobody asks for any more is not told"
    of.arrived("2", Step("review", "r2", "coder", last=True))
    of.started("2")
    of.finished("2", False, 3)  # aborted: it has not completed
    of.arrived("3", Step("review", "r3", "coder"))
    of.started("3")
    of.finished("3", tokens=7)
    Now.now = 61.0
    table.expire()
    assert told[2:] == [("aborted", "r2"), ("completed", 7), ("expired", "r3")]


def test_without_a_source_nothing_is_told_but_ends() -> None:
    of, heard = watched(Forecasts())
    for name, step in (("1", CODER), ("2", Step("review", "r1", "tester", last=True))):
        of.arrived(name, step)
        of.started(name)
        of.preempted(name)
        of.finished(name)
    assert heard.told == ["end"]


def test_a_source_that_fails_makes_workflows_unknown() -> None:
    class Failing(Source):
        def on_completion(self, *_: object, **__: object) -> LiveForecast:
            raise RuntimeError

    of, heard = watched(Forecasts(Failing()))
    of.arrived("1", CODER)
    of.started("1")
    of.finished("1")
    of.arrived("2", TESTER)
    of.started("2")
    assert heard.told == [PLAIN, "unknown", "unknown"]


def test_names_without_end_do_not_grow_the_tables() -> None:
    of, _, table, _ = made(Forecasts(Source()), most=3)
    for number in range(10):
        of.arrived(str(number), Step("review", f"r{number}", "coder"))
    assert len(table) == 3
    assert table.step("2") is not None
    assert table.step("3") is None
    of.arrived("again", Step("review", "r0", "coder"))  # one that is known goes on
    assert table.step("again") is not None
    of.finished("3", tokens=1)
    of.finished("1", tokens=1)
    assert table.end(CODER.workflow, EndReason.FINISHED)
    of.arrived("new", Step("review", "r11", "coder"))
    assert table.step("new") is not None


class Tapped(Source):
    """Another forecast once it has a state: the tester comes for certain, and then the end."""

    def __init__(self) -> None:
        self.completed: list[Any] = []
        self.awaits = False

    projections: ClassVar[Any] = {PREFILL: (np.eye(2, dtype=np.float32), np.zeros(2, np.float32))}

    def await_states(self) -> None:
        self.awaits = True

    def on_prefill_state(self, workflow: Workflow, projected: Any, of: Any) -> LiveForecast | None:
        if projected[0] < 0:
            return None  # too late
        return LiveForecast("champion", 9, PREFILL, KNOWN, AGENTS, 1)

    def on_completion(self, *_: object, projected: Any = None, **__: object) -> LiveForecast:
        self.completed.append(None if projected is None else projected.tolist())
        return LiveForecast("champion", 9, COMPLETION, AHEAD, AGENTS, 1)


KNOWN = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]], np.float32)
SURE = (0.0, 1.0)
# The coder is computed again: rows certain, first, second of KNOWN; weights 1, 0.5, 0.25
SURE_AGAIN = (1.0, 0.5)
STATE = np.ones(2, np.float32)


def tapped(state: Any = STATE) -> tuple[Told, Heard, Tapped, EventCounts]:
    source = Tapped()
    of, heard, _, counts = made(Forecasts(source))
    of.of.state_source = source, lambda _: state
    return of, heard, source, counts


def test_a_state_that_comes_changes_the_score_once() -> None:
    of, heard, source, counts = tapped()
    of.arrived("1", CODER)
    of.started("1")
    of.prefill_state("1", STATE)
    of.prefill_state("1", STATE)
    of.prefill_state("a request without a workflow", STATE)
    of.finished("1")
    assert heard.told == [PLAIN, SURE, PLAIN]
    assert source.completed == [[1.0, 1.0]]
    assert {name: count for name, count in counts.by_key().items() if "states" in name} == {
        "prefill states: used": 1,
        "completion states: used": 1,
    }


def test_a_state_of_a_step_that_is_preempted_holds_for_the_step_that_is_computed_again() -> None:
    of, heard, _, _ = tapped()
    of.arrived("1", CODER)
    of.started("1")
    of.preempted("1")
    of.prefill_state("1", STATE)
    of.resumed("1")
    assert heard.told == [PLAIN, AGAIN, SURE_AGAIN, SURE]


def test_states_that_are_late_or_missing_are_counted_and_those_of_aborted_requests_are_not() -> None:
    of, heard, source, counts = tapped(None)
    of.arrived("1", CODER)
    of.started("1")
    of.prefill_state("1", -STATE)
    of.finished("1")
    of.arrived("2", TESTER)
    of.started("2")
    of.finished("2")
    of.arrived("3", CODER)
    of.started("3")
    of.finished("3", False, 0)
    assert SURE not in heard.told
    assert source.completed == [None, None]
    assert {name: count for name, count in counts.by_key().items() if "states" in name} == {
        "prefill states: late": 1,
        "prefill states: missing": 1,
        "completion states: missing": 2,
    }


def test_a_source_that_fails_at_a_state_is_switched_off_and_the_score_stays() -> None:
    class Failing(Tapped):
        def on_prefill_state(self, *_: object, **__: object) -> LiveForecast | None:
            raise RuntimeError

    source = Failing()
    of, heard = watched(Forecasts(source))
    of.of.state_source = source, lambda _: None
    of.arrived("1", CODER)
    of.started("1")
    of.prefill_state("1", STATE)
    of.finished("1")
    assert heard.told == [PLAIN, "unknown"]


class Listens(Source):
    """Says how much is left, and keeps what it has heard of steps."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        self.heard.append("begins")
        return super().on_prefill()

    def on_completion(self, *_: object, **told: object) -> LiveForecast:
        self.heard.append(told["output_tokens"])
        return super().on_completion()

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float:
        return 5.0


@pytest.mark.parametrize("ranks", [True, False])
def test_who_foretells_hears_of_steps_where_eviction_is_off(ranks: bool) -> None:
    """Whoever ranks needs it, and forecasts are held against what comes whoever acts on them."""
    source = Listens()
    of = made(Forecasts(source, source if ranks else None), at_once=False)[0]
    of.of.retention = None
    of.arrived("first", CODER)
    of.started("first")
    of.finished("first", tokens=7)
    assert source.heard == ["begins", 7]
