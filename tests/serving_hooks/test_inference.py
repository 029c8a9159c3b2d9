"""Whose request it is, where no client says so: sources, first requests, agents, choices, retries and measurement."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from serving_samples import Clock

from presage.continuation import NAMED_FROM, REMEMBERED_S, UNKNOWN, TokenPrompt, chained
from presage.openings import ACTIVE_S
from presage.serving_hooks.identity.inference import MEASURED, SINGLE_S, Inference
from presage.serving_hooks.vllm.engine import EngineRequest, prompt_of
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import LONGEST_NAME, Step
from presage.serving_hooks.workflows.observed import NOTHING, Observed

BLOCK = 16


def drawn(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 50_000), k=n)


SYSTEM = drawn(0, 100)


class Engine:
    """Requests that are asked and answered one after the other."""

    def __init__(self) -> None:
        self.clock, self.asked = Clock(), 0
        self.inference = Inference(b"a key of the tests", BLOCK, self.clock)

    def prompt(self, tokens: Sequence[int], tenant: str = "") -> TokenPrompt:
        return TokenPrompt((tenant, None, ""), chained(tokens, BLOCK), tokens)

    def ask(
        self,
        tokens: Sequence[int],
        answer: Sequence[int] = (),
        found: Observed = NOTHING,
        tenant: str = "",
        request_id: str | None = None,
    ) -> Step | None:
        self.asked += 1
        name = request_id or f"r{self.asked}"
        step = self.inference.arrives(name, self.prompt(tokens, tenant), tenant, found)
        of = self.inference.leaves(name, completed=bool(answer))
        if of is not None:
            self.inference.answered(of, self.prompt([*tokens, *answer], tenant), len(tokens))
        return step

    def run(self, seed: int, steps: int, opening: Sequence[int] = SYSTEM) -> list[Step | None]:
        """A client in a loop, as agents are: each prompt is the history so far."""
        history, made = [*opening, *drawn(1000 * seed, 30)], list[Step | None]()
        for number in range(steps):
            answer = drawn(1000 * seed + 2 * number + 1, 40)
            made.append(self.ask(history, answer))
            history += answer + drawn(1000 * seed + 2 * number + 2, 20)
        return made


def test_a_client_in_a_loop_is_a_workflow() -> None:
    steps = [one for one in Engine().run(1, 4) if one is not None]
    assert len({one.workflow for one in steps}) == 1
    assert [one.number for one in steps] == [0, 1, 2, 3]
    assert [(one.source, one.confidence) for one in steps] == [("new", 1.0), *[("answered", 0.99)] * 3]


def test_an_agent_of_several_workflows_gets_a_name() -> None:
    of = Engine()
    for seed in range(1, NAMED_FROM + 1):
        of.run(seed, 3)
    first, second, _ = of.run(99, 3)
    assert first is not None
    assert second is not None
    assert (first.source, first.number, second.number) == ("new", 0, 1)
    assert first.agent == second.agent != UNKNOWN
    assert first.workflow_type == f"app-{first.agent.removeprefix('agent-')}"


def test_an_agent_that_comes_back_after_a_pause_begins_workflows_of_its_application() -> None:
    engine = Engine()
    planner, writer = (Observed(agent=name, agent_confidence=1.0, workflow_type=f"app-{name}") for name in "pw")
    begun = []
    for seed in range(3):
        history, answer = SYSTEM + drawn(10 * seed + 1, 30), drawn(10 * seed + 2, 120)
        engine.ask(history, answer, planner)
        engine.ask([*drawn(9, 40), *answer, *drawn(10 * seed + 3, 9)], drawn(10 * seed + 4, 40), writer)
        begun.append(engine.ask(drawn(9, 40) + drawn(10 * seed + 5, 80), drawn(10 * seed + 6, 40), writer))
    assert [step and step.workflow_type for step in begun] == ["app-w", "app-p", "app-p"]


@pytest.mark.parametrize("opening", [SYSTEM, []])
def test_single_requests_are_no_workflows_once_that_is_clear(opening: list[int]) -> None:
    of, steps = Engine(), []
    for seed in range(1, 200):
        of.clock.now += 10
        steps.append(of.ask(opening + drawn(seed, 90), drawn(seed + 5000, 40)))
    clear = int(SINGLE_S / 10) + NAMED_FROM + 1
    assert None not in steps[: int(SINGLE_S / 10)], "a second step may still come"
    assert steps[clear:] == [None] * (199 - clear)
    assert of.inference.by_source() == {"new": 199}
    loop = of.run(1000, 3, drawn(7777, 100))
    assert [one is not None for one in loop] == [False, True, True], "a workflow among them is one from its second step"


def test_what_goes_on_is_told_by_the_agent_before_it_is_by_the_tenant() -> None:
    of = Engine()
    for seed in range(1, 60):
        of.clock.now += 10
        of.ask(drawn(seed, 90), drawn(seed + 5000, 40))
        if seed % 10 == 0:
            of.run(seed, 3)
    assert of.ask(SYSTEM + drawn(1, 30), drawn(2, 9)) is not None
    assert of.ask(drawn(3, 90), drawn(4, 9)) is None


def test_the_choices_of_one_request_are_one_step() -> None:
    of = Engine()
    history = SYSTEM + drawn(1, 30)
    of.ask(history, drawn(2, 40))
    again = history + drawn(2, 40) + drawn(3, 20)
    choices = [of.ask(again, drawn(10 + n, 30), request_id=f"{n}_a") for n in range(3)]
    assert choices[0] is not None
    assert choices == [choices[0]] * 3
    for n in range(3):  # whichever answer the client goes on with
        step = of.ask(again + drawn(10 + n, 30) + drawn(20 + n, 9), drawn(40 + n, 9))
        assert step is not None
        assert step.workflow == choices[0].workflow


def test_a_first_request_that_was_given_up_and_sent_again_is_the_same() -> None:
    of, history = Engine(), SYSTEM + drawn(1, 30)
    of.ask(history)  # aborted
    of.ask(history, drawn(2, 40))
    assert of.ask(history + drawn(2, 40) + [5]) is not None


@pytest.mark.parametrize(
    ("found", "source"),
    [
        (Observed(trace="a" * 32), "trace"),
        (Observed(conversation="c1"), "conversation"),
        (Observed(cache_key="k" * 20), "cache key"),
    ],
)
def test_an_id_joins_requests_whose_prompts_share_nothing(found: Observed, source: str) -> None:
    of = Engine()
    of.ask(drawn(1, 50), drawn(2, 30), found)
    step = of.ask(drawn(3, 50), drawn(4, 30), found)
    assert step is not None
    assert step.source == source
    other = of.ask(drawn(5, 50), drawn(6, 30), found, tenant="key-1")
    assert other is not None
    assert other.source == "new", "another tenant's id says nothing"


def test_an_earlier_response_names_its_workflow() -> None:
    of = Engine()
    of.ask(drawn(1, 50), drawn(2, 30), request_id="resp_abc_0-7f")
    step = of.ask(drawn(3, 50), found=Observed(response="resp_abc"))
    assert step is not None
    assert step.source == "response"


def test_a_prompt_comes_before_a_cache_key_and_a_trace_before_a_prompt() -> None:
    of = Engine()
    one, other = SYSTEM + drawn(1, 30), SYSTEM + drawn(2, 30)
    of.ask(one, drawn(3, 40), Observed(cache_key="k" * 20, trace="a" * 32))
    of.ask(other, drawn(4, 40))
    by_prompt = of.ask(other + drawn(4, 40) + [1], drawn(5, 9), Observed(cache_key="k" * 20))
    by_trace = of.ask(other + drawn(4, 40) + [2], drawn(6, 9), Observed(trace="a" * 32))
    assert by_prompt is not None
    assert by_trace is not None
    assert (by_prompt.source, by_trace.source) == ("answered", "trace")
    assert by_prompt.workflow != by_trace.workflow


def test_tenants_never_share_a_workflow() -> None:
    of, history = Engine(), SYSTEM + drawn(1, 30)
    of.ask(history, drawn(2, 40), tenant="key-0")
    other = of.ask(history + drawn(2, 40) + [5], tenant="key-1")
    same = of.ask(history + drawn(2, 40) + [6], tenant="key-0")
    assert other is not None
    assert same is not None
    assert (other.source, same.source) == ("new", "answered")
    assert other.workflow != same.workflow


def test_the_servers_name_of_an_agent_counts_and_the_first_type_stays() -> None:
    of, history = Engine(), SYSTEM + drawn(1, 30)
    of.ask(history, drawn(2, 40), Observed(agent="planner", workflow_type="review"))
    step = of.ask(history + drawn(2, 40) + [5], found=Observed(agent="coder", workflow_type="app-9"))
    assert step is not None
    assert step.agent == "coder"


PLANNER, WRITER, TAIL, QUESTION = drawn(10, 60), drawn(11, 60), drawn(12, 4), drawn(13, 30)


def begun(tail: Sequence[int] = TAIL, others: int = 2) -> tuple[Engine, Step]:
    """A workflow that a planner began with the question, and others with questions of their own."""
    of = Engine()
    for seed in range(others):
        of.ask([*PLANNER, *drawn(100 + seed, 30), *tail], drawn(200 + seed, 40))
    first = of.ask([*PLANNER, *QUESTION, *tail], drawn(20, 40))
    assert first is not None
    return of, first


@pytest.mark.parametrize(
    ("before", "behind"),
    [((), TAIL), (drawn(14, 20), drawn(15, 200)), (drawn(14, 400), drawn(15, 3000)), (drawn(14, 3000), drawn(15, 400))],
)
def test_an_agent_that_is_given_what_a_workflow_began_with_is_of_it(before: list[int], behind: list[int]) -> None:
    of, first = begun()
    step = of.ask([*WRITER, *before, *QUESTION, *behind])
    assert step is not None
    assert (step.workflow, step.source) == (first.workflow, "quoted")
    assert of.inference.by_source()["quoted"] == 1


@pytest.mark.parametrize("place", [5, 15, 25])
def test_a_prompt_that_holds_nearly_what_a_workflow_began_with_is_none_of_its(place: int) -> None:
    of, first = begun()
    step = of.ask([*WRITER, *QUESTION[:place], 7, *QUESTION[place + 1 :], *TAIL])
    assert step is None or step.workflow != first.workflow


def test_a_document_with_another_question_is_none_of_the_workflow_that_read_it() -> None:
    of, document = begun()[0], drawn(16, 200)
    first = of.ask([*PLANNER, *document, *drawn(17, 12), *TAIL], drawn(21, 40))
    step = of.ask([*WRITER, *document, *drawn(18, 12), *TAIL])
    assert first is not None
    assert step is None or step.workflow != first.workflow


@pytest.mark.parametrize(
    ("before", "tenant", "pause_s"), [((*PLANNER, 9), "", 0.0), (WRITER, "key-1", 0.0), (WRITER, "", ACTIVE_S + 1)]
)
def test_the_same_agent_another_tenant_or_one_after_a_pause_begins_anew(
    before: Sequence[int], tenant: str, pause_s: float
) -> None:
    of, first = begun()
    of.clock.now += pause_s
    step = of.ask([*before, *QUESTION, *TAIL], tenant=tenant)
    assert step is None or step.workflow != first.workflow


def test_what_two_workflows_began_with_tells_neither() -> None:
    of, first = begun()
    second = of.ask([*PLANNER, *QUESTION, *TAIL], drawn(22, 40))
    step = of.ask([*WRITER, *QUESTION, *TAIL])
    assert second is not None
    assert step is None or step.workflow not in (first.workflow, second.workflow)


def test_a_template_that_one_workflow_alone_has_tells_nothing() -> None:
    of, first = begun(others=0)
    step = of.ask([*WRITER, *PLANNER, *QUESTION, *TAIL])
    assert step is None or step.workflow != first.workflow


ARGUMENT = drawn(23, 24)


@pytest.mark.parametrize(
    ("said", "given", "joins"),
    [
        ([*drawn(24, 10), *ARGUMENT, *drawn(25, 5)], ARGUMENT, True),
        ([*drawn(24, 10), *ARGUMENT[:12], 7, *ARGUMENT[13:]], ARGUMENT, False),
        ([*drawn(24, 10), *ARGUMENT], [*ARGUMENT, *drawn(26, 10)], False),
    ],
    ids=["all of it", "nearly all", "more than it"],
)
def test_an_agent_that_is_given_the_argument_of_a_call_is_of_the_workflow_that_made_it(
    said: list[int], given: list[int], joins: bool
) -> None:
    of = Engine()
    for seed in range(2):
        of.ask([*PLANNER, *drawn(100 + seed, 30), *TAIL], drawn(200 + seed, 40))
        of.ask([*WRITER, *drawn(300 + seed, 30), *TAIL], drawn(400 + seed, 40))
    caller = of.ask([*PLANNER, *drawn(27, 30), *QUESTION, *TAIL], said)
    called = of.ask([*WRITER, *given, *TAIL])
    assert caller is not None
    assert called is not None
    assert (called.workflow == caller.workflow) is joins


def test_what_an_answer_only_repeats_tells_nothing() -> None:
    of, history = begun()[0], [*PLANNER, *drawn(27, 30), *TAIL]
    for seed in range(2):
        of.ask([*WRITER, *drawn(300 + seed, 30), *TAIL], drawn(400 + seed, 40))
    caller = of.ask(history, drawn(28, 40))
    of.ask([*history, *drawn(28, 40), *ARGUMENT, *TAIL], [*drawn(24, 10), *ARGUMENT])
    called = of.ask([*WRITER, *ARGUMENT, *TAIL])
    assert caller is not None
    assert called is None or called.workflow != caller.workflow


def test_an_argument_that_two_workflows_gave_tells_neither() -> None:
    of = Engine()
    for seed in range(2):
        of.ask([*WRITER, *drawn(300 + seed, 30), *TAIL], drawn(400 + seed, 40))
    callers = [of.ask([*PLANNER, *drawn(seed, 30), *TAIL], [*drawn(24, 10), *ARGUMENT]) for seed in (28, 29)]
    called = of.ask([*WRITER, *ARGUMENT, *TAIL])
    assert called is None or called.workflow not in {caller.workflow for caller in callers if caller is not None}


def test_openings_are_forgotten_with_their_workflows() -> None:
    of, first = begun()
    workflow = Workflow(first, 0.0, 0.0)
    of.inference.arrives("r", of.prompt([*WRITER, *QUESTION, *TAIL]), "")
    of.inference.runs("r", workflow)
    of.inference.ended(workflow, told=True)
    step = of.ask([*WRITER[::-1], *QUESTION, *TAIL])
    assert step is None or step.workflow != first.workflow


def named(number: int) -> Step:
    return Step("t", f"w{number}", "a")


def test_named_workflows_measure_the_inference() -> None:
    of, measured = Engine(), 0
    for number in range(20 * MEASURED):
        history, workflow = SYSTEM + drawn(number, 30), Workflow(named(number), 0.0, 0.0)
        for turn in range(3):
            of.asked += 1
            name, prompt = f"r{of.asked}", of.prompt(history)
            of.inference.named(name, prompt, named(number), workflow)
            of.inference.runs(name, workflow)
            answer = drawn(10**6 + 10 * number + turn, 40)
            left = of.inference.leaves(name, completed=True)
            measured += turn > 0 and left is not None
            if left is not None:
                of.inference.answered(left, of.prompt([*history, *answer]), len(history))
            history = history + answer + [7] if number % 2 else SYSTEM + drawn(9 * 10**6 + number + turn, 30)
    checks = of.inference.checks()
    assert checks.keys() == {"right", "missed"}
    assert sum(checks.values()) == measured
    assert measured > 10


@pytest.mark.parametrize("told", [False, True])
def test_what_a_table_ends_without_a_word_may_come_back_and_nothing_else(told: bool) -> None:
    of, history = Engine(), SYSTEM + drawn(1, 30)
    of.ask(history, drawn(2, 40))
    history += [*drawn(2, 40), 5]
    step = of.ask(history, drawn(3, 40), request_id="r")
    assert step is not None
    workflow = Workflow(step, 0.0, 0.0)
    of.inference.arrives("again", of.prompt([*history, *drawn(3, 40), 6]), "")
    of.inference.runs("again", workflow)
    of.inference.leaves("again", completed=False)
    of.inference.ended(workflow, told)
    back = of.ask([*history, *drawn(3, 40), 8], drawn(4, 30))
    assert back is not None
    assert (back.workflow == step.workflow) is not told
    of.clock.now += REMEMBERED_S + 1
    late = of.ask([*history, *drawn(3, 40), 8, *drawn(4, 30), 9])
    assert late is None or late.workflow != step.workflow
    assert of.inference.debug_state() == {"requests of prompted workflows": 0}


def test_of_a_long_salt_a_digest_is_kept() -> None:
    def scope(salt: str | None) -> tuple[object, ...]:
        own = {"block_hashes": [], "all_token_ids": [1], "prompt_token_ids": [1], "prompt_embeds": None}
        rest = {"resumable": False, "lora_request": None, "mm_features": None}
        prompt = prompt_of(cast(EngineRequest, SimpleNamespace(**own, **rest, cache_salt=salt)), "key-0")
        assert prompt is not None
        return cast(tuple[object, ...], prompt.scope)

    assert scope("s") == ("key-0", "s", "")
    one, other = scope(10_000 * "s"), scope(10_000 * "s" + "t")
    assert one != other != scope(None)
    assert len(str(one[1])) <= LONGEST_NAME
