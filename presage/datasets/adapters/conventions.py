"""How a convention of attribute names is described; `otel.py`, `openinference.py` and `mlflow_names.py` hold one each.

A span may carry names of several conventions at once (instrumentors write both while names change), and spans of
several may meet in one tree, so all are looked for on every span. Where two conventions give a field, the one named
first in `attributes.CONVENTIONS` is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from presage.datasets.adapters.spans import Role


@dataclass(frozen=True)
class Convention:
    """What one convention calls things.

    Args:
        kind: attributes that tell what a span is, with the role for each value, in lower case. A value that is not
            listed is `Role.OTHER`.
        names: for each field of a step its attributes, the best first.
        messages: for `system`, `input` and `output` the attributes that hold messages or text, the best first; one that
            ends in a dot is the prefix of messages spread over numbered attributes.
    """

    kind: Mapping[str, Mapping[str, Role]]
    names: Mapping[str, tuple[str, ...]]
    messages: Mapping[str, tuple[str, ...]]
