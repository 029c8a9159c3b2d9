"""What the HTTP server computes of prompts and answers for an engine whose predictor reads texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.testclient import TestClient
from text_samples import text_lengths, text_predictor

from presage.datasets.synthetic.workflows import generate
from presage.features.lengths import CHARS_PER_TOKEN, length_rows
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.features.rows import SYSTEM_COLUMN, USER_COLUMN
from presage.features.states import TEXT_COLUMN
from presage.predictors.common.artefact import artefact_digest
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.vllm.http import plugin, texts
from presage.serving_hooks.vllm.http.texts import (
    ARGUMENT,
    MOST_VALUES,
    Exchange,
    Readers,
    ServerTexts,
    TextFeatures,
    decoded,
    encoded,
)
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.observed import REQUEST

CHAT = "/v1/chat/completions"
SENT = {"workflow_type": "review", "workflow_id": "r1", "agent": "main", "step": 4}
NAMES = ("review", "r1", "main", 4)
LENGTHS = "remaining-length"
DIGEST, OTHER_DIGEST = "sha256:0123", "sha256:4567"
PROMPT = "urgent regression in part 7 ✓ so evidence"
ANSWER = "stack broken so evidence: call tester"


class Engine:
    """A client of an engine, which keeps what it is asked for and told."""

    def __init__(self) -> None:
        self.engine_core = self
        self.extra: list[Any] = []
        self.told: list[tuple[Any, ...]] = []
        self.models: dict[str, dict[str, str]] = {}

    async def generate(self, prompt: str, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[str]:
        yield prompt

    async def call_utility_all_async(self, name: str, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "text_models":
            return [self.models]
        self.told.append((method, *args))
        return [True]


def server(answer: str | list[str], reads: Readers, *keys: str, **settings: Any):
    """vLLM's routes with this answer, in parts if it is streamed, and ours."""
    app, engine, routes = FastAPI(), Engine(), plugin.WorkflowRoutes()
    app.state.args = SimpleNamespace(api_key=list(keys) or None, additional_config={"presage": settings})

    async def route(request: Request) -> Response:
        sent = await request.json()
        for _ in range(sent.get("n", 1)):
            params = SimpleNamespace(extra_args=sent.get("vllm_xargs"))
            engine.generate("p", params, "r", session_id=None)
            engine.extra.append(params.extra_args)
        if isinstance(answer, str):
            return Response(answer, media_type="application/json")

        async def parts() -> AsyncIterator[str]:
            for part in answer:
                yield part

        return StreamingResponse(parts(), media_type="text/event-stream")

    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"):
        app.add_api_route(path, route, methods=["POST"])
    routes.attach_router(app)
    asyncio.run(routes.init_state(engine, app.state, app.state.args))
    if routes.texts is not None:
        routes.texts.readers = reads
    return TestClient(app), engine


@pytest.fixture(scope="module")
def reads() -> Readers:
    return {
        "next-agent": TextFeatures("next-agent", text_predictor(), DIGEST),
        LENGTHS: TextFeatures(LENGTHS, text_lengths(), OTHER_DIGEST),
    }


def offline(moment: Moment, text: str, system: str | None = None) -> dict[str, np.ndarray]:
    """As the predictors forecast with it, from a step of a trace; of lengths a row of the training's."""
    predictor, encoder = text_predictor(), text_lengths().encoder
    agents = predictor.project(moment, predictor.source.of_step({TEXT_COLUMN[moment]: text}, moment))
    step = {"workflow_type": "t", "workflow_id": "w", "step": 0, "agent": "a", "kind": "llm", "complete": True}
    table = pa.Table.from_pylist(
        [{**step, "input_text": text, "system_prompt": system, "output_text": text}, {**step, "step": 1}],
        schema=generate("retry", 1, 0, state_size=16).table.schema,
    )
    first, second = length_rows(table, encoder).numbers
    size = encoder.answer_size
    if moment == COMPLETION:
        return {"next-agent": agents, LENGTHS: second[-size:]}
    sizes = first[[SYSTEM_COLUMN, USER_COLUMN]] * np.float32(CHARS_PER_TOKEN)
    return {"next-agent": agents, LENGTHS: np.concatenate([sizes, first[-2 * size : -size]])}


