"""The prediction profile of vllm-router (`prediction_profile.profile_path`, schema "1"), from a trace.

It holds histograms of return times and of output lengths by workflow type and agent; the router backs off to less and
less specific keys, and predicts upper bounds of buckets. Its bucket bounds are those of the router's settings, else the
router does not start. In the router's versions up to 0.1.17 the predictions are compared with what happens and decide
nothing (mode `shadow`).

The schema is that of the snapshots that vllm-router 0.1.17 writes; it loaded such a profile and predicted from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.return_times import ReturnEncoder, return_rows
from presage.gateway.dialects.names import body_name

SCHEMA: Final = "1"

RETURN_BOUNDS_S: Final = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Up to the 10 s for which the router keeps an idle program by default; longer times fall into a last bucket."""

OUTPUT_BOUNDS_TOKENS: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)

POOL: Final = "program:all"
"""The router's name for the engines of one model behind it."""

MOST_KEYS: Final = 4096
"""The router's limit for each of the two lists (its setting `max_keys`)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RouterProfile:
    """A profile and what it was made of.

    Attributes:
        file: the JSON object.
        return_times: observed times, and steps after which a workflow did not return.
        output_lengths: observed lengths.
        left_out: the rarest keys, left out over MOST_KEYS.
    """

    file: Mapping[str, Any]
    return_times: int
    output_lengths: int
    left_out: int


def router_profile(table: pa.Table, pool: str = POOL) -> RouterProfile:
    """The profile of a trace in canonical order (as `read_traces` returns it).

    Return times are those that the return-time predictor learns: the last step of a complete workflow does not return,
    and that of a workflow that was cut is left out, as are unknown times and lengths.

    Raises:
        TraceError: the trace records no output tokens, or no times.
    """
    seconds = return_rows(table, ReturnEncoder.fit(table)).label.astype(np.float64) / 1e3
    steps = table.filter(pc.equal(table["kind"], "llm"))
    tokens = steps["output_tokens"].to_numpy(zero_copy_only=False).astype(np.float64)
    for values, columns in ((seconds, "started_at and ended_at"), (tokens, "output_tokens")):
        if not np.isfinite(values).any():
            raise TraceError(f"the traces record no {columns}: give traces with {columns}")
    names = list(zip(*(steps[name].to_pylist() for name in ("workflow_type", "agent")), strict=True))
    returns = _by_key(names, seconds, RETURN_BOUNDS_S, pool, _RETURN_KEYS)
    lengths = _by_key(names, tokens, OUTPUT_BOUNDS_TOKENS, pool, _OUTPUT_KEYS)
    file = {
        "schema_version": SCHEMA,
        "generated_at": None,
        "return_time_bucket_bounds_seconds": list(RETURN_BOUNDS_S),
        "output_length_bucket_bounds_tokens": list(OUTPUT_BOUNDS_TOKENS),
        "return_time_profiles": [
            {
                "key": {name: dict(key).get(name) for name in _RETURN_NAMES},
                "bucket_counts": histogram.counts.tolist(),
                "no_return_count": histogram.never,
                "max_observed_seconds": histogram.most,
            }
            for key, histogram in returns[:MOST_KEYS]
        ],
        "output_length_profiles": [
            {
                "key": {name: dict(key).get(name) for name in _OUTPUT_NAMES},
                "bucket_counts": histogram.counts.tolist(),
                "max_observed_tokens": histogram.most,
            }
            for key, histogram in lengths[:MOST_KEYS]
        ],
    }
    left_out = sum(max(0, len(histograms) - MOST_KEYS) for histograms in (returns, lengths))
    return RouterProfile(file, int((~np.isnan(seconds)).sum()), int((~np.isnan(tokens)).sum()), left_out)


def profile_settings(path: str) -> dict[str, Any]:
    """`prediction_profile` among the router's settings, for a profile at this path."""
    return {
        "mode": "shadow",
        "profile_path": path,
        "return_time_bucket_bounds_seconds": list(RETURN_BOUNDS_S),
        "output_length_bucket_bounds_tokens": list(OUTPUT_BOUNDS_TOKENS),
    }


Key = tuple[tuple[str, Any], ...]
"""Names and values of a key that are not null."""

_RETURN_NAMES: Final = (
    "workflow_profile_id",
    "profile_version",
    "model_pool",
    "agent_role",
    "spawn_reason",
    "blocks_parent",
    "expected_resume",
    "step_bucket",
)
_OUTPUT_NAMES: Final = ("workflow_profile_id", "profile_version", "model_pool", "profile_role")

_RETURN_KEYS: Final = (
    (),
    ("model_pool",),
    ("model_pool", "agent_role"),
    ("model_pool", "agent_role", "workflow_profile_id", "expected_resume"),
    ("model_pool", "agent_role", "workflow_profile_id", "expected_resume", "blocks_parent"),
)
"""What keys name, from the level to which the router backs off last. As the dialect `vllm-router` names requests."""

_OUTPUT_KEYS: Final = (
    (),
    ("model_pool",),
    ("model_pool", "profile_role"),
    ("model_pool", "profile_role", "workflow_profile_id"),
)


@dataclass
class _Histogram:
    counts: Floats
    never: float = 0.0
    most: float = 0.0

    def add(self, other: _Histogram) -> None:
        self.counts += other.counts
        self.never += other.never
        self.most = max(self.most, other.most)


def _by_key(
    names: Sequence[tuple[str, str]],
    values: Floats,
    bounds: Sequence[float],
    pool: str,
    levels: Sequence[Sequence[str]],
) -> list[tuple[Key, _Histogram]]:
    """Histograms of all levels, the most observed first; an infinite value is that of a workflow that ended."""
    histograms: dict[Key, _Histogram] = {}
    for (workflow_type, agent), histogram in _by_agent(names, values, bounds):
        labels = {
            "model_pool": pool,
            "agent_role": body_name(agent),
            "profile_role": body_name(agent),
            "workflow_profile_id": body_name(workflow_type),
            "expected_resume": True,
            "blocks_parent": False,
        }
        for level in levels:
            key = tuple((name, labels[name]) for name in level)
            histograms.setdefault(key, _Histogram(np.zeros(len(bounds) + 1))).add(histogram)
    return sorted(histograms.items(), key=lambda entry: -entry[1].counts.sum() - entry[1].never)


def _by_agent(
    names: Sequence[tuple[str, str]], values: Floats, bounds: Sequence[float]
) -> Iterator[tuple[tuple[str, str], _Histogram]]:
    """The histogram of each workflow type and agent; a bucket includes its upper bound."""
    distinct = sorted(set(names))
    number = {name: place for place, name in enumerate(distinct)}
    code = np.array([number[name] for name in names])
    finite = np.isfinite(values)
    size = len(bounds) + 1
    bucket = np.searchsorted(bounds, values[finite])
    counts = np.bincount(code[finite] * size + bucket, minlength=len(distinct) * size).reshape(-1, size)
    never = np.bincount(code[np.isposinf(values)], minlength=len(distinct))
    most = np.zeros(len(distinct))
    np.maximum.at(most, code[finite], values[finite])
    for place, name in enumerate(distinct):
        if counts[place].any() or never[place]:
            yield name, _Histogram(counts[place].astype(np.float64), float(never[place]), float(most[place]))
