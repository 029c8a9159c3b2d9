"""Conversations as turns: normalised texts by which a later prompt is recognised as the continuation of an earlier one.

A turn is one message, item or tool call. Roles are left out, since one agent's answer is another agent's input; system
messages are left out, since they change with the date and with the agent; so are reasoning and ids of tool calls, which
clients drop or replace. White space around texts and the layout of arguments do not count.

Prompts are untrusted. Time and memory are bounded: of a text past `LONGEST_TEXT` its head, tail and length are read, of
a conversation the first `MOST_TURNS` turns.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from presage.serving_hooks.identity.request import ApiRequest

MOST_TURNS: Final = 4096
LONGEST_TEXT: Final = 2**16
MOST_BYTES: Final = 2**21
"""Of a conversation; of later texts head, tail and length are read."""
_LONGEST_LATER: Final = 512
_MOST_PARTS: Final = 256
_MOST_CALLS: Final = 128
_DEEPEST: Final = 6
_CALL: Final = b"\0call "

LEAST_SENTENCE: Final = 32
_LONGEST_SENTENCE: Final = 512
_LABEL: Final = re.compile(rb"[\s{\"]*[A-Za-z_][\w ]{0,30}(?:\":|:\s)\s*")
_ENDS: Final = (b". ", b"! ", b"? ", b"\\n")
"""Of sentences, and of lines in JSON."""
_WIDE_ENDS: Final = tuple(end.encode() for end in "\u3002\uff01\uff1f")
_AROUND: Final = b" \t\r\n*->#`\"'|:,.!?{}"

_SYSTEM: Final = ("system", "developer")
_URLS: Final = ("image_url", "file_id", "url", "data", "input_audio", "file")


def turns(request: ApiRequest) -> list[bytes]:
    """The turns of a request, but to the completions API."""
    return of_messages(request.messages)


def of_messages(given: Any) -> list[bytes]:
    """The turns of messages or items, in order."""
    read: list[bytes] = []
    room = MOST_BYTES
    messages: Sequence[Any] = given if isinstance(given, list) else (given,)
    for message in islice(messages, 2 * MOST_TURNS):
        if len(read) >= MOST_TURNS:
            break
        if isinstance(message, dict):
            if message.get("role") in _SYSTEM or message.get("type") == "reasoning":
                continue
            content = message.get("content")
            if content is None:
                content = message.get("output")
            text = content if isinstance(content, str) else _text(content)
            calls = message.get("tool_calls")
            if message.get("type") == "function_call":
                calls = (message,)
        else:
            text, calls = message if isinstance(message, str) else "", None
        if text:
            turn = _normal(text, LONGEST_TEXT if room > 0 else _LONGEST_LATER)
            if turn:
                read.append(turn)
                room -= len(turn)
        if isinstance(calls, list | tuple):
            read += [_call(call) for call in calls[:_MOST_CALLS] if isinstance(call, dict)]
    return read[:MOST_TURNS]


def completion_bytes(prompt: Any) -> bytes:
    """The prompt of a completions request, text or token ids; of several the first."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[: 2 * MOST_BYTES].encode("utf-8", "surrogatepass")
    if isinstance(prompt, list):
        try:
            return array("Q", islice(prompt, MOST_BYTES)).tobytes()
        except (TypeError, ValueError, OverflowError):
            return b""
    return b""


def system_text(request: ApiRequest, longest: int) -> str:
    """The first characters of the system prompt; "" without one."""
    if request.endpoint == "completions":
        return ""
    parts: list[str] = []
    if request.endpoint == "responses":
        parts.append(_text(request.body.get("instructions")))
    given = request.messages
    for message in given[:MOST_TURNS] if isinstance(given, list) else ():
        if not isinstance(message, dict):
            continue
        if message.get("role") in _SYSTEM:
            parts.append(_text(message.get("content")))
        elif parts:
            break  # later ones are remarks on the conversation
    return "\n\n".join(part for part in parts if part)[:longest]


def tool_ids(message: Any) -> Iterator[str]:
    """Ids of the tool calls that a message makes or answers, those that cannot be guessed."""
    if not isinstance(message, dict):
        return
    calls = message.get("tool_calls")
    made = calls[:_MOST_CALLS] if isinstance(calls, list) else ()
    for tool_id in (
        message.get("tool_call_id"),
        message.get("call_id"),
        *(c.get("id") for c in made if type(c) is dict),
    ):
        if isinstance(tool_id, str) and is_unique(tool_id):
            yield tool_id


_UNIQUE: Final = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w.:/-]+")
_DRAWN: Final = re.compile(r"[A-Za-z0-9]{8}")
"""A pattern of its own: both in one tried every place for every length, 50 ms for 256 letters and a blank."""


def is_unique(name: str) -> bool:
    """Whether a name looks drawn at random, as a UUID or `call_a8Fk20dkPq` does and `functions.search:0` does not."""
    if not 12 <= len(name) <= 256 or _UNIQUE.fullmatch(name) is None or _DRAWN.search(name) is None:
        return False
    return sum(map(str.isdigit, name)) >= 2