def event(**of: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None, **of}]})}\n\n"


MESSAGES = [{"role": "system", "content": "You review."}, {"role": "user", "content": PROMPT}]
WHOLE = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ANSWER}}]}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]}
RESPONSE = {"id": "x", "status": "completed", "output": [ITEM]}
EXCHANGES = [
    (CHAT, {"messages": MESSAGES}, json.dumps(WHOLE)),
    (CHAT, {"messages": MESSAGES}, [event(delta={"content": ANSWER[:9]}), event(delta={"content": ANSWER[9:]})[:20],
                                    event(delta={"content": ANSWER[9:]})[20:], "data: [DONE]\n\n"]),
    ("/v1/completions", {"prompt": PROMPT}, json.dumps({"choices": [{"index": 0, "text": ANSWER}]})),
    ("/v1/completions", {"prompt": PROMPT}, [event(text=ANSWER[:5]), event(text=ANSWER[5:]), "data: [DONE]\n\n"]),
    ("/v1/responses", {"instructions": "You review.", "input": PROMPT}, json.dumps(RESPONSE)),
    ("/v1/responses", {"instructions": "You review.", "input": PROMPT},
     [f"data: {json.dumps({'type': 'response.completed', 'response': RESPONSE})}\n\n"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "answer"), EXCHANGES)
def test_features_are_those_of_training_bit_for_bit(reads: Readers, path: str, body: Any, answer: Any) -> None:
    http, engine = server(answer, reads, answers=False)
    with http:
        assert http.post(path, json={**body, "vllm_xargs": SENT}).text == "".join(answer)
        assert http.post("/v1/embeddings", json={"vllm_xargs": SENT}).status_code == 200
    prompt, other = engine.extra
    assert (other, {name: prompt[name] for name in SENT}) == (SENT, SENT)
    ((method, *names, told),) = engine.told
    assert (method, tuple(names)) == ("answer_text", NAMES)
    system = None if path == "/v1/completions" else "You review."
    for moment, sent, text in ((PREFILL, prompt[ARGUMENT], PROMPT), (COMPLETION, told, ANSWER)):
        assert set(sent) == set(reads)
        for kind, wanted in offline(moment, text, system).items():
            found = decoded(sent[kind], reads[kind].digest, len(wanted), kind)
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.tobytes()) == (np.float32, wanted.tobytes())
            assert wanted[-3:].any()
            assert text not in sent[kind]


def test_a_workflow_is_that_of_the_requests_tenant(reads: Readers) -> None:
    http, engine = server(json.dumps(WHOLE), reads, "one", "two", answers=False)
    with http:
        http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": SENT}, headers={"Authorization": "Bearer two"})
    assert engine.told[0][2] == scoped("key-1", "r1")


@pytest.mark.parametrize("settings", [{}, {"texts": False}])
def test_what_a_client_writes_there_is_discarded(settings: Any) -> None:
    http, engine = server(json.dumps(WHOLE), {}, answers=False, **settings)
    with http:
        assert http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": {**SENT, ARGUMENT: "x"}}).json() == WHOLE
        http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": {ARGUMENT: "x"}})
    named, unnamed = engine.extra
    assert named == SENT
    assert ARGUMENT not in unnamed
    assert engine.told == []


@pytest.mark.parametrize("infers", [True, False])
def test_what_cannot_be_a_step_has_no_features(reads: Readers, infers: bool) -> None:
    http, engine = server(json.dumps(WHOLE), reads, answers=False, infer_workflows=infers)
    with http:
        for sent in ({"agent": "main"}, None):
            assert http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": sent}).json() == WHOLE
        http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": SENT, "n": 2})
        http.post(CHAT, json={"messages": [], "vllm_xargs": SENT})
    assert [ARGUMENT in (extra or {}) for extra in engine.extra] == [infers, infers, True, False, False]
    named = [(told[0], told[1] if told[0] == "request_answer_text" else "") for told in engine.told]
    inferred = [("request_answer_text", extra[REQUEST]) for extra in engine.extra[:2]] if infers else []
    assert named == [*inferred, ("answer_text", "")], "the answer to an empty prompt is still one"


