"""What servers take of what the gateway adds to requests.

Some refuse fields that they do not know (`stream_options` at an older server, `priority` at another provider's). Such a
request is sent once more with less, and the next ones without that from the beginning. Each server is asked anew after
a while, since it may be another one by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Literal

Additions = Literal["all", "annotations", "none"]
"""All; without the wish for token counts; nothing, as without the gateway."""
ORDER: Final[tuple[Additions, ...]] = ("all", "annotations", "none")

REFUSED: Final = frozenset((400, 405, 415, 422, 500, 501))
"""Statuses with which servers refuse fields. The answer to the request without them is what the client gets."""
ASK_ANEW_S: Final = 600.0
_MOST: Final = 1000

Key = tuple[str, str, str]
"""Server, model and API."""


class Tolerance:
    """What each server takes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._takes: OrderedDict[Key, tuple[Additions, float]] = OrderedDict()

    def to_try(self, key: Key) -> Sequence[Additions]:
        """What to add to a request, and if it is refused."""
        takes = self._takes.get(key)
        return ORDER if takes is None or self._clock() - takes[1] > ASK_ANEW_S else (takes[0],)

    def takes(self, key: Key, additions: Additions) -> None:
        """A server has taken a request with these."""
        before = self._takes.get(key)
        if before is not None and before[0] == additions and self._clock() - before[1] <= ASK_ANEW_S:
            return
        self._takes[key] = additions, self._clock()
        self._takes.move_to_end(key)
        if len(self._takes) > _MOST:
            self._takes.popitem(last=False)
