"""Lines of request logs: one JSON object a request, with a prompt, an answer and a time under the names that servers,
gateways and clients use.

What is compared later must be what an engine would compare: of messages, each begins with a token for its role, and a
prompt ends with that of the assistant, so that the prompt and its answer are the beginning of the next prompt. A log
that flattens prompts to texts does the same by itself. A time without an end is taken for the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from presage.continuation import text_tokens
from presage.datasets.schema.columns import utc_us
from presage.datasets.schema.messages import fields, finish_reason, from_json, plain, spoken

PROMPTS: Final = ("prompt_token_ids", "input_token_ids", "messages", "prompt", "input", "input_text")
_ANSWERS: Final = (
    *("output_token_ids", "response_token_ids", "choices", "output", "output_text", "response", "completion", "answer"),
    *("generated_text", "content"),
)
STARTS: Final = (
    *("started_at", "start_time", "startTime", "arrival_time", "request_time", "timestamp", "@timestamp", "time"),
    *("created_at", "created", "ts"),
)
_ENDS: Final = ("ended_at", "end_time", "endTime", "finished_at", "completed_at")
REQUESTS: Final = ("request", "request_body", "body")
_RESPONSES: Final = ("response", "response_body")
_INPUT_TOKENS: Final = ("input_tokens", "prompt_tokens")
_OUTPUT_TOKENS: Final = ("output_tokens", "completion_tokens")
_UNIT_US: Final = ((1e11, 10**6), (1e14, 10**3), (1e17, 1), (1e20, 1e-3))
"""Below which a number is in seconds, milliseconds, microseconds and nanoseconds since 1970."""
_MOST_TOKENS: Final = 2**31
_MOST_ID: Final = 2**62

_Read = TypeVar("_Read")


class LoggedRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request of a log.

    Attributes:
        started_us, ended_us: microseconds since 1970.
        said: role and text of each message, or the whole prompt as one text of the role "".
        prompt_ids, answer_ids: token ids, where recorded.
    """

    started_us: int
    ended_us: int | None
    said: list[tuple[str, str]]
    answer: str | None
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    workflow_type: str | None = None
    agent: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was asked."""
        return not (self.prompt_ids or any(text for _, text in self.said))

    def prompt_tokens(self) -> list[int]:
        """The prompt as tokens: ids as recorded, else what stands for them."""
        if self.prompt_ids is not None:
            return self.prompt_ids
        tokens: list[int] = []
        for role, text in self.said:
            tokens += [*_role(role), *text_tokens(text)]
        return tokens if self.said[-1][0] in ("", "assistant") else tokens + _role("assistant")

    def answer_tokens(self) -> list[int]:
        """The answer as tokens that are comparable with those of the prompt; none if they are not recorded."""
        if self.prompt_ids is not None:
            return self.answer_ids or []
        return text_tokens(self.answer or "")

    def system_tokens(self) -> list[int]:
        """The system messages as tokens."""
        return [token for role, text in self.said if role == "system" for token in text_tokens(text)]

    @property
    def system_prompt(self) -> str | None:
        """The system messages."""
        return "\n\n".join(text for role, text in self.said if role == "system") or None

    @property
    def input_text(self) -> str | None:
        """All other messages, or the whole prompt."""
        return "\n\n".join(text for role, text in self.said if role != "system") or None


def _role(role: str) -> list[int]:
    return [-1 - token for token in text_tokens(role)[:1]]  # no text has a negative token


class NotARequestError(ValueError):
    """A line is no request; the arguments are a message and a phrase for counting."""


def is_log(names: frozenset[str]) -> bool:
    """Whether a line with these keys may be a request that names neither a workflow nor its step."""
    asks = not names.isdisjoint(PROMPTS) or not names.isdisjoint(REQUESTS)
    return asks and not names.isdisjoint((*STARTS, *_ENDS)) and names.isdisjoint(("workflow_id", "step"))


def logged_request(line: Any) -> LoggedRequest:
    """What a line tells of a request; raises NotARequestError, without values, since they may be prompts."""
    if not isinstance(line, dict):
        raise NotARequestError("no JSON object; expected one request a line: repair the line", "no JSON object")
    asked = _inside(line, REQUESTS, PROMPTS)
    replied = _inside(line, _RESPONSES, _ANSWERS)
    started, ended = _time(line, STARTS), _time(line, _ENDS)
    if started is None:
        started, ended = ended, None
    if started is None:
        raise NotARequestError(f"no time; expected one of {', '.join(STARTS)}: add when it began", "no time")
    if ended is not None and ended < started:
        raise NotARequestError("ends before it starts: check the clock", "an end before its start")
    said, prompt_ids = prompt_of(asked)
    answer, answer_ids = _answer(replied)
    usage = fields(replied.get("usage")) or fields(line.get("usage"))
    cached = fields(usage.get("prompt_tokens_details") or usage.get("input_tokens_details")).get("cached_tokens")
    reason = _named(line, "finish_reason") or finish_reason(replied)
    return LoggedRequest(
        started,
        ended,
        said,
        answer,
        prompt_ids,
        answer_ids,
        _named(line, "workflow_type"),
        _named(line, "agent"),
        _named(line, "model") or _named(asked, "model"),
        reason,
        _count(line, usage, _INPUT_TOKENS, prompt_ids),
        _count(line, usage, _OUTPUT_TOKENS, answer_ids),
        _whole(line.get("cached_input_tokens", cached)),
    )


def _inside(line: dict[str, Any], names: tuple[str, ...], wanted: tuple[str, ...]) -> dict[str, Any]:
    """The object that has what is wanted: the line, or a body that it holds."""
    for name in names:
        body = fields(from_json(line.get(name)))
        if any(body.get(key) is not None for key in wanted):
            return body
    return line


def prompt_of(asked: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[int] | None]:
    """Role and text of each message, and token ids, of the body of a request; raises NotARequestError for none."""
    name = next((name for name in PROMPTS if asked.get(name) is not None), None)
    if name is None:
        raise NotARequestError(f"no prompt; expected one of {', '.join(PROMPTS)}: add it", "no prompt")
    value = asked[name]
    if name.endswith("_token_ids") or (isinstance(value, list) and value and type(value[0]) is int):
        ids = _ids(from_json(value), name)
        texts = {key: asked[key] for key in PROMPTS if not key.endswith("_token_ids") and asked.get(key) is not None}
        return (prompt_of({**texts, "system": asked.get("system")})[0] if texts and name not in texts else []), ids
    begin = [("system", text) for key in ("system", "instructions") if (text := plain(asked.get(key)))]
    if name == "messages":
        value = from_json(value)
    if isinstance(value, str):
        return ([*begin, ("user", value)] if begin else [("", value)]), None
    if not isinstance(value, list | dict):
        raise NotARequestError(
            f'"{name}" of type {type(value).__name__}; expected a text, messages or token ids: correct it',
            f"{name} of a wrong type",
        )
    return [*begin, *spoken(value, "user")] or [("", "")], None


def _answer(replied: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    answer, ids = None, None
    for name in _ANSWERS:
        value = replied.get(name)
        if value is None or (name in ("output", "content") and replied.get("choices") is not None):
            continue
        if name.endswith("_token_ids") or (isinstance(value, list) and value and type(value[0]) is int):
            ids = _ids(from_json(value), name) if ids is None else ids
        elif answer is None:
            first = value[:1] if name == "choices" and isinstance(value, list) else value
            answer = value if isinstance(value, str) else plain(first)
    return answer, ids


def _ids(value: Any, name: str) -> list[int]:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < _MOST_ID for token in value):
        return value
    raise NotARequestError(f'"{name}": expected a list of token ids: correct it', f"{name} that are no token ids")


def _time(line: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if line.get(name) is not None), None)
    if name is None:
        return None
    value = line[name]
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    for below, factor in _UNIT_US:
        if 0 <= number < below:
            return int(value * factor) if isinstance(value, int) and factor >= 1 else round(number * factor)
    try:
        moment = utc_us(value.strip())
    except (AttributeError, ValueError, OverflowError):
        moment = -1
    if moment < 0:
        raise NotARequestError(
            f'"{name}" is no time; expected one in ISO 8601, or a number of seconds, milliseconds, microseconds or '
            "nanoseconds since 1970: correct it",
            f"{name} that is no time",
        )
    return moment


def _named(line: Mapping[str, Any], name: str) -> str | None:
    value = line.get(name)
    return value if isinstance(value, str) and value.strip() and value.isprintable() and value != "END" else None


def _count(
    line: Mapping[str, Any], usage: Mapping[str, Any], names: tuple[str, ...], ids: list[int] | None
) -> int | None:
    counts = (_whole(source.get(name)) for source in (line, usage) for name in names)
    counted = next((count for count in counts if count is not None), None)
    return counted if counted is not None else len(ids) if ids else None


def _whole(value: Any) -> int | None:
    """A count of tokens; 0 is none, since no request and no answer is empty."""
    if isinstance(value, str) and value.isdecimal():  # of a CSV file
        value = int(value[:10])
    return value if type(value) is int and 0 < value < _MOST_TOKENS else None
