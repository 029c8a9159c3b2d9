"""The verdict is written, the alias moves, and every move can be taken back."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from presage.errors import AliasMovedError, OutputError, RegistryError
from presage.registry.connect import Registry, attached
from presage.registry.gates import Gate, Verdict
from presage.registry.package import RegisteredVersion
from presage.registry.promote import check_alias, list_models, promote, rollback, vacant_aliases
from presage.registry.resolve import alias_holder

Register = Callable[[str], RegisteredVersion]


def verdict(name: str, version: int, *, passed: bool = True, gate: str = "latency") -> Verdict:
    return Verdict(
        name, version, (Gate("schema", True, None, None, "fine"), Gate(gate, passed, 20.0, 30.0, "x" * 9000))
    )


def move(registry: Registry, name: str, version: int, **options: bool) -> None:
    promote(registry, verdict(name, version), against=champion(registry, name), data_digest="sha256:test", **options)


def champion(registry: Registry, name: str) -> int | None:
    return registry.aliases(name).get("champion")


def test_promotion_moves_the_alias_and_writes_why(registry: Registry, registered: Register) -> None:
    registered("moved")
    done = promote(registry, verdict("moved", 1), against=None, data_digest="sha256:test")
    assert (done.previous, done.moved, champion(registry, "moved")) == (None, True, 1)
    tags = registry.version("moved", 1).tags
    assert tags.keys() == {
        "presage.kind", "presage.digest", "presage.headline", "presage.verdict", "presage.verdict.profile",
    }  # fmt: skip
    assert (tags["presage.verdict"], tags["presage.verdict.profile"]) == ("promoted", "engine")
    kept = json.loads(attached(registry, "moved", 1, "verdict", "verdict.json") or b"")
    assert kept["gates"] == [gate.to_dict() for gate in verdict("moved", 1).gates]
    assert kept["tags"]["presage.verdict.data_digest"] == "sha256:test"
    page = (attached(registry, "moved", 1, "verdict", "verdict.html") or b"").decode()
    assert "<h1>moved, version 1: promoted</h1>" in page
    assert "x" * 9000 in page
    assert "passed 20 &lt;= 30" in page


def test_a_refusal_is_written_and_moves_nothing(registry: Registry, registered: Register) -> None:
    registered("refused"), registered("refused")
    move(registry, "refused", 1)
    done = promote(registry, verdict("refused", 2, passed=False), against=1, data_digest="sha256:test")
    assert (done.moved, champion(registry, "refused")) == (False, 1)
    tags = registry.version("refused", 2).tags
    assert (tags["presage.verdict"], tags["presage.verdict.refused_by"]) == ("refused", "latency")
    assert len(tags) == 6
    kept = json.loads(attached(registry, "refused", 2, "verdict", "verdict.json") or b"")
    assert kept["tags"]["presage.verdict.against"] == "1"


def test_a_later_verdict_replaces_the_earlier_one_whole(registry: Registry, registered: Register) -> None:
    registered("rejudged")
    promote(registry, verdict("rejudged", 1, passed=False, gate="size"), against=None, data_digest="a")
    promote(registry, verdict("rejudged", 1), against=None, data_digest="b")
    tags = registry.version("rejudged", 1).tags
    assert tags["presage.verdict"] == "promoted"
    assert "presage.verdict.refused_by" not in tags
    kept = json.loads(attached(registry, "rejudged", 1, "verdict", "verdict.json") or b"")
    assert kept["tags"]["presage.verdict.data_digest"] == "b"


@pytest.mark.parametrize("passed", [True, False])
def test_a_dry_run_leaves_no_trace(registry: Registry, registered: Register, passed: bool) -> None:
    name = f"dry-{passed}"
    registered(name)
    before = dict(registry.version(name, 1).tags)
    done = promote(registry, verdict(name, 1, passed=passed), against=None, dry_run=True, data_digest="sha256:test")
    assert not done.moved
    assert registry.version(name, 1).tags == before
    assert registry.aliases(name) == {}
    assert registry.client.get_registered_model(name).tags == {}


def test_rollback_goes_back_one_by_one_and_then_says_so(registry: Registry, registered: Register) -> None:
    for _ in range(4):
        registered("chain")
    for version in (1, 3, 2):
        move(registry, "chain", version)
    move(registry, "chain", 2)  # promoting the holder again is no move
    assert rollback(registry, "chain") == (2, 3)
    assert rollback(registry, "chain") == (3, 1)
    with pytest.raises(RegistryError, match="version 1 is the first champion on record"):
        rollback(registry, "chain")
    assert champion(registry, "chain") == 1
    move(registry, "chain", 4)
    assert rollback(registry, "chain") == (4, 1)


def test_rollback_marks_what_it_took_back_until_judged_again(registry: Registry, registered: Register) -> None:
    registered("marked"), registered("marked")
    move(registry, "marked", 1)
    move(registry, "marked", 2)
    rollback(registry, "marked")
    listed = {entry["version"]: entry for entry in list_models(registry) if entry["name"] == "marked"}
    assert (listed[2]["rolled_back"], listed[1]["rolled_back"], listed[1]["aliases"]) == (True, False, ["champion"])
    assert listed[2]["verdict"] == "promoted"
    version = registry.version("marked", 2)
    assert version.tags["presage.verdict"] == "rolled back"
    assert len(version.tags) <= 6
    done = json.loads(registry.client.get_run(version.run_id).data.tags["presage.rolled_back"])
    assert (done["alias"], done["to"]) == ("champion", 1)
    move(registry, "marked", 2)
    (again,) = (one for one in list_models(registry) if (one["name"], one["version"]) == ("marked", 2))
    assert (again["rolled_back"], again["verdict"]) == (False, "promoted")


def test_a_version_with_the_tags_of_earlier_releases_is_read_and_judged_again(
    registry: Registry, registered: Register
) -> None:
    registered("earlier"), registered("earlier")
    tags = {
        "presage.size_bytes": "12",
        "presage.data_digest": "sha256:old",
        "presage.version": "0.1.0",
        "presage.lost.engine": "3",
        "presage.verdict": "refused",
        "presage.verdict.refused_by": "size, latency",
        "presage.verdict.at": "2025-01-01T00:00:00Z",
        "presage.verdict.alias": "champion",
        "presage.verdict.against": "",
        "presage.verdict.profile": "gateway",
        "presage.verdict.data_digest": "sha256:old",
        "presage.gate.size": "refused 9 > 8",
        "presage.gate.latency": "refused 31 > 30",
        "presage.rolled_back": '{"alias": "champion", "to": 1}',
    }
    for key, value in tags.items():
        registry.client.set_model_version_tag("earlier", "1", key, value)

    def listed() -> dict[str, object]:
        return next(one for one in list_models(registry) if (one["name"], one["version"]) == ("earlier", 1))

    assert {key: listed()[key] for key in ("verdict", "refused_by", "judged_at", "rolled_back", "size_bytes")} == {
        "verdict": "refused",
        "refused_by": ["size", "latency"],
        "judged_at": "2025-01-01T00:00:00Z",
        "rolled_back": True,
        "size_bytes": 12,
    }
    assert listed()["lost"] == {"engine": 3}
    move(registry, "earlier", 1)
    assert not [key for key in registry.version("earlier", 1).tags if key.startswith(("presage.gate.", "presage.roll"))]
    assert (listed()["verdict"], listed()["refused_by"], listed()["rolled_back"]) == ("promoted", [], False)
    move(registry, "earlier", 2)
    assert rollback(registry, "earlier") == (2, 1)


def test_rollback_passes_over_deleted_versions(registry: Registry, registered: Register) -> None:
    for _ in range(3):
        registered("holes")
    for version in (1, 2, 3):
        move(registry, "holes", version)
    registry.client.delete_model_version("holes", "2")
    assert rollback(registry, "holes") == (3, 1)


def test_a_crash_between_history_and_alias_does_no_harm(registry: Registry, registered: Register) -> None:
    registered("crash"), registered("crash")
    move(registry, "crash", 1)
    move(registry, "crash", 2)
    registry.client.set_registered_model_tag("crash", "presage.history.champion", "[1, 2]")
    assert rollback(registry, "crash") == (2, 1)


def test_an_alias_that_moved_while_the_version_was_judged_is_left_alone(
    registry: Registry, registered: Register
) -> None:
    for _ in range(5):
        registered("race")
    move(registry, "race", 3)
    judged = verdict("race", 5)
    move(registry, "race", 4)  # somebody else's
    before = dict(registry.version("race", 5).tags)
    with pytest.raises(AliasMovedError, match="judged while version 3 was champion, and version 4 is champion now"):
        promote(registry, judged, against=3, data_digest="sha256:test")
    assert champion(registry, "race") == 4
    assert registry.version("race", 5).tags == before
    assert attached(registry, "race", 5, "verdict", "verdict.json") is None


def test_an_alias_that_cannot_be_moved_leaves_no_verdict(
    registry: Registry, registered: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered("stuck")
    before = dict(registry.version("stuck", 1).tags)

    def fails(*_: object) -> None:
        raise OSError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(registry.client, "set_registered_model_alias", fails)
        with pytest.raises(OutputError, match="giving champion to 'stuck' version 1"):
            move(registry, "stuck", 1)
    assert registry.version("stuck", 1).tags == before
    assert attached(registry, "stuck", 1, "verdict", "verdict.json") is None


@pytest.mark.parametrize("alias", ["", "two words", "a@b", "latest", "V3", "x" * 256])
def test_an_alias_that_mlflow_refuses_is_refused_before(alias: str) -> None:
    with pytest.raises(RegistryError, match="as in 'champion'"):
        check_alias(alias)


def delete_holder(registry: Registry, name: str, version: int, *, dangling: bool) -> None:
    """Delete the champion: MLflow's databases drop the alias with it, other stores of MLflow leave it dangling."""
    registry.client.delete_model_version(name, str(version))
    if dangling:
        with closing(sqlite3.connect(registry.uri.removeprefix("sqlite:///"))) as database:
            row = (name, "champion", version)
            database.execute("INSERT INTO registered_model_aliases (name, alias, version) VALUES (?, ?, ?)", row)
            database.commit()


