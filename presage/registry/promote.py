"""Carry out a verdict: write it down, move the alias, remember who held it, and go back.

Verdict, figures and reasons become tags of the version, for refusals too; `list_models` reads them. Who held an alias
before is kept as a stack in a tag of the registered model, `presage.history.ALIAS`, so that roll-back can be repeated
down to the first holder.
The alias itself moves last when promoting and first when rolling back: after a crash in between, the top of the stack
is the holder itself, and that is skipped.

Two promotions at once: MLflow has no compare-and-set, so the last writer wins, and the other's entry in the history may
be lost. An alias moved by hand in the MLflow UI is not in the history; the next promotion records the holder it finds.
"""

import json
import time
from dataclasses import dataclass
from typing import Any, Final

from presage.errors import RegistryError
from presage.registry.connect import Registry, pages, speaking
from presage.registry.gates import Verdict, lost_by_target

CHAMPION: Final = "champion"

VERDICT: Final = "presage.verdict"
PROFILE: Final = f"{VERDICT}.profile"
"""The inputs that a version was judged with when it was promoted."""

GATE: Final = "presage.gate."
HISTORY: Final = "presage.history."
ROLLED_BACK: Final = "presage.rolled_back"

_HISTORY_LENGTH: Final = 100
_REASON_LENGTH: Final = 2000
"""Characters; older MLflow servers take 5,000 a tag."""


@dataclass(frozen=True)
class Promotion:
    """What `promote` did.

    Attributes:
        name: registered model.
        version: the version judged.
        alias: the alias asked for.
        previous: version that held the alias before; None where none did.
        moved: whether the alias now points at another version than before.
    """

    name: str
    version: int
    alias: str
    previous: int | None
    moved: bool


def promote(
    registry: Registry,
    name: str,
    version: int,
    verdict: Verdict,
    *,
    alias: str = CHAMPION,
    profile: str = "engine",
    dry_run: bool = False,
    data_digest: str,
) -> Promotion:
    """Write a verdict to a version and, where it passed, give it the alias.

    Args:
        registry: where.
        name: registered model.
        version: the version judged.
        verdict: of that version.
        alias: `champion`, `challenger`, `shadow` or another name.
        profile: what it was judged with: "engine", "gateway" or "full"; kept, so that an engine can tell whether it
            supplies as much.
        dry_run: look, and change nothing.
        data_digest: digest of the traces the verdict rests on.

    Raises:
        RegistryError: no such model or version, or the registry does not take the change.
        ValueError: the verdict is of another version.
    """
    if (verdict.name, verdict.version) != (name, version):
        raise ValueError(f"a verdict on {verdict.name!r} version {verdict.version} cannot promote {name!r} {version}")
    present = registry.version(name, version)
    previous = registry.aliases(name).get(alias)
    moved = verdict.promoted and previous != version
    if dry_run:
        return Promotion(name, version, alias, previous, moved=False)
    with speaking(registry.uri, f"writing the verdict on {name!r} version {version}"):
        _write_verdict(registry, name, version, verdict, alias, previous, profile, data_digest, set(present.tags))
        if moved:
            if previous is not None:
                _write_history(registry, name, alias, [*_history(registry, name, alias), previous])
            registry.client.set_registered_model_alias(name, alias, str(version))
    return Promotion(name, version, alias, previous, moved)


def rollback(registry: Registry, name: str, *, alias: str = CHAMPION) -> tuple[int, int]:
    """Give an alias back to the version that held it before; again and again, down to the first.

    Versions deleted since are passed over.

    Args:
        registry: where.
        name: registered model.
        alias: the alias to move.

    Returns:
        The version that held the alias, and the one that holds it now.

    Raises:
        RegistryError: no such model, nobody holds the alias, or nobody held it before.
    """
    holder = registry.aliases(name).get(alias)
    if holder is None:
        raise RegistryError(
            f"{name!r} has no {alias} in {registry.uri}, so there is nothing to roll back. Promote first."
        )
    existing = {int(version.version) for version in registry.versions(name)}
    with speaking(registry.uri, f"rolling back {name!r}"):
        history = _history(registry, name, alias)
        while history and (history[-1] == holder or history[-1] not in existing):
            history.pop()
        if not history:
            raise RegistryError(
                f"{name!r}: version {holder} is the first {alias} on record, there is nothing to roll back to. "
                "Promote another version, or remove the alias in MLflow."
            )
        target = history.pop()
        registry.client.set_registered_model_alias(name, alias, str(target))
        _write_history(registry, name, alias, history)
        registry.client.set_model_version_tag(
            name, str(holder), ROLLED_BACK, json.dumps({"alias": alias, "to": target, "at": _now()})
        )
    return holder, target