class Failing:
    """A predictor that fails at every text."""

    source = SimpleNamespace(of_step=lambda step, moment: 1 / 0)
    encoder = SimpleNamespace(read_prompt=lambda step: 1 / 0, read_answer=lambda step: 1 / 0)


@pytest.mark.parametrize(
    ("answer", "longest", "predictor", "prompt", "answered"),
    [
        (json.dumps(WHOLE), 2**22, Failing, texts.FAILED, texts.FAILED),
        (json.dumps(WHOLE), 10, None, texts.TOO_LONG, None),
        ("no json", 2**22, None, None, texts.FAILED),
    ],
)
def test_what_cannot_be_computed_goes_on_and_says_why(
    answer: Any, longest: int, predictor: Any, prompt: Any, answered: Any,
    reads: Readers, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(texts, "LONGEST", longest)
    failing = {kind: TextFeatures(kind, predictor, of.digest) for kind, of in reads.items()}
    http, engine = server(answer, reads if predictor is None else failing, answers=False)
    with http:
        assert http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": SENT}).text == "".join(answer)
    for kind, of in reads.items():
        found = decoded(engine.extra[0][ARGUMENT][kind], of.digest, len(offline(PREFILL, PROMPT)[kind]), kind)
        assert isinstance(found, np.ndarray) if prompt is None else found == prompt
        found = decoded(engine.told[0][-1][kind], of.digest, len(offline(COMPLETION, ANSWER)[kind]), kind)
        assert isinstance(found, np.ndarray) if answered is None else found == answered


def test_one_predictor_that_fails_leaves_the_other_its_features(reads: Readers) -> None:
    http, engine = server(json.dumps(WHOLE), {**reads, LENGTHS: TextFeatures(LENGTHS, Failing, "d")}, answers=False)
    with http:
        http.post(CHAT, json={"messages": MESSAGES, "vllm_xargs": SENT})
    for sent in (engine.extra[0][ARGUMENT], engine.told[0][-1]):
        assert sent[LENGTHS] == texts.FAILED
        assert sent["next-agent"].startswith(DIGEST)


@pytest.mark.parametrize("content", [None, [], [{"type": "image_url", "image_url": 7}], 7, {"x": 1}, [[["deep"]]]])
def test_what_a_hostile_body_holds_does_no_harm(reads: Readers, content: Any) -> None:
    http, engine = server(json.dumps(WHOLE), reads, answers=False)
    with http:
        for messages in ([{"role": "user", "content": content}], content):
            assert http.post(CHAT, json={"messages": messages, "vllm_xargs": SENT}).json() == WHOLE
    for extra in engine.extra:
        for kind, sent in extra.get(ARGUMENT, {}).items():
            found = decoded(sent, reads[kind].digest, len(offline(PREFILL, PROMPT)[kind]), kind)
            assert isinstance(found, np.ndarray) or found == texts.FAILED


def test_a_prompt_without_one_of_its_texts_says_so(reads: Readers) -> None:
    http, engine = server(json.dumps(WHOLE), {LENGTHS: reads[LENGTHS]}, answers=False)
    with http:
        http.post(CHAT, json={"messages": MESSAGES[:1], "vllm_xargs": SENT})
        http.post(CHAT, json={"messages": [], "vllm_xargs": SENT})
    found = decoded(engine.extra[0][ARGUMENT][LENGTHS], OTHER_DIGEST, 2 + text_lengths().encoder.answer_size, LENGTHS)
    assert isinstance(found, np.ndarray)
    assert found[0] == len("You review.")
    assert np.isnan(found[1:]).all()
    assert engine.extra[1] == SENT


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (texts.encoded("sha256:another", np.ones(3, np.float32)), texts.OTHER_VERSION),
        (texts.encoded(DIGEST, np.ones(4, np.float32)), texts.INVALID),
        (texts.encoded(DIGEST, np.full(3, np.nan, np.float32)), texts.INVALID),
        (f"{DIGEST} no base64!", texts.INVALID),
        (f"{DIGEST} AAA=", texts.INVALID),
        ("anything", texts.OTHER_VERSION),
        (7, texts.INVALID),
        ("too long", texts.TOO_LONG),
    ],
)
def test_features_that_are_none_are_not_read(sent: object, why: str) -> None:
    assert decoded(sent, DIGEST, 3, "next-agent") == why


