"""Requests as Claude Code sends them, by Anthropic's SDK: the session in three ways, a sub-agent, a plain user's id.

Its system prompt begins with a block that differs in each request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from anthropic import Anthropic
from scripted import MODEL, Answer, World, run_all

world = World()
client = Anthropic(base_url=world.url.removesuffix("/v1"), api_key="none")
SESSION = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
DEVICE = "0f" * 32
AGENTS = {
    "main": "You are Claude Code, Anthropic's official CLI for Claude. You help users with software engineering.",
    "explorer": "You are a file search specialist. You find files, and you never change one.",
}


def turn(agent: str, number: int, user_id: str, **more: Any) -> None:
    world.script(Answer(agent, "done"))
    attribution = f"x-anthropic-billing-header: cc_version=2.1.90.{number}a; cc_entrypoint=cli; cch=0d9e{number};"
    client.beta.messages.create(
        model=MODEL,
        max_tokens=100,
        system=[{"type": "text", "text": attribution}, {"type": "text", "text": AGENTS[agent]}],
        messages=[{"role": "user", "content": f"Fix test {number}."}],
        tools=[{"name": "Read", "input_schema": {"type": "object"}}],
        metadata={"user_id": user_id},
        **more,
    )


def session(user_id: str, **more: Any) -> Callable[[World], None]:
    def scenario(_: World) -> None:
        for number, agent in enumerate(("main", "explorer", "main")):
            turn(agent, number, user_id, **more)

    return scenario


run_all(
    {
        "until_2_1_77": session(f"user_{DEVICE}_account__session_{SESSION}"),
        "since_2_1_78": session(json.dumps({"device_id": DEVICE, "account_uuid": "", "session_id": SESSION})),
        "since_2_1_86": session(DEVICE, extra_headers={"X-Claude-Code-Session-Id": SESSION}),
        "user_alone": session(f"user_{DEVICE}"),
    },
    world,
)
