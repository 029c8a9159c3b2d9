"""Reflection: a writer drafts, a critic reads draft and text, the writer goes on until the summary is short."""

from presage.batch import Plan, call, given, loop, template

text = given("text")
WRITER, CRITIC = "You write summaries of three sentences.", "You compare summaries with their texts."
draft = call("writer", template("{text}\n\nSummarise.", text=text), system=WRITER, max_tokens=120)


def criticised(summary):
    """What a critic says of a summary."""
    return call(
        "critic",
        template("{text}\n\nSummary: {summary}\n\nName one error, or say: none.", text=text, summary=summary),
        system=CRITIC,
        max_tokens=40,
    )


def revised(summary):
    """The summary, written again."""
    return call(
        "writer",
        template(
            "{text}\n\nA summary: {summary}\n\nA critic: {critic}\n\nWrite it again.",
            text=text,
            summary=summary,
            critic=criticised(summary),
        ),
        system=WRITER,
        max_tokens=120,
    )


def is_short(summary):
    """Whether the loop is over."""
    return len(summary) < 300


summary = loop(revised(draft), revised, until=is_short, at_most=2)
plan = Plan("reflection", summary=summary, first_draft=draft)
