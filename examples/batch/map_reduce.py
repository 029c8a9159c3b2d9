"""Map-reduce: experts read a text and a question about it, each by itself; a writer makes one answer of theirs.

What each has to do stands after the text: so all of them read the text from the engine's cache.
"""

from presage.batch import Plan, call, given, join, template

EXPERTS = {
    "facts": "Quote what the text says about the question, and nothing else.",
    "doubts": "Say what the text leaves open about the question.",
    "numbers": "List every number in the text that bears on the question.",
}
read = template("{text}\n\nQuestion: {question}", text=given("text"), question=given("question"))
notes = [
    call(name, template("{read}\n\n{task}", read=read, task=task), system="You are one of a team.", max_tokens=80)
    for name, task in EXPERTS.items()
]
answer = call(
    "writer",
    template(
        "Question: {question}\n\nNotes:\n{notes}\n\nAnswer in two sentences.",
        question=given("question"),
        notes=join(notes),
    ),
    max_tokens=100,
)
plan = Plan("map-reduce", answer=answer)
