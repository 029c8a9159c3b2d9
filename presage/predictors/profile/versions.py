"""Versions of an application: workflow types with equal names before an @, as in `coding@1` and `coding@2`."""

from __future__ import annotations

import re
from collections.abc import Iterable


def application_of(workflow_type: str) -> str:
    """`coding` of `coding@2`; a name without a label is that of the application."""
    return workflow_type.partition("@")[0]


def latest_versions(workflow_types: Iterable[str]) -> dict[str, str]:
    """The workflow type with the latest label of each application.

    Numbers in labels count as numbers, so `@10` is later than `@9`; a name without a label is the earliest.
    """
    return {application_of(name): name for name in sorted(workflow_types, key=lambda name: (_age(name), name))}


def _age(workflow_type: str) -> list[tuple[int, int, str]]:
    parts = re.split("([0-9]+)", workflow_type.partition("@")[2])
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts if part]
