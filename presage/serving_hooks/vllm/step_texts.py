"""The features of texts that reach an engine, where its predictors read texts (`http/texts.py`).

Those of a prompt are in the request's `extra_args`, those of its answer come by a call after the step. Features for
another version than the engine's are left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.counts import EVENTS, EventCounts, ModelKind
from presage.serving_hooks.forecasting.forecasts import Forecasts, ReadsTexts, TextModel
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.http.texts import ARGUMENT, INVALID, decoded

PROJECTED: Final = "projected"
PROMPT_READ: Final = "prompt_read"
"""Arguments of a forecast source for the features of a text: those of next agents, those of remaining lengths."""

TextOf = Mapping[str, NDArray[np.float32]]
"""The features of a text by argument, float32 [p]; of each predictor that reads any."""

Found = dict[str, NDArray[np.float32] | str]

_ARGUMENTS: Final[Mapping[ModelKind, str]] = {"next-agent": PROJECTED, "remaining-length": PROMPT_READ}
_COUNTED: Final = {PROJECTED: "text features", PROMPT_READ: "text features of lengths"}


class RequestTexts:
    """The features of an engine's steps.

    Args:
        wanted: whether the predictors are to get texts.

    Attributes:
        source: the forecast source that reads them; None while none does.
    """

    def __init__(self, forecasts: Forecasts, counts: EventCounts, wanted: bool) -> None:
        self.source: ReadsTexts | None = None
        self._forecasts, self._counts = forecasts.next_agents if wanted else None, counts
        self._models: Mapping[ModelKind, TextModel] = {}
        self.renew()

    def renew(self) -> None:
        """Asks the predictors whether they read texts; called again when they have changed."""
        source, self._models, self.source = self._forecasts, {}, None
        if isinstance(source, ReadsTexts) and source.text_models:
            if "next-agent" in source.text_models:
                source.await_answers()
            self._models, self.source = source.text_models, source

    @property
    def models(self) -> dict[str, dict[str, str]]:
        """By kind the folder and digest of each predictor that reads texts, for the HTTP server."""
        return {kind: {"folder": str(of.folder), "digest": of.digest} for kind, of in self._models.items()}

    def arrived(self, request: EngineRequest) -> TextOf:
        """The features of the prompt of a request that can be used."""
        return self._usable(self._of_prompt(request))

    def started(self, request: EngineRequest) -> TextOf:
        """As `arrived`, when the request is scheduled for the first time; counts."""
        found = self._of_prompt(request)
        for argument, of in found.items():
            self._count(argument, PREFILL, "used" if isinstance(of, np.ndarray) else of)
        return self._usable(found)

    def answered(self, sent: object, use: Callable[[TextOf], Collection[str]] | None) -> None:
        """Passes on the features of an answer, as they were sent, to `use`, which returns those it uses; counts."""
        found = self._read(sent, COMPLETION)
        usable = self._usable(found)
        used = use(usable) if use is not None and usable else ()
        for argument, of in found.items():
            late = "used" if argument in used else "late"
            self._count(argument, COMPLETION, late if isinstance(of, np.ndarray) else of)

    def _of_prompt(self, request: EngineRequest) -> Found:
        if not self._models or request.sampling_params is None:
            return {}
        sent = (request.sampling_params.extra_args or {}).get(ARGUMENT)
        return {} if sent is None else self._read(sent, PREFILL)

    def _read(self, sent: object, moment: Moment) -> Found:
        """By argument the features, or why they cannot be used; without predictors for which nothing was sent."""
        if not isinstance(sent, Mapping):
            return {_ARGUMENTS[kind]: INVALID for kind in self._models}
        return {
            _ARGUMENTS[kind]: decoded(sent[kind], of.digest, of.widths.get(moment, 0), kind)
            for kind, of in self._models.items()
            if kind in sent
        }

    @staticmethod
    def _usable(found: Found) -> TextOf:
        return {argument: of for argument, of in found.items() if isinstance(of, np.ndarray)}

    def _count(self, argument: str, moment: Moment, outcome: str) -> None:
        self._counts.add(EVENTS, f"{_COUNTED[argument]} at {moment}: {outcome}")