def _write_verdict(
    registry: Registry,
    name: str,
    version: int,
    verdict: Verdict,
    alias: str,
    previous: int | None,
    profile: str,
    data_digest: str,
    present: set[str],
) -> None:
    tags = {
        VERDICT: "promoted" if verdict.promoted else "refused",
        f"{VERDICT}.alias": alias,
        f"{VERDICT}.against": "" if previous is None else str(previous),
        f"{VERDICT}.at": _now(),
        PROFILE: profile,
        f"{VERDICT}.data_digest": data_digest,
        f"{VERDICT}.refused_by": ", ".join(gate.name for gate in verdict.refusals)[:_REASON_LENGTH],
    }
    for gate in verdict.gates:
        found = gate.to_dict()
        found["reason"] = found["reason"][:_REASON_LENGTH]
        tags[GATE + gate.name] = json.dumps({key: value for key, value in found.items() if key != "name"})
    # Gates of an earlier verdict that were not judged now would read as if they belonged to this one.
    for stale in present - tags.keys():
        if stale.startswith(GATE) or (stale == ROLLED_BACK and verdict.promoted):
            registry.client.delete_model_version_tag(name, str(version), stale)
    for key, value in tags.items():
        registry.client.set_model_version_tag(name, str(version), key, value)


def _history(registry: Registry, name: str, alias: str) -> list[int]:
    """Former holders of the alias, oldest first."""
    written = registry.client.get_registered_model(name).tags.get(HISTORY + alias, "[]")
    try:
        return [int(version) for version in json.loads(written)]
    except (TypeError, ValueError) as error:
        raise RegistryError(
            f"{name!r}: the tag {HISTORY + alias} holds {written[:80]!r}; wanted a list of versions such as [1, 2]. "
            "It was edited by hand: correct or delete it in MLflow."
        ) from error


def _write_history(registry: Registry, name: str, alias: str, history: list[int]) -> None:
    registry.client.set_registered_model_tag(name, HISTORY + alias, json.dumps(history[-_HISTORY_LENGTH:]))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def list_models(registry: Registry) -> list[dict[str, Any]]:
    """All versions of all models that Presage registered, by name and newest first.

    Versions of others in a shared registry are left out.

    Returns:
        One JSON-able mapping a version: `name`, `version`, `aliases`, `kind`, `verdict` (`"promoted"`, `"refused"` or
        None when never judged), `refused_by` (names of gates), `judged_at`, `rolled_back` (bool), `registered_at`,
        `lost` (comparisons with baselines lost in training, by what it may be promoted to), `size_bytes`,
        `data_digest` (of the training data), `run_id` and `figures` (flat names as in `headline`).

    Raises:
        RegistryError: the registry does not answer.
    """
    listed = []
    with speaking(registry.uri, "listing models"):
        models = pages(registry.client.search_registered_models)
    for model in sorted(models, key=lambda model: str(model.name)):
        holders: dict[int, list[str]] = {}
        for alias, version in model.aliases.items():
            holders.setdefault(int(version), []).append(alias)
        for found in reversed(registry.versions(model.name)):
            if "presage.kind" in found.tags:
                listed.append(_describe(found, sorted(holders.get(int(found.version), []))))
    return listed


def _describe(version: Any, aliases: list[str]) -> dict[str, Any]:
    tags = version.tags
    return {
        "name": version.name,
        "version": int(version.version),
        "aliases": aliases,
        "kind": tags["presage.kind"],
        "verdict": tags.get(VERDICT),
        "refused_by": [gate for gate in tags.get(f"{VERDICT}.refused_by", "").split(", ") if gate],
        "judged_at": tags.get(f"{VERDICT}.at"),
        "rolled_back": ROLLED_BACK in tags,
        "registered_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(version.creation_timestamp / 1000)),
        "lost": lost_by_target(tags),
        "size_bytes": int(tags["presage.size_bytes"]),
        "data_digest": tags.get("presage.data_digest"),
        "run_id": version.run_id,
        "figures": json.loads(tags.get("presage.figures", "{}")),
    }
