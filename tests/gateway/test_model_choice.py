"""Which model serves a request of a pool: rules, evidence, stickiness, and a router that is late or dies."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registry_database import new_database

from presage.datasets.outcomes import prompt_keys
from presage.datasets.outcomes.split import split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import ArtefactError, ConfigurationError
from presage.gateway.models.model_choice import (
    AUTO,
    CLOSED,
    ERROR,
    FAILED,
    LATE,
    NO_PROMPT,
    NO_ROUTER,
    ONLY,
    OVERLOADED,
    REASONS,
    STAYS,
    TOO_FAR,
    UNKNOWN,
    ChosenModel,
    ModelChooser,
    Pool,
)
from presage.gateway.models.router_client import MOST_WAITING, RouterAnswer, RouterClient, Skipped
from presage.gateway.models.router_process import FILL_S
from presage.gateway.models.router_versions import NOT_YET, RouterVersions
from presage.gateway.monitor.fleet_monitor import FleetMonitor, FleetUpstream
from presage.predictors.common.artefact import artefact_digest
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.predictors.router.transformer import TransformerScorer
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.forecasting.reload import ProcessEnded, RegistryClient
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.policies.routing.chimera import CONFIDENT, FASTEST, WORTH
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.testing.models import MODELS, planted, save_encoder

SLOW = FleetUpstream("slow", "http://slow", ("large",))
FAST = FleetUpstream("fast", "http://fast", ("small",))
POOL = Pool(AUTO, ("small", "large"), "small", price=0.05)
PATIENT_S = 60.0


class Told:
    """A router that gives what it is told to."""

    def __init__(self, answer: RouterAnswer | Skipped | None = None, **probabilities: float) -> None:
        self.answer = answer or RouterAnswer(probabilities, far=False)
        self.prompts: list[str] = []

    async def forecast(self, prompt: str) -> RouterAnswer | Skipped:
        self.prompts.append(prompt)
        return self.answer


def monitored(*upstreams: FleetUpstream) -> FleetMonitor:
    """Measured: "slow" takes 0.04 s an output token, others 0.01 s; 1,000 tokens of prefill take 11 times as long."""
    clock = Hand()
    monitor = FleetMonitor(upstreams or (FAST, SLOW), clock)
    for upstream in monitor.upstreams:
        token_s = 0.04 if upstream.name == "slow" else 0.01
        monitor.sent(upstream.name, "r", 1000)
        clock.now += 10 * token_s + token_s
        monitor.first_token(upstream.name, "r")
        clock.now += 100 * token_s
        monitor.answered(upstream.name, "r", 101)
    return monitor


class Hand:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(text: str | None = "what is six times seven?", system: str | None = None) -> ApiRequest:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text}] if text else []
    return ApiRequest("chat", {"model": AUTO, "messages": messages})


def chosen(
    router: Any, pool: Pool = POOL, monitor: FleetMonitor | None = None, request: ApiRequest | None = None
) -> ChosenModel:
    chooser = ModelChooser(monitor or monitored(), router)
    found = asyncio.run(chooser.choose(request or asked(), pool, None, prompt_tokens=0, predicted_tokens=100))
    assert found.reason in REASONS
    assert chooser.counts == {(pool.name, found.model, found.reason): 1}
    return found


def test_a_price_gives_the_slower_model_what_it_gains_more_than_it_costs_in_seconds() -> None:
    # about 1 s against 4 s: 3 s at 0.05 a second are worth 0.15
    found = chosen(Told(small=0.5, large=0.7))
    assert (found.model, found.upstream_hint, found.reason) == ("large", "slow", WORTH)
    assert found.probabilities == {"small": 0.5, "large": 0.7}
    assert found.seconds["large"] > 3 * found.seconds["small"] > 0
    assert chosen(Told(small=0.5, large=0.6)).model == "small"


def test_chimeras_rule_needs_the_slack_and_the_margin() -> None:
    pool = Pool("p", ("small", "large"), "small", rule="slack", slack=4.0, margin=0.05)
    assert chosen(Told(small=0.5, large=0.6), pool).model == "large"
    assert chosen(Told(small=0.5, large=0.54), pool).model == "small"
    tight = chosen(Told(small=0.5, large=0.9), Pool("p", ("small", "large"), "large", rule="slack", slack=1.0))
    assert (tight.model, tight.reason) == ("small", FASTEST)
    unlimited = Pool("p", ("small", "large"), "small", rule="slack", slack=math.inf)
    assert chosen(Told(small=0.5, large=0.9), unlimited).reason == CONFIDENT


def test_a_model_must_bring_what_it_costs() -> None:
    pool = Pool("p", ("small", "large"), "small", price=0.0, costs={"large": 0.3})
    assert chosen(Told(small=0.5, large=0.75), pool).model == "small"
    assert chosen(Told(small=0.5, large=0.85), pool).model == "large"


def test_a_queue_moves_requests_to_the_other_model() -> None:
    monitor = monitored()
    assert chosen(Told(small=0.5, large=0.7), monitor=monitor).model == "large"
    for request in range(3000):
        monitor.sent("slow", request, 0, 1000.0, streams=False)
    assert chosen(Told(small=0.5, large=0.7), monitor=monitor).model == "small"


def test_of_two_upstreams_of_a_model_the_sooner_is_the_hint() -> None:
    monitor = monitored(FAST, SLOW, FleetUpstream("fast-2", "http://2", ("small",)))
    monitor.sent("fast", "r", 100_000)
    assert chosen(Told(small=0.9, large=0.1), monitor=monitor).upstream_hint == "fast-2"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RouterAnswer({"small": 0.1, "large": 0.9}, far=True), TOO_FAR),
        (RouterAnswer({"large": 0.9}, far=False), UNKNOWN),
        (RouterAnswer({}, far=False), UNKNOWN),
        ("no router", NO_ROUTER),
        ("late", LATE),
        ("overloaded", OVERLOADED),
        ("failed", FAILED),
    ],
)
def test_without_evidence_the_default_serves(answer: Any, reason: str) -> None:
    for default in ("small", "large"):
        found = chosen(Told(answer), Pool("p", ("small", "large"), default))
        assert (found.model, found.reason) == (default, reason)


def test_a_request_without_text_and_a_pool_of_one_ask_no_router() -> None:
    router = Told(small=0.1, large=0.9)
    assert chosen(router, request=asked(None)).reason == NO_PROMPT
    assert chosen(router, Pool("p", ("large",), "large")).reason == ONLY
    assert not router.prompts


def test_the_router_reads_what_varies_and_not_the_instructions() -> None:
    router = Told(small=0.1, large=0.9)
    chosen(router, request=asked("the task", "long instructions"))
    assert router.prompts == ["the task"]


def test_models_that_take_no_requests_are_not_chosen() -> None:
    monitor, router = monitored(), Told(small=0.1, large=0.9)
    monitor.failed("slow", "r", connect=True)
    assert (chosen(router, monitor=monitor).model, chosen(router, monitor=monitor).reason) == ("small", ONLY)
    large = Pool("p", ("small", "large"), "large")
    assert chosen(Told("late"), large, monitor).model == "small"
    monitor.failed("fast", "r", connect=True)
    found = chosen(router, large, monitor)
    assert (found.model, found.upstream_hint, found.reason) == ("large", None, CLOSED)


def test_an_upstream_whose_models_are_not_known_serves_any() -> None:
    found = chosen(Told(small=0.1, large=0.9), monitor=monitored(FleetUpstream("router", "http://r")))
    assert (found.model, found.upstream_hint) == ("large", "router")


def test_an_error_of_ours_is_the_default() -> None:
    class Broken:
        async def forecast(self, prompt: str) -> RouterAnswer | Skipped:
            raise RuntimeError("a prompt")

    assert (chosen(Broken()).model, chosen(Broken()).reason) == ("small", ERROR)


def in_turn(pool: Pool, *turns: tuple[float, float, float]) -> list[tuple[str, str]]:
    """Models and reasons for one workflow with (prompt tokens, probability of small, of large)."""
    router = Told()
    chooser, workflow = ModelChooser(monitored(), router), Workflow(Step("t", "w", "a"))

    async def turn(tokens: float, small: float, large: float) -> tuple[str, str]:
        router.answer = RouterAnswer({"small": small, "large": large}, far=False)
        found = await chooser.choose(asked(), pool, workflow, prompt_tokens=tokens, predicted_tokens=100)
        return found.model, found.reason

    async def run() -> list[tuple[str, str]]:
        return [await turn(*one) for one in turns]

    return asyncio.run(run())


def test_a_workflow_leaves_its_model_only_for_more_than_its_prefix_is_worth() -> None:
    # 20,000 tokens take about 9 s to prefill on large and 2 s on small, 100 output tokens 4 s and 1 s
    after = 20_000, 0.5, 0.6
    assert [model for model, _ in in_turn(POOL, (20_000, 0.2, 0.9), after)] == ["large", "large"]
    assert [model for model, _ in in_turn(POOL, (100, 0.2, 0.9), after)] == ["large", "small"]


def test_with_a_slack_another_model_needs_the_margin_over_the_workflows() -> None:
    pool = Pool("p", ("small", "large"), "small", rule="slack", slack=10.0, margin=0.1)
    turns = in_turn(pool, (10, 0.2, 0.9), (10, 0.65, 0.6), (10, 0.75, 0.6), (10, 0.75, 0.8))
    assert turns == [("large", CONFIDENT), ("large", STAYS), ("small", FASTEST), ("small", FASTEST)]


def test_without_evidence_a_workflow_stays_where_it_is() -> None:
    router = Told(small=0.1, large=0.9)
    chooser, workflow = ModelChooser(monitored(), router), Workflow(Step("t", "w", "a"))

    async def run() -> list[str]:
        found = [(await chooser.choose(asked(), POOL, workflow)).model]
        router.answer = "late"
        found.append((await chooser.choose(asked(), POOL, workflow)).model)
        return [*found, (await chooser.choose(asked(), POOL, None)).model]

    assert asyncio.run(run()) == ["large", "large", "small"]


@given(
    st.dictionaries(st.sampled_from(["small", "large", "other"]), st.floats(0, 1)),
    st.booleans(),
    st.sampled_from(["price", "slack"]),
    st.floats(0, 1e3),
    st.floats(0, 1e6),
)
def test_any_answer_gives_a_model_of_the_pool_and_a_known_reason(
    probabilities: dict[str, float], far: bool, rule: Any, limit: float, tokens: float
) -> None:
    pool = Pool("p", ("small", "large"), "large", rule=rule, price=limit, slack=limit)
    chooser = ModelChooser(FleetMonitor((FAST, SLOW), Hand()), Told(RouterAnswer(probabilities, far)))
    workflow = Workflow(Step("t", "w", "a"))
    for _ in range(2):
        found = asyncio.run(chooser.choose(asked(), pool, workflow, prompt_tokens=tokens, predicted_tokens=tokens))
        assert found.model in pool.models
        assert found.reason in REASONS
        if far or not {"small", "large"} <= probabilities.keys():
            assert found.model == "large"


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": ()},
        {"models": ("small", "small")},
        {"default": "other"},
        {"costs": {"other": 0.1}},
        {"price": -1.0},
        {"margin": math.nan},
        {"price": math.inf},
        {"costs": {"small": math.inf}},
    ],
)
def test_a_pool_that_cannot_be_is_refused(wrong: Mapping[str, Any]) -> None:
    given_ = {"name": "p", "models": ("small", "large"), "default": "small", **wrong}
    with pytest.raises(ConfigurationError, match="pool p"):
        Pool(**given_)


def process_that(does: str) -> tuple[str, ...]:
    """A process in the place of the router's, which has `query` and `answer`."""
    code = (
        "import json, os, sys, time\n"
        "def answer(**of): print(json.dumps({'id': query['id'], **of}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    query = json.loads(line)\n"
        f"    {does}\n"
    )
    return sys.executable, "-c", code