def values_of(turn: bytes) -> list[bytes]:
    """The texts in a turn: itself, or the strings in a tool call's arguments or in JSON that it consists of."""
    call, _, arguments = turn.partition(b"(")
    text = arguments[:-1] if call.startswith(_CALL) else turn
    if text[:1] in (b"{", b"[") and len(text) <= LONGEST_TEXT:
        try:
            return list(islice(_strings(msgspec.json.decode(text), 0), _MOST_PARTS))
        except (msgspec.DecodeError, RecursionError):
            pass
    return [text]


def sentences(text: bytes, most: int) -> list[bytes]:
    """Sentences and lines that are long enough to be told apart, without labels, bullets and quotation marks."""
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT // 2] + b"\n" + text[-LONGEST_TEXT // 2 :]
    kept: list[bytes] = []
    for end in _ENDS if text.isascii() else (*_ENDS, *_WIDE_ENDS):  # much faster than a pattern
        text = text.replace(end, b"\n")
    for part in text.split(b"\n"):
        if len(part) < LEAST_SENTENCE:
            continue
        bare = without_label(part)
        if len(bare) >= LEAST_SENTENCE:
            kept.append(bare[:_LONGEST_SENTENCE])
    if len(kept) <= most:
        return kept
    return kept[: most // 2] + kept[-(most - most // 2) :]


def without_label(line: bytes) -> bytes:
    """A line without label, bullets, quotation marks and punctuation at its ends."""
    label = _LABEL.match(line)
    return (line[label.end() :] if label else line).strip(_AROUND)


PHRASE_WORDS: Final = 5
_WORD: Final = re.compile(rb"[0-9A-Za-z_]+|[\xc2-\xdf].|[\xe0-\xef]..|[\xf0-\xf4]...", re.DOTALL)


def phrases(text: bytes, most_words: int) -> list[int]:
    """A hash of each run of PHRASE_WORDS words, in order, whatever stands between the words; each character beyond
    ASCII is a word.

    Of a longer text the first and the last words are read, half of `most_words` each. Hashes are Python's, keyed for
    this process: much faster than digests.
    """
    longest = 16 * most_words
    halves = [text] if len(text) <= longest else [text[: longest // 2], text[-longest // 2 :]]
    most, hashes = most_words // len(halves), list[int]()
    for half in halves:
        words = _WORD.findall(half)
        words = words[:most] if half is halves[0] else words[-most:]
        hashes += map(hash, zip(*(words[first:] for first in range(PHRASE_WORDS)), strict=False))
    return hashes


def edges(text: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Hashes of the first one to PHRASE_WORDS - 1 words of a text, and of as many last ones."""
    first, last = _WORD.findall(text[:256]), _WORD.findall(text[-256:])
    lengths = range(1, PHRASE_WORDS)
    return tuple(hash((0, *first[:n])) for n in lengths), tuple(hash((1, *last[-n:])) for n in lengths)


def _normal(text: str, longest: int) -> bytes:
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    if len(text) > longest:
        text = f"{len(text)}\0{text[: longest // 2]}\0{text[-longest // 2 :]}"
    return text.strip().encode("utf-8", "surrogatepass")


def _text(content: Any, depth: int = 0) -> str:
    """The text of a message's content; of images and files, where they are."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if depth >= _DEEPEST:
            return ""
        return "\n".join(filter(None, (_text(part, depth + 1) for part in content[:_MOST_PARTS])))
    if not isinstance(content, Mapping):
        return ""
    for key in ("text", "content", "output"):
        if isinstance(content.get(key), str):
            return str(content[key])
    for key in _URLS:
        place = content.get(key)
        if isinstance(place, Mapping):
            place = next((place[name] for name in ("url", "data", "file_id") if isinstance(place.get(name), str)), None)
        if isinstance(place, str):
            return f"{len(place)}\0{place[:_LONGEST_LATER]}\0{place[-_LONGEST_LATER:]}"
    return ""


def _call(call: Mapping[str, Any]) -> bytes:
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    name, arguments = function.get("name"), function.get("arguments", function.get("args"))
    encoded = b""
    try:
        if isinstance(arguments, str):
            encoded = arguments[: 2 * LONGEST_TEXT].encode("utf-8", "surrogatepass")
            if len(encoded) <= LONGEST_TEXT:
                encoded = msgspec.json.encode(msgspec.json.decode(encoded), order="deterministic")
        else:
            encoded = msgspec.json.encode(arguments, order="deterministic")[:LONGEST_TEXT]
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError):
        encoded = encoded[: 2 * LONGEST_TEXT].strip()
    called = name[:_LONGEST_LATER] if isinstance(name, str) else ""
    return _CALL + called.encode("utf-8", "surrogatepass") + b"(" + encoded + b")"


def _strings(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, str):
        yield value.strip().encode("utf-8", "surrogatepass")
    elif depth < _DEEPEST and isinstance(value, dict | list):
        inside: Sequence[Any] = list(islice(value.values() if isinstance(value, dict) else value, _MOST_PARTS))
        for part in inside:
            yield from _strings(part, depth + 1)
