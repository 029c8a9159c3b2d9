"""Iterative refinement: a summary is refined with one part of a long text after another."""

from presage.batch import Plan, call, given, template

SYSTEM = "You keep a running summary of a document that you read in parts. Keep it below 80 words."
summary = call("reader", template("First part:\n{part}", part=given("part1")), system=SYSTEM, max_tokens=120)
for name in ("part2", "part3"):
    summary = call(
        "reader",
        template("Summary so far:\n{summary}\n\nNext part:\n{part}", summary=summary, part=given(name)),
        system=SYSTEM,
        max_tokens=120,
    )
plan = Plan("refinement", summary=summary)
