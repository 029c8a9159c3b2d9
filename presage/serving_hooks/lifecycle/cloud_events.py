"""Lifecycle events as CloudEvents 1.0: JSON in structured mode, one event or a batch.

`type` is `presage.` and the kind, `subject` the workflow's id, and `data` holds all other fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from presage.errors import WebhookError
from presage.serving_hooks.lifecycle.event import LIFECYCLE_KINDS, LifecycleEvent

ONE: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
_PREFIX: Final = "presage."
_ENVELOPE: Final = ("id", "source", "kind", "at")


def as_cloud_event(event: LifecycleEvent) -> bytes:
    """The event as a JSON object."""
    data: dict[str, Any] = msgspec.to_builtins(event)
    event_id, source, kind, at = (data.pop(name) for name in _ENVELOPE)
    return msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": event_id,
            "source": source,
            "type": _PREFIX + kind,
            "subject": data["workflow_id"],
            "time": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "data": data,
        }
    )


def batched(events: Sequence[bytes]) -> bytes:
    """Several such objects as one array."""
    return b"[" + b",".join(events) + b"]"


def read_cloud_events(body: bytes) -> list[LifecycleEvent]:
    """The events of a body, one or a batch. Kinds that this version does not know are left out.

    Raises:
        WebhookError: it is no CloudEvent of ours.
    """
    try:
        found = msgspec.json.decode(body)
        return [_read(one) for one in (found if isinstance(found, list) else [found]) if _known(one)]
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WebhookError(
            f"the body is no CloudEvent of Presage ({type(error).__name__}); send what `webhook` of a gateway or an "
            "engine sends"
        ) from None


def _known(one: dict[str, Any]) -> bool:
    return one["type"].removeprefix(_PREFIX) in LIFECYCLE_KINDS


def _read(one: dict[str, Any]) -> LifecycleEvent:
    envelope = {"kind": one["type"].removeprefix(_PREFIX), "at": datetime.fromisoformat(one["time"]).timestamp()}
    return msgspec.convert({**one["data"], "id": one["id"], "source": one["source"], **envelope}, LifecycleEvent)
