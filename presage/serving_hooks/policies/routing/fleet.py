"""The table that routing policies read: engines with their load, and programs (running workflows) with their state.

Source: the activity monitor of Chimera (§3.5: requests in flight and predicted tokens of each engine) and the program
of ThunderAgent (§4.1: contexts, phase, placement, status). The caller reports events; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from presage.serving_hooks.policies.admission import Phase
from presage.serving_hooks.policies.fair_shares import Weights
from presage.serving_hooks.policies.workload import WorkloadMeans

_UNKNOWN_OUTPUT: Final = 256.0
"""Output tokens assumed of a request without a forecast, before any answer was seen."""

_NEW: Final = 0.02
"""Weight of a new answer in the mean output."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request to place.

    Attributes:
        id: any key.
        program: name of its workflow; where engines serve several models, of the workflow on its model.
        arrives_s: seconds of the caller's clock.
        shared_tokens: first prompt tokens that prompts of other programs have too.
        remaining_tokens: forecast output tokens of this step and all later ones; None if unknown.
        cached_tokens: prompt tokens in the cache of an engine, by its number.
        agent: that makes it; empty if unknown.
        model: that must serve it; empty for any.
        group: workflow type with its tenant.
        deadline_at: when its workflow has to have ended, on the caller's clock; infinity without a deadline.
    """

    id: tuple[int, int]
    program: str
    arrives_s: float
    prompt_tokens: int
    shared_tokens: int = 0
    remaining_tokens: float | None = None
    cached_tokens: Callable[[int], int] = lambda engine: 0
    agent: str = ""
    model: str = ""
    group: str = ""
    deadline_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes; engine None holds it. `reason` is one of a few fixed texts."""

    engine: int | None
    reason: str


@dataclass(slots=True)
class FleetEngine:
    """An engine and what runs on it.

    Attributes:
        cache_tokens: tokens its cache holds.
        most_requests: requests of one iteration.
        token_s: seconds of an iteration that decodes `most_requests` tokens.
        prefill_token_s: seconds each prefilled token adds.
        open: whether it takes programs; False while it loads or drains.
        requests: in flight.
        predicted_tokens: output tokens that they still have to produce, as forecast when they arrived.
        load_tokens: weighted contexts of its admitted programs; see `Fleet.count`.
        model: that it serves; empty if the fleet has only one.
    """

    name: str
    cache_tokens: int
    most_requests: int
    token_s: float
    prefill_token_s: float
    open: bool = True
    requests: int = 0
    predicted_tokens: float = 0.0
    load_tokens: float = 0.0
    model: str = ""
    programs: dict[str, Program] = field(default_factory=dict, repr=False)

    @property
    def queue_s(self) -> float:
        """Seconds of decoding ahead of a new request (Chimera §3.6, L[m])."""
        return self.predicted_tokens * self.token_s / self.most_requests


@dataclass(slots=True)
class Program:
    """A running workflow; where engines serve several models, what it does on one of them.

    Caches of two models have nothing in common, so neither has its state on them.

    Attributes:
        model: that serves it; empty for any.
        engine: that served its last request; None before the first.
        admitted: whether its requests are placed at once; False holds them.
        leaving: it is paused as soon as its request in flight is answered.
        since_s: when the phase began.
        context_tokens: of its last prompt, and of the answer once there is one; the sum of those that run at once.
        prompt_tokens: of its last prompt.
        contexts: prompt tokens of its requests that have no answer yet.
        remaining_tokens: forecast output tokens, from its last request on; infinity if unknown.
        return_s: forecast seconds from its last answer to its next request if it returns, median; NaN if unknown.
        end: forecast probability that its last answer was its last; 0 if unknown.
        counted_tokens: its share of its engine's `load_tokens`.
        waiting: its held requests.
        held_s: seconds held before the current hold.
        group: workflow type with its tenant, between which service is shared.
        charged_tokens: of its context, those that count as service since it was admitted; None while none is counted.
        asked_s, asked_held_s: when its last step arrived, and `held_s` then.
        deadline_at: when it has to have ended; infinity without a deadline.
    """

    name: str
    arrived_s: float
    engine: int | None = None
    admitted: bool = False
    leaving: bool = False
    phase: Phase = Phase.READY
    since_s: float = 0.0
    context_tokens: float = 0.0
    prompt_tokens: int = 0
    contexts: dict[tuple[int, int], int] = field(default_factory=dict)
    shared_tokens: int = 0
    steps: int = 0
    in_flight: int = 0
    remaining_tokens: float = math.inf
    return_s: float = math.nan
    end: float = 0.0
    counted_tokens: float = 0.0
    waiting: list[RoutingRequest] = field(default_factory=list)
    held_s: float = 0.0
    model: str = ""
    group: str = ""
    charged_tokens: float | None = None
    asked_s: float = 0.0
    asked_held_s: float = 0.0
    deadline_at: float = math.inf


