"""A receiver of webhooks on a port of this machine, which verifies what comes and can be away for a while."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from presage.errors import WebhookError
from presage.serving_hooks.lifecycle.cloud_events import read_cloud_events
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.receiver import WebhookReceiver


class ReceivingServer:
    """Serves while it is entered; entered again, on the same port.

    Attributes:
        status: answers with it, and takes nothing, unless it is 200.
        headers: of each delivery that came while it was 200.
        delivered: ids of the events of these deliveries, duplicates among them.
        events: those that are new.
    """

    def __init__(self, secret: str) -> None:
        self.status, self.port = 200, 0
        self.headers: list[Mapping[str, str]] = []
        self.delivered: list[str] = []
        self.events: list[LifecycleEvent] = []
        self._receiver = WebhookReceiver(secret)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}/events"

    def __enter__(self) -> Self:
        take, self.is_open = self._take, True
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if not server.is_open:
                    self.close_connection = True  # it outlived the server
                    return
                self.send_response(take(dict(self.headers), body))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.is_open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, headers: Mapping[str, str], body: bytes) -> int:
        if self.status != 200:
            return self.status
        try:
            with self._receiver.received(headers, body) as new:
                self.headers.append(headers)
                self.delivered += [event.id for event in read_cloud_events(body)]
                self.events += new
        except WebhookError:
            return 400
        return 200
