"""What an engine's hooks tell a recorder, and the recorder of an engine that has none.

    recorder = start(config, model="model-7b")                                   # once
    recorder.begun(request_id, step, input_tokens=n, cached_input_tokens=m)      # a step has been selected
    recorder.forecast(request_id, live)                                          # whenever one was made
    recorder.state(request_id, PREFILL, vector)                                  # when it comes, even a bit late; it
                                                                                 # must not be changed afterwards
    recorder.completed(request_id, output_tokens=n, finish_reason="stop")        # however the request left
    recorder.ended(workflow_type, workflow_id, SAID)                             # or SILENT

All of one thread. None of it blocks, and none raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from presage.features.moment import Moment

if TYPE_CHECKING:
    from presage.serving_hooks.forecasting.live import LiveForecast


class NamedStep(Protocol):
    """Which step of which workflow; the hooks' `Step` is one."""

    @property
    def workflow_type(self) -> str: ...  # noqa: D102
    @property
    def workflow_id(self) -> str: ...  # noqa: D102
    @property
    def agent(self) -> str: ...  # noqa: D102
    @property
    def number(self) -> int | None: ...  # noqa: D102


class StepRecorder(Protocol):
    """A recorder; see `Recorder`."""

    def begun(  # noqa: D102
        self,
        request_id: str,
        step: NamedStep,
        *,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        input_text: str | Sequence[int] | None = None,
    ) -> None: ...
    def state(self, request_id: str, moment: Moment, state: Any) -> None: ...  # noqa: D102
    def forecast(self, request_id: str, live: LiveForecast) -> None: ...  # noqa: D102
    def completed(  # noqa: D102
        self,
        request_id: str,
        *,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        output_text: str | Sequence[int] | None = None,
    ) -> None: ...
    def ended(self, workflow_type: str, workflow_id: str, how: str) -> None: ...  # noqa: D102
    def status(self) -> Mapping[str, Any]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class NoRecorder:
    """Records nothing."""

    def begun(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    state = forecast = completed = ended = close = begun

    def status(self) -> Mapping[str, Any]:
        """That it is off."""
        return {"on": False}
