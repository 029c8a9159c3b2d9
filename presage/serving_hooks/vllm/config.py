"""Settings of the hooks: `--additional-config '{"presage": {…}}'`, validated before the engine serves anything."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError

from presage.errors import ConfigurationError
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.policies.admission import AdmissionConfig
from presage.serving_hooks.policies.eviction import EvictionConfig, Rule
from presage.serving_hooks.policies.prefetch import PrefetchConfig
from presage.serving_hooks.policies.priority import PriorityConfig
from presage.serving_hooks.policies.score import ScoreConfig
from presage.serving_hooks.policies.wait_bounds import Objectives
from presage.serving_hooks.settings import (
    STRICT,
    ForecastSettings,
    ModeSettings,
    ObjectivesSettings,
    WeightSettings,
    Word,
    WorkflowTypeSettings,
)


class PresageConfig(ForecastSettings):
    """Settings of the hooks; each has a default, so an empty object is a configuration.

    The docstrings of the settings are their descriptions for `presage vllm-check --settings`.
    """

    model_config = STRICT

    state_layer: int | None = None
    """hidden states to read: those after this transformer layer, counted from 1, or -1 for the last; null for those
    after the final norm, from which tokens are sampled"""
    texts: bool = True
    """compute in the HTTP server what the models of next agents and lengths read of prompts and answers"""
    infer_workflows: bool = True
    """infer the workflow of requests whose clients name none, from ids that they send and from their prompts, of which
    only keyed hashes are kept; inactive without prefix caching"""
    metrics_by_type: bool = True
    """show metrics by workflow type on /metrics, which needs no key; false keeps the types' names off it"""
    agent_names: str | None = Field(None, min_length=1)
    """file of agent names by fingerprint (`presage traces agents`), by which the HTTP server recognises the agents of
    clients that do not name them"""
    workflow_type: WorkflowTypeSettings | None = None
    """type of inferred workflows, in place of `app-` and a hash, where the HTTP server's clients name none: one for
    all, or an object of header (whose value is the type), tenants (types by API key, such as key-0) and default"""
    mode: Word | ModeSettings = "on"
    """off, shadow (decisions are computed and shown, but not acted on) or on; or an object of default, policies and
    workflow_types, modes by name"""
    priority: bool = True
    """shortest total job first with ageing, in place of vLLM's waiting queues"""
    eviction: bool = True
    """the scored order of free blocks, in place of vLLM's; inactive without prefix caching"""
    starved_after: int = Field(PriorityConfig.starved_after, ge=1)
    """S, iterations without selection until a request is promoted by a level"""
    quantum: int = Field(PriorityConfig.quantum, ge=1)
    """Q, iterations selected until a promoted request is demoted"""
    horizon: int = Field(ScoreConfig.horizon, ge=1, le=64)
    """K, steps that eviction looks ahead"""
    gamma: float = Field(ScoreConfig.decay, gt=0, le=1)
    """γ of the rule pbkv, weight of a use one step later"""
    eviction_rule: Rule = EvictionConfig.rule
    """next-use: the block whose next use is expected last goes first; pbkv: the lowest score of PBKV's eq. 2"""
    admission: bool = True
    """hold workflows back where the load would settle at fewer steps per second; inactive without prefix caching"""
    admission_least_gain: float = Field(AdmissionConfig.least_gain, ge=0)
    """relative gain in steps per second that waiting must promise over letting all run"""
    held_at_most_s: float = Field(600.0, gt=0)
    """seconds a workflow may be held over its life; then it is never held again"""

    objectives: ObjectivesSettings | None = None
    """service objectives: an object of default, tenants and workflow_types, each with max_hold_s (seconds for which
    priority may delay a request, and admission a workflow over its life) and first_token_s (seconds to the first token,
    met by ending delays in time), deadline_s (seconds from a workflow's arrival until it has to have ended: who would
    miss it goes first), and factor: without an objective priority delays for so many mean times to a first token"""
    weights: WeightSettings | None = None
    """shares of tenants and workflow types where workflows are held: an object of tenants and workflow_types, numbers
    by name; who is not named has 1"""

    prefetch: bool = False
    """load or compute forecast prompts into idle blocks before they are requested; needs eviction"""
    prefetch_least_value: float = Field(PrefetchConfig.least_value, gt=0)
    """a prompt less likely than this to come next is not prefetched"""
    prefetch_most_blocks: int = Field(PrefetchConfig.most_blocks, ge=1)
    """limit of blocks per iteration"""
    prefetch_memory_mb: int = Field(64, ge=1)
    """MiB for the token ids and hashes of earlier prompts"""

    webhook: WebhookConfig | None = None
    """delivers lifecycle events of workflows: an object with at least `url` and `file`"""
    step_times_file: str | None = Field(None, min_length=1)
    """file for the tokens and seconds of each iteration, for `presage calibrate-cost`"""

    def objectives_settings(self) -> Objectives:
        """The service objectives."""
        return Objectives() if self.objectives is None else self.objectives.settings()

    def modes(self) -> ModeSettings:
        """The modes, from a single word or an object."""
        return self.mode if isinstance(self.mode, ModeSettings) else ModeSettings(default=self.mode)

    def priority_settings(self) -> PriorityConfig:
        """S and Q."""
        return PriorityConfig(self.starved_after, self.quantum)

    def score_settings(self) -> ScoreConfig:
        """K and γ."""
        return ScoreConfig(self.horizon, self.gamma)

    def eviction_settings(self) -> EvictionConfig:
        """Settings of the block order."""
        return EvictionConfig(self.eviction_rule)

    def admission_settings(self) -> AdmissionConfig:
        """Settings of admission."""
        weights = self.weights or WeightSettings()
        return AdmissionConfig(least_gain=self.admission_least_gain, weights=weights.settings())

    def prefetch_settings(self) -> PrefetchConfig:
        """Settings of prefetch."""
        return PrefetchConfig(self.prefetch_least_value, self.prefetch_most_blocks)


