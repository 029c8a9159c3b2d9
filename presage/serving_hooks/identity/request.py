"""A request as the gateway reads it: its API, its texts and who sent it.

Texts are those that ingestion reads from a span of the same request (`datasets/schema/messages.py`), so predictors see
in serving what they saw in training. They are never logged or stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from presage.datasets.schema.messages import split_system
from presage.serving_hooks.identity.anthropic_messages import chat_messages

Endpoint = Literal["chat", "completions", "responses", "messages"]

PATHS: Final[Mapping[str, Endpoint]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
MOST_TOOLS: Final = 512


def is_tokens(prompt: Any) -> bool:
    """Whether a prompt of the completions API is token ids, or several of those."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int | list)


@dataclass(frozen=True)
class ApiRequest:
    """One request to an OpenAI- or Anthropic-compatible API.

    Attributes:
        body: the parsed JSON object; not changed by anyone but a dialect, on a copy.
        headers: by names in lower case; of several with one name, the first.
        tenant: from the API key (`workflows/tenants.py`); "" without tenants.
        at_s: seconds of the gateway's clock.
        given_type: workflow type that the gateway's settings give to it if its client names none, and that of its route
            before the settings are asked; "" for none.
    """

    endpoint: Endpoint
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tenant: str = ""
    at_s: float = 0.0
    given_type: str = ""

    @property
    def model(self) -> str:
        """The model that the client asks for; "" if it names none."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return self.body.get("stream") is True

    @property
    def choices(self) -> int:
        """Answers asked for."""
        wanted = self.body.get("n", 1)
        return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 1

    @cached_property
    def messages(self) -> Any:
        """Messages or items, in the shape of OpenAI's APIs; not validated. None for completions."""
        if self.endpoint == "messages":
            return chat_messages(self.body)
        return self.body.get({"chat": "messages", "responses": "input"}.get(self.endpoint, ""))

    @property
    def input(self) -> Any:
        """The model's input, in the shape of its API; not validated. None for token ids, which are no text."""
        if self.endpoint == "responses":
            return {"instructions": self.body.get("instructions"), "input": self.messages}
        if self.endpoint != "completions":
            return self.messages
        prompt = self.body.get("prompt")
        return None if is_tokens(prompt) else prompt

    @cached_property
    def texts(self) -> tuple[str | None, str | None]:
        """(system prompt, all other input), as ingestion reads them; None for what is nested too deeply."""
        try:
            return split_system(self.input)
        except RecursionError:
            return None, None

    @cached_property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the model may call, in the order of the request."""
        names = []
        tools = self.body.get("tools")
        for tool in tools[:MOST_TOOLS] if isinstance(tools, list) else ():
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            name = function.get("name", function.get("type")) if isinstance(function, dict) else None
            if isinstance(name, str):
                names.append(name)
        return tuple(names)
