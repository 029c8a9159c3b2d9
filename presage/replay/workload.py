"""Makes jobs of a trace: arrivals, sizes of requests, the steps they wait for, and the earlier tokens they repeat.

A trace has sizes, not tokens. What a prompt repeats is recorded in `prefix_blocks`, or is a convention:

recorded            equal ids of `prefix_blocks` are equal tokens. Workflows without them are assembled history-first.
history-first       every prompt begins with the history of the workflow: it continues the longest sequence among its
                    parents'.
own-conversation    each agent continues its own conversation: the last step of the same agent among its ancestors.

Every prompt has as many tokens as recorded; what the continued sequence does not account for is new. By a convention, a
prompt too short to hold that sequence repeats only the opening. Sizes that were not recorded are estimated
(`features/missing_counts.py`), those of prompts large enough for that sequence. Only rows of kind "llm" are requests:
steps that waited for a tool wait for the tool's parents, and its time is part of the pause. A plain request is a job
without a workflow, whose `hash_ids` define what its prompt shares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa

from presage.datasets.schema import PREFIX_BLOCK_TOKENS
from presage.errors import ConfigurationError, TraceError
from presage.features.missing_counts import COUNTS, CountEstimates
from presage.features.served_steps import TOOLS_CALLED, running_steps
from presage.serving_hooks.engine_file import EngineFile

if TYPE_CHECKING:
    from presage.datasets.requests import PlainRequest

STAGGER_S: Final = 5.0
"""The first jobs of a closed loop arrive within this time, not all at once."""


@dataclass(frozen=True)
class Arrivals:
    """How jobs arrive; give exactly one of `concurrency`, `rate` and `as_recorded`.

    Attributes:
        concurrency: closed loop of this many jobs.
        rate: jobs per second, with gamma-distributed gaps.
        cv: coefficient of variation of the gaps; 1 is a Poisson process, more is bursts.
    """

    concurrency: int | None = None
    rate: float | None = None
    cv: float = 1.0
    as_recorded: bool = False

    def __post_init__(self) -> None:
        given = (self.concurrency is not None) + (self.rate is not None) + self.as_recorded
        if given != 1:
            raise ConfigurationError(
                f"{given} kinds of arrivals were given; give one of --concurrency, --rate and --as-recorded"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; give 1 workflow or more")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigurationError(f"rate is {self.rate}; give workflows per second, above 0")
        if not 0 < self.cv <= 100:
            raise ConfigurationError(f"cv is {self.cv}; give a coefficient of variation above 0, at most 100")


@dataclass(frozen=True)
class Schedule:
    """When each job arrives.

    Attributes:
        first: (seconds, number of the job), by time.
        then: numbers of the jobs that arrive one by one as others end.
    """

    first: tuple[tuple[float, int], ...]
    then: tuple[int, ...] = ()


def schedule(arrivals: Arrivals, jobs: Sequence[ReplayJob], seed: int) -> Schedule:
    """The arrivals of all jobs, in an order drawn from the seed unless they are as recorded.

    Raises:
        TraceError: arrivals as recorded, and a job has no time.
    """
    if arrivals.as_recorded:
        untimed = sum(job.arrives_s is None for job in jobs)
        if untimed:
            raise TraceError(
                f"{untimed} of {len(jobs)} workflows have no recorded times, so their arrivals cannot be replayed: "
                "give --concurrency or --rate, or traces with started_at and ended_at"
            )
        return Schedule(tuple(sorted((job.arrives_s or 0.0, number) for number, job in enumerate(jobs))))
    rng = np.random.default_rng(seed)
    order = [int(number) for number in rng.permutation(len(jobs))]
    if arrivals.concurrency is not None:
        now = order[: arrivals.concurrency]
        times = np.sort(rng.uniform(0.0, STAGGER_S, len(now)))
        return Schedule(tuple(zip(times.tolist(), now, strict=True)), tuple(order[len(now) :]))
    shape = 1.0 / arrivals.cv**2
    gaps = rng.gamma(shape, 1.0 / (float(arrivals.rate or 0.0) * shape), len(jobs))
    return Schedule(tuple(zip(np.cumsum(gaps).tolist(), order, strict=True)))


@dataclass(frozen=True)
class Phased:
    """Jobs that arrive in phases.

    Attributes:
        jobs: in the order of their arrival, with times; replay them as recorded.
        ends_s: arrival of the last job of each phase.
    """

    jobs: tuple[ReplayJob, ...]
    ends_s: tuple[float, ...]


def phased(jobs: Sequence[ReplayJob], phases: Sequence[tuple[float, float]], seed: int) -> Phased:
    """Draws arrivals by a Poisson process whose rate changes from phase to phase.

    Args:
        jobs: in any order; their order is drawn too.
        phases: (share of the jobs, jobs per second), one after the other.

    Raises:
        ConfigurationError: shares do not add up to 1, or a rate is not above 0.
    """
    shares = np.asarray([share for share, _ in phases])
    if not phases or not np.isclose(shares.sum(), 1.0) or (shares < 0).any():
        raise ConfigurationError(f"phases have shares {shares.tolist()} of the workflows; they must add up to 1")
    if any(not 0 < rate < float("inf") for _, rate in phases):
        raise ConfigurationError("a phase has no rate; give workflows per second, above 0")
    rng = np.random.default_rng([seed, len(jobs)])
    order = rng.permutation(len(jobs))
    last = np.round(np.cumsum(shares) * len(jobs)).astype(int)
    rates = np.concatenate(
        [np.full(end - begin, rate) for begin, end, (_, rate) in zip([0, *last[:-1]], last, phases, strict=True)]
    )
    times = np.cumsum(rng.exponential(1.0, len(jobs)) / rates)
    come = tuple(replace(jobs[number], arrives_s=float(at_s)) for number, at_s in zip(order, times, strict=True))
    return Phased(come, tuple(float(times[end - 1]) if end else 0.0 for end in last))


Prompts = Literal["recorded", "history-first", "own-conversation"]


@dataclass(frozen=True)
class PromptConvention:
    """How prompts are assembled.

    Attributes:
        prompts: what a prompt continues; see the module.
        opening_tokens: first tokens of prompts that continue nothing, shared by the workflows of a type; with
            own-conversation by the calls of an agent (its system prompt).
        closing_tokens: last tokens of each prompt (the agent's instruction), which no later prompt repeats.
    """

    prompts: Prompts = "recorded"
    opening_tokens: int = 0
    closing_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompts not in get_args(Prompts):
            raise ConfigurationError(f"prompts are {self.prompts!r}; give one of {', '.join(get_args(Prompts))}")
        for name in ("opening_tokens", "closing_tokens"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give 0 or more tokens")

    def takes_recorded(self, asked: Sequence[RecordedRequest]) -> bool:
        """Whether the prompts of a workflow are assembled from `prefix_blocks`."""
        return self.prompts == "recorded" and all(request.prefix is not None for request in asked)


@dataclass(frozen=True, slots=True)
class JobStep:
    """One request of a job.

    Attributes:
        continues: number of the step with whose prompt and output the prompt begins; None for an opening.
        repeated_tokens: of that prompt and output.
        opening_tokens: 0 if it continues a step.
        new_tokens: in no earlier prompt.
        closing_tokens: at the end, in no later prompt.
        output_tokens: 1 or more.
        parents: numbers of the steps it waits for.
        pause_s: from the end of the last parent to its arrival.
        hashed: hash ids of a plain request's prompt, of `hash_tokens` each.
        finish_reason, tools: of the answer, and the tools that it calls; None if not recorded.
    """

    agent: str
    continues: int | None
    repeated_tokens: int
    opening_tokens: int
    new_tokens: int
    closing_tokens: int
    output_tokens: int
    parents: tuple[int, ...]
    pause_s: float
    prompt_tokens: int
    hashed: tuple[int, ...] = ()
    hash_tokens: int = 0
    finish_reason: str | None = None
    tools: tuple[str, ...] | None = None

    @property
    def sequence_tokens(self) -> int:
        """Tokens of prompt and output that later prompts may repeat."""
        return self.prompt_tokens - self.closing_tokens + self.output_tokens

    @property
    def fixed_tokens(self) -> int:
        """Of these, the ones at the same position in later prompts: an output behind a closing moves."""
        return self.sequence_tokens - (self.output_tokens if self.closing_tokens else 0)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One workflow to replay.

    Attributes:
        workflow_type: empty for a plain request.
        steps: each after its parents; at least one.
        arrives_s: its start, seconds after the first of the trace; None if no times were recorded.
        complete: whether it reached its end in the trace.
    """

    workflow_type: str
    workflow_id: str
    steps: tuple[JobStep, ...]
    arrives_s: float | None = None
    complete: bool = True


@dataclass(frozen=True)
class Workload:
    """The jobs of a trace.

    Attributes:
        left_out: workflows without requests, or with a request of unknown size: no request of the trace has a count.
        recorded: jobs whose prompts are assembled from `prefix_blocks`.
        estimated_sizes: jobs with a request whose size was not recorded and is estimated.
        estimated_ends: requests without `ended_at`, whose end is estimated.
    """

    jobs: tuple[ReplayJob, ...]
    left_out: int
    recorded: int = 0
    estimated_sizes: int = 0
    estimated_ends: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as recorded: sizes, parents, pause, the runs of `prefix_blocks`, finish reason and tools called; and
    whether `input_tokens` were not recorded, but estimated.
    """

    agent: str
    input_tokens: int
    output_tokens: int
    parents: tuple[int, ...]
    pause_s: float
    prefix: Sequence[Sequence[int]] | None = None
    finish_reason: str | None = None
    tools: tuple[str, ...] | None = None
    estimated_prompt: bool = False


def workload(table: pa.Table, convention: PromptConvention, pause_s: float | None = None, seed: int = 0) -> Workload:
    """The jobs of a trace.

    Sizes that were not recorded are estimated by those of the trace. A request without `ended_at` is taken to end after
    the mean seconds per output token of those with one.

    Args:
        table: a trace, in canonical order.
        pause_s: mean of exponential pauses, drawn in place of the recorded ones; None keeps the recorded ones.
        seed: of drawn pauses and sizes.

    Raises:
        TraceError: no workflow has sizes, or pauses were neither recorded nor given.
        ConfigurationError: there are closing tokens, and prompts as recorded.
    """
    filled = CountEstimates.fit(table, seed).fill(table)
    rows = filled.table.select([name for name in _COLUMNS if name in table.column_names]).to_pylist()
    for row, *estimated in zip(rows, *(filled.estimated[name].tolist() for name in COUNTS), strict=True):
        row["estimated_prompt"], row["estimated"] = estimated[0], any(estimated)
    groups = [list(group) for _, group in groupby(rows, key=itemgetter("workflow_type", "workflow_id"))]
    started = [group[0]["started_at"] for group in groups]
    estimated_ends = _estimate_ends(rows) if pause_s is None else 0
    records_tools = any(row["kind"] == "tool" for row in rows)
    jobs, left_out, recorded, estimated_sizes = [], 0, 0, 0
    for number, group in enumerate(groups):
        requests = [row for row in group if row["kind"] == "llm"]
        if not requests or any(row[name] is None for row in requests for name in COUNTS):
            left_out += 1
            continue
        timed = all(row["started_at"] is not None and row["ended_at"] is not None for row in requests)
        if not timed and pause_s is None:
            raise TraceError(
                f"workflow {group[0]['workflow_id']!r}: a step has no started_at or ended_at, so pauses between steps "
                "are unknown: record times, or give the mean pause with --pause-s"
            )
        drawn = None if pause_s is None else np.random.default_rng([seed, number]).exponential(pause_s, len(group))
        asked = _asked(group, drawn, records_tools)
        steps = assemble(asked, convention)
        recorded += convention.takes_recorded(asked)
        estimated_sizes += any(row["estimated"] for row in requests)
        arrives = None if not timed or None in started else (started[number] - min(started)).total_seconds()
        first = group[0]
        jobs.append(
            ReplayJob(first["workflow_type"], first["workflow_id"], steps, arrives, bool(group[-1]["complete"]))
        )
    if not jobs:
        raise TraceError(
            f"none of {left_out} workflows has requests of known size, by counts or texts; replay needs the sizes of "
            "prompts and outputs: record input_tokens and output_tokens, or ingest traces that have them"
        )
    if recorded and convention.closing_tokens:
        raise ConfigurationError(
            f"--closing-tokens is {convention.closing_tokens}, and prefix_blocks of {recorded} workflows already say "
            "what later prompts repeat: leave it out, or give --prompts history-first or own-conversation"
        )
    return Workload(tuple(jobs), left_out, recorded, estimated_sizes, estimated_ends)


def _estimate_ends(rows: Sequence[dict[str, Any]]) -> int:
    """Fills in `ended_at` of requests that have a start and output tokens; returns of how many."""
    requests = [row for row in rows if row["kind"] == "llm" and row["started_at"] and row["output_tokens"] is not None]
    ended = [row for row in requests if row["ended_at"] is not None]
    tokens = sum(row["output_tokens"] for row in ended)
    if not tokens:
        return 0
    token_s = sum((row["ended_at"] - row["started_at"]).total_seconds() for row in ended) / tokens
    for row in requests:
        if row["ended_at"] is None:
            row["ended_at"] = row["started_at"] + timedelta(seconds=token_s * row["output_tokens"])
    return len(requests) - len(ended)


_COLUMNS: Final = (
    "workflow_type",
    "workflow_id",
    "step",
    "agent",
    "parent_steps",
    "kind",
    *COUNTS,
    "started_at",
    "ended_at",
    "complete",
    "prefix_blocks",
    "finish_reason",
    TOOLS_CALLED,
)


def _asked(group: Sequence[dict[str, Any]], drawn_s: Any, records_tools: bool) -> list[RecordedRequest]:
    """The requests of one workflow; parents are numbers of requests. Tools called are those of `running_steps`."""
    called = [step.get(TOOLS_CALLED) for step in running_steps(group)]
    waited: dict[int, tuple[int, ...]] = {}  # by step: the requests to wait for in its place
    requests: list[RecordedRequest] = []
    ended: list[Any] = []
    last: int | None = None
    for index, row in enumerate(group):
        parents = row["parent_steps"] if row["parent_steps"] is not None else ([] if last is None else [last])
        before = tuple(sorted({request for parent in parents for request in waited.get(parent, ())}))
        last = row["step"]
        if row["kind"] != "llm":
            waited[last] = before
            continue
        waited[last] = (len(requests),)
        tools = called[len(requests)]
        if drawn_s is not None:
            pause_s = float(drawn_s[index]) if before else 0.0
        else:
            pause_s = max(0.0, (row["started_at"] - max(ended[i] for i in before)).total_seconds()) if before else 0.0
        requests.append(
            RecordedRequest(
                row["agent"],
                max(1, row["input_tokens"]),
                max(1, row["output_tokens"]),
                before,
                pause_s,
                row.get("prefix_blocks"),
                row.get("finish_reason"),
                tuple(tools or ()) if records_tools or tools is not None else None,
                row["estimated_prompt"],
            )
        )
        ended.append(row["ended_at"])
    return requests


def assemble(asked: Sequence[RecordedRequest], convention: PromptConvention) -> tuple[JobStep, ...]:
    """The steps of one job, with prompts as recorded or assembled by a convention."""
    steps: list[JobStep] = []
    ancestors: list[frozenset[int]] = []
    prefixes = _Prefixes(asked) if convention.takes_recorded(asked) else None
    for number, request in enumerate(asked):
        before = frozenset(request.parents).union(*(ancestors[parent] for parent in request.parents))
        ancestors.append(before)
        continues: int | None
        if prefixes is not None:
            continues, repeated = prefixes.repeated(number, before)
        else:
            if convention.prompts == "own-conversation":
                continues = max((earlier for earlier in before if asked[earlier].agent == request.agent), default=None)
            else:  # a join continues the longest branch
                continues = max(
                    request.parents, key=lambda parent: (steps[parent].sequence_tokens, -parent), default=None
                )
            repeated = steps[continues].sequence_tokens if continues is not None else 0
            if request.estimated_prompt:
                # nothing recorded contradicts the convention, so the prompt holds the sequence
                least = repeated + convention.closing_tokens + 1
                request = replace(request, input_tokens=max(request.input_tokens, least))
        closing = 0 if prefixes is not None else min(convention.closing_tokens, request.input_tokens - 1)
        if repeated + closing >= request.input_tokens and prefixes is None:
            continues, repeated = None, 0
        opening = 0 if continues is not None else min(convention.opening_tokens, request.input_tokens - closing - 1)
        steps.append(
            JobStep(
                agent=request.agent,
                continues=continues,
                repeated_tokens=repeated,
                opening_tokens=opening,
                new_tokens=request.input_tokens - repeated - opening - closing,
                closing_tokens=closing,
                output_tokens=request.output_tokens,
                parents=request.parents,
                pause_s=request.pause_s,
                prompt_tokens=request.input_tokens,
                finish_reason=request.finish_reason,
                tools=request.tools,
            )
        )
    return tuple(steps)


class _Prefixes:
    """What the prompts of one workflow repeat, by the runs of ids in its `prefix_blocks`.

    Ids do not cover outputs. A prompt that goes on after exactly all blocks of an ancestor's prompt repeats the end of
    it that fills no block, if it is long enough for that; and its output, if it is the first to continue there and long
    enough for both.
    """

    def __init__(self, asked: Sequence[RecordedRequest]) -> None:
        self._asked = asked
        runs = (run for request in asked for run in request.prefix or ())
        self._bounds = sorted({bound for first, last in runs for bound in (first, last + 1)})
        self._holder: dict[int, int] = {}  # by the first id of each stretch between two bounds: the last step with it
        self._ending: dict[int, int] = {}  # by last id: the last step with such a prompt
        self._answered: set[int] = set()  # steps whose output a prompt repeats

    def repeated(self, number: int, ancestors: frozenset[int]) -> tuple[int | None, int]:
        """The step that a prompt continues, and how many of its tokens it repeats. To be called in order of steps."""
        request, bounds, holder = self._asked[number], self._bounds, self._holder
        continues: int | None = None
        blocks, end, shares = 0, 0, True
        for first, last in request.prefix or ():
            for place in range(bisect_left(bounds, first), bisect_left(bounds, last + 1)):
                stretch = bounds[place]
                if shares and stretch in holder:
                    continues, end = holder[stretch], bounds[place + 1]
                    blocks += end - stretch
                else:
                    shares = False
                holder[stretch] = number
        repeated = blocks * PREFIX_BLOCK_TOKENS
        before = self._ending.get(end)
        if before is not None and before in ancestors:
            prompt, output = self._asked[before].input_tokens, self._asked[before].output_tokens
            if before not in self._answered and prompt + output <= request.input_tokens:
                continues, repeated = before, prompt + output
                self._answered.add(before)
            elif prompt <= request.input_tokens and prompt - repeated < PREFIX_BLOCK_TOKENS:
                continues, repeated = before, prompt
        if request.prefix:
            self._ending[request.prefix[-1][1] + 1] = number
        return continues, repeated


AGENT: Final = "request"
"""Agent name of plain requests in figures."""


def requests_workload(requests: Sequence[PlainRequest], hash_tokens: int) -> Workload:
    """The jobs of plain requests.

    Args:
        requests: in order of arrival.
        hash_tokens: tokens per id of `hash_ids`.
    """
    children: dict[tuple[int, int], int] = {}  # the prefix tree of the hash ids seen so far
    jobs = []
    for number, request in enumerate(requests):
        node = repeated_ids = 0
        for hash_id in request.hash_ids:
            new = len(children) + 1
            node = children.setdefault((node, hash_id), new)
            repeated_ids += node != new  # below a new node, all are new
        prompt_tokens = max(1, request.input_tokens)
        again = min(repeated_ids * hash_tokens, prompt_tokens)
        step = JobStep(
            agent=AGENT,
            continues=None,
            repeated_tokens=0,
            opening_tokens=again,
            new_tokens=prompt_tokens - again,
            closing_tokens=0,
            output_tokens=max(1, request.output_tokens),
            parents=(),
            pause_s=0.0,
            prompt_tokens=prompt_tokens,
            hashed=tuple(request.hash_ids),
            hash_tokens=hash_tokens,
        )
        jobs.append(ReplayJob("", f"request {number}", (step,), request.arrives_s))
    return Workload(tuple(jobs), 0)


def check_fits(jobs: Sequence[ReplayJob], engine: EngineFile) -> None:
    """Checks that the cache can hold every request.

    Raises:
        TraceError: the prompt and output of a step need more blocks than the cache has.
    """
    room = (engine.blocks - 1) * engine.block_tokens
    for job in jobs:
        most = max(step.prompt_tokens + step.output_tokens for step in job.steps)
        if most > room:
            raise TraceError(
                f"workflow {job.workflow_id!r}: one of its requests has {most} tokens and the cache holds {room}, so "
                "it can never run: give more --cache-tokens, or leave the workflow out"
            )


def again_tokens(job: ReplayJob, index: int) -> int:
    """Tokens of a step's prompt that an endless cache would have, openings included.

    The last token of an output is never read, so no cache has it; the last token of a prompt is always computed.
    """
    step, again = job.steps[index], job.steps[index].opening_tokens
    if step.continues is not None:
        before = job.steps[step.continues]
        again = min(step.repeated_tokens, before.fixed_tokens - (0 if before.closing_tokens else 1))
    return min(again, step.prompt_tokens - 1)
