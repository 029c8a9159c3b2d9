"""Promote a version, roll back, and list versions.

Three tags of the version hold the verdict, also of a refusal: `presage.verdict`, what refused it, and the input
profile. The files `verdict/verdict.json` and `.html` of its run hold the rest: each gate with figures and reason, the
alias, the rival and the traces. The times of verdict and roll-back are tags of the run, which a listing reads anyway.

A tag of the registered model, `presage.history.ALIAS`, holds the stack of former holders for repeated roll-backs.
Promotion writes it before it moves the alias and roll-back afterwards: after a crash in between, the top of the stack
is the holder itself, which is skipped. The verdict comes last, so that a version whose alias could not be moved has
none.

A promotion is refused if the alias has another holder than the one that the version was judged against. MLflow has no
compare-and-set: of two promotions that move an alias within milliseconds the last one wins. Aliases moved in the MLflow
UI are missing in the history; the next promotion records the holder it finds.
"""

import json
import re
import tempfile
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from presage.errors import AliasMovedError, RegistryError
from presage.registry.connect import Registry, attach, pages, registry_errors
from presage.registry.gates import Verdict, lost_by_target
from presage.registry.package import EPOCH, EXPERIMENT

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION: Final = "champion"

VERDICT: Final = "presage.verdict"
PROFILE: Final = f"{VERDICT}.profile"
"""Tag: the input profile under which the version was judged; a router has none."""

REFUSED_BY: Final = f"{VERDICT}.refused_by"
"""Tag: the gates that refused the version; absent if none did."""

JUDGED_AT: Final = f"{VERDICT}.at"
"""Tag of the run."""

TAKEN_BACK: Final = "rolled back"
"""The verdict of a version that lost an alias by a roll-back, until it is judged again."""

ROLLED_BACK: Final = "presage.rolled_back"
"""Tag of the run: alias, successor and time of the latest roll-back."""

HISTORY: Final = "presage.history."

_EARLIER: Final = ("presage.gate.", f"{VERDICT}.", ROLLED_BACK)
"""Beginnings of the tags of a verdict; versions judged by Presage 0.1 have more than three."""

_OF_VERSIONS: Final = "tags.`presage.kind` != ''"  # baselines have runs too

VERDICT_FOLDER: Final = "verdict"
"""Folder of the version's run with `verdict.json` and `verdict.html`."""

_HISTORY_LENGTH: Final = 100
_LONGEST_TAG: Final = 2000
"""Characters; older MLflow servers allow 5,000 a tag."""


class Promotion(NamedTuple):
    """The former holder of the alias (None: there was none), and whether the alias moved."""

    previous: int | None
    moved: bool


def check_alias(alias: str) -> None:
    """Raise RegistryError unless MLflow takes this alias; commands call it before they judge."""
    if not re.fullmatch(r"[\w-]{1,255}", alias) or re.fullmatch(r"(?i)latest|v\d+", alias):
        raise RegistryError(
            f"alias {alias!r}: wanted letters, digits, '-' and '_' only, as in 'champion'; MLflow reserves 'latest' "
            "and names like 'v3'."
        )