@pytest.mark.parametrize("dangling", [False, True])
def test_the_alias_of_a_deleted_version_counts_as_none_and_can_be_rolled_back(
    registry: Registry, registered: Register, dangling: bool
) -> None:
    name = f"deleted-{dangling}"
    registered(name), registered(name), registered(name)
    move(registry, name, 1)
    move(registry, name, 2)
    delete_holder(registry, name, 2, dangling=dangling)
    assert [of for of in vacant_aliases(registry) if of["name"] == name] == [
        {"name": name, "alias": "champion", "version": 2 if dangling else None, "former": 1}
    ]
    assert champion(registry, name) is None
    assert alias_holder(registry, name, "champion") is None
    assert bool(registry.client.get_registered_model(name).aliases) == dangling
    promote(registry, verdict(name, 3), against=None, dry_run=True, data_digest="x")
    assert rollback(registry, name) == (None, 1)
    assert champion(registry, name) == alias_holder(registry, name, "champion") == 1
    assert [of for of in vacant_aliases(registry) if of["name"] == name] == []


def test_nothing_to_roll_back_is_said(registry: Registry, registered: Register) -> None:
    registered("idle")
    with pytest.raises(RegistryError, match="'idle' has no champion"):
        rollback(registry, "idle")
    with pytest.raises(RegistryError, match="no model 'nobody'"):
        rollback(registry, "nobody")
    move(registry, "idle", 1)
    registry.client.set_registered_model_tag("idle", "presage.history.champion", "one")
    with pytest.raises(RegistryError, match="edited by hand"):
        rollback(registry, "idle")


