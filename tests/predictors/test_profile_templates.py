"""Templates of applications whose composition is known: the segments found, and no prefix that is not exact."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.predictors.profile.composition import PromptStep
from presage.predictors.profile.templates import (
    PredictedPrefix,
    PromptContext,
    PromptTemplates,
    TemplateConfig,
    prompt_steps,
)

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "lk", "")]
KEPT = TemplateConfig(keep_stems=True)
Workflows = list[tuple[str, list[PromptStep]]]
App = Callable[[random.Random], list[PromptStep]]


def text(rng: random.Random, words: int = 30) -> str:
    """Text that no other has in common."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(words // 2, words)))


def map_reduce(rng: random.Random) -> list[PromptStep]:
    question = text(rng)
    steps = [PromptStep("splitter", f"Split this question into parts.\nQuestion: {question}\nParts:", text(rng))]
    steps += [PromptStep("mapper", f"Answer part {i} of:\n{steps[0].answer}\nAnswer:", text(rng)) for i in (1, 2, 3)]
    notes = "".join(f"\n## Notes {i}\n{steps[i].answer}" for i in (1, 2, 3))
    return [*steps, PromptStep("reducer", f"Merge the notes.\nQuestion: {question}{notes}\n\nMerged:", text(rng))]


def debate(rng: random.Random) -> list[PromptStep]:
    motion = text(rng)
    steps: list[PromptStep] = []
    for turn in range(6):
        agent = ("pro", "contra")[turn % 2]
        said = f"\nYour opponent said: {steps[-1].answer}\nReply." if steps else "\nBegin."
        steps.append(PromptStep(agent, f"You argue {agent} in a debate. Motion: {motion}{said}", text(rng)))
    return [*steps, PromptStep("judge", f"Who won?\nPro: {steps[4].answer}\nContra: {steps[5].answer}", "pro")]


def reflection(rng: random.Random) -> list[PromptStep]:
    steps = [PromptStep("writer", f"Write an essay about the topic.\nTopic: {text(rng)}", text(rng))]
    for _ in range(rng.randrange(1, 4)):
        steps.append(PromptStep("critic", f"You are a critic. Essay:\n{steps[-1].answer}\nCriticise it.", text(rng)))
        again = f"{steps[-2].prompt}\n\nassistant: {steps[-2].answer}\n\nuser: {steps[-1].answer}"
        steps.append(PromptStep("writer", again, text(rng)))
    return steps


def coder_tester(rng: random.Random) -> list[PromptStep]:
    """The tester's prompt ends in the output of a tool that no step holds."""
    task = text(rng)
    steps = [PromptStep("coder", f"You write code.\nTask: {task}\n", text(rng))]
    for _ in range(rng.randrange(1, 4)):
        code = steps[-1].answer
        steps.append(PromptStep("tester", f"You read test output.\n{code}\n>>> Output:\n{text(rng)}", text(rng)))
        steps.append(PromptStep("coder", f"You write code.\nTask: {task}\nReport: {steps[-1].answer}", text(rng)))
    return steps


def stamped(rng: random.Random) -> list[PromptStep]:
    """A long system prompt with the time and a request id inside; its date is that of all traces."""

    def system() -> str:
        when = f"2025-06-14 {rng.randrange(10, 24)}:{rng.randrange(10, 60)}:{rng.randrange(10, 60)}"
        polite = "Be polite to everybody. " * 40
        return f"You are an assistant of a shop. {polite}Time: {when}, id req-{rng.getrandbits(64):x}"

    first = PromptStep("clerk", f"{system()}\nAnswer the customer.\nCustomer: {text(rng)}", text(rng))
    return [first, PromptStep("clerk", f"{system()}\nAnswer the customer.\nCustomer: {text(rng)}", text(rng))]


def chat(rng: random.Random) -> list[PromptStep]:
    prompt = f"system: You chat with a user.\nuser: {text(rng)}"
    steps = [PromptStep("chat", prompt, text(rng))]
    for _ in range(rng.randrange(2, 8)):
        steps.append(
            PromptStep("chat", f"{steps[-1].prompt}\nassistant: {steps[-1].answer}\nuser: {text(rng)}", text(rng))
        )
    return steps


APPS: dict[str, App] = {app.__name__: app for app in (map_reduce, debate, reflection, coder_tester, stamped, chat)}


def workflows(app: App, number: int, seed: int) -> Workflows:
    return [(f"{seed}-{i}", app(random.Random(f"{seed}-{i}"))) for i in range(number)]


def as_tokens(runs: Workflows) -> Workflows:
    """The same with a token id for each character, some of them among the code points of surrogates and beyond."""

    def ids(of: Any) -> list[int]:
        return [ord(letter) * 600 for letter in of]

    return [(task, [PromptStep(s.agent, ids(s.prompt), ids(s.answer)) for s in steps]) for task, steps in runs]


