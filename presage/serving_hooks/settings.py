"""Settings of whatever serves with forecasts, an engine or the gateway: models, monitoring, recorder and modes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from presage.datasets.schema.names import MAX_NAME
from presage.predictors.common.forecast import RETENTION_TARGET
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.circuit_breaker import HANG_S, Budget
from presage.serving_hooks.forecasting.registry_process import MOST_MB
from presage.serving_hooks.mode_names import ADMIN_KEY_VARIABLE, ModeName, PolicyName
from presage.serving_hooks.policies.fair_shares import Weights
from presage.serving_hooks.policies.wait_bounds import Objective, Objectives
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.workflows import MOST_WORKFLOWS, TIME_TO_LIVE_S
from presage.serving_hooks.workflows.metadata import name as sound_name

logger = logging.getLogger(__name__)

# YAML reads `on` and `off` as booleans.
Word = Annotated[
    ModeName,
    BeforeValidator(lambda word: {True: "on", False: "off"}[word] if isinstance(word, bool) else word),
]

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModeSettings(BaseModel):
    """Modes by policy and workflow type."""

    model_config = STRICT

    default: Word = "on"
    policies: Mapping[PolicyName, Word] = {}
    workflow_types: Mapping[str, Word] = {}


class ObjectiveSettings(BaseModel):
    """A service objective; what is null has no objective of its own."""

    model_config = STRICT

    max_hold_s: Annotated[float, Field(ge=0)] | None = None
    first_token_s: Annotated[float, Field(gt=0)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    def settings(self) -> Objective:
        """As policies take it."""
        return Objective(self.max_hold_s, self.first_token_s, self.deadline_s)


class ObjectivesSettings(BaseModel):
    """Service objectives by tenant and workflow type, and the multiple that bounds all other requests."""

    model_config = STRICT

    default: ObjectiveSettings = ObjectiveSettings()
    tenants: Mapping[str, ObjectiveSettings] = {}
    workflow_types: Mapping[str, ObjectiveSettings] = {}
    factor: Annotated[float, Field(gt=0)] = Objectives.factor

    def settings(self) -> Objectives:
        """As policies take them."""
        tenants, types = (
            {name: one.settings() for name, one in given.items()} for given in (self.tenants, self.workflow_types)
        )
        return Objectives(self.default.settings(), tenants, types, self.factor)


class WeightSettings(BaseModel):
    """Shares of service by tenant and workflow type; who is not named has 1."""

    model_config = STRICT

    tenants: Mapping[str, Annotated[float, Field(gt=0)]] = {}
    workflow_types: Mapping[str, Annotated[float, Field(gt=0)]] = {}

    def settings(self) -> Weights:
        """As policies take them."""
        return Weights(self.tenants, self.workflow_types)


def _type_name(value: str) -> str:
    if sound_name(value, "workflow_type", EventCounts()) is None:
        raise ValueError(f"give a name of 1 to {MAX_NAME} printable characters")
    return value


TypeName = Annotated[str, AfterValidator(_type_name)]


class WorkflowTypeSettings(BaseModel):
    """The workflow type of requests whose clients name none, in place of `app-` and a hash: the first that is given by
    a header, then by API key, then the default.
    """

    model_config = STRICT

    default: TypeName | None = None
    """of all other requests; the setting may be this alone"""
    tenants: Mapping[str, TypeName] = {}
    """by tenant, such as key-0 for the first API key"""
    header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$", max_length=64)
    """name of a header whose value is the type, such as X-Application"""

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, given: object) -> object:
        if isinstance(given, Mapping):
            return given
        if not isinstance(given, str):
            raise ValueError(f"give a name, or {', '.join(cls.model_fields)}")
        return {"default": given}

    def given(self, headers: Mapping[str, str], tenant: str, of_route: str = "") -> str | None:
        """The type of a request; None if the settings give it none.

        Args:
            headers: by names in lower case.
            of_route: type of the route by which it came; "" for none.
        """
        named = None if self.header is None else headers.get(self.header.lower())
        named = sound_name(named, "workflow_type", EventCounts())
        return named or of_route or self.tenants.get(tenant, self.default)


NO_TYPES: Final = WorkflowTypeSettings()

_RENAMED: Final = {"truth": "monitor"}
"""Settings of the previous version that have another name, read until the next one."""


class ForecastSettings(BaseModel):
    """Which models forecast, how they are watched, and what is recorded; each setting has a default."""

    model_config = STRICT

    forecasts: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """package.module:function, called without arguments when the engine starts; returns Forecasts, which replace the
    registry's models"""
    next_agent: str | None = Field("models:/next-agent@champion", min_length=1)
    """next-agent model, for eviction: models:/NAME@ALIAS, models:/NAME/VERSION or an artefact folder; null for none"""
    remaining_length: str | None = Field("models:/remaining-length@champion", min_length=1)
    """remaining-length model, for priority; given like next_agent"""
    return_time: str | None = Field("models:/return-time@champion", min_length=1)
    """return-time model: when a workflow's next request comes; given like next_agent"""
    context_growth: str | None = Field("models:/context-growth@champion", min_length=1)
    """context-growth model, for admission: how far a workflow's context grows; given like next_agent"""
    profile: str | None = Field("models:/profile@champion", min_length=1)
    """workflow profile, which forecasts next agents where that model cannot; given like next_agent"""
    answers: bool = True
    """read from the HTTP server's chat responses why they ended and the names of the tools they call, for return
    times"""
    retention_target: float = Field(RETENTION_TARGET, gt=0, lt=1)
    """probability of the times to live that `presage explain` gives for caches outside the engine"""
    registry: str | None = Field(None, min_length=1)
    """MLflow tracking URI of the registry; by default MLFLOW_TRACKING_URI, else mlflow.db in the working directory if
    it exists, else no registry. The engine never creates one"""
    forecast_deadline_ms: float = Field(1000 * Budget.deadline_s, ge=0.001)
    """milliseconds of CPU time a forecast may take before it counts as late"""
    forecast_hang_ms: float = Field(1000 * HANG_S, gt=0)
    """milliseconds after which the engine waits no longer for a forecast; that model makes no other until it is back"""
    retry_s: float = Field(Budget.retry_s, gt=0)
    """seconds after which a model or policy that was switched off is tried again; doubles each time in a row, up to an
    hour"""
    error_budget: float = Field(Budget.share, ge=0, lt=1)
    """share of a model's latest forecasts that may fail or be late; above it the model is switched off"""
    reload_s: float | None = Field(30.0, gt=0)
    """seconds between two checks of the registry for newer versions, on average; null for never"""
    registry_memory_mb: int = Field(MOST_MB, ge=512)
    """MB of memory for the process that talks to the registry and tries versions; what needs more is refused"""
    monitor: bool = True
    """compare forecasts of the registry's models with outcomes; a workflow type that has drifted gets forecasts from
    online counts"""
    recorder: RecorderConfig | None = None
    """records served workflows as traces: an object with at least `folder`"""
    explain: int = Field(2000, ge=0)
    """latest forecasts kept for `presage explain`, over all workflows"""
    admin_key_variable: str = Field(ADMIN_KEY_VARIABLE, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """environment variable with the key for routes that change the engine; without a key these routes do not exist"""
    time_to_live_s: float = Field(TIME_TO_LIVE_S, gt=0)
    """seconds without a request after which a workflow counts as ended"""
    max_workflows: int = Field(MOST_WORKFLOWS, ge=1)
    """workflows running at once; requests of more are served without one. With `time_to_live_s` it bounds the memory of
    workflows that are never ended"""

    @model_validator(mode="before")
    @classmethod
    def _read_renamed(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for old, new in _RENAMED.items():
            if old in given and new not in given:
                logger.warning("the setting presage.%s is presage.%s now; the next version reads only that", old, new)
                given = {new if key == old else key: value for key, value in given.items()}
        return given

    def forecast_budget(self) -> Budget:
        """The limits of each model; first calls get no longer deadline, since the trial has compiled the models."""
        hang_s = self.forecast_hang_ms / 1000
        return Budget(
            deadline_s=self.forecast_deadline_ms / 1000,
            share=self.error_budget,
            hang_s=hang_s,
            first_hang_s=hang_s,
            retry_s=self.retry_s,
        )
