"""The API keys of the gateway's clients: whose request it is, and what no server may see.

OpenAI's SDK sends its key as `Authorization: Bearer KEY`, Anthropic's in `x-api-key`, Azure's in `api-key`, and Claude
Code in two headers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote_plus

from presage.gateway.refusal import Refusal
from presage.serving_hooks.workflows.tenants import ANONYMOUS, Tenants

KEY_HEADERS: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_BEARER: Final = "bearer"


class ClientKeys:
    """The keys that the gateway takes.

    Args:
        keys: each is a tenant; none lets everybody in, and passes clients' keys on.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants, self._keys = Tenants(keys), frozenset(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def of(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request, "" without tenants; ANONYMOUS if it has no key, or keys of several tenants."""
        if not self._keys:
            return ""
        sent = [_key(headers[name]) for name in KEY_HEADERS if name in headers]
        tenants = {self._tenants.of(f"Bearer {key}") for key in sent} - {ANONYMOUS}
        return tenants.pop() if len(tenants) == 1 else ANONYMOUS

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The same; raises Refusal instead of ANONYMOUS."""
        tenant = self.of(headers)
        if tenant == ANONYMOUS:
            raise Refusal(401, "Send one valid API key of this gateway.", "invalid_api_key")
        return tenant

    def in_header(self, name: str, value: str) -> bool:
        """Whether a server may not see this header: it has, or may have, a key of the gateway."""
        return bool(self._keys) and (name in KEY_HEADERS or _key(value) in self._keys)

    def without(self, query: str) -> str:
        """The query of a URL without keys of the gateway."""
        if not self._keys or not query:
            return query
        fields = query.split("&")
        return "&".join(field for field in fields if unquote_plus(field.partition("=")[2]) not in self._keys)


def _key(value: str) -> str:
    """The key in a header, with or without its scheme."""
    scheme, _, rest = value.strip().partition(" ")
    return rest.strip() if scheme.lower() == _BEARER else value.strip()
