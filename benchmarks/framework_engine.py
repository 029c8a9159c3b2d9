"""The requests of `frameworks.py` before an engine, which has nothing but tokens: whose does it find them to be?

Prompts are tokens of a chat template as ChatML's: tools stand under the system prompt, calls as JSON, and only its two
marks are tokens that no text has. Words are cut as ingestion cuts them, for want of a model's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from presage.continuation import TokenPrompt, chained, text_tokens
from presage.serving_hooks.identity.identifier import Identity
from presage.serving_hooks.identity.inference import Inference
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.identity.turns import system_text
from presage.serving_hooks.workflows.identity import Step

KEY, BLOCK = b"a key for the benchmark", 16
START, END = 1, 2
Event = tuple[float, ApiRequest, Sequence[Any] | None]
"""When a request arrived, or was answered by these messages."""


def text_of(content: Any) -> str:
    """The texts of a message, and its calls."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(text_of, content))
    if not isinstance(content, dict):
        return ""
    calls = [content] if content.get("type") == "function_call" else content.get("tool_calls") or ()
    said = content.get("text") or text_of(content.get("content") or content.get("output"))
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments")
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        said += f"\n<tool_call>\n{json.dumps({'name': function.get('name'), 'arguments': given})}\n</tool_call>"
    return str(said)


def prompt_tokens(request: ApiRequest) -> list[int]:
    """The prompt of a request, up to where the answer begins."""
    system, tools = system_text(request, 10**6), request.body.get("tools")
    above = f"{system}\n\n# Tools\n{json.dumps(tools)}" if tools else system
    given = request.messages if isinstance(request.messages, list) else [{"role": "user", "content": request.messages}]
    said = [("system", above)] if above else []
    for message in given:
        role = message.get("role") or ("tool" if "output" in message else "assistant")
        if role not in ("system", "developer"):
            said.append((role, text_of(message)))
    turns = ([START, *text_tokens(f"{role}\n{text}"), END, *text_tokens("\n")] for role, text in said)
    return [*(token for turn in turns for token in turn), START, *text_tokens("assistant\n")]


def identities(events: Iterable[Event]) -> list[Identity]:
    """Whose the engine finds the requests to be, in the order of their arrival."""
    now, found, running = [0.0], list[Identity](), dict[int, tuple[str, list[int]]]()
    engine = Inference(KEY, BLOCK, lambda: now[0])
    for now[0], request, answers in events:
        if answers is None:
            tokens, name = prompt_tokens(request), f"r{len(found)}"
            running[id(request)] = name, tokens
            step = engine.arrives(name, TokenPrompt("", chained(tokens, BLOCK), tokens), "")
            step = step or Step("", f"single-{name}", "", source="new")
            source = "new" if step.source == "new" else "continuation"
            found.append(Identity(step, source, step.confidence, "fingerprint", 1.0))
        else:
            name, tokens = running.pop(id(request))
            both = [*tokens, *text_tokens(text_of(list(answers))), END]
            owner = engine.leaves(name, completed=True)
            if owner is not None:
                engine.answered(owner, TokenPrompt("", chained(both, BLOCK), both), len(tokens))
    return found
