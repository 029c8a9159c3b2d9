"""The load that vLLM reports on its `/metrics` page (Prometheus text), checked.

A page is read as bytes from a server that may be broken: what is not a number that an engine can have is an error, and
what is not there is unknown. Names as of vLLM 0.32 and 0.33 (`vllm/v1/metrics/loggers.py`); data-parallel engines have
one line each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from presage.errors import InputError

MOST_REQUESTS: Final = 1_000_000
MOST_CACHE_TOKENS: Final = 10**10
_MOST_ENGINES: Final = 4096

_LINE: Final = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info)(?=[ \t{])(.*)$",
    re.MULTILINE,
)
_LABEL: Final = re.compile(r'(num_gpu_blocks|block_size)="(\d{1,12})"')


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a server reports, summed over its engines.

    Attributes:
        running, waiting: requests.
        cache_usage: mean share of the cache in use, 0 to 1; None if not reported.
        cache_tokens: tokens that the caches hold; None if not reported.
    """

    running: int
    waiting: int
    cache_usage: float | None = None
    cache_tokens: int | None = None


def read_engine_load(page: bytes) -> EngineLoad | None:
    """The load on a page; None if the page has no line of vLLM's, as that of a router.

    Raises:
        InputError: the page is no text; a value is no number, or none that an engine can have.
    """
    try:
        page.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("a page of metrics that is no UTF-8") from None
    values: dict[str, list[float]] = {}
    cache_tokens: list[int] = []
    for count, line in enumerate(_LINE.finditer(page)):
        if count >= _MOST_ENGINES:
            raise InputError(f"more than {_MOST_ENGINES} lines of one kind; expected one an engine")
        name, rest = line[1].decode(), line[2].decode("utf-8", "replace")
        labels, brace, after = rest.rpartition("}")
        if name == "cache_config_info":
            cache_tokens += _cache_tokens(labels)
        else:
            values.setdefault(name, []).append(_number(name, after if brace else rest))
    if not values:
        return None
    usage = values.get("kv_cache_usage_perc")
    tokens = sum(cache_tokens)
    if tokens > MOST_CACHE_TOKENS:
        raise InputError(f"a cache of more than {MOST_CACHE_TOKENS} tokens")
    return EngineLoad(
        round(sum(values.get("num_requests_running", ()))),
        round(sum(values.get("num_requests_waiting", ()))),
        sum(usage) / len(usage) if usage else None,
        tokens or None,
    )


def _number(name: str, text: str) -> float:
    most = 1.0 if name == "kv_cache_usage_perc" else MOST_REQUESTS
    try:
        value = float(text.split(maxsplit=1)[0])  # a timestamp may follow
    except (ValueError, IndexError):
        raise InputError(f"vllm:{name} is no number") from None
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InputError(f"vllm:{name} is {value:g}; expected 0 to {most:g}")
    return value


def _cache_tokens(labels: str) -> list[int]:
    values = {name: int(value) for name, value in _LABEL.findall(labels)}
    return [values["num_gpu_blocks"] * values["block_size"]] if len(values) == 2 else []