LOADS = "answer(models=['small'])"
ANSWERS = f"{LOADS} if 'load' in query else answer(probabilities={{'small': 0.5}}, far=False)"


def with_client(
    does: str, use: Callable[[RouterClient, Hand], Awaitable[None]], deadline_s: float = PATIENT_S
) -> RouterClient:
    clock = Hand()
    client = RouterClient(clock, deadline_s, process_that(does))

    async def run() -> None:
        try:
            await use(client, clock)
        finally:
            await client.close()

    asyncio.run(run())
    assert client.process_id is None
    return client


def test_a_forecast_before_any_version_waits_for_nothing() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        assert await client.forecast("p") == "no router"

    assert with_client(ANSWERS, use).starts == 0


def test_a_router_that_does_not_answer_in_time_is_skipped_and_its_backlog_is_bounded() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        found = await asyncio.gather(*(client.forecast("p") for _ in range(MOST_WAITING + 5)))
        assert found == ["late"] * MOST_WAITING + ["overloaded"] * 5
        first = client.process_id
        clock.now += 31.0  # it hangs
        assert await client.forecast("p") == "overloaded"
        await until(lambda: client.process_id is None, client)
        clock.now += 1.0
        await until(lambda: client.process_id not in (None, first), client)

    with_client(f"{LOADS} if 'load' in query else None", use, deadline_s=0.01)