def promote(
    registry: Registry,
    verdict: Verdict,
    *,
    against: int | None,
    alias: str = CHAMPION,
    profile: str | None = "engine",
    dry_run: bool = False,
    data_digest: str,
) -> Promotion:
    """Move the alias to the version that a verdict names, if it passed, and write the verdict to the version.

    Args:
        against: the holder of the alias when the version was judged; None if there was none.
        alias: `champion`, `challenger`, `shadow` or another name.
        profile: inputs it was judged with; a tag lets engines check that they supply them. None for a router.
        dry_run: change nothing.
        data_digest: of the traces behind the verdict.

    Raises:
        AliasMovedError: the alias has another holder by now; nothing was changed.
        RegistryError: there is no such model or version, or the registry refuses the change.
    """
    name, version = verdict.name, verdict.version
    present = registry.version(name, version)
    previous = registry.aliases(name).get(alias)
    if previous != against:
        before, now = ("no version" if version is None else f"version {version}" for version in (against, previous))
        raise AliasMovedError(
            f"{name!r} version {version} was judged while {before} was {alias}, and {now} is {alias} now. Nothing was "
            "changed: promote it again, to judge it against that."
        )
    moved = verdict.promoted and previous != version
    if dry_run:
        return Promotion(previous, moved=False)
    if moved:
        with registry_errors(registry.uri, f"giving {alias} to {name!r} version {version}"):
            if previous is not None:
                _write_history(registry, name, alias, [*_history(registry, name, alias), previous])
            registry.client.set_registered_model_alias(name, alias, str(version))
    refused_by = ", ".join(gate.name for gate in verdict.refusals)[:_LONGEST_TAG]
    tags = {VERDICT: "promoted" if verdict.promoted else "refused"}
    if profile is not None:
        tags[PROFILE] = profile
    if refused_by:
        tags[REFUSED_BY] = refused_by
    judged_at = _utc(time.time())
    about = {
        REFUSED_BY: "",
        **tags,
        JUDGED_AT: judged_at,
        f"{VERDICT}.alias": alias,
        f"{VERDICT}.against": "" if previous is None else str(previous),
        f"{VERDICT}.data_digest": data_digest,
    }
    _write_verdict(registry, verdict, about)
    with registry_errors(registry.uri, f"writing the verdict on {name!r} version {version}"):
        for stale in present.tags.keys() - tags.keys():
            if stale.startswith(_EARLIER):
                registry.client.delete_model_version_tag(name, str(version), stale)
        for key, value in tags.items():
            registry.client.set_model_version_tag(name, str(version), key, value)
        _tag_run(registry, present, JUDGED_AT, judged_at)
    return Promotion(previous, moved)


def rollback(registry: Registry, name: str, *, alias: str = CHAMPION) -> tuple[int | None, int]:
    """Give an alias back to its former holder; repeatable down to the first. Deleted versions are skipped.

    Returns the version that held the alias (None if there is none, such as after its deletion), and the one that holds
    it now. Raises RegistryError for no such model, or no former holder.
    """
    existing = {int(version.version): version for version in registry.versions(name)}
    holder = registry.aliases(name).get(alias)
    with registry_errors(registry.uri, f"rolling back {name!r}"):
        history = _history(registry, name, alias)
        while history and (history[-1] == holder or history[-1] not in existing):
            history.pop()
        if not history and holder is None:
            raise RegistryError(
                f"{name!r} has no {alias} in {registry.uri}, so there is nothing to roll back. Promote first."
            )
        if not history:
            raise RegistryError(
                f"{name!r}: version {holder} is the first {alias} on record, there is nothing to roll back to. "
                "Promote another version, or remove the alias in MLflow."
            )
        target = history.pop()
        registry.client.set_registered_model_alias(name, alias, str(target))
        _write_history(registry, name, alias, history)
        if holder is not None:
            registry.client.set_model_version_tag(name, str(holder), VERDICT, TAKEN_BACK)
            done = {"alias": alias, "to": target, "at": _utc(time.time())}
            _tag_run(registry, existing[holder], ROLLED_BACK, json.dumps(done))
    return holder, target


def _tag_run(registry: Registry, version: "ModelVersion", key: str, value: str) -> None:
    if version.run_id:  # a version that was made in MLflow has none
        registry.client.set_tag(version.run_id, key, value)


def _write_verdict(registry: Registry, verdict: Verdict, about: Mapping[str, str]) -> None:
    """Attach the verdict with all figures and reasons, for programs and for people; `about` is what it rests on."""
    rows = [("gate", "result", "reason"), *((gate.name, gate.result, gate.reason) for gate in verdict.gates)]
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    facts = "".join(f"<li>{key}: {escape(value) or '–'}</li>" for key, value in about.items())
    title = f"<h1>{escape(verdict.name)}, version {verdict.version}: {about[VERDICT]}</h1>"
    page = f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{title}<ul>{facts}</ul><table>{table}</table>"
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"verdict.{suffix}" for suffix in ("json", "html")]
        files[0].write_text(json.dumps({**verdict.to_dict(), "tags": dict(about)}, indent=1, ensure_ascii=False))
        files[1].write_text(page)
        attach(registry, verdict.name, verdict.version, files, VERDICT_FOLDER)


_STYLE: Final = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:1em}h1{font-size:1.3em}table{border-collapse:collapse}"
    "td{padding:.3em .8em .3em 0;vertical-align:top;border-bottom:1px solid #ddd}tr:first-child{font-weight:bold}"
    "td:nth-child(2){min-width:9em}li{overflow-wrap:anywhere}"
)