def read_config(additional: object) -> PresageConfig:
    """Reads the settings of the hooks from vLLM's `additional_config`.

    Args:
        additional: `vllm_config.additional_config`; other keys than "presage" are ignored.

    Raises:
        ConfigurationError: lists all unknown keys and invalid values.
    """
    given: Any = additional.get("presage", {}) if isinstance(additional, dict) else {}
    try:
        return PresageConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigurationError(f"additional_config: {'; '.join(map(_described, error.errors()))}") from None


def _described(problem: Any) -> str:
    where = ".".join(["presage", *map(str, problem["loc"])])
    if problem["type"] == "extra_forbidden":
        table: type[BaseModel] = PresageConfig
        for key in problem["loc"][:-1]:
            about = table.model_fields.get(str(key))
            kinds = [about.annotation, *get_args(about.annotation)] if about is not None else []
            table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), table)
        return f"{where} is unknown; the settings are {', '.join(sorted(table.model_fields))}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {problem['input']!r:.60}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def counted_from_1(layer: int | None, layers: int) -> int | None:
    """The layer whose hidden states are read, as recordings and predictors store it.

    Layers count as Hugging Face's `output_hidden_states` and PBKV count them: 1 is the first transformer layer, and a
    state is the residual stream after it; after the last layer, before the final norm.

    Args:
        layer: the setting `state_layer`; negative numbers count from the end.
        layers: transformer layers of the served model.

    Returns:
        1..layers; None for the states after the final norm.

    Raises:
        ConfigurationError: the model has no such layer.
    """
    if layer is None:
        return None
    if not 1 <= abs(layer) <= layers:
        raise ConfigurationError(
            f"presage.state_layer is {layer}; this model has {layers} transformer layers: give 1 to {layers}, or -1 to "
            f"-{layers} from the end, or leave it out for the states after the final norm"
        )
    return layer if layer > 0 else layers + 1 + layer