class Fleet:
    """Engines and programs.

    Attributes:
        moves: programs that went to another engine.
        mean_output: running mean of output tokens.
        mean_growth: running mean of the tokens by which a prompt is longer than the one before it.
        weights: shares of tenants and workflow types.
        groups: programs by group.
        workload: means by group: steps, and seconds of a step without what it was held.
    """

    def __init__(self, engines: Sequence[FleetEngine], weights: Weights | None = None) -> None:
        self.engines = list(engines)
        self.weights = weights or Weights()
        self.groups: Counter[str] = Counter()
        self.programs: dict[str, Program] = {}
        self.workload = WorkloadMeans()
        self.moves = 0
        self.mean_output = _UNKNOWN_OUTPUT
        self.mean_growth = 0.0
        self._in_flight: dict[tuple[int, int], tuple[int, float]] = {}

    def open(self, model: str = "") -> list[int]:
        """Numbers of the engines that take programs of a model; empty is any."""
        return [
            number for number, engine in enumerate(self.engines) if engine.open and (not model or engine.model == model)
        ]

    def arrived(self, request: RoutingRequest) -> Program:
        """A request has arrived; returns its program, which may be new."""
        program = self.programs.get(request.program)
        if program is None:
            program = self.programs[request.program] = Program(
                request.program, request.arrives_s, model=request.model, group=request.group
            )
            self.groups[program.group] += 1
        if program.steps and not program.contexts:
            grown = request.prompt_tokens - program.prompt_tokens
            self.mean_growth += _NEW * (max(0, grown) - self.mean_growth)
        if not program.contexts:
            if program.steps:
                held_s = program.held_s - program.asked_held_s
                took_s = max(0.0, request.arrives_s - program.asked_s - held_s)
                self.workload.of_type(program.group).step_s.observe(took_s)
            program.asked_s, program.asked_held_s = request.arrives_s, program.held_s
        program.deadline_at = request.deadline_at
        program.prompt_tokens = request.prompt_tokens
        program.contexts[request.id] = request.prompt_tokens
        program.context_tokens = float(sum(program.contexts.values()))
        program.shared_tokens = request.shared_tokens
        if request.remaining_tokens is not None:
            program.remaining_tokens = request.remaining_tokens
        if not program.in_flight:
            program.phase, program.since_s = Phase.READY, request.arrives_s
            program.return_s, program.end = math.nan, 0.0
        return program

    def place(self, request: RoutingRequest, engine: int) -> None:
        """A request goes to an engine."""
        program, target = self.programs[request.program], self.engines[engine]
        self.move(program, engine)
        program.phase = Phase.STEP
        program.in_flight += 1
        expected = min(self.mean_output, program.remaining_tokens)
        self._in_flight[request.id] = engine, expected
        target.requests += 1
        target.predicted_tokens += expected

    def move(self, program: Program, engine: int) -> None:
        """Binds a program to an engine."""
        if program.engine == engine:
            return
        if program.engine is not None:
            self.moves += 1
            self.count(program, 0.0)
            self.engines[program.engine].programs.pop(program.name, None)
        program.engine = engine
        self.engines[engine].programs[program.name] = program

    def answered(self, request: tuple[int, int], program: str, output_tokens: int, now: float) -> Program:
        """A request has its last token."""
        engine, expected = self._in_flight.pop(request)
        target, running = self.engines[engine], self.programs[program]
        target.requests -= 1
        target.predicted_tokens = max(0.0, target.predicted_tokens - expected) if target.requests else 0.0
        self.mean_output += _NEW * (output_tokens - self.mean_output)
        running.in_flight -= 1
        running.steps += 1
        running.context_tokens = float(sum(running.contexts.values()) + output_tokens)
        del running.contexts[request]
        running.remaining_tokens = max(0.0, running.remaining_tokens - output_tokens)
        if not running.in_flight and not running.waiting:
            running.phase, running.since_s = Phase.TOOL, now
        return running

    def ended(self, program: str) -> None:
        """A workflow has ended."""
        ended = self.programs.pop(program)
        if ended.steps:
            self.workload.of_type(ended.group).steps.observe(ended.steps)
        self.groups[ended.group] -= 1
        if not self.groups[ended.group]:
            del self.groups[ended.group]
        self.count(ended, 0.0)
        if ended.engine is not None:
            self.engines[ended.engine].programs.pop(program, None)

    def count(self, program: Program, tokens: float) -> None:
        """Sets the tokens that a program counts for in the load of its engine."""
        if program.engine is not None:
            self.engines[program.engine].load_tokens += tokens - program.counted_tokens
        program.counted_tokens = tokens
