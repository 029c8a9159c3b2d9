"""What live forecasts of a version are held against: measured when it is promoted, and kept in its run.

Measured as an engine forecasts that is told names and sizes alone: without texts, which the hooks do not read, and
without hidden states, which not every engine hands out. With states forecasts are better; that raises no alarm. Only
workflows that have ended count: what a workflow looks like that was broken off hangs on where.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from presage.cli.kinds import Loaded
from presage.cli.output import Output
from presage.cli.said import said

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.connect import Registry
    from presage.serving_hooks.truth.promoted import Promoted

AT_LEAST: Final = 20
"""Workflows of a type that figures are made of."""

_NAMED: Final = 8


def measured(candidate: Loaded, table: pa.Table, out: Output) -> dict[str, Promoted] | None:
    """Figures by workflow type; None for a predictor that no engine holds against what comes.

    Args:
        candidate: the version.
        table: traces that it was not trained on, in canonical order.
        out: told of which types there were too few workflows.
    """
    import pyarrow.compute as pc

    from presage.features.input_profiles import PROFILES, masked
    from presage.serving_hooks.truth.promoted import promoted_by_type
    from presage.serving_hooks.truth.recorded import followed_of

    kind = candidate.kind.name
    if kind not in ("next-agent", "remaining-length"):
        return None
    if kind == "remaining-length" and candidate.predictor.target != "remaining":
        return None
    bare = masked(table, PROFILES["ids+tokens"])
    ended = [of for of in followed_of(bare, said({kind: candidate}, bare)) if of.ended]
    found = promoted_by_type(ended, AT_LEAST)
    if few := sorted(set(pc.unique(table["workflow_type"]).to_pylist()) - found.keys()):
        more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
        out.note(
            f"fewer than {AT_LEAST} workflows that ended of {', '.join(map(repr, few[:_NAMED]))}{more}: an engine "
            "will hold these workflow types against their own first workflows"
        )
    return found


def keep(registry: Registry, name: str, version: int, promoted: dict[str, Promoted]) -> None:
    """Puts the figures into the run of the version, in the place of those of an earlier promotion.

    The file is whole before it is handed over; one of which the copy is cut does not parse, and counts as none.

    Raises:
        RegistryError: the registry does not take it.
    """
    from presage.registry.attach import attach
    from presage.serving_hooks.truth.promoted_file import FILE, FOLDER, written

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / FILE
        file.write_text(written(promoted), encoding="utf-8")
        attach(registry, name, version, [file], FOLDER)