async def until(holds: Callable[[], bool], client: RouterClient) -> None:
    """Makes requests until it holds."""
    begun = time.monotonic()
    while not holds():
        await client.forecast("p")
        await asyncio.sleep(0.01)
        assert time.monotonic() - begun < PATIENT_S


BESIDE = "answer(models=['small'], fallback=True)"
EARLY = "answer(probabilities={'small': 0.2}, far=False, early=True)"
LATE_ANSWER = RouterAnswer({"small": 0.2}, far=False, fallback=True)


def test_the_linear_head_answers_where_the_transformer_is_late_or_has_too_many_waiting() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        found = await asyncio.gather(*(client.forecast("p") for _ in range(MOST_WAITING + 5)))
        assert found == [LATE_ANSWER] * (MOST_WAITING + 5)
        assert await client.forecast("p") == LATE_ANSWER  # the transformer has still too many
        more = await asyncio.gather(*(client.forecast("slow") for _ in range(MOST_WAITING + 1)))
        assert more == ["late"] * MOST_WAITING + ["overloaded"]

    quick = "answer(probabilities={'small': 0.2}, far=False) if query['prompt'] == 'p' else None"
    does = f"{BESIDE} if 'load' in query else ({quick}) if query['quick'] else {EARLY}"
    with_client(does, use, deadline_s=0.5)


