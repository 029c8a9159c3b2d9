"""No request is lost on a kept-alive connection: idle for longer than vLLM keeps one, held, beside clients that go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests start its server")

import httpx
from feedback_loop import Server, make_model, started
from soak import ANSWERED, BLOCKS, GAVE_UP, MODEL, OURS, SERVERS, TEMPLATE, WORDS, Planned, send

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.engine]
IDLE_S = 6.0
"""Longer than vLLM's own keep-alive time-out, 5 s."""
HELD_S = 2 * IDLE_S
"""Long enough that a busy machine, too, asks for the status meanwhile."""
LINES = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kept")
    make_model(folder / "model")
    with started(folder, SERVERS["with hooks"], BLOCKS, "--chat-template", TEMPLATE, *OURS) as up:
        yield up


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(keepalive_expiry=90))


def request(number: int, *, held_s: float = 0.0, gives_up_s: float | None = None) -> Planned:
    """A step of a workflow of its own; streamed and not, of chat and of completions."""
    chat, stream = number % 2 == 0, number // 2 % 2 == 0
    words = " ".join(WORDS[number : number + 40])
    agent = f"hold_{held_s}" if held_s else "agent"
    sent = {"workflow_type": "kept", "workflow_id": f"w{number}", "agent": agent}
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
        "vllm_xargs": sent,
        **({"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}),
    }
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Planned(f"w{number}-0", path, body, held_s, gives_up_s, 0.0)


def test_requests_held_for_longer_than_time_outs_are_answered_beside_clients_that_go(server: Server) -> None:
    async def line(number: int, together: asyncio.Barrier) -> None:
        async with client(server) as kept:
            plain = await send(kept, request(number))
            await together.wait()
            sent = await send(kept, request(number, held_s=HELD_S, gives_up_s=1.0 if number >= 8 else None))
            after = await send(kept, request(number))
        assert (plain.outcome, after.outcome) == (ANSWERED, ANSWERED)
        assert sent.outcome == (GAVE_UP if number >= 8 else ANSWERED)
        assert sent.tokens in ((), plain.tokens)
        assert after.tokens == plain.tokens

    async def all_lines() -> int:
        together = asyncio.Barrier(LINES)
        lines = asyncio.gather(*(line(number, together) for number in range(LINES)))
        most = 0
        async with client(server) as other:
            while not lines.done():  # also keeps the engine from standing still
                await send(other, request(100))
                (told,) = (await other.get("/v1/workflows/status")).json()["engines"]
                most = max(most, told["admission"]["held_requests"])
        await lines
        return most

    assert asyncio.run(all_lines()) >= 8, "all of those that stay were held at once"
    time.sleep(1.0)  # the server computes a status once a second
    assert server.status()["admission"]["held_requests"] == 0
    assert "Traceback" not in server.log.read_text()


def test_a_connection_stays_open_for_longer_than_vllm_keeps_it(server: Server) -> None:
    async def ports() -> list[int]:
        found = []
        async with client(server) as kept:
            for pause_s in (0.0, IDLE_S):
                await asyncio.sleep(pause_s)
                answer = await kept.get("/health")
                found.append(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
        return found

    first, second = asyncio.run(ports())
    assert first == second
