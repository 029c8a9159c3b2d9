"""HTTP requests to a running server; every failure is one sentence.

Redirects are not followed, so an API key goes to the given address only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from presage.errors import EngineError

if TYPE_CHECKING:
    import requests

TIMEOUT_S: Final = 10.0
KEY: Final = "VLLM_API_KEY"

_LONGEST: Final = 300
_SAYS_NOTHING: Final = frozenset(status.phrase for status in HTTPStatus)
"""What servers send where they have nothing to say."""

Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the server, such as http://localhost:8000.")]
ApiKey = Annotated[str | None, typer.Option(envvar=KEY, help="The server's API key, if it has one.")]


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
    import requests

    where = _base(url)
    sent = {"Accept": "application/json", **(headers or {})}
    if body is not None:
        sent["Content-Type"] = "application/json"

    def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Else requests would send what ~/.netrc has for this host."""
        if api_key:
            request.headers["Authorization"] = f"Bearer {api_key}"
        return request

    try:
        answer = requests.request(
            "GET" if body is None else "POST",
            where + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=sent,
            auth=authorize,
            timeout=TIMEOUT_S,
            allow_redirects=False,
        )
        if 200 <= answer.status_code < 300:
            return json.loads(answer.content)
    except (ValueError, OSError) as error:  # those of requests are OSErrors
        raise EngineError(_no_answer(where, path, error)) from None
    code, said = answer.status_code, _json(answer)
    words = _words(said) if code != 500 else None
    remedy = (remedies or {}).get(code) if words is not None or "detail" in said else None
    told = "; ".join(filter(None, (words, remedy)))
    raise EngineError(f"{where}: {told}" if told else _refused(where, path, code, bool(api_key)))


def _no_answer(where: str, path: str, error: Exception) -> str:
    """That nobody answers and why, or that another server does: it speaks no JSON, or another protocol."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError, ProtocolError

    chain = list(_causes(error))
    first = next((cause for cause in chain if not isinstance(cause, RequestException | HTTPError)), error)
    if any(isinstance(cause, TimeoutError) for cause in chain):
        reason = "no answer in time"
    elif isinstance(first, OSError) and not any(isinstance(cause, ProtocolError) for cause in chain):
        reason = first.strerror or str(first)
    else:
        return f"{where}{path}: {_another(type(first).__name__)}"
    return f"{where} does not answer ({reason}); start it with `presage serve`, or correct the URL"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _json(answer: requests.Response) -> dict[str, Any]:
    try:
        said = json.loads(answer.content)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _words(answer: dict[str, Any]) -> str | None:
    """Why a server refuses, in its own words: those of FastAPI, or of OpenAI's API as vLLM and the gateway use it."""
    try:
        detail = answer.get("detail") or answer["error"]["message"]
        if isinstance(detail, list):  # of a request that does not conform
            detail = detail[0]["msg"]
    except (LookupError, TypeError):
        return None
    words = "".join(filter(str.isprintable, " ".join(str(detail).split())))[:_LONGEST].rstrip(".")
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