def test_a_transformer_in_time_is_not_replaced() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        assert await client.forecast("p") == RouterAnswer({"small": 0.5}, far=False)

    with_client(f"{BESIDE} if 'load' in query else ({EARLY}, {ANSWERS})", use)


def test_a_choice_by_the_linear_head_says_so() -> None:
    answer = RouterAnswer({"small": 0.1, "large": 0.9}, far=False, fallback=True)
    chooser = ModelChooser(monitored(), Told(answer))
    found = asyncio.run(chooser.choose(asked("p"), Pool("p", ("small", "large"), "small", price=0.0), None))
    assert (found.model, found.fallback) == ("large", True)


def test_a_process_that_dies_is_started_again_after_waits_that_double() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        for starts, wait_s in ((2, 1.0), (3, 2.0), (4, 4.0)):
            assert await client.forecast("p") == "failed"
            await until(lambda: client.process_id is None, client)
            clock.now += wait_s - 0.1
            assert await client.forecast("p") == "no router"
            assert client.starts == starts - 1
            clock.now += 0.2
            await until(lambda: client.process_id is not None, client)
            assert client.starts == starts

    with_client(f"{LOADS} if 'load' in query else os._exit(1)", use)


def test_a_version_that_fails_leaves_the_one_before() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        assert await client.load("f", "d") == ("small",)
        before = client.process_id
        with pytest.raises(ArtefactError, match="it is broken"):
            await client.load("broken", "d")
        with pytest.raises(ProcessEnded):
            await client.load("deadly", "d")
        assert client.process_id == before
        assert await client.forecast("p") == RouterAnswer({"small": 0.5}, far=False)
        await client.load("g", "d")
        assert client.process_id != before

    does = "answer(error='it is broken') if query.get('load') == 'broken' else os._exit(1) if query.get('load') == "
    with_client(f"{does}'deadly' else {ANSWERS}", use)


