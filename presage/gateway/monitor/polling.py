"""Polls the upstreams of a fleet monitor: `/health`, and `/metrics` if that answers.

Each upstream is polled by itself, so one that hangs delays no other. Answers are bounded in time and bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import httpx

from presage.errors import InputError
from presage.gateway.monitor.fleet_monitor import FleetMonitor, FleetUpstream, MonitorSettings, Poll
from presage.serving_hooks.engine_metrics import read_engine_load

_HEADERS: Final = {"accept-encoding": "identity", "accept": "text/plain"}
"""A compressed page could be any number of bytes."""

_log = logging.getLogger(__name__)


async def watch(
    monitor: FleetMonitor, client: httpx.AsyncClient, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Polls until it is cancelled. The client should be used for nothing else, so that polls need not wait for it."""
    async with asyncio.TaskGroup() as group:
        for upstream in monitor.upstreams:
            group.create_task(_watch(monitor, upstream, client, sleep))


async def poll(upstream: FleetUpstream, client: httpx.AsyncClient, settings: MonitorSettings) -> Poll:
    """One poll. Does not raise."""
    base_url = upstream.base_url.rstrip("/")
    try:
        status, _ = await _get(client, f"{base_url}/health", settings.timeout_s, 0)
    except httpx.PoolTimeout:
        return Poll("unknown")
    except (TimeoutError, httpx.TimeoutException):
        return Poll("hangs")
    except httpx.TransportError:
        return Poll("dead")
    except Exception:
        _log.exception("the health of upstream %s cannot be polled", upstream.name)
        return Poll("unknown")
    if status >= 500:
        return Poll("dead")
    try:
        status, page = await _get(client, f"{base_url}/metrics", settings.timeout_s, settings.most_bytes)
        load = read_engine_load(page) if status == 200 else None
        return Poll("alive", load, without_load=status == 200 and load is None)
    except InputError:
        return Poll("alive", lies=True)
    except (TimeoutError, httpx.HTTPError):
        return Poll("alive")
    except Exception:
        _log.exception("the metrics of upstream %s cannot be polled", upstream.name)
        return Poll("alive")


async def _watch(
    monitor: FleetMonitor,
    upstream: FleetUpstream,
    client: httpx.AsyncClient,
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    while True:
        await sleep(monitor.due_s(upstream.name))
        monitor.polled(upstream.name, await poll(upstream, client, monitor.settings))


async def _get(client: httpx.AsyncClient, url: str, timeout_s: float, most_bytes: int) -> tuple[int, bytes]:
    """Status and body of an answer; `most_bytes` 0 reads no body."""
    page = bytearray()
    async with (
        asyncio.timeout(timeout_s),
        client.stream("GET", url, headers=_HEADERS, timeout=timeout_s, follow_redirects=False) as response,
    ):
        if most_bytes and response.status_code == 200:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InputError("a page of metrics that is compressed, though that was not asked for")
            async for part in response.aiter_bytes():
                page += part
                if len(page) > most_bytes:
                    raise InputError(f"a page of metrics of more than {most_bytes} bytes")
        return response.status_code, bytes(page)
