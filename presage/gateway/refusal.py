"""Answers of the gateway's own, as OpenAI's and Anthropic's APIs word errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Refusal(Exception):  # noqa: N818  an answer, not an error of ours
    """The answer to a request that is not forwarded, or whose upstream gave none."""

    def __init__(self, status: int, message: str, code: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, list(headers)

    @property
    def error(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"type": "error", "error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    async def send(self, send: Send) -> None:
        """Answers the request."""
        body = msgspec.json.encode(self.error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
