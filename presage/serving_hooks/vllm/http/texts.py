"""What predictors read of prompts and answers, computed in the HTTP server's process.

A scheduler sees no texts, so a predictor of texts would forecast without them in an engine. If the engine's predictor
of next agents or of remaining lengths reads texts, this process loads the same artefact and computes by the training's
code, on the texts that ingestion reads from a span of the same request: the features of the prompt before the request
reaches the engine, those of the answer once its last part has been sent. Features are a projected state, or a sketch
and two sizes; texts are neither stored nor logged.

Without such a predictor a request costs one comparison. A request whose features cannot be computed goes on without
them, and the engine counts why.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.identity.request import PATHS, ApiRequest, Endpoint
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.observed import answers_to
from presage.serving_hooks.workflows.tenants import arguments_of

ARGUMENT: Final = "presage_text"
"""Key in `extra_args`; what a client writes there is discarded."""

LONGEST: Final = 2**22
"""Bytes of a request whose texts are read."""
MOST_VALUES: Final = 2**14
"""Messages, parts of them and other values in such a request; 4 MB of token ids took 3 s."""
MOST_WAITING: Final = 1000
"""Answers whose features the engine has not taken yet; those of further ones are lost."""
FIRST_S: Final = 1.0
POLL_S: Final = 5.0
"""Seconds between two questions which predictors the engine has."""

TOO_LONG: Final = "too long"
FAILED: Final = "failed"
REASONS: Final = (TOO_LONG, FAILED)
"""What is sent in place of features that were not computed."""
OTHER_VERSION: Final = "another version"
INVALID: Final = "invalid"

Ask = Callable[[], Awaitable[list[Any]]]
"""Asks each engine for the folder and digest of its predictors of texts, by kind."""
Report = Callable[[Step | str, dict[str, str]], Awaitable[Any]]
"""Tells the engine of the features of a step's answer, by kind of predictor."""

_log = logging.getLogger(__name__)


def encoded(digest: str, state: NDArray[np.float32]) -> str:
    """Features as they are sent: the digest of the predictor, and the features, float32 [p]."""
    return f"{digest} {base64.b64encode(state.astype('<f4').tobytes()).decode()}"


def decoded(sent: object, digest: str, width: int, kind: str) -> NDArray[np.float32] | str:
    """The features, float32 [width], or why they cannot be used by the predictor with this digest.

    Those of lengths are NaN where a prompt has no such text.
    """
    if not isinstance(sent, str):
        return INVALID
    if sent in REASONS:
        return sent
    of, _, content = sent.partition(" ")
    if of != digest:
        return OTHER_VERSION
    if len(content) > 8 * (width + 1):  # not ours: nothing of it is decoded on the engine's thread
        return INVALID
    try:
        state = np.frombuffer(base64.b64decode(content, validate=True), "<f4").astype(np.float32)
    except (binascii.Error, ValueError):
        return INVALID
    valid = ~np.isinf(state) if kind == "remaining-length" else np.isfinite(state)
    return state if len(state) == width and valid.all() else INVALID


def _of_agents(predictor: Any, moment: Moment, step: Mapping[str, str | None]) -> NDArray[np.float32]:
    projected: NDArray[np.float32] = predictor.project(moment, predictor.source.of_step(step, moment))
    return projected


def _of_lengths(predictor: Any, moment: Moment, step: Mapping[str, str | None]) -> NDArray[np.float32]:
    encoder = predictor.encoder
    read: NDArray[np.float32] = encoder.read_prompt(step) if moment == PREFILL else encoder.read_answer(step)
    return read


_FEATURES: Final[Mapping[str, Callable[[Any, Moment, Mapping[str, str | None]], NDArray[np.float32]]]] = {
    "next-agent": _of_agents,
    "remaining-length": _of_lengths,
}


