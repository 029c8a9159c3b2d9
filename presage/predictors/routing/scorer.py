"""What a router asks of whatever reads its prompts: a logit for each served model, and the parts of an artefact.

A scorer knows prompts and nothing of labels, thresholds or the name of a command. What it says is not yet a
probability: calibration, evidence and back-off stand on top of it and are the same for every scorer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Scorer(Protocol):
    """Reads prompts, says of each how likely each of M models is to solve it, up to calibration."""

    name: ClassVar[str]
    """What `RouterConfig.head` calls it."""

    def logits(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Finite log-odds float32 [n, M], one column a model in the order it was fitted on; n may be 0."""

    def to_config(self) -> dict[str, Any]:
        """What it is rebuilt from beside its tensors: JSON values, finite numbers."""

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays by name, finite, without a prefix: the router puts them under `scorer/`."""

    def to_files(self) -> dict[str, bytes]:
        """Further data files of the artefact by file name, such as a tokenizer's; none of most scorers."""

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], folder: Path) -> Self:
        """Inverse of `to_config`, `to_tensors` and `to_files`; `folder` is the artefact's, its digests checked.

        Raises:
            ArtefactError, LookupError, TypeError or ValueError: a part is missing or is not what a scorer consists of.
        """