def template(templates: PromptTemplates, agent: str) -> list[str]:
    """The segments of an agent's widest template, stems as their texts."""
    return [s.text if s.text is not None else str(s) for s in templates.templates[PromptContext(agent)].segments]


def test_map_reduce() -> None:
    found = template(PromptTemplates.fit(workflows(map_reduce, 40, 0), KEPT), "reducer")
    assert found == [
        "Merge the notes.\n",
        "last prompt of splitter[32:-6]",
        "## Notes 1\n",
        "last but 2 answer of mapper",
        "\n## Notes 2\n",
        "last but 1 answer of mapper",
        "\n## Notes 3\n",
        "last answer of mapper",
        "\n\nMerged:",
    ]


def test_debate_the_judge_reads_the_last_answers_of_both() -> None:
    found = template(PromptTemplates.fit(workflows(debate, 40, 0), KEPT), "judge")
    assert found == ["Who won?\nPro: ", "last answer of pro", "\nContra: ", "last answer of contra"]


def test_reflection_both_agents() -> None:
    templates = PromptTemplates.fit(workflows(reflection, 40, 0), KEPT)
    assert template(templates, "critic") == [
        "You are a critic. Essay:\n",
        "last answer of writer",
        "\nCriticise it.",
    ]
    assert template(templates, "writer") == [
        "last prompt of writer",
        "\n\nassistant: ",
        "last answer of writer",
        "\n\nuser: ",
        "last answer of critic",
    ]


def test_a_tool_output_is_a_gap() -> None:
    templates = PromptTemplates.fit(workflows(coder_tester, 40, 0), KEPT)
    *known, gap = template(templates, "tester")
    assert known == ["You read test output.\n", "last answer of coder", "\n>>> Output:\n"]
    assert gap.startswith("gap")


def test_a_growing_chat_copies_its_last_prompt_and_answer() -> None:
    found = template(PromptTemplates.fit(workflows(chat, 40, 0), KEPT), "chat")
    assert found[:4] == ["last prompt of chat", "\nassistant: ", "last answer of chat", "\nuser: "]
    assert found[4].startswith("gap")


def test_a_time_stamp_ends_the_exact_prefix_even_where_all_traces_are_of_one_day() -> None:
    templates = PromptTemplates.fit(workflows(stamped, 40, 0), KEPT)
    prefix, exact = templates.predict([], "clerk")
    assert exact
    assert isinstance(prefix, str)
    assert prefix.endswith("Be polite to everybody. Time: ")
    found = template(templates, "clerk")
    assert any("\nAnswer the customer.\nCustomer: " in segment for segment in found)  # known, but behind a gap


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("tokens", [False, True])
def test_every_predicted_prefix_of_a_fixed_composition_is_exact(name: str, tokens: bool) -> None:
    learn, test = workflows(APPS[name], 40, 0), workflows(APPS[name], 30, 1)
    if tokens:
        learn, test = as_tokens(learn), as_tokens(test)
    figures = PromptTemplates.fit(learn).evaluate(test)
    assert figures.precision == 1
    assert figures.predicted > 0.9 * figures.prompts - 10  # all but those whose stems have not been observed


def test_figures_count_what_no_cache_holds_apart() -> None:
    """Each prompt extends the previous prompt and its answer by an unknown text."""

    def app(rng: random.Random) -> list[PromptStep]:
        steps = [PromptStep("chat", text(rng), text(rng))]
        for _ in range(5):
            steps.append(PromptStep("chat", f"{steps[-1].prompt}{steps[-1].answer}{text(rng)}", text(rng)))
        return steps

    figures = PromptTemplates.fit(workflows(app, 40, 0)).evaluate(workflows(app, 30, 1))
    assert figures.precision == 1
    assert figures.recall is not None
    assert figures.recall > 0.6
    assert figures.recall_new == 0


def test_one_agent_that_differs_between_applications_makes_no_others_worse() -> None:
    """Half of the workflows put another static text first: the common part is used, or nothing."""
    runs = workflows(reflection, 80, 0)
    mixed = [
        (
            task,
            [
                PromptStep(s.agent, (f"{number % 2} " if s.agent == "critic" else "") + str(s.prompt), s.answer)
                for s in steps
            ],
        )
        for number, (task, steps) in enumerate(runs)
    ]
    templates = PromptTemplates.fit(mixed[:50], KEPT)
    assert templates.predict(mixed[60][1][:1], "critic") == PredictedPrefix("", False)
    assert templates.evaluate(mixed[50:]).precision == 1


