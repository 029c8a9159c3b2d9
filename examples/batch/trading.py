"""Trading: analysts report on a company's news, bull and bear argue, a trader decides by the row's strategy.

The reports depend on the company alone: rows of one company share them, and they are asked for once.
"""

from presage.batch import Plan, call, given, join, template

news, strategy = given("news"), given("strategy")
RULES = "You work for a fund. Be brief. Say what you do not know."
reports = [
    call(
        f"{aspect} analyst",
        template("{news}\n\nReport on its {aspect}.", news=news, aspect=aspect),
        system=RULES,
        max_tokens=80,
    )
    for aspect in ("business", "finances", "risks")
]
read = template("{news}\n\nReports:\n{reports}", news=news, reports=join(reports))
bull = call("bull", template("{read}\n\nArgue for buying.", read=read), system=RULES, max_tokens=80)
bear = call(
    "bear", template("{read}\n\nBull says: {bull}\n\nArgue against.", read=read, bull=bull), system=RULES, max_tokens=80
)
decision = call(
    "trader",
    template(
        "{read}\n\nBull: {bull}\nBear: {bear}\nStrategy: {strategy}\n\nBuy, hold or sell?",
        read=read,
        bull=bull,
        bear=bear,
        strategy=strategy,
    ),
    system=RULES,
    max_tokens=40,
)
plan = Plan("trading", decision=decision)
