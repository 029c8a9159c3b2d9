"""Predictors of texts in vLLM's own scheduler: their forecasts are those that they make offline of the texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from text_samples import Steps, so_far, text_lengths, text_predictor, text_workflows

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its scheduler")

from vllm_samples import Engine, ask, build

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.http.texts import ARGUMENT, TextFeatures, encoded
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.live import LiveForecast

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]
AGENTS, LENGTHS = "next-agent", "remaining-length"
EVENTS = ("on_prefill", "on_completion", "on_completion_state")


class Watched(SyncWorkflowScheduler):
    """Keeps the forecasts that it gets for running steps."""

    def forecasts(self, config: PresageConfig) -> Forecasts:
        found: Forecasts = super().forecasts(config)
        self.found, self.made = found, list[LiveForecast | None]()

        def keeping(event: Callable[..., Any]) -> Callable[..., Any]:
            def kept(*args: Any, **given: Any) -> Any:
                self.made.append(event(*args, **given))
                return self.made[-1]

            return kept

        for name in EVENTS:
            setattr(found.next_agents, name, keeping(getattr(found.next_agents, name)))
        return found


def same(live: LiveForecast | None, steps: Steps) -> None:
    assert live is not None
    whole = text_predictor().forecast(steps)
    assert (live.source, live.evidence, live.moment) == (whole.source, whole.evidence, whole.moment)
    offline = [[*agents.values(), end] for agents, end in zip(whole.agents, whole.end, strict=True)]
    assert live.probabilities.tolist() == offline


def same_lengths(live: LiveForecast | None, steps: Steps) -> None:
    assert live is not None
    whole = text_lengths().forecast(steps)
    assert (live.remaining.source, live.remaining.evidence) == (whole.source, whole.evidence)
    assert dict(zip(live.remaining.quantiles, live.remaining.tokens, strict=True)) == whole.quantiles


def built(folder: Path, **settings: Any) -> tuple[Any, Engine]:
    text_predictor().save(folder / "predictor")
    text_lengths().save(folder / "lengths")
    models = {"next_agent": str(folder / "predictor"), "remaining_length": str(folder / "lengths")}
    given = {**models, "return_time": None, "profile": None, "reload_s": None}
    scheduler = build(
        folder / "model", Watched, blocks=256, presage={**given, "forecast_deadline_ms": 60_000.0, **settings}
    )
    return scheduler, Engine(scheduler)


def loaded(scheduler: Any) -> dict[str, TextFeatures]:
    return {kind: TextFeatures.load(kind, **model) for kind, model in scheduler.text_models().items()}


def read(reads: dict[str, TextFeatures], moment: Moment, row: dict[str, Any]) -> dict[str, str | None]:
    return {kind: of.of(moment, row) for kind, of in reads.items()}


def counted(scheduler: Any) -> dict[str, int]:
    return {name: of for name, of in scheduler.presage_status()["counts"].items() if "text features" in name}


@pytest.mark.parametrize("priority", [True, False])
def test_forecasts_in_the_engine_are_those_of_the_texts_offline(tmp_path: Path, priority: bool) -> None:
    scheduler, engine = built(tmp_path, priority=priority, admission=priority)
    reads = loaded(scheduler)
    assert set(reads) == {AGENTS, LENGTHS}
    served = scheduler.engine_port.config.served_model
    steps = text_workflows(1)[0][:4]
    seen: Steps = []
    for number, row in enumerate(steps):
        names = {key: row[key] for key in ("workflow_type", "workflow_id", "agent", "step")}
        features = read(reads, PREFILL, row)
        scheduler.add_request(ask(f"r{number}", list(range(40 + number)), 4, **names, **{ARGUMENT: features}))
        engine.run()
        told = scheduler.answer_text(*names.values(), read(reads, COMPLETION, row))
        assert told
        seen.append({**row, "input_tokens": 40 + number, "output_tokens": 4, "model": served})
        assert len(scheduler.made) == 3
        begun, bare, answered = scheduler.made
        same(begun, so_far(seen, number, False))
        same(answered, so_far(seen, number, True))
        same_lengths(begun, so_far(seen, number, False))
        assert bare is not None
        assert bare.probabilities.tolist() != answered.probabilities.tolist()
        scheduler.made.clear()
    kinds, moments = ("text features", "text features of lengths"), (PREFILL, COMPLETION)
    assert counted(scheduler) == {f"{kind} at {moment}: used": len(steps) for kind in kinds for moment in moments}
    scheduler.workflow_ended("retry", steps[0]["workflow_id"])
    assert scheduler.debug_state()["workflows"] == 0


def test_features_that_cannot_be_used_leave_forecasts_without_texts(tmp_path: Path) -> None:
    scheduler, engine = built(tmp_path)
    reads = loaded(scheduler)
    answered = read(reads, COMPLETION, {"output_text": "an answer"})
    (row, *_), bad = text_workflows(1)[0], encoded("sha256:another", text_predictor().project(PREFILL, None))
    names = {key: row[key] for key in ("workflow_type", "workflow_id", "agent", "step")}
    scheduler.add_request(ask("r0", list(range(40)), 4, **names, **{ARGUMENT: {AGENTS: bad, LENGTHS: bad}}))
    engine.run()
    scheduler.answer_text(*names.values(), {AGENTS: "too long", LENGTHS: "failed"})
    scheduler.answer_text(*names.values(), {})
    scheduler.answer_text(*names.values(), answered)
    scheduler.answer_text(*names.values(), answered)
    scheduler.answer_text("retry", names["workflow_id"], "another", 7, answered)
    assert not scheduler.answer_text("retry", "nobody", "planner", 0, {AGENTS: "too long"})
    same(scheduler.made[0], [{**names, "input_tokens": 40}])
    same(scheduler.made[1], [{**names, "input_tokens": 40, "output_tokens": 4}])
    same_lengths(scheduler.made[0], [{**names, "input_tokens": 40}])
    assert counted(scheduler) == {
        "text features at prefill: another version": 1,
        "text features at completion: too long": 1,
        "text features at completion: used": 1,
        "text features at completion: late": 2,
        "text features of lengths at prefill: another version": 1,
        "text features of lengths at completion: failed": 1,
        "text features of lengths at completion: used": 1,
        "text features of lengths at completion: late": 2,
    }


@pytest.mark.parametrize("sent", ["x y", 7, [], {AGENTS: 7, LENGTHS: ["x"], "another": "x"}])
def test_what_is_sent_in_another_form_is_not_read(tmp_path: Path, sent: Any) -> None:
    scheduler, engine = built(tmp_path)
    names = {"workflow_type": "retry", "workflow_id": "w", "agent": "planner", "step": 0}
    scheduler.add_request(ask("r0", list(range(40)), 4, **names, **{ARGUMENT: sent}))
    engine.run()
    scheduler.answer_text(*names.values(), sent)
    same_lengths(scheduler.made[0], [{**names, "input_tokens": 40}])
    kinds, moments = ("text features", "text features of lengths"), (PREFILL, COMPLETION)
    assert counted(scheduler) == {f"{kind} at {moment}: invalid": 1 for kind in kinds for moment in moments}


def test_lengths_get_texts_without_a_model_of_next_agents(tmp_path: Path) -> None:
    scheduler, engine = built(tmp_path, next_agent=None)
    reads = loaded(scheduler)
    assert set(reads) == {LENGTHS}
    served, seen = scheduler.engine_port.config.served_model, []
    for number, row in enumerate(text_workflows(1)[0][:3]):
        names = {key: row[key] for key in ("workflow_type", "workflow_id", "agent", "step")}
        scheduler.add_request(ask(f"r{number}", list(range(40)), 4, **names, **{ARGUMENT: read(reads, PREFILL, row)}))
        engine.run()
        scheduler.answer_text(*names.values(), read(reads, COMPLETION, row))
        seen.append({**row, "input_tokens": 40, "output_tokens": 4, "model": served})
        same_lengths(scheduler.made[0], so_far(seen, number, False))
        scheduler.made.clear()


class Newer:
    """Models that are swapped in between two iterations, as those of a registry are; other digests, same contents."""

    digests: ClassVar = {AGENTS: "sha256:newer", LENGTHS: "sha256:newest"}

    def __init__(self, found: Any, served_model: str) -> None:
        self._found, self._served_model, self._swapped = found, served_model, False

    def renew(self) -> bool:
        if self._swapped:
            return False
        models = {kind: replace(of, digest=self.digests[kind]) for kind, of in self._found.text_models.items()}
        made = {"served_model": self._served_model, "text_models": models, "budget": Budget(60.0)}
        self._found.take_over(Forecaster(text_predictor(), 2, lengths=text_lengths(), lengths_version=2, **made))
        self._swapped = True
        return True

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def test_a_reload_between_a_prompt_and_the_engine_mixes_no_versions(tmp_path: Path) -> None:
    scheduler, engine = built(tmp_path)
    older, served = loaded(scheduler), scheduler.engine_port.config.served_model
    (first, second, *_), (other, *_), (third, *_) = text_workflows(3)

    def begun(row: dict[str, Any], reads: dict[str, TextFeatures]) -> LiveForecast | None:
        names = {key: row[key] for key in ("workflow_type", "workflow_id", "agent", "step")}
        sent = {ARGUMENT: read(reads, PREFILL, row)}
        scheduler.made.clear()
        scheduler.add_request(ask(f"{row['workflow_id']}.{row['step']}", list(range(40)), 4, **names, **sent))
        engine.run()
        return scheduler.made[0]

    def with_texts(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "input_tokens": 40, "output_tokens": 4, "output_text": None, "model": served}

    def without(row: dict[str, Any]) -> dict[str, Any]:
        return {**with_texts(row), "input_text": None, "system_prompt": None, "model": None}

    same_lengths(begun(first, older), [with_texts(first)])
    scheduler.upkeep = Newer(scheduler.found.next_agents, served)
    scheduler.add_request(ask("nobody's", list(range(40)), 4))
    engine.run()
    assert {kind: model["digest"] for kind, model in scheduler.text_models().items()} == Newer.digests
    for steps, row in (([with_texts(first)], second), ([], other)):
        live, offline = begun(row, older), so_far([*steps, without(row)], len(steps), False)
        same_lengths(live, offline)
        same(live, offline)
    names = [first["workflow_type"], first["workflow_id"], second["agent"], second["step"]]
    assert scheduler.answer_text(*names, read(older, COMPLETION, second))
    kinds = ("text features", "text features of lengths")
    assert [counted(scheduler)[f"{kind} at prefill: another version"] for kind in kinds] == [2, 2]
    assert [counted(scheduler)[f"{kind} at completion: another version"] for kind in kinds] == [1, 1]
    models = {AGENTS: text_predictor(), LENGTHS: text_lengths()}
    live = begun(third, {kind: TextFeatures(kind, of, Newer.digests[kind]) for kind, of in models.items()})
    assert live is not None
    assert live.remaining.version == 2
    same_lengths(live, [with_texts(third)])


@pytest.mark.parametrize("settings", [{"texts": False}, {"next_agent": None, "remaining_length": None}])
def test_an_engine_without_a_model_of_texts_reads_none(tmp_path: Path, settings: Any) -> None:
    scheduler, engine = built(tmp_path, **settings)
    assert scheduler.text_models() == {}
    scheduler.add_request(ask("r0", list(range(40)), 4, workflow_type="t", workflow_id="w", **{ARGUMENT: "x y"}))
    engine.run()
    scheduler.answer_text("t", "w", "", None, {AGENTS: "x y", LENGTHS: "x y"})
    assert not any("text features" in name for name in scheduler.presage_status()["counts"])