def test_features_of_lengths_may_be_unknown_but_are_numbers() -> None:
    unknown = np.array([3, np.nan, np.nan], np.float32)
    found = decoded(texts.encoded(DIGEST, unknown), DIGEST, 3, LENGTHS)
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == unknown.tobytes()
    for other in (np.full(3, np.inf, np.float32), unknown[:2]):
        assert decoded(texts.encoded(DIGEST, other), DIGEST, 3, LENGTHS) == texts.INVALID


def test_the_server_loads_what_its_engine_reads_and_follows_it(tmp_path: Path) -> None:
    engine = Engine()
    text_predictor().save(tmp_path / "next-agent")
    text_lengths().save(tmp_path / LENGTHS)

    async def ask() -> list[Any]:
        return await engine.call_utility_all_async("presage_call", "text_models", ())

    loads: list[str] = []

    def load(kind: str, folder: str, of: str) -> TextFeatures:
        loads.append(of)
        return TextFeatures.load(kind, folder, of)

    follows = ServerTexts(ask, load)

    def renewed(**models: dict[str, str]) -> Readers:
        engine.models = {kind.replace("_", "-"): of for kind, of in models.items()}
        asyncio.run(follows.renew())
        return follows.readers

    def model(kind: str, digest: str | None = None) -> dict[str, str]:
        return {"folder": str(tmp_path / kind), "digest": digest or artefact_digest(tmp_path / kind)}

    agents, lengths = model("next-agent"), model(LENGTHS)
    assert renewed() == {}
    found = renewed(next_agent=agents)["next-agent"]
    step: dict[str, str | None] = {"input_text": PROMPT, "system_prompt": None}
    assert found.of(PREFILL, step) == texts.encoded(agents["digest"], offline(PREFILL, PROMPT)["next-agent"])
    both = renewed(next_agent=agents, remaining_length=lengths)
    assert both["next-agent"] is found
    assert both[LENGTHS].of(PREFILL, step) == texts.encoded(lengths["digest"], offline(PREFILL, PROMPT)[LENGTHS])
    assert renewed(next_agent=agents, remaining_length=lengths) == both
    other = model(LENGTHS, "sha256:other")
    for _ in range(2):
        kept = renewed(next_agent=agents, remaining_length=other)
        assert kept == {"next-agent": found}, "the artefact is not the one that the engine has"
    assert renewed() == {}
    assert loads == [agents["digest"], lengths["digest"], "sha256:other"]


def test_an_engine_that_does_not_answer_changes_nothing(reads: Readers) -> None:
    async def ask() -> list[Any]:
        raise RuntimeError("the engine is gone")

    follows = ServerTexts(ask)
    follows.readers = reads
    asyncio.run(follows.renew())
    assert follows.readers is reads


@pytest.mark.parametrize("messages", [[1] * (MOST_VALUES + 1), [{"content": ["a"] * MOST_VALUES}]])
def test_a_body_of_many_values_is_not_read(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiRequest, "texts", None)
    exchange = Exchange({"next-agent": cast(TextFeatures, None)}, "chat")
    exchange.received({"type": "http.request", "body": json.dumps({"messages": messages}).encode()})
    params = SimpleNamespace(extra_args={**SENT})
    exchange.generates(params, None)
    assert params.extra_args[ARGUMENT] == {"next-agent": texts.TOO_LONG}


def test_features_that_are_too_long_to_be_ours_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(decoded(encoded("d", np.zeros(4, np.float32)), "d", 4, "next-agent"), np.ndarray)
    monkeypatch.setattr(texts.base64, "b64decode", None)
    assert decoded("d " + 100 * "A", "d", 4, "next-agent") == texts.INVALID