def test_each_alias_has_its_own_history(registry: Registry, registered: Register) -> None:
    registered("several"), registered("several")
    for version in (1, 2):
        move(registry, "several", version)
        promote(registry, verdict("several", version), against=version - 1 or None, alias="shadow", data_digest="x")
    assert rollback(registry, "several", alias="shadow") == (2, 1)
    assert registry.aliases("several") == {"champion": 2, "shadow": 1}


def test_a_version_that_is_not_there_is_not_promoted(registry: Registry, registered: Register) -> None:
    registered("single")
    with pytest.raises(RegistryError, match="has no version 2"):
        move(registry, "single", 2, dry_run=True)


def test_the_listing_names_versions_verdicts_and_figures(registry: Registry, registered: Register) -> None:
    registered("listed"), registered("listed")
    move(registry, "listed", 1)
    promote(registry, verdict("listed", 2, passed=False), against=1, data_digest="x")
    newest, oldest = [entry for entry in list_models(registry) if entry["name"] == "listed"]
    assert (newest["version"], newest["verdict"], newest["refused_by"], newest["aliases"]) == (
        2,
        "refused",
        ["latency"],
        [],
    )
    assert (oldest["version"], oldest["verdict"], oldest["aliases"]) == (1, "promoted", ["champion"])
    assert oldest["figures"]["prefill_accuracy_1"] == 0.9
    assert oldest["size_bytes"] > 0
    json.dumps([newest, oldest])


def test_a_version_without_a_run_is_listed_with_what_it_has(registry: Registry, registered: Register) -> None:
    registry.client.delete_run(registered("bare").run_id)
    (entry,) = (entry for entry in list_models(registry) if entry["name"] == "bare")
    assert (entry["size_bytes"], entry["lost"], entry["verdict"], entry["figures"]) == (None, {}, None, {})


def test_models_of_others_in_a_shared_registry_are_not_listed(registry: Registry) -> None:
    registry.client.create_registered_model("stranger")
    registry.client.create_model_version("stranger", source="file:///nowhere")
    assert "stranger" not in {entry["name"] for entry in list_models(registry)}
    with pytest.raises(RegistryError, match="no model 'empty'"):
        registry.versions("empty")
    registry.client.create_registered_model("empty")
    assert registry.versions("empty") == []
