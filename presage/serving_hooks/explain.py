"""Explains one workflow: its forecasts, the decisions about it, and their reasons. No text of a prompt is kept.

One ring buffer keeps the latest forecasts of all workflows, so an ended workflow can be explained for a while.
Everything else is read from the policies on request.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any, Final

from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths, LiveReturn

MOST_SHOWN: Final = 50
"""Latest forecasts of one workflow, and requests of it in the engine."""
AGENTS_SHOWN: Final = 8
"""Most likely agents of a forecast at each horizon."""


FRESH_S: Final = 1.0
"""Seconds for which an answer is given again."""
MOST_ANSWERS: Final = 64


class RecentAnswers:
    """Answers to questions that are asked again and again, each computed once in `FRESH_S`: on the engine's thread all
    requests wait for it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._given: OrderedDict[Hashable, tuple[float, dict[str, Any]]] = OrderedDict()

    def answer(self, question: Hashable, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer to a question, at most `FRESH_S` old."""
        now = self._clock()
        given = self._given.pop(question, None)
        if given is None or not 0 <= now - given[0] < FRESH_S:
            given = now, compute()
        self._given[question] = given
        if len(self._given) > MOST_ANSWERS:
            self._given.popitem(last=False)
        return given[1]


class LastForecasts:
    """The `most` latest forecasts of all workflows."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._ring: deque[tuple[float, Step, LiveForecast]] = deque(maxlen=most)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, step: Step, forecast: LiveForecast) -> None:
        """Adds a forecast."""
        self._ring.append((self._clock(), step, forecast))

    def of(self, workflow: str) -> list[dict[str, Any]]:
        """The forecasts of one workflow, the oldest first. Costs O(most)."""
        now = self._clock()
        made = (entry for entry in reversed(self._ring) if entry[1].workflow == workflow)
        return [_as_plain(step, live, now - made_s) for made_s, step, live in islice(made, MOST_SHOWN)][::-1]


def _as_plain(step: Step, forecast: LiveForecast, ago_s: float) -> dict[str, Any]:
    return {
        "ago_s": round(ago_s, 3),
        "agent": step.agent,
        "sent_agent": step.sent[1],
        "known_as": forecast.known_as,
        "step": step.number,
        "moment": forecast.moment,
        **_source(forecast),
        "horizons": [_row(row.tolist(), forecast.agents) for row in forecast.probabilities],
        "remaining": lengths_as_plain(forecast.remaining),
    }


def lengths_as_plain(lengths: LiveLengths) -> dict[str, Any]:
    """A forecast of tokens."""
    quantiles = {f"{q:g}": round(n, 1) for q, n in zip(lengths.quantiles, lengths.tokens, strict=True)}
    return {**_source(lengths), "quantiles": quantiles}


def return_as_plain(forecast: LiveReturn, away_s: float, target: float) -> dict[str, Any]:
    """The forecast of a workflow that has been away for `away_s`: the time that is left, given that it returns.

    `retention` is for caches outside the engine: the time to live from now on, see `ReturnForecast.ttl`.
    """
    from presage.serving_hooks.forecasting.return_times import waited  # only if used: it compiles

    plain: dict[str, Any] = {"away_s": round(away_s, 3), **_source(forecast), "end": None, "quantiles": {}}
    plain["retention"] = None
    if forecast.quantiles:
        left = waited(forecast, away_s)
        plain["end"] = round(left.end, 4)
        plain["quantiles"] = {f"{q:g}": round(seconds, 3) for q, seconds in left.quantiles.items()}
        plain["retention"] = {"target": target, "ttl_s": round(left.ttl(target), 3)}
    return plain


def _source(forecast: LiveForecast | LiveLengths | LiveReturn) -> dict[str, Any]:
    return {
        "source": forecast.source,
        "version": forecast.version,
        "evidence": forecast.evidence,
        "reason": forecast.reason,
    }


def _row(row: list[float], agents: tuple[str, ...]) -> dict[str, Any]:
    likeliest = heapq.nlargest(AGENTS_SHOWN, zip(row, agents, strict=False))
    return {"agents": {name: round(share, 4) for share, name in likeliest}, "end": round(row[-1], 4)}


def reasons(explanation: dict[str, Any]) -> list[str]:
    """The explanation in sentences, the most important first."""
    modes = explanation["modes"].items()
    sentences = [f"{policy} is {mode} for this workflow type" for policy, mode in modes if mode != "on"]
    if not explanation["alive"]:
        return [*sentences, "it is not running: it has ended or expired, or never arrived"]
    admission, blocks = explanation["admission"], explanation["blocks"]
    if admission is not None and admission["held"]:
        sentences.append(f"it is held: {admission['reason']}; for {admission['held_s']:.1f} s so far")
    elif admission is not None and admission["reason"]:
        sentences.append(f"admission would hold it ({admission['reason']}), but does not act on it")
    for request in explanation["requests"]:
        if request["place"] is not None:
            place = f"{request['place']} of {request['waiting']}"
            sentences.append(f"a request of agent {request['agent']!r} waits, {place}")
    if not explanation["forecasts"]:
        sentences.append("it has no recent forecast")
    elif explanation["forecasts"][-1]["source"] == "none":
        sentences.append(f"its last forecast is unknown: {explanation['forecasts'][-1]['reason']}")
    if explanation["forecasts"] and (last := explanation["forecasts"][-1])["sent_agent"] != last["agent"]:
        sentences.append(f"its agent {last['sent_agent']!r} is forecast as {last['agent']!r}")
    elif explanation["forecasts"] and last["known_as"] is not None:
        sentences.append(f"its agent {last['sent_agent']!r} is forecast as {last['known_as']!r}, whose place it takes")
    if explanation["position"] is not None:
        sentences += _stands(explanation["position"])
    if explanation["growth"] is not None:
        sentences.append(_grows(explanation["growth"], admission))
    if explanation["returns"] is not None:
        sentences.append(_away(explanation["returns"]))
        sentences += _kept(explanation["returns"])
    if (in_engine := explanation.get("in_engine", 0)) > MOST_SHOWN:  # earlier engines do not tell
        sentences.append(f"it has {in_engine} requests in the engine; the first {MOST_SHOWN} are shown")
    if blocks is not None and blocks["free"]:
        places = [group["before"] for group in blocks["groups"] if group["before"] is not None]
        first = f"{min(places)} others are evicted before the first" if places else "many others are evicted first"
        sentences.append(f"{blocks['free']} of its {blocks['blocks']} blocks are free; {first}")
    return sentences


def _stands(position: dict[str, Any]) -> list[str]:
    """Where it is on the profile of its type, and what workflows of its type do."""
    by = "profile" if position["version"] is None else f"profile {position['version']}"
    if position["state"] is None:
        return [f"{by} does not know where it is: no workflow that it learnt from ran this agent"]
    where = f"state {position['state']}, {' ‖ '.join(position['at'])}" if position["at"] else "its start"
    graph = "on the graph" if position["on_graph"] else "off the graph since a call that no workflow made before"
    left = "how many steps are left is unknown"
    if position["left"]:
        left = (
            f"{position['left']['mean']:.1f} further steps are expected (90 %: at most {position['left']['0.9']:.0f})"
        )
    doubt = "" if position["confident"] else f"; {by} is not confident"
    doubt += "" if position["own"] else f"; its type has no profile, so this is that of {position['workflow_type']}"
    return [f"by {by} it is in {where}, {graph}; {left}{doubt}", f"workflows of its type run {position['expression']}"]


def _grows(growth: dict[str, Any], admission: dict[str, Any] | None) -> str:
    tokens = {float(q): at_most for q, at_most in growth["quantiles"].items()}
    median, most = (min(tokens, key=lambda q: abs(q - wanted)) for wanted in (0.5, 0.9))
    by = growth["source"] if growth["version"] is None else f"{growth['source']} {growth['version']}"
    grows = f"its context is expected to grow by {tokens[median]:,.0f} tokens"
    counts = f"; admission counts it as {admission['context_tokens']:,} tokens" if admission is not None else ""
    return f"{grows} ({100 * most:g} %: at most {tokens[most]:,.0f}; {by}){counts}"


def _away(returns: dict[str, Any]) -> str:
    away = f"it has been away for {_duration(returns['away_s'])}"
    left = {float(q): seconds for q, seconds in returns["quantiles"].items()}
    if not left:
        return f"{away}; when it returns is unknown: {returns['reason']}"
    median, most = (min(left, key=lambda q: abs(q - wanted)) for wanted in (0.5, 0.9))
    back = f"expected back in {_duration(left[median])} ({100 * most:g} %: {_duration(left[most])})"
    return f"{away}; {back}; ended with probability {100 * returns['end']:.0f} %"


def _kept(returns: dict[str, Any]) -> list[str]:
    hint = returns["retention"]
    if hint is None:
        return []
    if not hint["ttl_s"]:
        return [f"caches outside need not keep it: it has ended with probability {100 * returns['end']:.0f} %"]
    return [f"caches outside should keep it for {_duration(hint['ttl_s'])} (target {100 * hint['target']:g} %)"]


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
