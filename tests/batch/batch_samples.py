"""Plans and a server for tests of batches: it answers with what it was asked, or as a test says."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import httpx

from presage.batch import Plan, branch, call, function, given, join, loop, map_each, template

ENGINE = "http://engine"


def reviews() -> Plan:
    """Every operator: drafts by two experts, a list of points, a branch, a bounded loop."""
    question = given("question")
    drafts = [call(role, template("{q}", q=question), system=f"You are a {role}.") for role in ("lawyer", "doctor")]
    points = map_each(function(str.split, question), lambda word: call("lister", template("explain {w}", w=word)))
    longer = loop(join(drafts), lambda text: call("editor", template("shorten: {t}", t=text)), until=short, at_most=3)
    checked = branch(given("check"), call("checker", template("check {t}", t=longer)), "not checked")
    listed = function(WITHOUT, function(functools.partial(str.split, sep=" "), question))
    return Plan("reviews", answer=longer, points=join(points, "|"), check=checked, listed=listed)


def _without(left_out: set[str], words: list[str]) -> list[str]:
    return [word for word in words if word not in left_out and word not in SPELT.values()]


SPELT = {"the": "a", "an": "a"}
WITHOUT = functools.partial(_without, {"a", "the", "an", "of"})


def short(text: str) -> bool:
    return len(text) < 40


class Echo(httpx.AsyncBaseTransport):
    """A server in this process.

    Args:
        says: the answer to some messages, or a whole message; a number is an HTTP status instead.
        cache_tokens: as vLLM tells the size of its cache in its metrics; 0: no metrics.
        tokens: that four characters of a prompt have.

    Attributes:
        under_way: at each call, how many there were at that time.
    """

    def __init__(
        self,
        says: Callable[[list[dict[str, str]]], str | int | dict[str, Any]] | None = None,
        delay_s: float = 0.0,
        cache_tokens: int = 0,
        tokens: float = 1.0,
    ) -> None:
        self.says = says or (lambda messages: f"<{messages[-1]['content'][:20]}>")
        self.delay_s, self.tokens = delay_s, tokens
        self.under_way: list[int] = []
        blocks = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{cache_tokens // 16}"}} 1.0'
        self.metrics = f"vllm:num_requests_running 0.0\n{blocks}\n" if cache_tokens else ""
        self.hosts: list[str] = []
        self.models = ["tiny"]
        self.asked: list[dict[str, Any]] = []
        self.names: list[tuple[str, str, str]] = []
        self.ended: list[str] = []
        self.now = self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name, "root": f"{name}-1"} for name in self.models]})
        if path == "/metrics":
            return httpx.Response(200 if self.metrics else 404, text=self.metrics)
        if path.startswith("/v1/workflows/"):
            self.ended.append(path)
            return httpx.Response(200, json={})
        body = json.loads(await request.aread())
        self.asked.append(body)
        self.hosts.append(request.url.host)
        headers = request.headers
        kinds = ("x-presage-workflow-type", "x-presage-workflow-id", "x-presage-agent")
        self.names.append((headers[kinds[0]], headers[kinds[1]], headers[kinds[2]]))
        self.now += 1
        self.most = max(self.most, self.now)
        self.under_way.append(self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        said = self.says(body["messages"])
        if isinstance(said, int):
            return httpx.Response(said, json={"error": {"message": "no"}})
        asked = max(1, int(self.tokens * sum(len(message["content"] or "") for message in body["messages"]) / 4))
        usage = {"prompt_tokens": asked, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        reason = message.pop("finish_reason", "length" if str(message["content"]).endswith("…") else "stop")
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage}
        whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        return httpx.Response(200, content=json.dumps(whole).encode())

    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]
