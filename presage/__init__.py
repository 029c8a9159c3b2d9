"""Presage: learns from the traces of multi-agent LLM applications what a running workflow will do next.

`NextAgent`, `RemainingLength`, `ContextGrowth`, `ReturnTime`, `Profile` and `Router` are estimators with scikit-learn's
conventions (`presage.api`). Importing this package loads neither torch, MLflow nor vLLM; a name is imported when it is
first used.
"""

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from presage.compiled import choose_cache
from presage.version import __version__

if TYPE_CHECKING:
    from presage.api import (
        ContextGrowth,
        NextAgent,
        Profile,
        RemainingLength,
        Report,
        ReturnTime,
        Router,
        load,
        promote,
        split,
    )
    from presage.datasets.outcomes.files import read_outcomes
    from presage.datasets.read import Traces, read_traces
    from presage.datasets.synthetic.workflows import generate_traces

choose_cache(Path(__file__).parent, os.environ)

_FROM = {
    **dict.fromkeys(
        (
            *("ContextGrowth", "NextAgent", "Profile", "RemainingLength", "ReturnTime", "Report", "Router"),
            *("load", "promote", "split"),
        ),
        "presage.api",
    ),
    **dict.fromkeys(("Traces", "read_traces"), "presage.datasets.read"),
    "generate_traces": "presage.datasets.synthetic.workflows",
    "read_outcomes": "presage.datasets.outcomes.files",
}
__all__ = [
    "ContextGrowth",
    "NextAgent",
    "Profile",
    "RemainingLength",
    "Report",
    "ReturnTime",
    "Router",
    "Traces",
    "__version__",
    "generate_traces",
    "load",
    "promote",
    "read_outcomes",
    "read_traces",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'presage' has no attribute {name!r}")
    return resolve_name(f"{_FROM[name]}:{name}")


def __dir__() -> list[str]:
    return __all__
