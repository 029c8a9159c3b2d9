"""Two trainings side by side, from the figures kept with them; nothing is judged anew."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from presage.errors import ArtefactError
from presage.features.input_profiles import as_served
from presage.registry.connect import Registry, attached
from presage.registry.package import TABLES, headline
from presage.registry.promote import PROFILE, VERDICT, VERDICT_FOLDER
from presage.registry.resolve import kept_file, registered_version

_WITHOUT_INTERVAL: Final = re.compile(r"(.+_)?(nll|ece)(_\d+)?|latency_us|size_bytes")
"""Figures that are shown although no interval of theirs is kept."""

_COMPARES: Final = re.compile("the champion.*95 % interval")
"""Reasons of gates with a paired difference from the champion."""


@dataclass(frozen=True)
class KeptTraining:
    """What was kept of a training: its `metrics.json`, and the aliases and verdict of a registered version."""

    reference: str
    metrics: Mapping[str, Any]
    name: str | None = None
    version: int | None = None
    aliases: Sequence[str] = ()
    verdict: Mapping[str, Any] | None = None

    def digest(self, of: str) -> str | None:
        """The digest of the "training" or "test" data, of traces or outcomes."""
        start = f"digest of the {of} "
        return next((value for key, value in self.metrics["data"].items() if key.startswith(start)), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        judged = self.metrics["workflows"] if "workflows" in self.metrics else self.metrics["prompts"]
        return {
            "reference": self.reference,
            "name": self.name,
            "version": self.version,
            "aliases": list(self.aliases),
            "verdict": None if self.verdict is None else self.verdict["tags"][VERDICT],
            "judged_on": judged,
            "test_digest": self.digest("test"),
        }


def kept_training(reference: str, registry: Callable[[], Registry]) -> KeptTraining:
    """Read what was kept of `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an output folder; raises InputError."""
    path = kept_file(reference, "metrics.json", registry)
    try:
        metrics = json.loads(path.read_bytes())
        kept = isinstance(metrics["kind"], str) and isinstance(metrics["data"], dict) and bool(headline(metrics))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = False
    if not kept:
        raise ArtefactError(f"{path}: not the metrics of a training; expected what train-predictor writes.")
    if not reference.startswith("models:"):
        return KeptTraining(reference, metrics)
    opened, name, version = registered_version(reference, registry)
    aliases = sorted(alias for alias, held in opened.aliases(name).items() if held == version)
    verdict = attached(opened, name, version, VERDICT_FOLDER, "verdict.json")
    return KeptTraining(reference, metrics, name, version, aliases, None if verdict is None else json.loads(verdict))


def compare(first: KeptTraining, second: KeptTraining) -> dict[str, Any]:
    """The headline figures of both, with the difference, second − first.

    Returns:
        JSON values: "kind"; "models" (both); "same_test_data" and "same_training_data" (None: not known); "figures"
        {name: {"values", "ci95", "difference", "difference_ci95"}}, where the interval of a difference is unpaired, and
        None without both intervals; "paired", the verdict on one against the other, None if there is none:
        {"version", "against", "profile", "data_digest", "gates": {name: reason}}.

    Raises ArtefactError for predictors of two kinds.
    """
    kinds = [training.metrics["kind"] for training in (first, second)]
    if kinds[0] != kinds[1]:
        raise ArtefactError(
            f"{first.reference} is a {kinds[0]} predictor and {second.reference} a {kinds[1]} predictor; expected two "
            "of one kind."
        )
    return {
        "kind": kinds[0],
        "models": [first.to_dict(), second.to_dict()],
        **{f"same_{part}_data": _same(first.digest(part), second.digest(part)) for part in ("test", "training")},
        "figures": _figures(first.metrics, second.metrics),
        "paired": _paired(first, second) or _paired(second, first),
    }


def _same(first: str | None, second: str | None) -> bool | None:
    return None if first is None or second is None else first == second


def _figures(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    values, ends = (headline(first), headline(second)), (_intervals(as_served(first)), _intervals(as_served(second)))
    both = {}
    for name in values[0].keys() & values[1].keys():
        if not (name in ends[0] or name in ends[1] or _WITHOUT_INTERVAL.fullmatch(name)):
            continue
        own, other = (by_name[name] for by_name in values)
        its, others = (by_name.get(name) for by_name in ends)
        both[name] = {
            "values": [own, other],
            "ci95": [its, others],
            "difference": other - own,
            "difference_ci95": _unpaired(own, other, its, others),
        }
    order = sorted(both, key=lambda name: (both[name]["difference_ci95"] is None, name))  # those with intervals first
    return {name: both[name] for name in order}


def _intervals(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """The intervals that `metrics.json` has, by the names of `headline`."""
    intervals = {key.removesuffix("_ci95"): ends for key, ends in metrics.items() if key.endswith("_ci95")}
    for moment, figures in metrics.get("moments", {}).items():
        intervals |= {f"{moment}_accuracy_{k}": ends for k, ends in enumerate(figures["ci95"], start=1)}
    for table in TABLES:
        by_key = metrics.get(f"{table}_ci95")
        intervals |= {f"{table}_{key}": ends for key, ends in by_key.items()} if isinstance(by_key, Mapping) else {}
    return {name: ends for name, ends in intervals.items() if isinstance(ends, list) and None not in ends}


def _unpaired(
    first: float, second: float, its: Sequence[float] | None, other: Sequence[float] | None
) -> list[float] | None:
    """The interval of a difference, second − first, of independent figures: Zou and Donner (2008), "MOVER"."""
    if its is None or other is None:
        return None
    difference = second - first
    below, above = math.hypot(second - other[0], its[1] - first), math.hypot(other[1] - second, first - its[0])
    return [difference - below, difference + above]


def _paired(judged: KeptTraining, holder: KeptTraining) -> dict[str, Any] | None:
    """The verdict on a version against another, as far as it compares the two."""
    tags = {} if judged.verdict is None else judged.verdict["tags"]
    if judged.verdict is None or judged.name != holder.name or tags[f"{VERDICT}.against"] != str(holder.version):
        return None
    gates = judged.verdict["gates"]
    return {
        "version": judged.version,
        "against": holder.version,
        "profile": tags.get(PROFILE),
        "data_digest": tags.get(f"{VERDICT}.data_digest"),
        "gates": {gate["name"]: gate["reason"] for gate in gates if _COMPARES.search(gate["reason"])},
    }
