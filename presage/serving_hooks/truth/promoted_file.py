"""The file of a registered version that keeps what it was promoted with, and the figures of two versions as one.

`presage promote` writes it, an engine that loads the version reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from presage.errors import ArtefactError
from presage.serving_hooks.truth.promoted import COVERAGE, Promoted

FOLDER: Final = "truth"
"""Among the artifacts of the version's run."""
FILE: Final = "promoted.json"

_FORMAT: Final = 1


def written(promoted: Mapping[str, Promoted]) -> str:
    """The content of the file: figures by workflow type."""
    types = {name: of.to_dict() for name, of in sorted(promoted.items())}
    return json.dumps({"format_version": _FORMAT, "workflow_types": types}, ensure_ascii=False)


def read(content: bytes) -> dict[str, Promoted]:
    """Inverse of `written`.

    Raises:
        ArtefactError: it is cut, of another version, or no such file.
    """
    try:
        data = json.loads(content)
        if data["format_version"] != _FORMAT:
            raise ValueError(f"format version {data['format_version']!r}")
        return {name: Promoted.from_dict(of) for name, of in data["workflow_types"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtefactError(
            f"{FOLDER}/{FILE} is none of format version {_FORMAT} ({type(error).__name__}): promote the version again"
        ) from error


def merged(next_agent: Mapping[str, Promoted], lengths: Mapping[str, Promoted]) -> dict[str, Promoted]:
    """What an engine with both kinds holds each workflow type against.

    Of a type in both the call graph, and the figures that go with it, are those of next agents: figures and graph must
    be of one trace. Of lengths its coverage is added.
    """
    found = {**lengths, **next_agent}
    for name in next_agent.keys() & lengths.keys():
        coverage = {figure: of for figure, of in lengths[name].figures.items() if figure.startswith(COVERAGE)}
        found[name] = replace(next_agent[name], figures={**next_agent[name].figures, **coverage})
    return found
