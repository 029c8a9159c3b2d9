"""An agent keeps its name whatever stands in its system prompt, and two agents do not share one."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from presage.errors import ArtefactError, InputError, OutputError
from presage.features.agent_fingerprint import masked_prompt
from presage.features.agent_names import FEW_PROMPTS, MOST_PROMPTS, AgentNames
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.agents import CONFIDENCE, MOST_CLUSTERS, MOST_ROLES, UNKNOWN, Agents
from presage.serving_hooks.identity.identifier import Identifier
from presage.serving_hooks.identity.request import ApiRequest, Endpoint

RULES = " ".join(f"Rule {at}: never change the {noun} of an order that was shipped." for at, noun in enumerate(
    ("price", "address", "buyer", "weight", "carrier", "invoice", "currency", "discount")))  # fmt: skip
TEMPLATE = (
    "You are the {role} of a shop. It is {date}. The customer is {user}, order {order}.\n"
    "Files are in {path}. Session {session}.\n{rules}"
)
FIRST = {
    "role": "clerk",
    "date": "Monday, 2 March 2026, 10:31",
    "user": "Alice Smith",
    "order": "483920",
    "path": "/home/alice/shop/orders.csv",
    "session": "0198c5c4-11d0-7c31-b0a5-6d0c2a41f9be",
    "rules": RULES,
}


def name(agents: Agents, tools: tuple[str, ...] = (), tenant: str = "", **changed: str) -> str:
    return agents.recognise(tenant, TEMPLATE.format(**FIRST | changed), tools).name


@pytest.mark.parametrize(
    "changed",
    [
        {"date": "Sunday, 17 November 2027, 09:05"},
        {"date": "2026-03-02T10:31:07Z"},
        {"user": "Jean-Luc Bogdan Picard"},
        {"order": "7"},
        {"path": "C:\\Users\\bob\\orders.csv"},
        {"session": "3f2a9c1b-77aa-4b1e-9c55-0d9e8f7a6b5c"},
        {"rules": f"{RULES}\nSo far the customer asked about a late parcel, got a refund and is content."},
    ],
)
def test_values_in_the_prompt_do_not_make_another_agent(changed: dict[str, str]) -> None:
    agents = Agents(None)
    assert name(agents) == name(agents, **changed)


ROLES = [{"role": "reviewer"}, {"rules": "Answer in French."}, {"rules": f"{RULES} You act as buyer."}]


@pytest.mark.parametrize("changed", ROLES)
def test_another_role_is_another_agent(changed: dict[str, str]) -> None:  # fmt: skip
    agents = Agents(None)
    assert name(agents) != name(agents, **changed)


def test_another_set_of_tools_is_another_agent_and_their_order_does_not_matter() -> None:
    agents = Agents(None)
    assert name(agents, ("a", "b")) == name(agents, ("b", "a"), user="Chen Wei") != name(agents, ("a",))


def test_names_are_the_same_after_a_restart_and_for_each_tenant() -> None:
    agents = Agents(None)
    found = {name(agents), name(Agents(None), user="Chen Wei"), name(agents, tenant="key-1")}
    assert len(found) == 1
    assert found.pop().startswith("agent-")


def test_many_small_variants_are_one_agent_in_the_end() -> None:
    agents = Agents(None)
    tones = [f"{first}{second}" for first in "abcdef" for second in "qrstuv"]
    assert len({name(agents, rules=f"{RULES} The tone is {tone}.") for tone in tones}) <= MOST_ROLES


def test_without_system_prompt_and_tools_the_name_is_stable_and_says_so() -> None:
    agents = Agents(None)
    found = agents.recognise("", "", ())
    assert (found.name, found.confidence) == (UNKNOWN, 0.0)
    assert agents.recognise("", "", ("search",)).name.startswith("agent-")


def test_memory_is_bounded() -> None:
    agents = Agents(None)
    for at in range(2 * MOST_CLUSTERS):
        agents.recognise("", f"{chr(0x4E00 + at)} works alone on task kind {chr(0x5E00 + at)}", ())
    assert agents.debug_state()["agent_clusters"] == MOST_CLUSTERS


def trace(*rows: tuple[str, str, str | None]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table(dict(zip(("workflow_type", "agent", "system_prompt"), map(list, columns), strict=True)))


TRACE = trace(
    ("shop", "clerk", TEMPLATE.format(**FIRST)),
    ("shop", "clerk", TEMPLATE.format(**FIRST | {"user": "Chen Wei"})),
    ("shop", "judge", TEMPLATE.format(**FIRST | {"role": "judge"})),
    ("shop", "one", "You help."),
    ("shop", "two", "You help."),
    ("shop", "three", None),
)


def test_agents_have_the_names_of_the_trace(tmp_path: Path) -> None:
    AgentNames.learn(TRACE).save(tmp_path / "names.json")
    names = AgentNames.load(tmp_path / "names.json")
    identifier = Identifier(names=names, counts=EventCounts(), most_conversations=10)

    def identified(system: str) -> tuple[str, str]:
        body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]}
        step = identifier.identify(ApiRequest("chat", body)).step
        return step.workflow_type, step.agent

    assert identified(TEMPLATE.format(**FIRST | {"user": "Dana Katz", "order": "1234567"})) == ("shop", "clerk")
    assert identified(TEMPLATE.format(**FIRST | {"role": "judge", "path": "/srv/a/b.csv"})) == ("shop", "judge")
    assert identified("You help.")[1].startswith("agent-")  # two agents of the trace have this prompt


def test_names_of_a_file_count_before_those_of_a_model_and_these_go_with_the_model() -> None:
    model, file = AgentNames.learn(TRACE), AgentNames.learn(TRACE).renamed({"clerk": "seller"})
    agents = Agents()
    unnamed = name(agents)
    agents.take_names(model)
    assert name(agents) == "clerk"
    agents.take_names(None)
    assert name(agents) == unnamed
    assert not agents.may_be_renamed("seller")
    given = Agents(AgentNames.learn(trace(("shop", "judge", TEMPLATE.format(**FIRST | {"role": "judge"})))))
    given.take_names(file)
    assert (name(given), name(given, role="judge")) == ("seller", "judge")
    given = Agents(file)
    given.take_names(model)
    assert name(given) == "seller"


def test_of_prompts_with_a_clock_in_them_a_bounded_number_is_kept_and_the_agent_known_by_it() -> None:
    moments = [f"2026-{at // 28 % 12 + 1:02}-{at % 28 + 1:02}T{at % 24:02}:{at % 60:02}:07Z" for at in range(3000)]
    clock = [TEMPLATE.format(**FIRST | {"date": moment}) for moment in moments]
    names = AgentNames.learn(trace(*(("travel", "planner", text) for text in clock), ("travel", "guide", "You guide.")))
    assert len(names) <= 2 * MOST_PROMPTS
    agents = Agents(names)
    assert agents.recognise("", TEMPLATE.format(**FIRST | {"date": "2027-01-01T11:00:00Z"}), ()).name == "planner"
    assert agents.recognise("", "You guide.", ()).name == "guide"


def test_a_model_keeps_few_prompts_of_an_agent_and_knows_it_by_them_with_other_values() -> None:
    users = [("shop", "clerk", TEMPLATE.format(**FIRST | {"user": f"Ana {chr(65 + at % 26)}ovak"})) for at in range(40)]
    parts = [("shop", "clerk", f"Part {chr(0x4E00 + at)} of the desk says {chr(0x5E00 + at)}.") for at in range(40)]
    names = AgentNames.of_traces(trace(*users, *parts, ("shop", "judge", TEMPLATE.format(**FIRST | {"role": "judge"}))))
    assert names is not None
    assert len(names) <= FEW_PROMPTS + 1
    agents = Agents()
    agents.take_names(names)
    assert (name(agents, user="Chen Wei"), name(agents, role="judge")) == ("clerk", "judge")
    assert AgentNames.of_traces(trace(("shop", "clerk", None))) is None


def test_an_agent_that_was_seen_is_named_by_its_id_with_all_its_prompts(tmp_path: Path) -> None:
    seen = name(Agents(None), ("search",))
    names = AgentNames(()).renamed({seen: "clerk"}, "shop")
    names.renamed({"clerk": "seller"}, "shop").save(tmp_path / "names.json")
    agents = Agents(AgentNames.load(tmp_path / "names.json"))
    for changed in ({}, {"user": "Chen Wei"}, {"date": "2026-03-02T10:31:07Z"}):
        found = agents.recognise("", TEMPLATE.format(**FIRST | changed), ("search",))
        assert (found.workflow_type, found.name, found.confidence) == ("shop", "seller", CONFIDENCE)
    assert name(agents, ("other tool",)).startswith("agent-")


def test_names_of_a_trace_are_changed_for_one_application_or_for_all() -> None:
    names = AgentNames.learn(trace(("shop", "clerk", RULES), ("bank", "clerk", f"You count. {RULES}")))
    found = Agents(names.renamed({"clerk": "seller"}, "shop").renamed({"clerk": "teller"}))
    assert [found.recognise("", system, ()).name for system in (RULES, f"You count. {RULES}")] == ["seller", "teller"]
    with pytest.raises(InputError, match=r"clark: neither an id .* did you mean clerk"):
        names.renamed({"clark": "seller"})
    with pytest.raises(InputError, match="neither an id"):
        names.renamed({"clerk": "seller"}, "airport")
    for unsound in ({"clerk": "a\n"}, {"agent-0a1b2c3d": "a" * 300}):
        with pytest.raises(InputError, match="is no name"):
            names.renamed(unsound)


def test_a_file_without_ids_is_read_by_the_version_before(tmp_path: Path) -> None:
    AgentNames.learn(TRACE).save(tmp_path / "names.json")
    content = json.loads((tmp_path / "names.json").read_text())
    assert (content["format_version"], content.keys()) == (1, {"format", "format_version", "agents"})


def test_the_file_of_names_holds_no_text(tmp_path: Path) -> None:
    AgentNames.learn(TRACE).save(tmp_path / "names.json")
    content = (tmp_path / "names.json").read_text()
    assert not any(word in content for word in ("Alice", "shipped", "customer", "help"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"format": "x"}', "another file"),
        (b'{"format": "presage-agent-names", "format_version": 3}', "format version 3; expected format version 1 or 2"),
        (b'{"format": "presage-agent-names", "format_version": 1, "agents": [{"agent": 1}]}', "damaged entry"),
        (
            b'{"format": "presage-agent-names", "format_version": 2, "agents": [], "ids": {"agent-0a1b2c3d": ["t"]}}',
            "damaged entry",
        ),
        (
            b'{"format": "presage-agent-names", "format_version": 2, "agents": [], "ids": {"agent-1": ["", "\\n"]}}',
            "not printable",
        ),
    ],
)
def test_a_broken_file_of_names_says_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "names.json").write_bytes(content)
    with pytest.raises(ArtefactError, match=message):
        AgentNames.load(tmp_path / "names.json")


def test_names_that_no_table_could_hold_are_refused(tmp_path: Path) -> None:
    AgentNames.learn(TRACE).save(tmp_path / "names.json")
    content: dict[str, Any] = json.loads((tmp_path / "names.json").read_text())
    content["agents"][0]["agent"] = "a\nb"
    (tmp_path / "names.json").write_text(json.dumps(content))
    with pytest.raises(ArtefactError, match="not printable"):
        AgentNames.load(tmp_path / "names.json")


def test_a_missing_file_and_a_trace_without_system_prompts_say_so(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="no readable file"):
        AgentNames.load(tmp_path / "names.json")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        AgentNames.learn(TRACE).save(tmp_path / "file" / "names.json")
    with pytest.raises(InputError, match="no column system_prompt"):
        AgentNames.learn(pa.table({"agent": ["a"]}))
    with pytest.raises(InputError, match="no step of the trace"):
        AgentNames.learn(trace(("shop", "three", None)))


def test_similarity_is_one_for_itself_and_small_for_another_text() -> None:
    texts = (RULES, "Something else entirely, about ships and harbours in the north.")
    one, other = (masked_prompt(text, {}).fingerprint() for text in texts)
    assert one.similarity(one) == 1.0
    assert one.similarity(other) == other.similarity(one) < 0.1


def test_an_agent_has_one_name_in_every_api() -> None:
    identifier, said = Identifier(counts=EventCounts(), most_conversations=10), [{"role": "user", "content": "Hello"}]
    bodies: dict[Endpoint, dict[str, Any]] = {
        "chat": {
            "messages": [{"role": "system", "content": RULES}, *said],
            "tools": [{"type": "function", "function": {"name": "search"}}],
        },
        "messages": {"system": RULES, "messages": said, "tools": [{"name": "search"}]},
        "responses": {"instructions": RULES, "input": "Hello", "tools": [{"type": "function", "name": "search"}]},
    }
    requests = [ApiRequest(endpoint, body, tenant="key-1") for endpoint, body in bodies.items()]
    assert [(request.texts, request.tools) for request in requests] == [((RULES, "Hello"), ("search",))] * 3
    (agent,) = {identifier.identify(request).step.agent for request in requests}
    assert agent != UNKNOWN