class TextFeatures:
    """Features by one version of a predictor.

    Args:
        kind: of the predictor, "next-agent" or "remaining-length".
        digest: of its artefact.
    """

    def __init__(self, kind: str, predictor: Any, digest: str) -> None:
        self.digest = digest
        self._predictor, self._features = predictor, _FEATURES[kind]

    @classmethod
    def load(cls, kind: str, folder: str, digest: str) -> TextFeatures:
        """Loads the engine's predictor, and compiles what computes features; takes seconds in a new process.

        Raises:
            PresageError: the artefact is not there, broken, or another one.
        """
        # Late: vLLM's CPU worker breaks if the process that starts it has loaded numba.
        from presage.serving_hooks.forecasting.sources import load_validated

        made = cls(kind, load_validated(kind, Path(folder), digest), digest)
        for moment in (PREFILL, COMPLETION):
            made.of(moment, {"input_text": "a trial", "output_text": "a trial"})
        return made

    def of(self, moment: Moment, step: Mapping[str, str | None]) -> str | None:
        """The features of a step's texts, by columns of a trace, as they are sent.

        None if it has no text that is read at this moment.
        """
        found = self._features(self._predictor, moment, step)
        return None if np.isnan(found).all() else encoded(self.digest, found)


Readers = Mapping[str, TextFeatures]
"""By kind of predictor."""


def _features_of(readers: Readers, moment: Moment, step: Mapping[str, str | None]) -> dict[str, str]:
    """What is sent of a step's texts, by kind of predictor; empty if nothing is read of them."""
    found: dict[str, str] = {}
    for kind, reader in readers.items():
        try:
            sent = reader.of(moment, step)
        except Exception:
            sent = FAILED
        if sent is not None:
            found[kind] = sent
    return found


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, readers: Readers, endpoint: Endpoint) -> None:
        self._readers, self._endpoint = readers, endpoint
        self._body: bytearray | None = bytearray()
        self._reader: AnswerReader | None = None
        self._requests = 0
        self.step: Step | str | None = None

    def received(self, message: MutableMapping[str, Any]) -> None:
        """A part of the request."""
        if self._body is not None and message["type"] == "http.request":
            self._body += message.get("body", b"")
            if len(self._body) > LONGEST:
                self._body = None

    def generates(self, params: Any, session_id: object) -> None:
        """The engine is asked for an answer; writes the features of the prompt of a workflow's step.

        If it is asked for several, as with a list of prompts, only the first has them, and no answer has.
        """
        self._requests += 1
        self.step = answers_to(params.extra_args, session_id) if self._requests == 1 else None
        if self.step is None:
            return
        body, self._body = self._body, None
        features = dict.fromkeys(self._readers, TOO_LONG)
        if body is not None:
            try:
                request = ApiRequest(self._endpoint, msgspec.json.decode(body))
                if _is_small(request.input):
                    system, text = request.texts
                    features = _features_of(self._readers, PREFILL, {"system_prompt": system, "input_text": text})
            except Exception:
                features = dict.fromkeys(self._readers, FAILED)
        if features:
            arguments_of(params)[ARGUMENT] = features

    def sent(self, message: MutableMapping[str, Any]) -> bool:
        """A message of the response was sent; returns whether it was the last one of an answer to a step."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
            streamed = {b"text/event-stream": True, b"application/json": False}.get(kind)
            if self.step is not None and message["status"] == 200 and streamed is not None:
                self._reader = AnswerReader(self._endpoint, streamed)
                self._reader.failed = b"content-encoding" in headers
            return False
        if self._reader is None or message["type"] != "http.response.body":
            return False
        self._reader.add(message.get("body", b""))
        return not message.get("more_body")

    def answer(self) -> dict[str, str]:
        """The features of the answer, once it was sent, by kind of predictor."""
        if self._reader is None:
            return {}
        try:
            self._reader.end()
            if not self._reader.failed:
                return _features_of(self._readers, COMPLETION, {"output_text": self._reader.text})
        except Exception as error:
            _log.debug("an answer was not read: %s", type(error).__name__)
        return dict.fromkeys(self._readers, FAILED)


_EXCHANGE: ContextVar[Exchange | None] = ContextVar("presage_exchange", default=None)


def generates(params: Any, session_id: object) -> None:
    """The current HTTP request asks the engine for an answer, with these sampling parameters."""
    exchange = _EXCHANGE.get()
    if exchange is not None:
        exchange.generates(params, session_id)


def _is_small(value: Any) -> bool:
    """Whether JSON has at most MOST_VALUES values; looks at no more."""
    unseen, seen = [value], 0
    while unseen:
        inside = unseen.pop()
        if isinstance(inside, dict | list):
            seen += len(inside)
            if seen > MOST_VALUES:
                return False
            unseen += inside.values() if isinstance(inside, dict) else inside
    return True


async def follow(renew: Callable[[], Awaitable[None]]) -> None:
    """Follows what the engine has, from soon after the start on."""
    await asyncio.sleep(FIRST_S)
    while True:
        await renew()
        await asyncio.sleep(POLL_S)


class ServerTexts:
    """The predictors of texts that the engine has, loaded in this process.

    Attributes:
        readers: empty while the engine reads no texts; replaced, never changed.
    """

    def __init__(self, ask: Ask, load: Callable[[str, str, str], TextFeatures] = TextFeatures.load) -> None:
        self._ask, self._load = ask, load
        self.readers: Readers = {}
        self._refused: dict[str, str] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follows the engine from now on; called in the server's loop."""
        self._following = asyncio.get_running_loop().create_task(follow(self.renew))

    async def renew(self) -> None:
        """Loads the predictors that the engine has now, in a thread. Does not raise."""
        try:
            found: dict[str, dict[str, str]] = next(filter(None, await self._ask()), {})
        except Exception as error:
            _log.debug("the engine did not say what it reads of texts: %s", type(error).__name__)
            return
        digests = {kind: of["digest"] for kind, of in found.items()}
        self.readers = {kind: of for kind, of in self.readers.items() if of.digest == digests.get(kind)}
        for kind, digest in digests.items():
            if kind in self.readers or digest == self._refused.get(kind):
                continue
            try:
                loaded = await asyncio.to_thread(self._load, kind, found[kind]["folder"], digest)
                self.readers = {**self.readers, kind: loaded}
                _log.info("the %s model reads texts: its features are computed in this process", kind)
            except Exception as error:
                self._refused[kind] = digest
                _log.warning("the %s model gets no texts: %s: %s", kind, type(error).__name__, error)


