"""HTTP requests to a running server; every failure is one sentence.

Redirects are not followed, so an API key goes to the given address only.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from presage.errors import EngineError

TIMEOUT_S: Final = 10.0
KEY: Final = "VLLM_API_KEY"

_LONGEST: Final = 300
_SAYS_NOTHING: Final = frozenset(status.phrase for status in HTTPStatus)
"""What servers send where they have nothing to say."""

Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the server, such as http://localhost:8000.")]
ApiKey = Annotated[str | None, typer.Option(envvar=KEY, help="The server's API key, if it has one.")]


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


def ask(
    url: str,
    path: str,
    api_key: str | None,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    remedies: Mapping[int, str] | None = None,
) -> Any:
    """The JSON answer of the server to a request.

    Args:
        url: of the server, optionally with a path prefix; `http://` is the default scheme.
        path: of the API.
        api_key: sent as a bearer token.
        body: sent as JSON by POST; None sends a GET.
        headers: further headers.
        remedies: what to do, by status code; follows the server's own words, if it has any.

    Raises EngineError: no answer, a missing or wrong key, another server, or a refusal.
    """
    where = _base(url)
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(where + path, data, {"Accept": "application/json"})
    if data is not None:
        request.add_header("Content-Type", "application/json")
    for name, value in (headers or {}).items():
        request.add_unredirected_header(name, value)
    if api_key:
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        remedy, answer = (remedies or {}).get(error.code), _json(error)
        words = _words(answer) if error.code != 500 else None
        known = remedy if words is not None or "detail" in answer else None
        told = "; ".join(filter(None, (words, known)))
        raise EngineError(f"{where}: {told}" if told else _refused(where, path, error.code, bool(api_key))) from None
    except (TimeoutError, urllib.error.URLError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = "no answer in time" if isinstance(why, TimeoutError) else getattr(why, "strerror", None) or str(why)
        raise EngineError(
            f"{where} does not answer ({reason}); start it with `presage serve`, or correct the URL"
        ) from None
    except (ValueError, OSError, HTTPException) as error:  # no JSON, or another protocol
        raise EngineError(f"{where}{path}: {_another(type(error).__name__)}") from None


def _json(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        answer = json.load(error)
    except (ValueError, OSError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _words(answer: dict[str, Any]) -> str | None:
    """Why a server refuses, in its own words: those of FastAPI, or of OpenAI's API as vLLM and the gateway use it."""
    try:
        found = answer.get("detail") or answer["error"]["message"]
        if isinstance(found, list):  # of a request that does not conform
            found = found[0]["msg"]
    except (LookupError, TypeError):
        return None
    words = "".join(filter(str.isprintable, " ".join(str(found).split())))[:_LONGEST].rstrip(".")
    return words if words and words not in _SAYS_NOTHING else None


def _base(url: str) -> str:
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        bad = True
    if not bad and "@" in parts.netloc:
        raise EngineError(
            f"the URL contains a user name or password; remove it, and give the key as --api-key or in {KEY}"
        )
    if bad or not given.isascii() or not given.isprintable() or " " in given:
        raise EngineError(f"{url!r:.80} is no address of a server; give one such as http://localhost:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def _refused(where: str, path: str, code: int, with_key: bool) -> str:
    if code == 401:
        wrong = "does not take this key" if with_key else "wants a key"
        return f"{where} {wrong}; give the one it was started with as --api-key or in {KEY}"
    if code == 503:
        return f"{where}: no engine runs behind this server; use the URL of the server that runs the workflows"
    if code == 404:
        return f"{where}{path} is not there; {_another('404')}"
    return f"{where}{path} answers {code}; see the server's log"


def _another(found: str) -> str:
    return (
        f"this is another server, or one without Presage's routes ({found}): correct the URL, or start it with "
        "`presage serve`, which names presage in VLLM_PLUGINS"
    )
