"""What runs behind the gateway: which upstreams take requests, how much is ahead of a new one, and how fast they are.

Source: the activity monitor of Chimera (§3.5), which counts only what the gateway itself has sent. Here that account is
combined with what vLLM reports (`engine_metrics.py`), since others may send requests too, and speeds are measured
(`upstream_speed.py`). An upstream that is dead, hangs or reports impossible figures is left out with a reason, and is
probed after waits that double. Only the events of its methods and the given clock change the state; `polling.py` polls.

Policies read `engines`. Figures that are too old are unknown, not zero: what others have sent to such an upstream is
then assumed to be the mean over the upstreams that are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from presage.gateway.monitor.upstream_speed import UpstreamSpeed
from presage.serving_hooks.engine_file import EngineFile
from presage.serving_hooks.engine_metrics import EngineLoad
from presage.serving_hooks.policies.routing.fleet import FleetEngine

Outage = Literal[
    "does not accept requests",
    "does not answer its health check",
    "no first token while others answer",
    "reports impossible figures",
]
DEAD: Final = "does not accept requests"
HANGS: Final = "does not answer its health check"
SILENT: Final = "no first token while others answer"
LIES: Final = "reports impossible figures"

UNKNOWN_CACHE: Final = 10**9
"""Tokens of a cache that is not reported: no limit."""

_UNKNOWN_OUTPUT: Final = 256.0
_NEW: Final = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetUpstream:
    """A server behind the gateway.

    Attributes:
        base_url: without /v1.
        models: that it serves; empty if unknown, which is one row for any model.
        engine: its engine file; None measures its speed.
    """

    name: str
    base_url: str
    models: tuple[str, ...] = ()
    engine: EngineFile | None = None


@dataclass(frozen=True)
class MonitorSettings:
    """Limits of the monitor.

    Attributes:
        poll_s: seconds between two polls of an upstream.
        timeout_s: of a health check, and of the page of metrics.
        most_bytes: of that page.
        stale_polls: polls without an answer after which its figures are unknown.
        timeouts: health checks in a row without an answer after which an upstream hangs.
        silence_s: seconds without a first token, while others answer, after which an upstream hangs.
        first_wait_s, longest_wait_s: seconds until the first probe of a closed upstream, and the most.
    """

    poll_s: float = 1.0
    timeout_s: float = 2.0
    most_bytes: int = 2 << 20
    stale_polls: int = 5
    timeouts: int = 2
    silence_s: float = 60.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll has found.

    Attributes:
        health: "unknown" if the poll itself failed here.
        load: None if it reports none, or not in time.
        lies: its figures are impossible, or its page is too large.
        without_load: its page has none of vLLM's figures: that of a router, or of an engine that has lost them.
    """

    health: Literal["alive", "dead", "hangs", "unknown"]
    load: EngineLoad | None = None
    lies: bool = False
    without_load: bool = False


@dataclass(slots=True)
class _InFlight:
    sent_s: float
    uncached_tokens: float
    predicted_tokens: float
    ahead_tokens: float
    prefill_ahead_tokens: float
    alone: bool
    first_s: float | None = None


@dataclass(slots=True)
class _State:
    """Of one upstream."""

    speed: UpstreamSpeed
    rows: list[FleetEngine]
    outage: Outage | None = None
    answered: bool = False
    failures: int = 0
    timeouts: int = 0
    next_poll_s: float = 0.0
    opened_s: float = 0.0
    event_s: float = float("-inf")
    load: EngineLoad | None = None
    load_s: float = float("-inf")
    foreign: int = 0
    most_in_flight: int = 0
    """Since the last figures, which are a little older than they look."""
    predicted_tokens: float = 0.0
    prefill_tokens: float = 0.0
    in_flight: dict[Hashable, _InFlight] = field(default_factory=dict)
    waiting: dict[Hashable, _InFlight] = field(default_factory=dict)
    """Streamed requests without a first token, the oldest first."""


