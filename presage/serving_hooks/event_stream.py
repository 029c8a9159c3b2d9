"""Server-sent events of an answer, as its bytes come: what each event says, and the bytes that it consists of.

Lines may end with CR, LF or CRLF, mixed, and parts may be cut anywhere (WHATWG HTML, 9.2.6). The bytes of all events,
one after the other, are the stream. An event that the stream breaks off in, or that lacks its blank line, counts: many
servers leave the last one out.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

LONGEST: Final = 2**22
"""Bytes of an event that is read; a longer one passes in pieces, unread."""

_BLANK: Final = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_BOM: Final = b"\xef\xbb\xbf"
_LONGEST_END: Final = 3
"""Bytes that may begin the end of an event whose last byte has not come."""


class StreamEvent(NamedTuple):
    """One event, or a piece of a stream that says nothing, such as a comment.

    Attributes:
        raw: its bytes, with the blank line.
        data: its data lines, joined by LF; None if it has none.
        name: of the field `event`.
    """

    raw: bytes
    data: bytes | None = None
    name: bytes = b""


class EventReader:
    """The events of one stream."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun = self._unread = False

    def add(self, part: bytes) -> list[StreamEvent]:
        """A part has come; returns the events that it completes."""
        rest, events, begin = self._rest, [], 0
        searched = max(0, len(rest) - _LONGEST_END)
        rest += part
        for end in [match.end() for match in _BLANK.finditer(rest, searched)]:
            events.append(self._event(bytes(rest[begin:end])))
            begin = end
        if len(rest) - begin > LONGEST:
            events.append(StreamEvent(bytes(rest[begin:-_LONGEST_END])))
            begin, self._begun, self._unread = len(rest) - _LONGEST_END, True, True
        del rest[:begin]
        return events

    def end(self) -> list[StreamEvent]:
        """No further part comes; returns the event in which the stream ended."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [self._event(rest)] if rest else []

    def _event(self, raw: bytes) -> StreamEvent:
        text = raw if self._begun else raw.removeprefix(_BOM)
        unread, self._begun, self._unread = self._unread, True, False
        if unread:
            return StreamEvent(raw)
        if text.startswith(b"data: {") and text.find(b"\n") == len(text) - 2 and b"\r" not in text:  # nearly always
            return StreamEvent(raw, text[6:-2])
        lines, name = [], b""
        for line in _LINE_END.split(text):
            field, _, value = line.partition(b":")
            if field == b"data":
                lines.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
        return StreamEvent(raw, b"\n".join(lines) if lines else None, name)