@pytest.mark.parametrize("line", ["no JSON", "[]", "{}", "1", '{"id": 2, "far": 1}'])
def test_nonsense_instead_of_an_answer_is_a_failure(line: str) -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        assert await client.forecast("p") == "failed"

    with_client(f"{LOADS} if 'load' in query else print({line!r}, flush=True)", use)


def test_only_both_ends_of_a_long_prompt_are_sent() -> None:
    async def use(client: RouterClient, clock: Hand) -> None:
        await client.load("f", "d")
        found = await client.forecast("a" * 10**6 + "z")
        assert isinstance(found, RouterAnswer)
        assert found.probabilities["small"] < 17_000

    with_client(f"{LOADS} if 'load' in query else answer(probabilities={{'small': len(line)}}, far=False)", use)


@pytest.fixture(scope="module")
def router() -> RouterPredictor:
    train, calibration = split_outcomes(generate_outcomes(400, 0).outcomes, 0.25, 0)
    return RouterPredictor().fit(
        train.prompts,
        train.correct,
        calibration.prompts,
        calibration.correct,
        models=train.models,
        trained_on=prompt_keys(train),
    )


@pytest.fixture(scope="module")
def folder(router: RouterPredictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("router") / "model"
    router.save(folder)
    return folder


@pytest.mark.slow
def test_a_real_router_answers_in_its_process_as_it_would_here(router: RouterPredictor, folder: Path) -> None:
    prompts = [prompt for prompt in generate_outcomes(50, 9).outcomes.prompts if not router.evidence.far([prompt])[0]]
    pool = Pool("p", ("small", "large"), "small", price=0.0)

    async def run() -> None:
        client = RouterClient(time.monotonic, PATIENT_S)
        chooser = ModelChooser(monitored(), client)
        try:
            assert await client.load(str(folder), artefact_digest(folder)) == router.models
            found = await asyncio.gather(*(chooser.choose(asked(prompt), pool, None) for prompt in prompts))
            for prompt, one in zip(prompts, found, strict=True):
                known = router.forecast(prompt).probabilities
                assert one.probabilities == {model: known[model] for model in pool.models}
                assert one.model == max(pool.models, key=lambda model: known[model])
                assert one.reason == WORTH
            assert (await chooser.choose(asked("zzyzx qwrtp grmbl"), pool, None)).reason == TOO_FAR
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGKILL)
            assert (await chooser.choose(asked(prompts[0]), pool, None)).reason in (FAILED, NO_ROUTER)
            await until(lambda: client.starts == 2 and client.process_id is not None, client)
            assert (await chooser.choose(asked(prompts[0]), pool, None)).reason == WORTH
            with pytest.raises(ArtefactError, match="digest"):
                await client.load(str(folder), "sha256:of another one")
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_transformer_answers_what_comes_together_as_one_batch_and_the_linear_head_before_it(tmp_path: Path) -> None:
    texts, correct = planted(240, seed=5)
    encoder = save_encoder(tmp_path / "encoder")
    scorer = TransformerScorer.from_encoder(str(encoder), models=MODELS, head_tokens=60, tail_tokens=60)
    router = RouterPredictor(RouterConfig(head="transformer"))
    router.fit(texts[:120], correct[:120], texts[120:], correct[120:], models=MODELS, scorer=scorer)
    router.save(tmp_path / "router")
    assert router.fallback is not None

    async def run() -> None:
        client = RouterClient(time.monotonic, PATIENT_S)
        try:
            await client.load(str(tmp_path / "router"), artefact_digest(tmp_path / "router"))
            found = await asyncio.gather(*(client.forecast(text) for text in texts[:16]))
            for text, of in zip(texts, found, strict=False):
                assert isinstance(of, RouterAnswer)
                assert not of.fallback
                assert of.probabilities == pytest.approx(router.forecast(text).probabilities, abs=1e-5)
        finally:
            await client.close()
        hasty = RouterClient(time.monotonic, FILL_S / 5)  # a batch of one waits longer than that
        try:
            await hasty.load(str(tmp_path / "router"), artefact_digest(tmp_path / "router"))
            begun = time.monotonic()
            while not isinstance(of := await hasty.forecast(texts[0]), RouterAnswer):  # the machine is busy
                assert time.monotonic() - begun < PATIENT_S
            assert of.fallback
            assert of.probabilities == router.fallback.forecast(texts[0]).probabilities
        finally:
            await hasty.close()

    asyncio.run(run())


