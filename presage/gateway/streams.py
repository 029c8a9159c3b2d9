"""The event with token counts that the gateway asks servers for, and clients have not asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from presage.serving_hooks.event_stream import EventReader, StreamEvent


class _Counts(msgspec.Struct):
    choices: Any = None
    usage: Any = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Counts)


class UsageFilter:
    """Takes that event out of a stream; all others pass byte for byte, each once it is whole."""

    def __init__(self) -> None:
        self._reader = EventReader()
        self._cut = False  # an event was taken out that ended with CR: an LF after it is a part of its end

    def passed(self, part: bytes) -> tuple[bytes, list[StreamEvent]]:
        """What the client gets once a part has come, and all events that it completes."""
        events = self._reader.add(part)
        return self._without_counts(events), events

    def rest(self) -> tuple[bytes, list[StreamEvent]]:
        """The same at the end of the stream."""
        events = self._reader.end()
        return self._without_counts(events), events

    def _without_counts(self, events: list[StreamEvent]) -> bytes:
        passed = []
        for event in events:
            cut, self._cut = self._cut, False
            if _has_counts_alone(event):
                self._cut = event.raw.endswith(b"\r")
            else:
                passed.append(event.raw.removeprefix(b"\n") if cut else event.raw)
        return b"".join(passed)


def _has_counts_alone(event: StreamEvent) -> bool:
    """Servers send it last, with no choices: an empty list, null, or no such key."""
    if event.data is None or b'"usage"' not in event.data:
        return False
    try:
        read = _DECODER.decode(event.data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(read.usage, dict) and not read.choices and not read.error
