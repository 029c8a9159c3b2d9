"""What a run leaves behind: one record a request, one number a job, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Asked:
    """A request and what became of it; times in seconds of the virtual clock.

    Attributes:
        job: number of its job.
        step: its number in the job.
        agent: that asked.
        came_s: when it came.
        prompt_tokens: of its prompt.
        again_tokens: of them, in whole blocks, those that an endless cache would have had.
        hit_tokens: those that were found when the request was first selected, in the cache or the host's.
        began_s: when that was.
        first_token_s: when its first token was there.
        ended_s: when its last was.
        host_tokens: of those found, the ones that were loaded from the host.
    """

    job: int
    step: int
    agent: str
    came_s: float
    prompt_tokens: int
    again_tokens: int
    hit_tokens: int = 0
    began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    host_tokens: int = 0


@dataclass
class Run:
    """One run of a workload under a policy.

    Attributes:
        asked: requests, in the order in which they ended.
        completions_s: of each job, from its arrival to its end.
        end_s: when the last job ended.
        iterations: of the engine.
        short_iterations: of them, done in short.
        prefilled_tokens: computed of prompts, and of outputs again after preemptions.
        output_tokens: of all requests.
        preemptions: requests that lost their blocks.
        evicted: blocks that were given up, by class; empty where nobody counted.
        loaded_tokens: from the host, also for what no workflow asked for and again after preemptions; None without one.
    """

    asked: list[Asked] = field(default_factory=list)
    completions_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    iterations: int = 0
    short_iterations: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int | None = None
