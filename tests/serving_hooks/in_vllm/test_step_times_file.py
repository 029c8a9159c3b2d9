"""With `step_times_file` every iteration's tokens and time are in a file, whatever policies are on."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_samples import AsyncScheduler, Engine, Scheduler, ask, build

from presage.errors import ConfigurationError
from presage.replay.calibrate import read_step_times
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.vllm.step_times_file import StepTimesFile

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

OFF = {"priority": False, "eviction": False, "admission": False}


class Ticks:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def timed(tmp_path: Path, base: type[Any], presage: Mapping[str, Any]) -> Any:
    kind = type("Timed", (base,), {"clock": staticmethod(Ticks())})
    return build(
        tmp_path / "model", kind, blocks=100, presage={"step_times_file": str(tmp_path / "s.jsonl"), **presage}
    )


@pytest.mark.parametrize("presage", [{}, OFF], ids=["policies on", "policies off"])
@pytest.mark.parametrize("base", [SyncWorkflowScheduler, WorkflowScheduler])
def test_tokens_are_those_that_were_scheduled(tmp_path: Path, base: type[Any], presage: Mapping[str, Any]) -> None:
    scheduler = timed(tmp_path, base, presage)
    engine = Engine(scheduler, ahead=base is WorkflowScheduler)
    scheduler.add_request(ask("one", list(range(300)), 4))
    scheduler.add_request(ask("two", list(range(300, 320)), 6))
    engine.run()
    found = read_step_times([tmp_path / "s.jsonl"])
    # 256 tokens an iteration: the first prompt in two parts, the second beside the end of the first.
    # A prompt of n has n (n + 1) / 2 pairs, in however many parts.
    parts = [[256, 0, 256, 256 * 257 // 2], [64, 0, 320, (300 * 301 - 256 * 257 + 20 * 21) // 2]]
    assert found.tokens[:3].tolist() == [*parts, [0, 2, 301 + 21, 0]]
    assert found.tokens[:, 0].sum() == 320
    assert found.tokens[:, 1].sum() == (4 - 1) + (6 - 1)
    assert (found.seconds > 0).all()
    assert found.engine.cache_tokens == 1600
    assert (found.engine.most_requests, found.engine.most_tokens, found.engine.chunked_prefill) == (16, 256, True)
    assert scheduler.presage_status()["step_times"]["iterations"] == len(found.seconds)


def test_answers_are_the_same_with_it(tmp_path: Path) -> None:
    logs = []
    for kind in (Scheduler, SyncWorkflowScheduler):
        presage = None if kind is Scheduler else {**OFF, "step_times_file": str(tmp_path / "s.jsonl")}
        engine = Engine(build(tmp_path / "model", kind, blocks=100, presage=presage))
        engine.scheduler.add_request(ask("one", list(range(300)), 4))
        engine.run()
        logs.append((engine.log, engine.said))
    assert logs[0] == logs[1]


def test_without_the_setting_nothing_is_timed(tmp_path: Path) -> None:
    scheduler = build(tmp_path / "model", SyncWorkflowScheduler, blocks=100, presage={})
    assert scheduler.presage_status()["step_times"] is None
    assert not issubclass(AsyncScheduler, SyncWorkflowScheduler)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StepTimesFile]:
    made = StepTimesFile(tmp_path / "s.jsonl", {"model": "m"}, most=3)
    yield made
    made.close()


def seconds(file: StepTimesFile) -> list[float]:
    return [json.loads(line)["seconds"] for line in file.path.read_text().splitlines()[1:]]


def test_a_busy_engine_is_timed_from_update_to_update_and_an_idle_one_from_its_beginning(file: StepTimesFile) -> None:
    one, two, three = object(), object(), object()
    file.scheduled(one, (5, 0, 5, 0), 10.0)
    file.updated(one, 12.0, True)
    file.scheduled(two, (0, 1, 6, 0), 12.5)  # half a second passes between the two, and is the second's
    file.updated(two, 14.0, False)
    file.scheduled(three, (0, 1, 7, 0), 99.0)
    file.updated(three, 100.0, False)
    assert seconds(file) == [2.0, 2.0, 1.0]


def test_one_scheduled_ahead_is_timed_from_the_update_before(file: StepTimesFile) -> None:
    one, two = object(), object()
    file.scheduled(one, (5, 0, 5, 0), 10.0)
    file.scheduled(two, (0, 1, 6, 0), 11.0)
    file.updated(one, 12.0, True)
    file.updated(two, 13.0, False)
    assert seconds(file) == [2.0, 1.0]


def test_it_ends_when_it_is_full(file: StepTimesFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "presage")
    for number in range(5):
        file.scheduled(number, (1, 0, 1, 1), float(number))
        file.updated(number, number + 0.5, False)
    assert seconds(file) == [0.5] * 3
    assert caplog.text.count("no more are written") == 1


def test_no_file_is_written_over_and_no_engine_starts_without_one(tmp_path: Path) -> None:
    names = [StepTimesFile(tmp_path / "s.jsonl", {}).path.name for _ in range(3)]
    assert names == ["s.jsonl", "s-1.jsonl", "s-2.jsonl"]
    with pytest.raises(ConfigurationError, match=r"step_times_file is .*nowhere"):
        build(
            tmp_path / "model",
            SyncWorkflowScheduler,
            blocks=100,
            presage={"step_times_file": str(tmp_path / "nowhere" / "s.jsonl")},
        )


def test_a_full_disk_costs_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    scheduler = timed(tmp_path, SyncWorkflowScheduler, OFF)
    monkeypatch.setattr(StepTimesFile, "updated", full)
    engine = Engine(scheduler)
    scheduler.add_request(ask("one", list(range(30)), 4))
    engine.run()
    assert engine.ended == ["one"]
    status = scheduler.presage_status()
    assert status["step_times"]["on"] is False
    assert status["counts"]["step times: OSError"] == 1
