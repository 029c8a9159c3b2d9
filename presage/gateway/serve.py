"""Builds a gateway from its settings, and serves it."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from presage.errors import ConfigurationError, PresageError
from presage.features.agent_names import AgentNames
from presage.gateway.config import GatewayConfig
from presage.gateway.decisions import Decisions
from presage.gateway.dialects.names import SafeNames
from presage.gateway.front import Front
from presage.gateway.heads import BoundedHeads
from presage.gateway.metrics import GatewayMetrics
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictor_kinds import KINDS
from presage.serving_hooks.addresses import split_address
from presage.serving_hooks.counts import DEADLINES, FORECASTS, RECORDER, EventCounts
from presage.serving_hooks.forecasting.champions import load_forecasts
from presage.serving_hooks.identity.identifier import Identifier
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.serving_hooks.modes import Modes
from presage.serving_hooks.recorder.recorder import start

Host = Callable[[Front], AbstractAsyncContextManager[Any]]

_log = logging.getLogger(__name__)


def build_decisions(config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> Decisions:
    """What a gateway decides with, its models loaded, for a host that routes requests itself.

    Raises:
        PresageError: API keys or the secret of the webhook are not set, the file of agent names is broken, the file for
            events cannot be used, or the configured redaction or function of forecasts cannot be loaded. A missing
            model or registry raises nothing.
    """
    given, counts = config.forecasts, EventCounts(FORECASTS, RECORDER, DEADLINES)
    names = AgentNames.load(Path(config.agent_names)) if config.agent_names else None
    modes = Modes(config.modes.default, config.modes.policies, config.modes.workflow_types, known=config.policies)
    served = (kind for kind in KINDS.values() if kind.counted)
    engines_alone = {kind.name.replace("-", "_"): None for kind in served if not kind.in_gateway}
    forecasts = load_forecasts(given.model_copy(update=engines_alone), texts=("next-agent", "remaining-length"))
    decisions = Decisions(
        Identifier(names=names, counts=counts, most_conversations=given.max_workflows),
        forecasts,
        modes,
        counts,
        recorder=start(given.recorder),
        webhook=Webhook(config.webhook).start() if config.webhook is not None else None,
        time_to_live_s=given.time_to_live_s,
        most_workflows=given.max_workflows,
        retention_target=given.retention_target,
        objectives=config.objectives.settings(),
        shown=given.explain,
        clock=clock,
        names=SafeNames(config.names_secret()),
        workflow_types=config.workflow_type,
    )
    if forecasts.upkeep is not None:
        forecasts.upkeep.start()
    return decisions


def build(config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> Front:
    """A gateway with its models loaded; `front.app()` is its ASGI application.

    Raises:
        PresageError: as `build_decisions`, or an engine file is broken.
    """
    decisions = build_decisions(config, clock)
    return Front(config, decisions, GatewayMetrics(decisions.status), clock)


def simulated() -> str:
    """Starts a simulated engine on a free port of this machine, for as long as the process runs; returns its URL."""
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # with another one asyncio leaves Nagle's algorithm on
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(SimulatedEngine().app(), log_level="error", access_log=False))
    threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True).start()
    host, port = listening.getsockname()
    return f"http://{host}:{port}"


def beside(app: Starlette, front: Front, hosts: Sequence[Host]) -> Starlette:
    """The application, with hosts that run for as long as it does, in its event loop."""
    alone = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            await running.enter_async_context(alone(app))
            for host in hosts:
                await running.enter_async_context(host(front))
            yield

    app.router.lifespan_context = lifespan
    return app


def listening_socket(address: str) -> socket.socket:
    """A socket that is bound to an address, host:port, and does not listen yet.

    Raises:
        ConfigurationError: another program listens there, or the address is not this machine's.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise _cannot_listen(address, error) from None
    return listening


def _cannot_listen(address: str, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        what = "another program listens there; stop it, or give another port"
    else:
        what = f"{(error.strerror or type(error).__name__).lower()}; give an address of this machine and a free port"
    return ConfigurationError(f"{address} cannot be listened on: {what}")


class _AnnouncedServer(uvicorn.Server):
    """Says that it listens once it does."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


def serve(config: GatewayConfig, hosts: Sequence[Host] = ()) -> None:
    """Serves until it is told to stop; running requests get `drain_s` to finish.

    Args:
        hosts: that ask the gateway for decisions, beside its HTTP.

    Raises:
        PresageError: as `build`, or the address cannot be listened on.
    """
    listening = listening_socket(config.listen)
    front = build(config)
    names = ", ".join(f"{upstream.name} ({upstream.settings.dialect})" for upstream in front.upstreams.all)
    gc.collect()
    gc.freeze()  # a full collection of what is loaded now stops all requests for 60 ms
    settings = uvicorn.Config(
        beside(front.app(), front, hosts),
        http=BoundedHeads,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=round(config.limits.drain_s),
    )
    server = _AnnouncedServer(
        settings,
        lambda: _log.info(
            "the gateway listens on %s and forwards to %s; http://%s/ shows it", config.listen, names, config.listen
        ),
    )
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    except OSError as error:  # another program was faster
        raise _cannot_listen(config.listen, error) from None
    finally:
        listening.close()
    if not server.started:
        raise PresageError("the gateway did not start; the lines above say why")
