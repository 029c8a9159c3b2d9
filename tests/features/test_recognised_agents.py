"""A renamed agent is known by its system prompt, and no known agent is called anything else."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.schema.names import NameMapping
from presage.features.agent_fingerprint import masked_prompt
from presage.features.agent_names import AgentNames, recognised, recognised_as
from presage.features.vocabulary import Vocabulary

AGENTS, TYPES = ("clerk", "judge", "buyer"), ("bank", "shop")
SYSTEM = "You are the {} of a shop."
MODEL = Vocabulary(TYPES, AGENTS, names=NameMapping(((r"(\w+)-\d+", r"\1"),), ((r"(\w+) run \d+", r"\1"),)))
OTHER = Vocabulary(("mail",), ("sorter",))
AGENT = st.sampled_from([*AGENTS, "clerk-7", "sorter", "", "teller"]) | st.text(max_size=4)
TYPE = st.sampled_from([*TYPES, "shop run 3", "mail", "", "store"]) | st.text(max_size=4)


def trace(*rows: tuple[str, str, str | None]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table(dict(zip(("workflow_type", "agent", "system_prompt"), map(list, columns), strict=True)))


NAMES = AgentNames.learn(trace(*(("shop", agent, SYSTEM.format(agent)) for agent in AGENTS)))


def test_a_renamed_agent_is_the_one_with_its_system_prompt() -> None:
    for workflow_type in ("shop", "shop run 3", "store", ""):  # its own, with an id, or renamed too
        assert recognised_as((workflow_type, "seller"), ("shop", "clerk"), [OTHER, MODEL]) == "clerk"


def test_another_application_that_the_models_know_may_share_a_prompt() -> None:
    for workflow_type in ("bank", "bank run 1", "mail"):
        assert recognised_as((workflow_type, "seller"), ("shop", "clerk"), [MODEL, OTHER]) is None


@given(AGENT, TYPE, st.none() | st.tuples(TYPE, AGENT))
def test_only_names_that_no_model_knows_stand_for_another_and_only_for_one_that_a_model_knows(
    agent: str, workflow_type: str, found: tuple[str, str] | None
) -> None:
    named = recognised_as((workflow_type, agent), found, [MODEL, OTHER])
    if named is not None:
        assert not MODEL.knows_agent(agent)
        assert not OTHER.knows_agent(agent)
        assert found is not None
        assert named == found[1]
        assert MODEL.knows_agent(named) or OTHER.knows_agent(named)
        assert recognised_as((workflow_type, named), found, [MODEL, OTHER]) is None, "a name stands for no third one"
    assert recognised_as((workflow_type, agent), None, [MODEL]) is None
    assert recognised_as((workflow_type, agent), found, []) is None


@given(
    st.lists(st.tuples(TYPE, AGENT, st.none() | st.sampled_from([*map(SYSTEM.format, AGENTS), "Hi.", ""])), min_size=1)
)
def test_a_trace_is_read_as_requests_are(rows: list[tuple[str, str, str | None]]) -> None:
    table = trace(*rows)
    table = table.set_column(2, "system_prompt", table["system_prompt"].cast(pa.string()))
    read = recognised(table, NAMES, MODEL)
    assert read.drop_columns(["agent"]) == table.drop_columns(["agent"])
    for (workflow_type, agent, prompt), now in zip(rows, read["agent"].to_pylist(), strict=True):
        found = NAMES.find_reworded(masked_prompt(prompt, {}).fingerprint()) if prompt else None
        assert now == (recognised_as((workflow_type, agent), found and found[0], [MODEL]) or agent)


ROLES = {
    "clerk": "You are the clerk. You file every letter under its sender. Answer politely, invent nothing.",
    "judge": "You are the judge. Weigh evidence from both parties before any verdict. Answer politely, invent nothing.",
    "buyer": "You are the buyer. Compare offers, haggle over discounts, order stock. Answer politely, invent nothing.",
}
REWORDED = "Be polite. Never make anything up. Compare offers, haggle over rebates, order stock. You purchase."


def found(names: AgentNames, prompt: str) -> str | None:
    of = names.find_reworded(masked_prompt(prompt, {}).fingerprint())
    return of and of[0][1]


def test_an_agent_whose_prompt_was_reworded_is_found_by_the_words_that_only_it_has() -> None:
    names = AgentNames.learn(trace(*(("shop", agent, prompt) for agent, prompt in ROLES.items())))
    assert names.find(masked_prompt(REWORDED, {}).fingerprint()) is None
    assert found(names, REWORDED) == "buyer"
    assert [found(names, prompt) for prompt in ROLES.values()] == list(ROLES)
    assert found(names, "Answer politely, invent nothing.") is None, "every agent has these words"


def test_an_agent_that_the_names_lack_is_not_taken_for_one_with_the_same_boilerplate() -> None:
    for agent, prompt in ROLES.items():
        others = AgentNames.learn(trace(*(("shop", name, of) for name, of in ROLES.items() if name != agent)))
        assert found(others, prompt) is None
    shared = AgentNames.learn(trace(("shop", "clerk", ROLES["clerk"]), ("shop", "judge", ROLES["clerk"])))
    assert found(shared, ROLES["clerk"]) is None, "two agents have this prompt"


def test_without_names_or_prompts_a_trace_stays_as_it_is() -> None:
    table = trace(("shop", "seller", SYSTEM.format("clerk")), ("shop", "judge", SYSTEM.format("buyer")))
    assert recognised(table, NAMES, MODEL)["agent"].to_pylist() == ["clerk", "judge"]
    assert recognised(table, None, MODEL) is table
    assert recognised(table.drop_columns(["system_prompt"]), NAMES, MODEL)["agent"].to_pylist() == ["seller", "judge"]
    known = trace(("shop", "judge", SYSTEM.format("clerk")))
    assert recognised(known, NAMES, MODEL) is known