def test_an_identifier_repeated_in_one_task_is_no_stem() -> None:
    """Shares are of tasks: a thousand prompts of one task are one task."""
    runs = [("one task", [PromptStep("a", f"Ticket 77123: {text(random.Random(i))}", "ok")]) for i in range(1000)]
    runs += [(f"{i}", [PromptStep("a", f"Ticket {i * 917}: {text(random.Random(i))}", "ok")]) for i in range(30)]
    prefix, _ = PromptTemplates.fit(runs, KEPT).predict([], "a")
    assert prefix == "Ticket "


def test_stems_are_digests_unless_kept_and_come_back_from_observed_prompts() -> None:
    learn, test = workflows(reflection, 40, 0), workflows(reflection, 2, 1)
    templates = PromptTemplates.fit(learn)
    assert "critic. Essay" not in json.dumps(templates.to_json())
    first, second = test[0][1], test[1][1]
    assert templates.predict(first[:1], "critic") == PredictedPrefix("", False)
    templates.observe(first[:1], first[1])
    prefix, exact = templates.predict(second[:1], "critic")
    assert exact
    assert prefix == second[1].prompt


def test_a_stem_is_taken_from_an_earlier_prompt_of_the_history() -> None:
    (_, steps), templates = workflows(debate, 1, 7)[0], PromptTemplates.fit(workflows(debate, 40, 0))
    assert templates.predict(steps[:4], "pro") == PredictedPrefix(str(steps[4].prompt), True)


@pytest.mark.parametrize("config", [TemplateConfig(), KEPT])
@pytest.mark.parametrize("tokens", [False, True])
def test_json_restores_equal_templates(config: TemplateConfig, tokens: bool) -> None:
    learn, test = workflows(map_reduce, 30, 0), workflows(map_reduce, 10, 1)
    if tokens:
        learn, test = as_tokens(learn), as_tokens(test)
    templates = PromptTemplates.fit(learn, config)
    read = PromptTemplates.from_json(json.loads(json.dumps(templates.to_json())))
    assert read.templates == templates.templates
    assert read.statement == templates.statement
    assert read.evaluate(test) == templates.evaluate(test)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda d: d.update(version=2),
    "further field": lambda d: d.update(more=1),
    "config": lambda d: d["config"].update(precision=7),
    "unit": lambda d: d.update(unit="bytes"),
    "count": lambda d: d.update(prompts=-1),
    "templates": lambda d: d.update(templates=3),
    "twice": lambda d: d["templates"].append(d["templates"][0]),
    "agent": lambda d: d["templates"][0]["context"].update(agent=None),
    "usable": lambda d: d["templates"][0].update(usable=99),
    "kind": lambda d: d["templates"][0]["segments"][0].update(kind="code"),
    "digest": lambda d: d["templates"][0]["segments"][0].update(digest="abc"),
    "text": lambda d: d["templates"][0]["segments"][0].update(text="another"),
    "support": lambda d: d["templates"][0]["segments"][0].update(support="all"),
    "source": lambda d: d["templates"][0]["segments"][0].update(source={"step": "any"}),
    "not an object": lambda d: d["templates"].__setitem__(0, 5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_json_is_refused(damage: str) -> None:
    data = json.loads(json.dumps(PromptTemplates.fit(workflows(map_reduce, 30, 0), KEPT).to_json()))
    DAMAGES[damage](data)
    with pytest.raises(ArtefactError, match="train the profile again"):
        PromptTemplates.from_json(data)


def test_absent_texts_are_stated() -> None:
    steps = [PromptStep("a", None, None), PromptStep("b", None, "ok")]
    templates = PromptTemplates.fit([(f"{i}", steps) for i in range(30)])
    assert "no prompt is recorded in 60 steps" in templates.statement
    assert templates.predict(steps, "a") == PredictedPrefix("", False)
    assert templates.evaluate([("x", steps)]).precision is None
    assert PromptTemplates.fit([]).statement.startswith("no prompt")


def test_too_few_tasks_give_no_prefix() -> None:
    templates = PromptTemplates.fit(workflows(debate, 6, 0), KEPT)
    assert templates.predict([], "pro") == PredictedPrefix("", False)
    assert "0 templates" in templates.statement


def test_an_unknown_agent_and_a_history_without_texts_give_nothing() -> None:
    templates = PromptTemplates.fit(workflows(reflection, 40, 0), KEPT)
    assert templates.predict([], "nobody") == PredictedPrefix("", False)
    assert templates.predict([PromptStep("writer", None, None)], "critic").prefix == "You are a critic. Essay:\n"


def test_what_cannot_be_compared_is_refused() -> None:
    templates = PromptTemplates.fit(workflows(reflection, 40, 0))
    with pytest.raises(InputError, match="history of tokens"):
        templates.predict([PromptStep("writer", [1, 2], [3])], "critic")
    with pytest.raises(InputError, match="one form"):
        templates.predict([PromptStep("writer", "text", [3])], "critic")
    with pytest.raises(InputError, match="token ids from -1"):
        PromptTemplates.fit([("t", [PromptStep("a", [-1], None)])])
    with pytest.raises(InputError, match="give one form"):
        PromptTemplates.fit([*workflows(chat, 2, 0), *as_tokens(workflows(chat, 2, 0))])
    with pytest.raises(ConfigurationError, match="precision"):
        TemplateConfig(precision=0.2)
    with pytest.raises(ConfigurationError, match="min_tasks"):
        TemplateConfig(min_tasks=0)


def test_rows_of_a_trace_become_steps() -> None:
    rows = [
        {"agent": "a", "system_prompt": "You are a.\n", "input_text": "Hello", "output_text": "Hi"},
        {"agent": "b", "system_prompt": None, "input_text": None, "output_text": None},
    ]
    assert prompt_steps(rows) == [PromptStep("a", "You are a.\nHello", "Hi"), PromptStep("b", None, None)]


def test_token_ids_may_be_arrays() -> None:
    runs = as_tokens(workflows(chat, 40, 0))
    arrays = [(t, [PromptStep(s.agent, np.array(s.prompt), np.array(s.answer)) for s in steps]) for t, steps in runs]
    assert PromptTemplates.fit(arrays).templates == PromptTemplates.fit(runs).templates


LEARNT = {name: PromptTemplates.fit(workflows(app, 40, 0), KEPT) for name, app in APPS.items()}


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(LEARNT)),
    history=st.lists(
        st.tuples(st.integers(0, 3), *[st.none() | st.text("ab\n:", max_size=60)] * 2),
        max_size=9,
    ),
    agent=st.integers(0, 3),
)
def test_a_prefix_consists_of_stems_and_pieces_of_the_history(
    name: str, history: list[tuple[int, str | None, str | None]], agent: int
) -> None:
    templates = LEARNT[name]
    agents = [*sorted({context.agent for context in templates.templates}), "other"]
    steps = [PromptStep(agents[a % len(agents)], prompt, answer) for a, prompt, answer in history]
    prefix, exact = templates.predict(steps, agents[agent % len(agents)])
    assert exact == bool(prefix)
    assert isinstance(prefix, str)
    stems = [s.text for t in templates.templates.values() for s in t.segments if s.text]
    sources = [*stems, *(text for step in steps for text in step[1:] if isinstance(text, str))]
    at = 0
    while at < len(prefix):  # greedy from the left: every beginning of a piece is a piece
        longest = max(
            (
                length
                for source in sources
                for length in range(len(source), 0, -1)
                if prefix[at : at + length] in source
            ),
            default=0,
        )
        assert longest, "text from nowhere"
        at += longest


