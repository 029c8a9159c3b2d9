"""Server-sent events on their way through the gateway."""

from __future__ import annotations

from typing import Final

_END: Final = b"\n\n"
LONGEST: Final = 2**20
"""Bytes of one event that are held back until it is complete."""


class UsageFilter:
    """Removes the event with token counts that the gateway asked for and the client did not.

    Servers send it last, with no choices. Parts of an event are held back until it is complete; servers send whole
    events, so nothing waits.
    """

    def __init__(self) -> None:
        self._rest = b""

    def passed(self, part: bytes) -> bytes:
        """What the client gets of a part."""
        whole = self._rest + part
        cut = max(whole.rfind(end) + len(end) if end in whole else 0 for end in (_END, b"\r\n\r\n"))
        self._rest = whole[cut:]
        found = whole[:cut]
        if len(self._rest) > LONGEST:
            found, self._rest = whole, b""
        if b'"choices":[]' in found or b'"choices": []' in found:
            found = b"".join(event + _END for event in found.split(_END) if event and not _is_usage(event))
        return found

    def rest(self) -> bytes:
        """What is left at the end of the stream."""
        found, self._rest = self._rest, b""
        return found


def _is_usage(event: bytes) -> bool:
    return (b'"choices":[]' in event or b'"choices": []' in event) and (b'"usage":{' in event or b'"usage": {' in event)