def _history(registry: Registry, name: str, alias: str) -> list[int]:
    """Former holders of an alias, oldest first."""
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


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def list_models(registry: Registry) -> list[dict[str, Any]]:
    """All versions that Presage registered, by name and newest first; other models of a shared registry are left out.

    Returns one mapping of JSON values a version: `name`, `version`, `aliases`, `kind`, `verdict` (`"promoted"`,
    `"refused"`, or None if never judged), `refused_by` (names of gates), `judged_at`, `rolled_back` (bool),
    `registered_at`, `lost` (comparisons with baselines lost in training, by target), `size_bytes` (None if the tag is
    missing), `data_digest` (of the training data), `run_id` and `figures` (flat names as in `headline`). Raises
    RegistryError if the registry does not answer.
    """
    listed = []
    with registry_errors(registry.uri, "listing models"):
        models = pages(registry.client.search_registered_models)
        runs = _runs(registry)
    for model in sorted(models, key=lambda model: str(model.name)):
        holders: dict[int, list[str]] = {}
        for alias, version in model.aliases.items():
            holders.setdefault(int(version), []).append(alias)
        for listed_version in reversed(registry.versions(model.name)):
            if "presage.kind" in listed_version.tags:
                listed.append(_describe(listed_version, sorted(holders.get(int(listed_version.version), [])), runs))
    return listed


def vacant_aliases(registry: Registry) -> list[dict[str, Any]]:
    """Aliases that point to a deleted version, or had holders and have none, by name.

    Returns one mapping of JSON values an alias: `name`, `alias`, `version` (that it points to, None if to none) and
    `former` (the version that `rollback` would give it to, None if there is none). Raises RegistryError if the registry
    does not answer.
    """
    vacant: list[dict[str, Any]] = []
    with registry_errors(registry.uri, "listing aliases"):
        models = pages(registry.client.search_registered_models)
    for model in sorted(models, key=lambda model: str(model.name)):
        had = {tag.removeprefix(HISTORY): None for tag in model.tags if tag.startswith(HISTORY)}
        pointing = {**had, **{alias: int(version) for alias, version in model.aliases.items()}}
        versions = registry.versions(model.name) if pointing else []
        if not had and not any("presage.kind" in version.tags for version in versions):
            continue  # another's model
        existing = {int(version.version) for version in versions}
        for alias, version in sorted(pointing.items()):
            if version not in existing:
                former = [earlier for earlier in _history(registry, model.name, alias) if earlier in existing]
                row = {"name": model.name, "alias": alias, "version": version, "former": former[-1] if former else None}
                vacant.append(row)
    return vacant


class _Run(NamedTuple):
    figures: dict[str, float]
    tags: dict[str, str]


def _runs(registry: Registry) -> dict[str, _Run]:
    """The headline figures and tags of each version's run, in a few requests."""
    experiment = registry.client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return {}
    runs = pages(registry.client.search_runs, experiment_ids=[experiment.experiment_id], filter_string=_OF_VERSIONS)
    return {
        run.info.run_id: _Run(
            {key: value for key, value in run.data.metrics.items() if not key.startswith(EPOCH)}, dict(run.data.tags)
        )
        for run in runs
    }


def _describe(version: Any, aliases: list[str], runs: Mapping[str, _Run]) -> dict[str, Any]:
    figures, of_run = runs.get(version.run_id, _Run({}, {}))
    tags = {**of_run, **version.tags}  # versions of Presage 0.1 have all of them themselves
    refused_by = [gate for gate in tags.get(REFUSED_BY, "").split(", ") if gate]
    verdict = version.tags.get(VERDICT)
    taken_back = verdict == TAKEN_BACK
    if taken_back:
        verdict = ("refused" if refused_by else "promoted") if JUDGED_AT in tags else None
    return {
        "name": version.name,
        "version": int(version.version),
        "aliases": aliases,
        "kind": tags["presage.kind"],
        "verdict": verdict,
        "refused_by": refused_by,
        "judged_at": tags.get(JUDGED_AT),
        "rolled_back": taken_back or ROLLED_BACK in version.tags,
        "registered_at": _utc(version.creation_timestamp / 1000),
        "lost": lost_by_target(tags),
        "size_bytes": int(tags["presage.size_bytes"]) if "presage.size_bytes" in tags else None,
        "data_digest": tags.get("presage.data_digest"),
        "run_id": version.run_id,
        "figures": figures,
    }