def test_contexts_are_told_apart_by_the_agent_before() -> None:
    def app(rng: random.Random) -> list[PromptStep]:
        first = PromptStep(rng.choice(["search", "browse"]), f"Go: {text(rng)}", text(rng))
        lead = "Results of a search: " if first.agent == "search" else "The page reads: "
        return [first, PromptStep("reader", f"{lead}{first.answer}", text(rng))]

    templates = PromptTemplates.fit(workflows(app, 80, 0), KEPT)
    assert PromptContext("reader", "search", None, 0) in templates.templates
    figures = templates.evaluate(workflows(app, 40, 1))
    assert figures.precision == 1
    assert templates.predict([PromptStep("browse", "Go: x", "seen")], "reader") == PredictedPrefix(
        "The page reads: seen", True
    )


def test_an_agent_renamed_halfway_has_a_template_under_each_name() -> None:
    runs = [
        (task, [PromptStep(f"{s.agent} {number // 40}", s.prompt, s.answer) for s in steps])
        for number, (task, steps) in enumerate(workflows(debate, 80, 0))
    ]
    templates = PromptTemplates.fit(runs, KEPT)
    for number in (0, 1):
        prefix, _ = templates.predict([], f"pro {number}")
        assert str(prefix).startswith("You argue pro in a debate. Motion: ")


def test_interleaved_branches_copy_from_their_own_agent() -> None:
    def app(rng: random.Random) -> list[PromptStep]:
        last, steps = {"left": text(rng), "right": text(rng)}, []
        for _ in range(8):
            branch = rng.choice(["left", "right"])
            steps.append(PromptStep(branch, f"Go on with: {last[branch]}\n", text(rng)))
            last[branch] = str(steps[-1].answer)
        return steps

    templates = PromptTemplates.fit(workflows(app, 60, 0), KEPT)
    assert template(templates, "left") == ["Go on with: ", "last answer of left", "\n"]
    assert templates.evaluate(workflows(app, 30, 1)).precision == 1


def test_one_workflow_however_long_proves_nothing() -> None:
    steps = [step for _, steps in workflows(chat, 100, 0) for step in steps]
    assert PromptTemplates.fit([("one", steps)], KEPT).templates == {}
