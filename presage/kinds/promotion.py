"""Promotion: a version is judged against the holder of an alias on held-out data, by the gates of its kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from presage.errors import ArtefactError, ConfigurationError, InputError, RegistryError
from presage.features.input_profiles import TARGETS
from presage.kinds.loaded import Loaded, load
from presage.kinds.reference_figures import keep_figures, promotion_figures
from presage.predictor_kinds import Kind
from presage.progress import Progress
from presage.registry.connect import Registry, attached
from presage.registry.gates import Gate, Verdict, floor_gates, forgetting_gates, types_gate, warning_gates
from presage.registry.promote import check_alias
from presage.registry.promote import promote as carry_out
from presage.report.data_warnings import trace_warnings

_SEED: Final = 0
"""Seed of the gates' bootstrap: the same traces give the same verdict."""


@dataclass(frozen=True)
class Contest:
    """What the last gate judges.

    Attributes:
        candidate, champion: the version to promote, and the holder of the alias or None.
        table: traces that neither was trained on.
        note: prints a note for people.
    """

    candidate: Loaded
    champion: Loaded | None
    table: pa.Table
    note: Callable[[str], None]
    report: Progress


class LastGate(Protocol):
    """Judges both versions by more than their figures (`replay/promotion_gate.py`)."""

    def check(self, kind: Kind, name: str) -> None:
        """Raise ConfigurationError unless it can judge this kind of predictor."""

    def judge(self, judged: Contest) -> tuple[tuple[Gate, ...], dict[str, Any]]:
        """The gates, and their figures."""

    def keep(self, registry: Registry, name: str, version: int, found: Mapping[str, Any]) -> None:
        """Attach the figures to the run of the version; raises RegistryError."""


def judge_version(
    registry: Registry,
    name: str,
    version: int,
    held: Callable[[Kind, list[Any]], tuple[Any, int]],
    *,
    alias: str,
    target: str | None,
    types: Collection[str] | None = None,
    dry_run: bool,
    note: Callable[[str], None],
    report: Progress,
    last: LastGate | None = None,
) -> tuple[Verdict, dict[str, Any]]:
    """Judge a version against the holder of an alias, and move the alias if every gate passes.

    Args:
        registry: of the version.
        held: (kind, predictors) -> the data that none of them was trained on, and the number of units left out.
        target: the input profile, a key of `TARGETS`; None: `engine`, or none for a router.
        types: the workflow types to judge on; the candidate need not know others of the champion. None: all.
        note: prints a note for people.
        last: judges after all other gates.

    Returns:
        The verdict, and the JSON of `presage promote`.

    Raises:
        ConfigurationError: `target` or `types` for a router.
        InputError: no held-out workflow has one of the `types`.
    """
    check_alias(alias)
    holder = registry.aliases(name).get(alias)
    candidate = load(f"models:/{name}/{version}", lambda: registry)
    kind = candidate.kind
    prompts = kind.reads_prompts
    if prompts and (target is not None or types is not None):
        option = "--types" if target is None else f"--profile {target}"
        raise ConfigurationError(
            f"{option}: {name!r} is a router, which reads prompts alone: it has no workflow types and no input "
            "profiles; leave the option out"
        )
    if target is None and not prompts:
        target = "engine"
    if last is not None:
        last.check(kind, name)
    champion = None
    if holder is not None and holder != version:  # a version compared with itself always passes
        try:
            champion = load(f"models:/{name}/{holder}", lambda: registry)
        except ArtefactError as error:  # engines cannot load it either, so it must not block promotion
            note(f"the {alias}, version {holder}, cannot be read ({error}); comparing with baselines only")
    if champion is not None and champion.kind.name != kind.name:
        raise RegistryError(
            f"{name!r} version {version} is a {kind.name} predictor and the {alias}, version "
            f"{holder}, a {champion.kind.name} predictor: register each kind under its own name"
        )
    judged = [contender.predictor for contender in (candidate, champion) if contender is not None]
    judged_on, left_out = held(kind, judged)
    if types is not None:
        judged_on = _of_types(judged_on, types)
    against = f", against the {alias}, version {holder}" if champion else ""
    report(f"judging version {version}{against}", None)
    trained = json.loads(attached(registry, name, version, "", "metrics.json") or b"{}")
    under = target or "full"
    gates = [*kind.gates(candidate, champion, judged_on, _SEED, TARGETS[under]), *floor_gates(trained, under)]
    gates += forgetting_gates(trained)
    if not prompts:
        known_types = [kind.types(predictor) for predictor in judged]
        gates.append(types_gate(known_types[0], known_types[1] if champion else (), _types_of(judged_on), types))
        gates += warning_gates(trace_warnings(judged_on))
    replayed = None
    if last is not None:
        further, replayed = last.judge(Contest(candidate, champion, judged_on, note, report))
        gates += further
        if not dry_run:
            last.keep(registry, name, version, replayed)
    verdict = Verdict(name, version, tuple(gates))
    held_against = promotion_figures(candidate, judged_on, note, under) if verdict.promoted else None
    if held_against is not None and not dry_run:  # before the alias moves: an engine may load the version at once
        keep_figures(registry, name, version, held_against)
    done = carry_out(
        registry,
        verdict,
        against=holder,
        alias=alias,
        profile=target,
        dry_run=dry_run,
        data_digest=f"sha256:{kind.digest(judged_on)}",
    )
    data = {**verdict.to_dict(), "alias": alias, "profile": target, "previous": done.previous, "moved": done.moved}
    data["types"] = None if types is None else sorted(types)
    data["dry_run"] = dry_run
    data["left_out"] = left_out
    if held_against is not None:
        data["held_against"] = {
            workflow_type: figures.workflows for workflow_type, figures in sorted(held_against.items())
        }
    if replayed is not None:
        data["replay"] = replayed
    return verdict, data


def _types_of(table: pa.Table) -> list[str]:
    names: list[str] = pc.unique(table["workflow_type"]).to_pylist()
    return names


def _of_types(table: pa.Table, types: Collection[str]) -> pa.Table:
    """The workflows of these types; raises InputError for a type without any."""
    there = sorted(_types_of(table))
    if not types or (missing := sorted(set(types) - set(there))):
        named = ", ".join(missing) if types else "an empty list of types"
        raise InputError(
            f"--types: there is no held-out workflow of {named}, so nothing can be judged; there are {', '.join(there)}"
        )
    return table.filter(pc.is_in(table["workflow_type"], pa.array(list(types))))
