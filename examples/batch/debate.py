"""Debate: two agents answer, read each other and answer again, each in its own conversation; a judge decides."""

from presage.batch import Plan, call, given, template
from presage.batch.operators import Operator

question = template("{text}\n\nQuestion: {question}", text=given("text"), question=given("question"))
SIDES = {"optimist": "You look for what speaks for it.", "critic": "You look for what speaks against it."}
talks: dict[str, list[tuple[str, str | Operator]]] = {side: [] for side in SIDES}
prompts: dict[str, Operator] = dict.fromkeys(SIDES, question)
said: dict[str, Operator] = {}
for _ in range(3):
    said = {
        side: call(side, prompts[side], system=system, history=talks[side], max_tokens=80)
        for side, system in SIDES.items()
    }
    for side, other in (("optimist", "critic"), ("critic", "optimist")):
        talks[side] += [("user", prompts[side]), ("assistant", said[side])]
        prompts[side] = template("The other one says: {other}\n\nAnswer again.", other=said[other])
verdict = call(
    "judge",
    template(
        "{question}\n\nFor: {a}\n\nAgainst: {b}\n\nWho is right?",
        question=question,
        a=said["optimist"],
        b=said["critic"],
    ),
    max_tokens=80,
)
plan = Plan("debate", verdict=verdict, optimist=said["optimist"], critic=said["critic"])
