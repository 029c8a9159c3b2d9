"""Forecasts from the registry's models, the default of an engine.

They are the champions of next agents, remaining lengths, return times, context growth and profiles. Without them, or
while the registry is down, online counts forecast once they have enough data.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from presage.errors import ConfigurationError, RegistryError, why
from presage.features.input_profiles import ANSWERS, PROFILES, STATES, TARGETS, TEXT, TOKENS, Sources
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictor_kinds import KINDS
from presage.registry.connect import DATABASE_FILE, Registry
from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.forecasting.adapters import warm
from presage.serving_hooks.forecasting.context_growth import ContextForecaster
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts, TextModel
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.forecasting.reload import RegistryClient, Reload
from presage.serving_hooks.forecasting.return_times import ReturnTimeForecaster
from presage.serving_hooks.forecasting.sources import Held, resolve_predictors
from presage.serving_hooks.monitoring.causes import missing_inputs
from presage.serving_hooks.monitoring.drift import Drift
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.promoted import merged_promoted
from presage.serving_hooks.settings import ForecastSettings
from presage.serving_hooks.status import ModelStatus

NO_REGISTRY: Final = (
    f"no registry: neither the setting presage.registry nor MLFLOW_TRACKING_URI names one, and the working directory "
    f"holds no {DATABASE_FILE}"
)

START_S: Final = 300.0
"""Time limit of the load at the start; compiling on a new machine takes most of it. The reload tries what is late
again."""

_FIRST_STEPS: Final = 1000
"""Steps within which an engine may have read no answer yet."""

_log = logging.getLogger(__name__)


def resolve_registry_uri(setting: str | None) -> str | None:
    """The MLflow tracking URI of an engine's registry; None if there is none.

    It is the setting, MLFLOW_TRACKING_URI, or the database in the working directory, if it exists: opening a missing
    MLflow database would create one, and an engine started in the wrong folder would serve from an empty registry.
    """
    if named := setting or os.environ.get("MLFLOW_TRACKING_URI"):
        return named
    database = Path.cwd() / DATABASE_FILE
    return f"sqlite:///{database}" if database.is_file() else None


class Champions:
    """The configured models while an engine runs, of which `found` are those loaded: forecasts, monitoring, reload.

    `texts` are the kinds of models that get texts, or what they read of them.
    """

    def __init__(
        self,
        config: ForecastSettings,
        found: Mapping[str, Held],
        served_model: str | None,
        state_layer: int | None = None,
        texts: Collection[str] = (),
    ) -> None:
        self.models: dict[str, ModelStatus] = {}
        self._config, self._served_model, self._state_layer = config, served_model, state_layer
        self._texts = texts
        self._counts, self._live = OnlineCounts(), LiveAccuracy()
        self._inputs: Counter[str] = Counter()
        self._promoted_under: dict[str, Sources] = {}
        self._renewed = 0
        self.source = VersionedForecaster(self._forecaster(found))
        self.returns = ReturnTimeForecaster(
            found["return-time"].predictor,
            found["return-time"].version,
            budget=config.forecast_budget(),
            drifted=self._drifted,
        )
        self.contexts = ContextForecaster(
            found["context-growth"].predictor,
            found["context-growth"].version,
            budget=config.forecast_budget(),
        )
        if config.reload_s is not None:
            warm()  # compiles now, in case a model is loaded while serving
        registry = RegistryClient(partial(resolve_registry_uri, config.registry), most_mb=config.registry_memory_mb)
        self.reload = Reload(found, registry, config.reload_s)
        self._report_models(found)

    def start(self) -> None:
        """Starts to watch the registry for newer versions."""
        self.reload.start()

    def renew(self) -> bool:
        """Activates a validated set of newer models between two iterations; returns False if there is none."""
        held_by_kind = self.reload.take()
        if held_by_kind is None:
            return False
        before, forecaster = self.source.latest, self._forecaster(held_by_kind)
        earlier = {"next-agent": before.predictor, "remaining-length": before.lengths, "profile": before.profile}
        for kind, predictor in earlier.items():
            # The abandoned thread may still change the predictor.
            if held_by_kind[kind].predictor is predictor and before.breakers[kind].hung:
                forecaster.breakers[kind].follow(before.breakers[kind])
        self.source.take_over(forecaster)
        self.returns.take_over(held_by_kind["return-time"].predictor, held_by_kind["return-time"].version)
        self.contexts.take_over(held_by_kind["context-growth"].predictor, held_by_kind["context-growth"].version)
        self._renewed += 1
        self._report_models(held_by_kind)
        _log.info("newer models are live; %d running workflows keep the earlier ones", self.source.under_older)
        return True

    def status(self) -> dict[str, Any]:
        """Status of reloads, inputs and the monitor."""
        missing = self._missing()
        status: dict[str, Any] = {
            "reload": {
                "on": self._config.reload_s is not None,
                "renewed": self._renewed,
                "refused": dict(self.reload.refused),
                "troubles": dict(self.reload.troubles),
                "loading": self.reload.loading(),
                "workflows_under_older": self.source.under_older,
            },
            "inputs": {"counts": dict(self._inputs), "missing": missing},
            "returns": self.returns.status(),
        }
        monitor = self.source.latest.monitor
        if monitor is not None:
            status["monitor"] = judged = monitor.status()
            inputs = sorted(set().union(*missing.values()))
            for promise in judged["promised"].values() if inputs else ():
                if promise["causes"]:
                    promise["causes"].insert(0, missing_inputs(inputs).to_dict())
        return status

    def close(self) -> None:
        """The engine shuts down."""
        self.reload.close()

    def _drifted(self, workflow_type: str) -> bool:
        monitor = self.source.latest.monitor
        if monitor is None or not monitor.drift.alarms:
            return False
        return monitor.falls_back(workflow_type, "return-time") is not None

    def _missing(self) -> dict[str, list[str]]:
        """The inputs that each champion was promoted with and that no step here had."""
        seen = {source for source in (TOKENS, TEXT, STATES, ANSWERS) if self._inputs[source]}
        seen |= {ANSWERS} if self._config.answers and self._inputs["steps"] < _FIRST_STEPS else set()
        expected = seen if self._inputs["steps"] else seen | {TOKENS, STATES, *([TEXT] if self._texts else ())}
        return {
            kind: sorted(sources - expected) for kind, sources in self._promoted_under.items() if sources - expected
        }

    def _forecaster(self, held_by_kind: Mapping[str, Held]) -> Forecaster:
        promoted = merged_promoted(held_by_kind["next-agent"].promoted, held_by_kind["remaining-length"].promoted)
        return Forecaster(
            held_by_kind["next-agent"].predictor,
            held_by_kind["next-agent"].version,
            lengths=held_by_kind["remaining-length"].predictor,
            lengths_version=held_by_kind["remaining-length"].version,
            profile=held_by_kind["profile"].predictor,
            profile_version=held_by_kind["profile"].version,
            back_off=self._counts,
            served_model=self._served_model,
            state_layer=self._state_layer,
            budget=self._config.forecast_budget(),
            # Each version is compared with its own promoted figures.
            monitor=ForecastMonitor(Drift(promoted), self._live) if self._config.monitor else None,
            inputs=self._inputs,
            text_models=_text_models(held_by_kind),
        )

    def _report_models(self, held_by_kind: Mapping[str, Held]) -> None:
        for kind, held in held_by_kind.items():
            self.models[kind] = model_status(held)
            self._promoted_under.pop(kind, None)
            if held.predictor is None:
                continue
            _log.info("%s: %s, %s", kind, self.models[kind], held.digest)
            if held.profile is not None and held.profile in TARGETS:
                self._promoted_under[kind] = PROFILES[TARGETS[held.profile]] & held.predictor.reads
                if TEXT in self._promoted_under[kind] and kind not in self._texts:
                    _log.warning(
                        "%s was promoted under the profile %s, with texts that this engine does not supply: expect its "
                        "figures under the profile engine (presage promote --profile engine judges by those)",
                        self.models[kind],
                        held.profile,
                    )


def predictors(config: ForecastSettings, most_s: float = START_S) -> dict[str, Held]:
    """The configured models by kind, each loaded or with the reason why not. Logs what is missing.

    Versions of the registry are fetched and tried by the process beside the engine, which takes neither its memory nor,
    in all, more than `most_s` seconds of its start.
    """
    named = {setting.replace("_", "-"): setting for setting in ForecastSettings.model_fields}
    wanted: dict[str, str | None] = {kind: getattr(config, setting) for kind, setting in named.items() if kind in KINDS}
    registered = {kind: name for kind, name in wanted.items() if name is not None and name.startswith("models:")}
    resolved = resolve_predictors(_no_registry, wanted | dict.fromkeys(registered))
    return resolved | _registered(config, registered, most_s) if registered else resolved


def _no_registry() -> Registry:
    raise RegistryError(NO_REGISTRY)


def _registered(config: ForecastSettings, references: Mapping[str, str], most_s: float) -> dict[str, Held]:
    """The `Held` of each reference, by kind."""
    registry = RegistryClient(partial(resolve_registry_uri, config.registry), most_s, config.registry_memory_mb)
    until = time.monotonic() + most_s
    held_by_kind: dict[str, Held] = {}
    try:
        without = NO_REGISTRY if registry.versions({}) is None else None
        for kind, reference in references.items() if without is None else ():
            registry.most_s = max(until - time.monotonic(), 1.0)
            try:
                held_by_kind[kind] = registry.load(kind, reference)
            except Exception as error:
                _log.warning("%s is not used: %s", reference, why(error))
                held_by_kind[kind] = Held(None, reference, reason=why(error))
    except Exception as error:
        without = why(error)
    finally:
        registry.close()
    if without is not None:  # the log warns once and not for each model
        _log.warning("%s; using online counts once there are enough", without.rstrip("."))
        return {kind: Held(None, reference, reason=without) for kind, reference in references.items()}
    return held_by_kind


def _text_models(held_by_kind: Mapping[str, Held]) -> dict[ModelKind, TextModel]:
    """The artefacts of models that read sketches of texts; text encoders are too slow to run beside an HTTP server."""
    agents, lengths = held_by_kind["next-agent"].predictor, held_by_kind["remaining-length"].predictor
    widths: dict[ModelKind, dict[Moment, int]] = {}
    if agents is not None and agents.source.kind == "sketch":
        projections = {moment: agents.projection(moment) for moment in agents.source.sizes}
        widths["next-agent"] = {
            moment: len(projection[1]) for moment, projection in projections.items() if projection is not None
        }
    if lengths is not None and TEXT in lengths.reads:
        size = lengths.encoder.answer_size
        widths["remaining-length"] = {PREFILL: 2 + size, COMPLETION: size}
    made: dict[ModelKind, TextModel] = {}
    for kind, of_kind in widths.items():
        held = held_by_kind[kind]
        if of_kind and held.folder is not None and held.digest is not None:
            made[kind] = TextModel(held.folder, held.digest, of_kind)
    return made


def model_status(held: Held) -> ModelStatus:
    """Which model of a kind is loaded, or why none is."""
    return ModelStatus(held.reference, held.version, str(held.reason) if held.predictor is None else None)


def load_forecasts(
    config: ForecastSettings,
    served_model: str | None = None,
    state_layer: int | None = None,
    texts: Collection[str] = (),
) -> Forecasts:
    """The forecast sources: those of the configured function, else the registry's models, with online counts behind.

    A registry that is down or a missing model raises nothing: the engine serves without it.

    Args:
        served_model: hidden states belong to one model. Given to a function that takes it.
        state_layer: the layer that is captured; None for the states after the final norm.
        texts: kinds of the registry's models that will get texts, or what they read of them.

    Raises:
        ConfigurationError: there is no such function, it fails, or it returns something else.
    """
    name = config.forecasts
    if name is None:
        champions = Champions(config, predictors(config), served_model, state_layer, texts)
        return Forecasts(
            next_agents=champions.source,
            remaining=champions.source,
            returns=champions.returns,
            contexts=champions.contexts,
            models=champions.models,
            upkeep=champions,
        )
    module, function = name.split(":")
    try:
        make = getattr(importlib.import_module(module), function)
        takes = "served_model" in inspect.signature(make).parameters
        made = make(served_model=served_model) if takes else make()
    except Exception as error:
        raise ConfigurationError(
            f"presage.forecasts is {name}, which cannot be loaded and called ({type(error).__name__}: {error}); name a "
            "function without arguments, or with served_model, that returns Forecasts"
        ) from error
    if not isinstance(made, Forecasts):
        raise ConfigurationError(
            f"presage.forecasts is {name}, which returns a {type(made).__name__}; return Forecasts"
        )
    return made
