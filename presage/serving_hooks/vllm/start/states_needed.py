"""Whether an engine needs the worker and the KV connector that read hidden states: `presage serve --states auto`.

A connector is not free in vLLM, even an idle one: with EAGLE it shortens prefix hits, and some engines start with none.
So an engine gets ours if the recorder stores states or the next-agent model, the only one that reads states, reads
them. Where that cannot be found out in time, it gets the connector: an idle one costs less than a forecast without its
states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from presage.errors import why
from presage.predictors.common.artefact import read_artefact
from presage.serving_hooks.forecasting.champions import resolve_registry_uri
from presage.serving_hooks.forecasting.registry_process import state_source
from presage.serving_hooks.forecasting.reload import RegistryClient
from presage.serving_hooks.vllm.config import PresageConfig

Choice = Literal["auto", "on", "off"]

Look = Callable[[PresageConfig, str], str | None]

CAPTURED: Final = "captured"
"""The kind of states that only an engine has."""

LOOK_S: Final = 60.0
"""Time limit of a look into the registry. It may download the version, which the engine then has."""


@dataclass(frozen=True)
class StatesDecision:
    """Whether worker and connector are added; `note` says why, None if the operator has decided."""

    added: bool
    note: str | None = None


def decided(choice: Choice, config: PresageConfig, look: Look | None = None) -> StatesDecision:
    """Decides by the operator's choice, else by what reads states.

    Args:
        look: as `model_states`, the default.
    """
    if choice != "auto":
        return StatesDecision(choice == "on")
    reads = _reads(config, look or model_states)
    if reads is not None:
        return StatesDecision(True, f"{reads}: worker and connector for them are added; --states off leaves them out")
    return StatesDecision(
        False,
        "no champion reads hidden states and the recorder does not store them: the connector is not added; --states on "
        "adds it",
    )


def _reads(config: PresageConfig, look: Look) -> str | None:
    """What reads hidden states or may read them; None: nothing does."""
    if config.recorder is not None and config.recorder.states != "off":
        return "the recorder stores hidden states"
    if config.forecasts is not None:
        return f"{config.forecasts} may read hidden states"
    if config.next_agent is None:
        return None
    try:
        return f"{config.next_agent} reads hidden states" if look(config, config.next_agent) == CAPTURED else None
    except Exception as error:
        return f"{config.next_agent} may read hidden states, {why(error).rstrip('.')}"


def model_states(config: PresageConfig, reference: str) -> str | None:
    """The kind of states that the model of a reference reads, such as "captured"; None if there is no such model.

    Raises:
        PresageError: the registry does not answer in time, or the artefact is broken.
    """
    if not reference.startswith("models:"):
        return state_source(read_artefact(Path(reference)))
    registry = RegistryClient(partial(resolve_registry_uri, config.registry), LOOK_S, config.registry_memory_mb)
    try:
        return registry.states(reference)
    finally:
        registry.close()
