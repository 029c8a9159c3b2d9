"""Newer versions of an engine's models: a set is handed over whole, or what is there stays, and that is logged once."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from presage.errors import ArtefactError, RegistryError
from presage.registry.resolve import parse
from presage.serving_hooks.forecasting.reload import ProcessEnded, RegistryClient, Reload, around
from presage.serving_hooks.forecasting.sources import Held

AGENTS, LENGTHS = "models:/next-agent@champion", "models:/remaining-length@champion"


class Made(RegistryClient):
    """A registry of two models, and what each version does when it is tried, and when it is loaded."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.aliases: dict[str, dict[str, int]] = {"next-agent": {"champion": 1}, "remaining-length": {"champion": 1}}
        self.down = False
        self.asked = 0
        self.tried: list[str] = []
        self.loaded: list[str] = []
        self.faults: dict[str, Callable[[], None]] = {}
        self.faults_of_loading: dict[str, Callable[[], None]] = {}
        self.at_rest = False

    def versions(self, references: Mapping[str, str]) -> dict[str, int | None]:
        self.asked += 1
        if self.down:
            raise RegistryError("made-up: does not answer")
        found: dict[str, int | None] = {}
        for kind, reference in references.items():
            name, alias, version = parse(reference)
            found[kind] = version if alias is None else self.aliases.get(name, {}).get(alias)
        return found

    def trial(self, kind: str, reference: str) -> Held:
        self.at_rest = False
        self.tried.append(reference)
        self.faults.get(reference, lambda: None)()
        version = int(reference.rsplit("/", 1)[1])
        return Held(None, reference, version, f"sha256:{reference}", folder=Path(reference))

    def load(self, kind: str, folder: Path, digest: str) -> Any:
        assert digest == f"sha256:{folder}"
        self.loaded.append(str(folder))
        self.faults_of_loading.get(str(folder), lambda: None)()
        return f"predictor {folder}"

    def rest(self) -> None:
        self.at_rest = True

    def close(self) -> None:
        self.down = True


def held(reference: str | None, version: int | None = 1) -> Held:
    return Held("the first one" if version is not None else None, reference, version)


def models(agents: Held, lengths: Held) -> dict[str, Held]:
    return {"next-agent": agents, "remaining-length": lengths, "return-time": held(None, None)}


def watching(made: Made, agents: Held | None = None, lengths: Held | None = None) -> Reload:
    return Reload(models(agents or held(AGENTS), lengths or held(LENGTHS)), made, 30.0, load=made.load)


def versions(found: dict[str, Held] | None) -> tuple[int | None, int | None] | None:
    return None if found is None else (found["next-agent"].version, found["remaining-length"].version)


