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

Endpoint = Literal["chat", "completions", "responses"]

PATHS: Final[Mapping[str, Endpoint]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}


@dataclass(frozen=True)
class ApiRequest:
    """One request to an OpenAI-compatible API.

    Attributes:
        body: the parsed JSON object; not changed by anyone but a dialect, on a copy.
        headers: by names in lower case; of several with one name, the first.
        tenant: from the API key (`workflows/tenants.py`); "" without tenants.
        at_s: seconds of the gateway's clock.
    """

    endpoint: Endpoint
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tenant: str = ""
    at_s: float = 0.0

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

    @property
    def input(self) -> Any:
        """The model's input, in the shape of its API; not validated."""
        if self.endpoint == "chat":
            return self.body.get("messages")
        if self.endpoint == "completions":
            return self.body.get("prompt")
        return {"instructions": self.body.get("instructions"), "input": self.body.get("input")}

    @cached_property
    def texts(self) -> tuple[str | None, str | None]:
        """(system prompt, all other input), as ingestion reads them."""
        return split_system(self.input)

    @cached_property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the model may call, in the order of the request."""
        found = []
        tools = self.body.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            of = tool.get("function", tool) if isinstance(tool, dict) else None
            name = of.get("name", of.get("type")) if isinstance(of, dict) else None
            if isinstance(name, str):
                found.append(name)
        return tuple(found)
