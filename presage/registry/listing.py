"""What stands in the registry, for `presage models`."""

import json
import time
from typing import Any

from presage.registry.connect import Registry, pages, speaking
from presage.registry.floors import lost_by_target
from presage.registry.promote import ROLLED_BACK, VERDICT


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