class TextMiddleware:
    """ASGI middleware that computes the features of prompts and answers."""

    def __init__(self, app: Any, texts: ServerTexts, report: Report) -> None:
        self._app, self._texts, self._report = app, texts, report
        self._waiting: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request."""
        readers = self._texts.readers
        if not readers or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        endpoint = PATHS.get(scope.get("path", "").removeprefix(scope.get("root_path", "")))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        exchange: Exchange | None = Exchange(readers, endpoint)

        async def received() -> Any:
            message = await receive()
            if exchange is not None:
                exchange.received(message)
            return message

        async def passed_on(message: MutableMapping[str, Any]) -> None:
            nonlocal exchange
            await send(message)
            try:
                if exchange is not None and exchange.sent(message):
                    self._answered(exchange)
            except Exception as error:
                exchange = None
                _log.debug("an answer was not read: %s", type(error).__name__)

        token = _EXCHANGE.set(exchange)
        try:
            await self._app(scope, received, passed_on)
        finally:
            _EXCHANGE.reset(token)

    def _answered(self, exchange: Exchange) -> None:
        if len(self._waiting) < MOST_WAITING:
            task = asyncio.get_running_loop().create_task(self._told(exchange))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def _told(self, exchange: Exchange) -> None:
        try:
            features = exchange.answer()
            if features and exchange.step is not None:
                await self._report(exchange.step, features)
        except Exception as error:
            _log.debug("the engine was not told of an answer: %s", type(error).__name__)
