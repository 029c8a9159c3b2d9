"""Heads of requests, bounded in bytes and seconds; the HTTP server alone bounds neither, and keeps all that comes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES: Final = 2**17
HEAD_S: Final = 60.0


class BoundedHeads(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._size: int | None = 0  # of the head that is arriving; None between its end and the next one
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client has connected."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, of which a head may be the first part."""
        if self._size is not None:
            self._size += len(data)
        super().data_received(data)
        if self._size is not None and self._size > MOST_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MOST_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        """It has ended."""
        self._size = None
        self._cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._cancel()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._cancel()
        self._size = self._size or 0
        self._late = self.loop.call_later(HEAD_S, self._close)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