def fails(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_what_has_not_changed_is_neither_loaded_nor_handed_over() -> None:
    made = Made()
    reload = watching(made)
    reload.look()
    reload.look()
    assert (reload.take(), made.tried, made.loaded, made.asked) == (None, [], [], 2)


def test_a_version_that_passes_is_handed_over_once_with_what_stays() -> None:
    made = Made()
    reload = watching(made)
    made.aliases["next-agent"]["champion"] = 4
    reload.look()
    found = reload.take()
    assert versions(found) == (4, 1)
    assert found is not None
    assert found["next-agent"].reference == AGENTS, "told as it was asked for"
    assert found["remaining-length"].predictor == "the first one"
    assert made.at_rest, "what was loaded for the trial takes no memory any more"
    reload.look()
    assert reload.take() is None
    made.aliases["next-agent"]["champion"] = 1  # rolled back
    reload.look()
    assert versions(reload.take()) == (1, 1)


def test_a_version_on_its_way_is_shown_until_it_is_loaded_or_fails() -> None:
    made, now, shown = Made(), [100.0], []
    reload = Reload(
        models(held(AGENTS), held(LENGTHS)),
        made,
        30.0,
        made.load,
        clock=lambda: now[0],
    )

    def takes_12_s() -> None:
        now[0] += 12.0
        shown.append(reload.loading())

    made.aliases["next-agent"]["champion"] = 4
    made.faults["models:/next-agent/4"] = takes_12_s
    assert reload.loading() == {}
    reload.look()
    assert shown == [{"next-agent": "version 4 is being loaded since 12 s"}]
    assert reload.loading() == {}
    made.aliases["next-agent"]["champion"] = 5
    made.faults["models:/next-agent/5"] = fails(ArtefactError("it is cut"))
    reload.look()
    assert reload.loading() == {}


@pytest.mark.parametrize("error", [ArtefactError("it is cut"), ZeroDivisionError("in a kernel")])
def test_neither_is_used_where_one_fails_and_it_is_tried_and_said_once(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    made = Made()
    reload = watching(made)
    made.aliases = {"next-agent": {"champion": 2}, "remaining-length": {"champion": 3}}
    made.faults["models:/remaining-length/3"] = fails(error)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reload.look()
    assert reload.take() is None
    assert made.tried.count("models:/remaining-length/3") == 1
    assert made.loaded == [], "nothing is loaded before all have passed"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "remaining-length version 3 is refused, version 1 stays"
    ]
    assert list(reload.refused) == ["remaining-length version 3"]
    made.aliases["remaining-length"]["champion"] = 4
    reload.look()
    assert versions(reload.take()) == (2, 4)


def test_a_model_that_is_not_there_yet_holds_nothing_up_by_failing() -> None:
    made = Made()
    reload = watching(made, lengths=held(LENGTHS, None))
    made.faults["models:/remaining-length/1"] = fails(ArtefactError("it is cut"))
    made.aliases["next-agent"]["champion"] = 2
    reload.look()
    assert versions(reload.take()) == (2, None)
    made.aliases["next-agent"]["champion"] = 3
    reload.look()
    assert versions(reload.take()) == (3, None)
    assert made.tried.count("models:/remaining-length/1") == 1


def test_a_registry_that_is_down_and_back_is_said_twice_and_what_was_missed_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Made()
    made.down = True
    reload = watching(made, agents=held("models:/next-agent/7", None), lengths=held(None, None))
    with caplog.at_level(logging.WARNING):
        reload.look()
        reload.look()
        assert "does not answer; retrying (next-agent: no model is loaded)" in reload.troubles["registry"]
        made.down = False
        reload.look()
    assert versions(reload.take()) == (7, None)
    assert reload.troubles == {}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["registry"] * 2


def test_a_registry_that_fails_while_a_version_is_fetched_refuses_nothing() -> None:
    made = Made()
    reload = watching(made)
    made.aliases["next-agent"]["champion"] = 2
    made.faults["models:/next-agent/2"] = fails(RegistryError("the download broke off"))
    reload.look()
    assert (reload.take(), reload.refused) == (None, {})
    assert "broke off; version 1 stays" in reload.troubles["next-agent"]
    made.faults.clear()
    reload.look()
    assert versions(reload.take()) == (2, 1)
    assert reload.troubles == {}


@pytest.mark.parametrize("gone", [{"remaining-length": {"champion": 1}}, {"next-agent": {}, "remaining-length": {}}])
def test_an_alias_that_is_gone_takes_nothing_away(caplog: pytest.LogCaptureFixture, gone: dict[str, Any]) -> None:
    made = Made()
    reload = watching(made)
    made.aliases = gone
    with caplog.at_level(logging.WARNING):
        reload.look()
        reload.look()
    assert reload.take() is None
    assert "no longer resolves to a version; version 1 stays" in reload.troubles["next-agent"]
    assert sum("next-agent" in record.getMessage().split(":")[0] for record in caplog.records) == 1


def test_neither_is_used_where_one_cannot_be_loaded_here() -> None:
    made = Made()
    reload = watching(made)
    made.aliases = {"next-agent": {"champion": 2}, "remaining-length": {"champion": 3}}
    made.faults_of_loading["models:/remaining-length/3"] = fails(ArtefactError("digest sha256:0…; another was tried"))
    reload.look()
    reload.look()
    assert reload.take() is None
    assert reload.refused == {"remaining-length version 3": "digest sha256:0…; another was tried"}
    assert made.loaded == ["models:/next-agent/2", "models:/remaining-length/3"]


def test_a_version_that_does_not_come_back_is_refused() -> None:
    made = Made()
    reload = watching(made)
    made.aliases["next-agent"]["champion"] = 2
    made.faults["models:/next-agent/2"] = fails(ProcessEnded("no answer within 600 s", late=True))
    reload.look()
    assert reload.refused == {"next-agent version 2": "no answer within 600 s"}
    assert reload.take() is None


def test_a_version_whose_trial_ends_the_process_is_tried_once_more_and_then_refused() -> None:
    made = Made()
    reload = watching(made)
    made.aliases["next-agent"]["champion"] = 2
    made.faults["models:/next-agent/2"] = fails(ProcessEnded("the registry process has ended (SIGSEGV)"))
    reload.look()
    assert (reload.take(), reload.refused) == (None, {})
    assert "SIGSEGV" in reload.troubles["next-agent"]
    for _ in range(2):
        reload.look()
    assert list(reload.refused) == ["next-agent version 2"]
    assert made.tried == ["models:/next-agent/2"] * 2


def test_a_look_that_breaks_unforeseen_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    reload = watching(made)
    monkeypatch.setattr(made, "versions", lambda _: {"routes": 4})
    reload.look()
    assert "KeyError" in reload.troubles["reload"]
    monkeypatch.setattr(made, "versions", lambda _: fails(ValueError("many"))())
    reload.look()
    assert "ValueError" in reload.troubles["registry"]


def test_it_looks_in_a_thread_of_its_own_until_it_is_closed() -> None:
    made, tried = Made(), threading.Event()
    made.aliases["next-agent"]["champion"] = 2
    made.faults["models:/next-agent/2"] = tried.set
    reload = Reload(models(held(AGENTS), held(LENGTHS)), made, 0.001, load=made.load)
    reload.start()
    assert tried.wait(30)
    reload.close()
    assert made.down, "the worker is asked to end"


def test_checks_of_a_fleet_spread_around_their_interval() -> None:
    assert [around(30.0, lambda share=share: share) for share in (0.0, 0.5, 1.0)] == [22.5, 30.0, 37.5]


def test_folders_are_not_watched() -> None:
    made = Made()
    made.down = True
    reload = watching(made, agents=held("/srv/model", None), lengths=held(None, None))
    before = set(threading.enumerate())  # one of another test may not have ended yet
    reload.start()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "presage-reload"]
