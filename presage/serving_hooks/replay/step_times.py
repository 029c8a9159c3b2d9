"""Step times measured on an engine, read from the files that the setting `step_times_file` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from presage.errors import TraceError

FORMAT: Final = "presage_step_times"

_Tokens = Annotated[int, Field(ge=0)]


class Measured(BaseModel):
    """The engine that was measured."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    presage_step_times: int = Field(ge=1, le=1)
    vllm: str
    model: str
    device: str
    cache_tokens: int = Field(gt=0)
    block_tokens: int = Field(gt=0)
    most_requests: int = Field(gt=0)
    most_tokens: int = Field(gt=0)
    chunked_prefill: bool

    def limits(self) -> dict[str, Any]:
        """Cache and limits, as an engine file has them."""
        return self.model_dump(exclude={FORMAT, "vllm", "model", "device"})


class _Step(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prefill_tokens: _Tokens
    decode_tokens: _Tokens
    context_tokens: _Tokens
    seconds: float = Field(gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class StepTimes:
    """N iterations, in the order in which they were measured.

    Attributes:
        engine: that was measured.
        tokens: int64 [N, 3]: prefilled, decoded, attended to.
        seconds: float64 [N].
    """

    engine: Measured
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]


def read_step_times(paths: Sequence[Path]) -> StepTimes:
    """Reads files of one engine. A last line that was cut by the end of an engine is left out.

    Raises:
        TraceError: a file is missing or none of these, a line is not as wanted (names it), or the files are of
            different engines.
    """
    found = [_read(path) for path in paths]
    for path, of in zip(paths[1:], found[1:], strict=True):
        if of.engine != found[0].engine:
            raise TraceError(f"{path}: step times of another engine than {paths[0]}; give files of one engine")
    return StepTimes(
        found[0].engine, np.concatenate([of.tokens for of in found]), np.concatenate([of.seconds for of in found])
    )


def _read(path: Path) -> StepTimes:
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: no step times ({type(error).__name__}); a file is wanted that an engine wrote with the setting "
            "step_times_file"
        ) from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        engine = Measured.model_validate(json.loads(lines[0]) if lines else {})
    except (ValueError, ValidationError):
        raise TraceError(
            f"{path}: its first line is not that of step times of version 1; a file is wanted that an engine wrote "
            "with the setting step_times_file"
        ) from None
    steps = [_step(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    tokens = [(step.prefill_tokens, step.decode_tokens, step.context_tokens) for step in steps]
    return StepTimes(engine, np.asarray(tokens, np.int64).reshape(-1, 3), np.asarray([step.seconds for step in steps]))


def _step(path: Path, number: int, line: str) -> _Step:
    try:
        return _Step.model_validate_json(line)
    except ValidationError as error:
        problem: Any = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the line"
        raise TraceError(
            f"{path}, line {number}: {where}: {problem['msg'][0].lower()}{problem['msg'][1:]}; repair or remove it"
        ) from None
