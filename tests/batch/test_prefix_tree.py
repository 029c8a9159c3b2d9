"""The tree of prompts: what begins alike shares a path, and no token is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given as given_that
from hypothesis import strategies as st

from presage.batch import Plan, call, given, join, template
from presage.batch.prefix_tree import Piece, PromptNode, field_tokens, pieces_of, prefix_tree, tokens_of, tree_of
from presage.batch.schedule import paths, soft_order


def together(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text if piece.text is not None else f"[{piece.filled_by}]" for piece in pieces)


def texts(tree: PromptNode) -> dict[str, str]:
    """The prompt of each call, put together again from the tree."""
    found: dict[str, str] = {}
    waiting = [(tree, "")]
    while waiting:
        node, above = waiting.pop()
        text = above + together(node.pieces)
        found.update(dict.fromkeys(node.calls, text))
        waiting.extend((child, text) for child in node.children.values())
    return found


def said(*pieces: str) -> list[Piece]:
    return [
        Piece(None, text[1:], 10.0, True) if text.startswith("$") else Piece(text, "", tokens_of(text), False)
        for text in pieces
    ]


def test_calls_with_one_system_prompt_share_its_node() -> None:
    system = "You are a careful reviewer of contracts. " * 5
    plan = Plan(
        "review",
        out=join([call(str(n), template("{t} aspect {n}", t=given("t"), n=str(n)), system=system) for n in range(3)]),
    )
    tree = tree_of(plan, {})
    (top,) = tree.children.values()
    assert sorted(len(node.calls) for node in top.walk() if node.calls) == [1, 1, 1]
    assert any(piece.of_row for piece in top.pieces)
    assert top.tokens > tokens_of(system) + 100  # the row's text, of which nothing is known, too


def test_static_text_is_split_between_words() -> None:
    tree = prefix_tree({"a": said("be brief and kind"), "b": said("be brief and kinder", "$q"), "c": said("be", "$q")})
    assert texts(tree) == {"a": "be brief and kind", "b": "be brief and kinder[q]", "c": "be[q]"}
    shared = paths(tree)
    assert shared["a"][0] == shared["b"][0]


WORDS = st.sampled_from(["be ", "brief ", "kind", "$q", "$r", "and\n", "a long text of words "])


@given_that(st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=8))
def test_the_tree_holds_every_prompt(prompts: list[list[str]]) -> None:
    named = {str(number): said(*prompt) for number, prompt in enumerate(prompts)}
    tree = prefix_tree(named)
    assert texts(tree) == {key: together(prompt) for key, prompt in named.items()}
    for key, path in paths(tree).items():
        tokens = sum(piece.tokens for piece in named[key])
        assert abs(sum(count for _, count in path) - tokens) < 1e-6 * max(tokens, 1)


def test_fields_have_the_mean_tokens_of_their_rows() -> None:
    plan = Plan("p", out=call("x", template("{t}", t=given("t"))))
    (found,) = field_tokens(plan, [{"t": "a" * 40}, {"t": "b" * 80}]).values()
    assert found == 15.0
    (node,) = plan.calls
    filled = [piece.tokens for piece in pieces_of(node, field_tokens(plan, [{"t": "a" * 40}])) if piece.of_row]
    assert filled == [10.0]


def test_calls_that_read_a_rows_text_first_run_row_by_row_and_others_operator_by_operator() -> None:
    text = given("text")
    alike = [call(f"a{n}", template("{t} aspect {n}", t=text, n=str(n)), system="Same for all.") for n in range(2)]
    other = [call(f"b{n}", template("{t}", t=text), system=f"{n} is another role") for n in range(2)]
    plan = Plan("order", out=join([*alike, *other]))
    agents = {node.key: node.operator.agent for node in plan.calls}  # type: ignore[attr-defined]
    of = {agents[key]: place for key, place in soft_order(plan, tree_of(plan, {}), []).places.items()}
    assert of["a0"][0] == of["a1"][0]
    assert len({of["a0"][0], of["b0"][0], of["b1"][0]}) == 3


def test_a_debate_runs_row_by_row_and_rows_that_begin_alike_are_neighbours() -> None:
    question, text = given("question"), given("text")
    said = [call(f"a{n}", template("{t}\n{q}", t=text, q=question), system=f"{n} is your role") for n in range(2)]
    replies = [
        call(f"a{n}", template("{t}\n{q}\n{o}", t=text, q=question, o=said[1 - n]), system=f"{n} is your role")
        for n in range(2)
    ]
    plan = Plan("debate", out=join(replies))
    rows = [{"text": text, "question": question} for question in "ab" for text in "xyz"]
    order = soft_order(plan, tree_of(plan, {}), rows)
    assert {sequence for sequence, _ in order.places.values()} == {0}
    assert [rows[number]["text"] for number in order.rows] == list("xxyyzz")
    long = [{"text": f"{'the same letterhead ' * 40}{row['text']}", "question": row["question"]} for row in rows]
    found = [long[number]["text"] for number in soft_order(plan, tree_of(plan, {}), long).rows]
    assert all(found[at] == found[at + 1] for at in (0, 2, 4))
