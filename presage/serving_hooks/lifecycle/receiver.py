"""The receiving side of webhooks: verifies, reads, and leaves out events that were handled before."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from presage.serving_hooks.lifecycle.cloud_events import read_cloud_events
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.signature import secret_keys, verify


class WebhookReceiver:
    """Reads deliveries. Not thread-safe.

    Known ids are in memory: after a restart of the receiver, an event may be handled a second time.

    Args:
        secret: as the sender has it; during a rotation two, separated by a space.
        most: ids of handled events that are known, the latest.
        now: seconds since 1970.

    Raises:
        ConfigurationError: the secret has another form.
    """

    def __init__(self, secret: str, most: int = 100_000, now: Callable[[], float] = time.time) -> None:
        self._keys, self._most, self._now = secret_keys(secret), most, now
        self._handled: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def received(self, headers: Mapping[str, str], body: bytes) -> Iterator[list[LifecycleEvent]]:
        """The events of a delivery that are new. They count as handled once the block ends without an exception.

        Answer 2xx after the block, and 5xx if it raises: then the delivery comes again.

        Raises:
            WebhookError: the delivery is not signed by the sender, or cannot be read; answer 400.
        """
        verify(self._keys, headers, body, self._now())
        new = {event.id: event for event in read_cloud_events(body) if event.id not in self._handled}
        yield list(new.values())
        self._handled.update(dict.fromkeys(new))
        while len(self._handled) > self._most:
            self._handled.popitem(last=False)