@pytest.mark.slow
def test_the_champion_is_loaded_and_reloaded_from_the_registry(folder: Path, tmp_path: Path) -> None:
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    metrics = {"kind": "router"}
    for version in ("1", "2"):
        register(registry, folder, name="router", metrics=metrics, params={}, tags={}, input_example=[{"prompt": "p"}])
        if version == "1":
            registry.client.set_registered_model_alias("router", "champion", "1")

    async def run() -> None:
        client = RouterClient(time.monotonic, PATIENT_S)
        versions = RouterVersions("models:/router@champion", client, RegistryClient(lambda: registry.uri), 0.1)
        assert versions.held.version is None
        versions.start()
        try:
            for version in (1, 2):
                begun = time.monotonic()
                while versions.held.version != version:
                    await asyncio.sleep(0.05)
                    assert time.monotonic() - begun < 10 * PATIENT_S, versions.status()
                assert isinstance(await client.forecast("what is six times seven?"), RouterAnswer)
                registry.client.set_registered_model_alias("router", "champion", "2")
        finally:
            await versions.close()
        assert client.process_id is None

    asyncio.run(run())


def versions_of(reference: str | None, does: str = ANSWERS) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        client = RouterClient(time.monotonic, PATIENT_S, process_that(does))
        versions = RouterVersions(reference, client, RegistryClient(lambda: None), None)
        versions.start()
        begun = time.monotonic()
        while reference is not None and versions.status()["reason"] == NOT_YET:
            await asyncio.sleep(0.01)
            assert time.monotonic() - begun < PATIENT_S
        status = versions.status()
        await versions.close()
        return status

    return asyncio.run(run())


def test_a_folder_is_loaded_at_the_start(folder: Path, tmp_path: Path) -> None:
    assert versions_of(str(folder))["reason"] is None
    assert "it is broken" in versions_of(str(folder), "answer(error='it is broken')")["reason"]
    assert "nothing" in versions_of(str(tmp_path / "nothing"))["reason"]
    shutil.copytree(folder, tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text(json.dumps({}))
    assert versions_of(str(tmp_path / "cut"), "os._exit(1)")["reason"]
    assert versions_of(None)["starts"] == 0
