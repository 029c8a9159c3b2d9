"""When blocks are read next, by hand; and that the furthest goes first."""

import math

from replay_samples import chain
from test_workload import chained

from presage.replay.belady import NEVER, NextUses
from presage.replay.prompts import PromptIds
from presage.replay.workload import PromptConvention, ReplayJob

BLOCK = 10


def foresight(*jobs: ReplayJob, convention: PromptConvention) -> tuple[NextUses, PromptIds]:
    prompts = PromptIds(jobs, convention)
    prompts.hash_all(BLOCK, chained)
    return NextUses(jobs, prompts), prompts


def test_a_conversation_is_due_when_its_agent_comes_again() -> None:
    own = PromptConvention("own-conversation")
    # p, q, p: 60 new tokens and 20 said each, half a second of pause before every step but the first.
    seen, prompts = foresight(chain(0, "pqp", own), convention=own)

    def due(step: int, block: int) -> float:
        return float(seen.due[seen.group(prompts.known(0, step)[block])])

    seen.began(0, 0.0)
    seen.asked(0, 0, 0.0)
    seen.finished(0, 0, 4.0)
    a_step_s = 20 * (0.03 + 0.05 * (4.0 / 20 - 0.03))
    # q comes at 4.5; then p, half a second after it has ended.
    assert due(1, 0) == 4.5
    assert due(0, 0) == due(0, 7) == 4.5 + a_step_s + 0.5
    seen.asked(0, 1, 4.5)
    assert due(1, 0) == 4.5
    seen.finished(0, 1, 6.0)
    assert due(1, 0) == due(1, 7) == math.inf
    assert due(0, 0) == 6.5
    seen.asked(0, 2, 6.5)
    seen.finished(0, 2, 9.0)
    assert due(0, 0) == due(2, 13) == math.inf


def test_a_stranger_is_never_read() -> None:
    history = PromptConvention()
    seen, _ = foresight(chain(0, "pq", history), convention=history)
    assert seen.group(b"stranger") == NEVER
    assert seen.due[NEVER] == math.inf


def test_an_opening_is_due_with_the_first_that_reads_it_and_never_once_all_have() -> None:
    shared = PromptConvention(opening_tokens=20)
    seen, prompts = foresight(*(chain(n, "p", shared) for n in range(3)), convention=shared)
    opening = seen.group(prompts.known(0, 0)[0])
    assert opening == seen.group(prompts.known(2, 0)[1])
    for number, at_s in ((0, 0.0), (1, 1.0)):
        seen.began(number, at_s)
        seen.asked(number, 0, at_s)
    assert seen.due[opening] == 0.0
    seen.finished(0, 0, 2.0)
    assert seen.due[opening] == 1.0
    seen.finished(1, 0, 3.0)
    assert seen.due[opening] == 3.0 + 3.0 / 2  # another comes, at the pace of those before
    seen.began(2, 4.0)
    seen.asked(2, 0, 4.0)
    seen.finished(2, 0, 5.0)
    assert seen.due[opening] == math.inf
