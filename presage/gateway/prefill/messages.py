"""Chat messages from the known beginning of a prompt as ingestion reads it, one text: exactly or not at all.

In that text, which templates are learnt from, nothing says where a message ends: messages are joined by blank lines,
which they may contain, too. So the agent's earlier prompts must agree on the system messages, on the roles, and on what
each message but the last is: always the same, or always a certain earlier message or answer of the workflow. A message
that the beginning does not hold to its end is left open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple

BETWEEN: Final = "\n\n"
"""Between two messages (`datasets/schema/messages.py`)."""
MOST_MESSAGES: Final = 256
MOST_RANKS: Final = 4
"""Steps of one agent, from the latest, whose messages and answers a message is compared with."""
MOST_STEPS: Final = 16
"""Steps of the workflow, from the latest, likewise."""

INPUTS: Final = (
    "model", "tools", "tool_choice", "functions", "function_call", "documents", "chat_template", "chat_template_kwargs",
    "reasoning_effort", "add_special_tokens", "response_format", "cache_salt",
)  # fmt: skip
"""Fields of a request that may change its prompt, or whose cache it shares."""
_CHANGES_THE_PROMPT: Final = ("continue_final_message", "truncate_prompt_tokens", "prompt_embeds", "lora_request")
_SYSTEM: Final = ("system", "developer")
_ROLES: Final = (*_SYSTEM, "user", "assistant")

Unmapped = Literal["another system prompt", "unclear where messages end"]


class PlainMessage(NamedTuple):
    """A message of a role and a text alone."""

    role: str
    content: str


class MessageOrigin(NamedTuple):
    """What a message is: one of the messages, or the answer, of an agent's latest step but `rank` - 1."""

    kind: Literal["message", "answer"]
    agent: str
    rank: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class StepMessages:
    """A step of a workflow: its agent, prompt and answer; None where they are unknown, or not plain."""

    agent: str
    messages: tuple[PlainMessage, ...] | None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """What the prompts of an agent have in common.

    Attributes:
        system: their system messages.
        roles: of the other messages.
        constants: each of these but the last, where it is always the same.
        origins: what else it always is.
        inputs: their `INPUTS`, without the salt of the cache.
        prompts: how many agree; of different workflows.
    """

    system: tuple[PlainMessage, ...]
    roles: tuple[str, ...]
    constants: tuple[str | None, ...]
    origins: tuple[frozenset[MessageOrigin], ...]
    inputs: Mapping[str, Any]
    prompts: int = 1

    def joined(self, other: PromptForm) -> PromptForm:
        """The form of these prompts and of a later one; that of the later one alone if they differ.

        A single prompt in which a message is something else than in several before it only puts these in doubt: the
        next one decides.
        """
        if (self.system, self.roles, self.inputs) != (other.system, other.roles, other.inputs):
            return other
        constants = tuple(
            ours if ours == theirs else None for ours, theirs in zip(self.constants, other.constants, strict=True)
        )
        origins = tuple(ours & theirs for ours, theirs in zip(self.origins, other.origins, strict=True))
        several = self.prompts > 1
        for number, (constant, sources) in enumerate(zip(constants, origins, strict=True)):
            was_known = self.origins[number] or (several and self.constants[number] is not None)
            if was_known and constant is None and not sources:
                return replace(self, prompts=1) if several else other
        return PromptForm(self.system, self.roles, constants, origins, self.inputs, self.prompts + 1)

    @property
    def characters(self) -> int:
        """Of the texts that it keeps."""
        return sum(len(message.content) for message in self.system) + sum(
            len(constant or "") for constant in self.constants
        )


def plain_messages(body: Mapping[str, Any]) -> tuple[PlainMessage, ...] | None:
    """The messages of a chat request; None if one is no role and text, or anything else would change the prompt."""
    given = body.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        return None
    if body.get("add_generation_prompt") is False or any(body.get(name) for name in _CHANGES_THE_PROMPT):
        return None
    messages = []
    for message in given:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            return None
        role, content = message["role"], message["content"]
        if role not in _ROLES or not isinstance(content, str) or not content:
            return None
        messages.append(PlainMessage(role, content))
    system = len(_system(messages))
    return (
        None
        if any(message.role in _SYSTEM for message in messages[system:]) or system == len(messages)
        else tuple(messages)
    )


def prompt_inputs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The `INPUTS` that a request has, without the salt of the cache, which is its sender's."""
    return {name: body[name] for name in INPUTS if name != "cache_salt" and body.get(name) is not None}


def form_of(messages: Sequence[PlainMessage], inputs: Mapping[str, Any], earlier: Sequence[StepMessages]) -> PromptForm:
    """The form of one prompt; `earlier` are the steps of its workflow before it."""
    system = _system(messages)
    other = messages[len(system) :]
    whole = tuple(message.content for message in other[:-1])
    texts = dict(_texts(earlier))
    origins = tuple(frozenset(origin for origin, text in texts.items() if text == content) for content in whole)
    return PromptForm(tuple(system), tuple(message.role for message in other), whole, origins, inputs)


def messages_of(prefix: str, form: PromptForm, earlier: Sequence[StepMessages]) -> list[PlainMessage] | Unmapped:
    """The messages that a prompt of this form begins with, the last one open, if its text begins with `prefix`.

    Args:
        earlier: the steps of the workflow so far.
    """
    system = BETWEEN.join(message.content for message in form.system)
    if not prefix.startswith(system):
        return "another system prompt"
    messages, position, earlier_texts = list(form.system), len(system), dict(_texts(earlier))
    for number, role in enumerate(form.roles):
        rest = prefix[position:]
        if number == len(form.roles) - 1:
            return _with(messages, role, rest)
        texts = {form.constants[number], *map(earlier_texts.get, form.origins[number])} - {None}
        text = texts.pop() if len(texts) == 1 else None
        if text is not None and rest.startswith(text + BETWEEN):
            messages.append(PlainMessage(role, text))
            position += len(text) + len(BETWEEN)
            continue
        whole = text is not None and (text + BETWEEN).startswith(rest)
        if not whole and (text is not None or BETWEEN in rest):
            return "unclear where messages end"
        if role == "assistant":
            return messages  # templates write the last answer of a conversation otherwise than earlier ones
        return _with(messages, role, text if whole and text is not None and len(rest) > len(text) else rest)
    return messages


def rendered(messages: Sequence[PlainMessage], open_: bool = False) -> str:
    """Messages as one text in which their ends can be told, for comparisons; `open_`: the last one has no end."""
    text = "".join(f"{message.role}\x1f{message.content}\x1e" for message in messages)
    return text[:-1] if open_ and messages else text


def _with(messages: list[PlainMessage], role: str, text: str) -> list[PlainMessage]:
    """Further an open message, without white space at its end, which is part of a token with what follows."""
    text = text.rstrip()
    return [*messages, PlainMessage(role, text)] if text else messages


def _system(messages: Sequence[PlainMessage]) -> list[PlainMessage]:
    return list(takewhile(lambda message: message.role in _SYSTEM, messages))


def _texts(earlier: Sequence[StepMessages]) -> Iterator[tuple[MessageOrigin, str]]:
    """The messages and answers of earlier steps, by what they are now."""
    ranks: dict[str, int] = {}
    for step in reversed(earlier[-MOST_STEPS:]):
        rank = ranks[step.agent] = ranks.get(step.agent, 0) + 1
        if rank > MOST_RANKS:
            continue
        if step.answer:
            yield MessageOrigin("answer", step.agent, rank), step.answer
        for index, message in enumerate(step.messages or ()):
            yield MessageOrigin("message", step.agent, rank, index), message.content
