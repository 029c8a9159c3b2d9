"""A running workflow to a predictor of lengths: its steps so far in so many numbers, however many steps there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthEncoder, count_of


class LengthWorkflow:
    """A workflow before its first step; `begun` and `completed` move it by half a step each.

    The numbers are those of `LengthEncoder.vector` on the steps so far; a test holds that.
    """

    __slots__ = ("_answer", "_course", "_encoder", "_type")

    def __init__(self, encoder: LengthEncoder, workflow_type: str) -> None:
        self._encoder, self._type = encoder, encoder.vocabulary.workflow_type(workflow_type)
        self._course = encoder.open()
        self._answer = encoder.sketched({}, "output_text")

    def begun(self, step: Mapping[str, Any]) -> tuple[int, int, int, NDArray[np.float32]]:
        """A step begins: as `LengthEncoder.vector`.

        Raises:
            InputError: a negative or no number of tokens, or a text that is none; the workflow is lost with it.
        """
        encoder, agent = self._encoder, self._encoder.vocabulary.agent(step["agent"])
        course = self._course.begun(agent)
        numbers = encoder.joined(step, course, self._answer)
        self._answer = encoder.sketched({}, "output_text")
        return self._type, agent, encoder.model(step.get("model")), numbers

    def completed(self, step: Mapping[str, Any]) -> None:
        """The step that began last has produced its output.

        Raises:
            InputError: as `begun`.
        """
        encoder = self._encoder
        self._course.completed(float(np.float32(count_of(step, "output_tokens"))))
        self._answer = encoder.sketched(step, "output_text")
