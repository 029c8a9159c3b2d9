"""A trace becomes jobs: sizes as recorded, prefixes by convention, pauses between parents and children."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_samples import chain, row, table

from presage.errors import ConfigurationError, TraceError
from presage.replay.prompts import PromptIds
from presage.replay.workload import (
    JobStep,
    PromptConvention,
    RecordedRequest,
    ReplayJob,
    assemble,
    workload,
)

HISTORY, OWN = PromptConvention(), PromptConvention("own-conversation")


def test_a_history_first_prompt_continues_all_that_was_said() -> None:
    found = workload(
        table(
            row("a", 0, "plan", 0.0, input_tokens=100, output_tokens=10),
            row("a", 1, "code", 4.0, input_tokens=150, output_tokens=20),
        ),
        HISTORY,
    )
    first, second = found.jobs[0].steps
    assert (first.continues, first.new_tokens, first.prompt_tokens) == (None, 100, 100)
    assert (second.continues, second.new_tokens, second.prompt_tokens) == (0, 40, 150)
    assert (second.pause_s, second.parents) == (3.0, (0,))


def test_in_its_own_conversation_an_agent_continues_its_last_turn() -> None:
    rows = [row("a", i, agent, 2.0 * i, input_tokens=100 + 50 * i) for i, agent in enumerate("pqp")]
    steps = workload(table(*rows), OWN).jobs[0].steps
    assert [step.continues for step in steps] == [None, None, 0]
    assert steps[2].new_tokens == 200 - 110


def test_a_prompt_too_short_for_what_it_would_continue_repeats_only_the_opening() -> None:
    convention = PromptConvention(opening_tokens=30)
    rows = [row("a", 0, "p", 0.0, input_tokens=500), row("a", 1, "q", 2.0, input_tokens=80)]
    steps = workload(table(*rows), convention).jobs[0].steps
    assert (steps[1].continues, steps[1].opening_tokens, steps[1].new_tokens) == (None, 30, 50)


def test_a_tool_is_no_request_and_its_time_is_a_pause() -> None:
    rows = [
        row("a", 0, "p", 0.0, input_tokens=100),
        row("a", 1, "search", 1.0, took_s=5.0, kind="tool", input_tokens=None, output_tokens=None),
        row("a", 2, "q", 6.5, input_tokens=130),
    ]
    steps = workload(table(*rows), HISTORY).jobs[0].steps
    assert [step.agent for step in steps] == ["p", "q"]
    assert (steps[1].parents, steps[1].pause_s) == ((0,), 5.5)


def test_the_tools_of_an_answer_are_those_recorded_or_those_that_waited_for_it() -> None:
    tool = {"kind": "tool", "input_tokens": None, "output_tokens": None}
    rows = [
        row("a", 0, "p", 0.0, input_tokens=100, parent_steps=[]),
        row("a", 1, "q", 1.0, input_tokens=120, parent_steps=[0]),
        row("a", 2, "search", 2.5, parent_steps=[0], **tool),
        row("a", 3, "s", 7.0, input_tokens=300, parent_steps=[1, 2]),
    ]
    assert [step.tools for step in workload(table(*rows), HISTORY).jobs[0].steps] == [("search",), (), ()]
    bare = [row("a", i, "p", 2.0 * i, tools_called=called) for i, called in enumerate((["read"], []))]
    assert [step.tools for step in workload(table(*bare), HISTORY).jobs[0].steps] == [("read",), ()]


def test_forks_and_joins_wait_for_their_parents_and_a_join_continues_the_longest() -> None:
    rows = [
        row("a", 0, "p", 0.0, input_tokens=100, parent_steps=[]),
        row("a", 1, "q", 2.0, input_tokens=120, parent_steps=[0]),
        row("a", 2, "r", 2.0, took_s=3.0, input_tokens=160, parent_steps=[0]),
        row("a", 3, "s", 7.0, input_tokens=300, parent_steps=[1, 2]),
    ]
    steps = workload(table(*rows), HISTORY).jobs[0].steps
    assert [step.continues for step in steps] == [None, 0, 0, 2]
    assert (steps[3].parents, steps[3].pause_s, steps[3].new_tokens) == ((1, 2), 2.0, 300 - 170)


def recorded(*prompts: tuple[list[list[int]] | None, int, int], **more: object) -> tuple[JobStep, ...]:
    """Steps in a chain, of (prefix_blocks, input tokens, output tokens)."""
    rows = [
        row("a", step, "p", 2.0 * step, prefix_blocks=runs, input_tokens=tokens, output_tokens=output)
        for step, (runs, tokens, output) in enumerate(prompts)
    ]
    return workload(table(*rows), PromptConvention(**more)).jobs[0].steps  # type: ignore[arg-type]


def test_recorded_prompts_repeat_the_blocks_of_the_longest_prompt_before() -> None:
    steps = recorded(
        ([[1, 10]], 650, 5),
        ([[1, 4], [20, 29]], 900, 5),  # compacted: begins as before, and goes on otherwise
        ([[1, 10], [40, 41]], 780, 1000),  # resumed; too short for what the first step said
        ([[1, 4], [20, 25], [60, 61]], 800, 5),
        ([[70, 71]], 140, 5),
    )
    assert [step.continues for step in steps] == [None, 0, 0, 1, None]
    assert [step.repeated_tokens for step in steps] == [0, 4 * 64, 655, 10 * 64, 0]
    assert [step.prompt_tokens for step in steps] == [650, 900, 780, 800, 140]


def test_an_output_is_repeated_by_the_first_prompt_that_is_long_enough() -> None:
    steps = recorded(
        ([[1, 10]], 650, 100),
        ([[1, 11]], 749, 5),  # too short by one
        ([[1, 10], [30, 31]], 800, 5),
        ([[1, 10], [40, 41]], 800, 5),  # other ids, so other tokens
        ([[1, 10], [30, 32]], 880, 5),
    )
    assert [step.continues for step in steps] == [None, 0, 0, 0, 2]
    assert [step.repeated_tokens for step in steps] == [0, 650, 750, 650, 805], "with the end that fills no block"


def test_prompts_are_recorded_only_if_all_of_a_workflow_are_and_nobody_wants_a_convention() -> None:
    prompts = (([[1, 2]], 150, 5), ([[1, 1], [3, 3]], 200, 5))
    assert recorded(*prompts)[1].repeated_tokens == 64
    assert recorded(*prompts, prompts="history-first")[1].repeated_tokens == 155
    assert recorded(prompts[0], (None, 200, 5))[1].repeated_tokens == 155
    with pytest.raises(ConfigurationError, match="leave it out, or give --prompts history-first"):
        recorded(*prompts, closing_tokens=3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 200), st.integers(1, 200)), min_size=1))
def test_prompts_as_recorded_are_alike_as_far_as_their_ids_are(drawn: list[tuple[int, int, int, int]]) -> None:
    ids: list[list[int]] = []
    for step, (kept, new, _, _) in enumerate(drawn):
        ids.append((ids[step // 2] if ids else [])[:kept] + [100 * step + n for n in range(new)])
    steps = recorded(
        *(
            ([[one, one] for one in of], len(of) * 64 + rest, output)
            for of, (_, _, rest, output) in zip(ids, drawn, strict=True)
        )
    )
    ids_of = PromptIds([ReplayJob("t", "a", steps)], PromptConvention())
    prompts = []
    for number in range(len(steps)):
        prompts.append(ids_of.prompt(0, number))
        for before in range(number):
            pairs = zip(ids[number], ids[before], strict=False)
            shared = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            blocks = min(len(ids[number]), len(ids[before])) if shared is None else shared
            assert prompts[number][: blocks * 64] == prompts[before][: blocks * 64]
            if shared is not None:
                assert prompts[number][: (blocks + 1) * 64] != prompts[before][: (blocks + 1) * 64]


def test_an_end_that_was_not_recorded_is_estimated_by_the_output() -> None:
    rows = [
        row("a", 0, "p", 0.0, took_s=2.0, output_tokens=20),
        row("a", 1, "p", 5.0, input_tokens=200, output_tokens=30) | {"ended_at": None},
        row("a", 2, "p", 9.0, input_tokens=300, took_s=4.0, output_tokens=40),
    ]
    found = workload(table(*rows), HISTORY)
    assert found.estimated_ends == 1
    assert [step.pause_s for step in found.jobs[0].steps] == [0.0, 3.0, 1.0]


def test_workflows_come_when_they_were_recorded() -> None:
    found = workload(table(row("a", 0, "p", 30.0), row("b", 0, "p", 10.0)), HISTORY)
    assert all(job.arrives_s is not None for job in found.jobs)
    assert {job.workflow_id: job.arrives_s for job in found.jobs} == {"a": 20.0, "b": 0.0}


def test_a_workflow_without_all_sizes_is_replayed_with_estimates_and_counted() -> None:
    missing: dict[str, None] = {"input_tokens": None, "output_tokens": None}
    recorded = [row(f"w{i}", 0, "p", input_tokens=50, output_tokens=8) for i in range(5)]
    found = workload(table(*recorded, row("x", 0, "p", **missing), row("x", 1, "p", 2.0, input_tokens=70)), HISTORY)
    assert (len(found.jobs), found.left_out, found.estimated_sizes) == (6, 0, 1)
    first, second = next(job.steps for job in found.jobs if job.workflow_id == "x")
    assert first.prompt_tokens in (50, 70)
    assert first.output_tokens in (8, 10)
    assert second.prompt_tokens == 70
    assert workload(table(*recorded), HISTORY).estimated_sizes == 0


def test_an_estimated_prompt_is_long_enough_for_what_it_continues() -> None:
    recorded = [row(f"w{i}", 0, "q", input_tokens=50) for i in range(5)]
    found = workload(table(*recorded, row("x", 0, "p"), row("x", 1, "q", 2.0, input_tokens=None)), HISTORY)
    second = next(job.steps for job in found.jobs if job.workflow_id == "x")[1]
    assert (second.continues, second.repeated_tokens, second.prompt_tokens) == (0, 110, 111)


def test_an_estimated_answer_has_the_tokens_of_its_text() -> None:
    found = workload(table(row("a", 0, "p"), row("b", 0, "p", output_tokens=None, output_text="x" * 40)), HISTORY)
    assert {job.workflow_id: job.steps[0].output_tokens for job in found.jobs} == {"a": 10, "b": 10}


def test_sizes_that_no_request_has_leave_nothing_to_replay() -> None:
    with pytest.raises(TraceError, match="none of 1 workflows has requests of known size"):
        workload(table(row("b", 0, "p", output_tokens=None)), HISTORY)
    found = workload(table(row("a", 0, "p"), row("b", 0, "search", kind="tool")), HISTORY)
    assert ([job.workflow_id for job in found.jobs], found.left_out) == (["a"], 1)


def test_without_times_a_mean_pause_has_to_be_given() -> None:
    rows = table(row("a", 0, "p", None), row("a", 1, "q", None, input_tokens=200))
    with pytest.raises(TraceError, match="--pause-s"):
        workload(rows, HISTORY)
    drawn = workload(rows, HISTORY, pause_s=2.0)
    assert any(job.arrives_s is None for job in drawn.jobs)
    assert drawn.jobs[0].steps[1].pause_s > 0
    assert drawn == workload(rows, HISTORY, pause_s=2.0)


def test_conventions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="history-first, own-conversation"):
        PromptConvention("mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="closing_tokens is -1"):
        PromptConvention(closing_tokens=-1)


asked = st.lists(
    st.tuples(st.sampled_from("pqr"), st.integers(1, 400), st.integers(1, 50), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)
conventions = st.builds(
    PromptConvention,
    st.sampled_from(["history-first", "own-conversation"]),
    st.integers(0, 60),
    st.integers(0, 60),
)


def job(given_: list, convention: PromptConvention, name: str = "a") -> ReplayJob:
    steps = []
    for number, (agent, tokens, output, back) in enumerate(given_):
        parents = (number - 1 - min(back, number - 1),) if number else ()
        steps.append(RecordedRequest(agent, tokens, output, parents, 0.0))
    return ReplayJob("t", name, assemble(steps, convention))


@given(asked, conventions)
def test_every_prompt_has_as_many_tokens_as_recorded_and_begins_with_what_it_continues(
    given_: list, convention: PromptConvention
) -> None:
    one = job(given_, convention)
    prompts = PromptIds([one], convention)
    sequences = []
    for number, step in enumerate(one.steps):
        prompt = prompts.prompt(0, number)
        assert len(prompt) == step.prompt_tokens == given_[number][1]
        assert step.new_tokens >= 1
        if step.continues is not None:
            assert prompt[: len(sequences[step.continues])] == sequences[step.continues]
        body = prompt[: len(prompt) - step.closing_tokens]
        sequences.append(body + [prompts.says(0, number)] * step.output_tokens)
        assert len(sequences[-1]) == step.sequence_tokens


def chained(before: bytes | None, tokens: list[int]) -> bytes:
    return sha256((before or b"") + repr(tokens).encode()).digest()


@given(asked, conventions, st.integers(1, 20))
def test_hashes_that_are_computed_once_are_those_of_each_sequence_alone(
    given_: list, convention: PromptConvention, block: int
) -> None:
    jobs = [job(given_, convention, "a"), job(given_, convention, "b")]
    prompts = PromptIds(jobs, convention)
    prompts.hash_all(block, chained)
    for number, one in enumerate(jobs):
        for index, step in enumerate(one.steps):
            tokens = prompts.prompt(number, index) + [prompts.says(number, index)] * step.output_tokens
            alone, last = [], None
            for start in range(0, len(tokens) - block + 1, block):
                last = chained(last, tokens[start : start + block])
                alone.append(last)
            assert prompts.known(number, index) == alone


@given(asked, conventions)
def test_two_workflows_share_their_openings_and_nothing_after(given_: list, convention: PromptConvention) -> None:
    jobs = [job(given_, convention, "a"), job(given_, convention, "b")]
    prompts = PromptIds(jobs, convention)
    for number, step in enumerate(jobs[0].steps):
        one, other = prompts.prompt(0, number), prompts.prompt(1, number)
        shared = next((i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), len(one))
        opened = step
        while opened.continues is not None:
            opened = jobs[0].steps[opened.continues]
        assert shared == opened.opening_tokens


def test_a_prompt_repeats_what_stands_before_a_closing() -> None:
    for convention, tokens in ((HISTORY, 80), (PromptConvention(closing_tokens=16), 60)):
        assert chain(0, "pq", convention).steps[0].fixed_tokens == tokens  # of 60 new and 20 said; of 60