class FleetMonitor:
    """The state of all upstreams.

    Args:
        clock: monotonic seconds.

    Attributes:
        engines: a row for each upstream and model, in order, with corrected speeds. Call `refresh` before reading. No
            `Fleet` may count requests in these rows; see `describe`.
        mean_output: running mean of output tokens.
    """

    def __init__(
        self,
        upstreams: Sequence[FleetUpstream],
        clock: Callable[[], float],
        settings: MonitorSettings | None = None,
    ) -> None:
        self.upstreams, self.settings, self._clock = tuple(upstreams), settings or MonitorSettings(), clock
        self.mean_output = _UNKNOWN_OUTPUT
        self.engines: list[FleetEngine] = []
        self._states: dict[str, _State] = {}
        now = clock()
        for upstream in self.upstreams:
            state = _State(UpstreamSpeed(upstream.engine), [], opened_s=now, next_poll_s=now)
            cache = UNKNOWN_CACHE if upstream.engine is None else upstream.engine.cache_tokens
            for model in upstream.models or ("",):
                state.rows.append(FleetEngine(upstream.name, cache, state.speed.most_requests, 0.0, 0.0, model=model))
            self.engines += state.rows
            self._states[upstream.name] = state
        self.refresh()

    def sent(
        self,
        upstream: str,
        request_id: Hashable,
        prompt_tokens: float,
        predicted_tokens: float | None = None,
        *,
        cached_tokens: float = 0.0,
        streams: bool = True,
    ) -> None:
        """A request goes to an upstream.

        Args:
            predicted_tokens: forecast output tokens of this request; None takes the mean.
            cached_tokens: prompt tokens that its cache is expected to have.
            streams: whether a first token will be reported.
        """
        state, now = self._states[upstream], self._clock()
        uncached = max(0.0, prompt_tokens - cached_tokens)
        predicted = self.mean_output if predicted_tokens is None else max(0.0, predicted_tokens)
        others = len(state.in_flight) + state.foreign
        alone = not state.waiting and others < state.speed.most_requests and not (state.load and state.load.waiting)
        ahead = state.predicted_tokens + state.foreign * self.mean_output
        flight = _InFlight(now, uncached, predicted, ahead, state.prefill_tokens, alone)
        state.in_flight[request_id] = flight
        state.most_in_flight = max(state.most_in_flight, len(state.in_flight))
        state.predicted_tokens += predicted
        if streams:
            state.waiting[request_id] = flight
            state.prefill_tokens += uncached

    def first_token(self, upstream: str, request_id: Hashable) -> None:
        """The first token of a request has come."""
        state, now = self._states[upstream], self._clock()
        flight = state.in_flight.get(request_id)
        if flight is None or flight.first_s is not None:
            return
        flight.first_s = state.event_s = now
        state.failures = 0
        self._begun(state, request_id)
        if flight.alone:
            state.speed.first_token(now - flight.sent_s, flight.uncached_tokens)

    def answered(self, upstream: str, request_id: Hashable, output_tokens: int | None = None) -> None:
        """A request has its last token; `output_tokens` is None if they were not counted."""
        state, now = self._states[upstream], self._clock()
        flight = self._gone(state, request_id)
        state.event_s, state.failures = now, 0
        if flight is None or not output_tokens:
            return
        self.mean_output += _NEW * (output_tokens - self.mean_output)
        if flight.first_s is not None:
            state.speed.decoded(now - flight.first_s, output_tokens - 1)
        prefill = flight.uncached_tokens + flight.prefill_ahead_tokens
        estimated = state.speed.estimate_s(flight.ahead_tokens, prefill, output_tokens)
        state.speed.answered(estimated, now - flight.sent_s, now)

    def failed(self, upstream: str, request_id: Hashable, *, connect: bool = False) -> None:
        """A request ended otherwise: aborted, an error, or with `connect` no connection, which closes the upstream."""
        state = self._states[upstream]
        self._gone(state, request_id)
        if connect and state.outage is None:
            self._close(upstream, state, DEAD)

    def polled(self, upstream: str, poll: Poll) -> None:
        """A poll has come back."""
        state, now = self._states[upstream], self._clock()
        due = now >= state.next_poll_s
        state.next_poll_s = max(state.next_poll_s, now + self.settings.poll_s)
        state.timeouts = state.timeouts + 1 if poll.health == "hangs" else 0
        if poll.health == "unknown":
            return
        outage: Outage | None = None
        if poll.health == "dead":
            outage = DEAD
        elif poll.health == "hangs":
            if state.timeouts < self.settings.timeouts and state.outage is None:
                return
            outage = HANGS
        elif poll.lies or (poll.without_load and state.load is not None):
            outage, state.load = LIES, None  # so one without figures for good is taken for a router at the next probe
        if outage is not None:
            self._close(upstream, state, outage)
            return
        state.answered = True
        if poll.load is not None:
            self._loaded(state, poll.load, now)
        if state.outage is not None and due:
            _log.warning("upstream %s takes requests again", upstream)
            state.outage, state.opened_s = None, now

    def due_s(self, upstream: str) -> float:
        """Seconds until the next poll of an upstream, or the next probe of a closed one."""
        return max(0.0, self._states[upstream].next_poll_s - self._clock())

    def load(self, upstream: str) -> EngineLoad | None:
        """What an upstream reports; None if it reports nothing, or its figures are too old."""
        state = self._states[upstream]
        fresh = self._clock() - state.load_s <= self.settings.stale_polls * self.settings.poll_s
        return state.load if fresh else None

    def outage(self, upstream: str) -> Outage | None:
        """Why an upstream is left out; None if it takes requests."""
        return self._states[upstream].outage

    def ready(self, upstream: str) -> bool:
        """Whether an upstream has answered a poll, and takes requests."""
        return self._states[upstream].answered and self._states[upstream].outage is None

    def prefill_tokens(self, upstream: str) -> float:
        """Prompt tokens of requests there that have no first token yet."""
        return self._states[upstream].prefill_tokens

    def requests(self, upstream: str) -> int:
        """Requests there: those sent from here, and of others as far as they are known."""
        state = self._states[upstream]
        return len(state.in_flight) + state.foreign

    def refresh(self) -> None:
        """Brings `engines` up to date."""
        now = self._clock()
        self._close_silent(now)
        foreign = [
            state.foreign
            for name, state in self._states.items()
            if state.outage is None and self.load(name) is not None
        ]
        typical = round(sum(foreign) / len(foreign)) if foreign else 0
        for name, state in self._states.items():
            if self.load(name) is None:
                state.foreign = typical
            for row in state.rows:
                self._describe(row, state, now)
                row.requests = len(state.in_flight) + state.foreign
                row.predicted_tokens = state.predicted_tokens + state.foreign * self.mean_output

    def describe(self, rows: Iterable[FleetEngine]) -> None:
        """Brings rows of the caller, named as upstreams, up to date, but for the requests, which its `Fleet` counts."""
        now = self._clock()
        self._close_silent(now)
        for row in rows:
            self._describe(row, self._states[row.name], now)

    def status(self) -> dict[str, dict[str, Any]]:
        """The upstreams as JSON values; None where something is unknown."""
        self.refresh()
        statuses: dict[str, dict[str, Any]] = {}
        for name, state in self._states.items():
            load, row = self.load(name), state.rows[0]
            statuses[name] = {
                "open": row.open,
                "reason": state.outage,
                "running": None if load is None else load.running,
                "waiting": None if load is None else load.waiting,
                "cache_usage": None if load is None else load.cache_usage,
                "requests": len(state.in_flight),
                "predicted_tokens": state.predicted_tokens,
                "prefill_tokens": state.prefill_tokens,
                "token_s": row.token_s,
                "prefill_token_s": row.prefill_token_s,
                "bias": state.speed.bias(self._clock()),
                "measured": dict(zip(("decoding", "prefill"), state.speed.measured, strict=True)),
            }
        return statuses

    def _describe(self, row: FleetEngine, state: _State, now: float) -> None:
        bias = state.speed.bias(now)
        row.open = state.outage is None
        row.token_s = state.speed.token_s * bias
        row.prefill_token_s = state.speed.prefill_token_s * bias
        row.most_requests = state.speed.most_requests
        if state.load is not None and state.load.cache_tokens is not None:
            row.cache_tokens = state.load.cache_tokens  # a figure that does not age

    def _loaded(self, state: _State, load: EngineLoad, now: float) -> None:
        before, state.load, state.load_s = state.load, load, now
        state.foreign = max(0, load.running + load.waiting - state.most_in_flight)
        state.most_in_flight = len(state.in_flight)
        if load.waiting and before is not None and before.waiting:  # not for the moment of a prefill
            state.speed.saturated(max(before.running, load.running))

    def _close(self, name: str, state: _State, outage: Outage) -> None:
        now, settings = self._clock(), self.settings
        if state.outage is None:
            _log.warning("upstream %s is left out: %s", name, outage)
            if now - state.opened_s > settings.longest_wait_s:
                state.failures = 0
        state.outage = outage
        wait_s = min(settings.first_wait_s * 2.0 ** min(state.failures, 32), settings.longest_wait_s)
        state.failures += 1
        state.next_poll_s = now + wait_s

    def _close_silent(self, now: float) -> None:
        """Closes upstreams that gave no first token for too long, if another one answered meanwhile."""
        since = now - self.settings.silence_s
        answering = [name for name, state in self._states.items() if state.event_s > since]
        for name, state in self._states.items():
            if state.outage is not None or not state.waiting or not set(answering) - {name}:
                continue
            oldest = next(iter(state.waiting.values())).sent_s
            if max(oldest, state.event_s, state.opened_s) <= since:
                self._close(name, state, SILENT)

    def _begun(self, state: _State, request_id: Hashable) -> None:
        flight = state.waiting.pop(request_id, None)
        if flight is not None:
            state.prefill_tokens = max(0.0, state.prefill_tokens - flight.uncached_tokens) if state.waiting else 0.0

    def _gone(self, state: _State, request_id: Hashable) -> _InFlight | None:
        self._begun(state, request_id)
        flight = state.in_flight.pop(request_id, None)
        if flight is not None:
            left = state.predicted_tokens - flight.predicted_tokens
            state.predicted_tokens = max(0.0, left) if state.in_flight else 0.0
        return flight
