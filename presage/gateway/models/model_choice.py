"""Which model serves a request that names a pool of models.

The router's calibrated probabilities, less what a model costs, are weighed against the seconds to the last token that
the fleet monitor estimates, by the rules of `policies.routing.chimera`: Chimera's latency slack and margin, or our
price of a second. What a workflow's last prompt has left in a cache shortens the estimate of its model there, so it
leaves a model only for more than its prefix is worth.

Without evidence nothing changes: the workflow stays on its model, and a new one gets the pool's default.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from presage.datasets.schema.messages import routed_prompt
from presage.errors import ConfigurationError
from presage.gateway.models.router_client import RouterAnswer, Skipped
from presage.gateway.monitor.fleet_monitor import FleetMonitor
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.policies.routing.chimera import (
    CONFIDENT,
    FASTEST,
    WORTH,
    last_token_s,
    net_of_waiting,
    within_slack,
)
from presage.serving_hooks.policies.routing.fleet import FleetEngine
from presage.serving_hooks.workflows import PartState, Workflow

AUTO: Final = "presage/auto"
"""The name under which clients ask for a pool, if only one is configured."""

STAYS: Final = "model of the workflow: no other is more confident by the margin"
ONLY: Final = "only model of the pool that takes requests"
CLOSED: Final = "no model of the pool takes requests: default"
TOO_FAR: Final = "no evidence: prompt too far from the router's training prompts"
UNKNOWN: Final = "no evidence: models unknown to the router"
NO_PROMPT: Final = "no evidence: no text in the request"
NO_ROUTER: Final = "no router is loaded"
LATE: Final = "router was late"
OVERLOADED: Final = "router has too many requests waiting"
FAILED: Final = "router failed"
ERROR: Final = "choice failed"
REASONS: Final = (
    CONFIDENT, FASTEST, WORTH, STAYS, ONLY, CLOSED, TOO_FAR, UNKNOWN, NO_PROMPT, NO_ROUTER, LATE, OVERLOADED, FAILED,
    ERROR,
)  # fmt: skip
"""Every reason of a choice."""

_SKIPPED: Final[Mapping[Skipped, str]] = {
    "no router": NO_ROUTER,
    "late": LATE,
    "overloaded": OVERLOADED,
    "failed": FAILED,
}
_CHARS_OF_A_TOKEN: Final = 4.0

_log = logging.getLogger(__name__)


class RouterSource(Protocol):
    """Forecasts which models solve a prompt, as `RouterClient` does."""

    async def forecast(self, prompt: str) -> RouterAnswer | Skipped:
        """The forecast of a prompt, or why there is none."""


@dataclass(frozen=True)
class Pool:
    """Models among which the gateway chooses.

    Attributes:
        name: that clients ask for.
        default: the model without evidence.
        rule: "price", or "slack" as Chimera.
        price: λ, confidence that a second is worth.
        slack: τ, share by which the answer may be later than the fastest.
        margin: Δs, confidence that a slower model must have more than the fastest, and another one than the workflow's.
        costs: by model, confidence that a request to it must bring; others cost nothing.

    Raises:
        ConfigurationError: a model twice, none, a default or costs of another model, or a number out of range.
    """

    name: str
    models: tuple[str, ...]
    default: str
    rule: Literal["price", "slack"] = "price"
    price: float = 0.001
    slack: float = 1.0
    margin: float = 0.05
    costs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = ", ".join(self.models)
        if not self.models or len(set(self.models)) < len(self.models):
            raise ConfigurationError(f"pool {self.name}: models are [{listed}]; list at least one, each once")
        for called, model in (("default", self.default), *(("costs", model) for model in self.costs)):
            if model not in self.models:
                raise ConfigurationError(f"pool {self.name}: {called} names {model!r}; name one of {listed}")
        limits = {"price": self.price, "slack": self.slack, "margin": self.margin, **self.costs}
        for called, value in limits.items():
            if not value >= 0 or (math.isinf(value) and called != "slack"):
                raise ConfigurationError(f"pool {self.name}: {called} is {value}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model of a request.

    Attributes:
        upstream_hint: where its estimate is the best, the workflow's prefix included; None if unknown.
        reason: one of `REASONS`.
        probabilities: by model of the pool that the router knows.
        seconds: estimated to the last token, by model that takes requests.
        fallback: the probabilities are the linear head's, in place of a transformer that was late.
    """

    model: str
    upstream_hint: str | None
    reason: str
    probabilities: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """A model on an upstream."""

    model: str
    upstream: str


@dataclass(frozen=True, slots=True)
class LastPlace(PartState):
    """Where a workflow's last request went, and its prompt tokens."""

    place: _Place
    prompt_tokens: float


class ModelChooser:
    """Chooses the models of requests.

    Attributes:
        counts: choices by pool, model and reason.
    """

    def __init__(self, monitor: FleetMonitor, router: RouterSource) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._monitor, self._router = monitor, router

    async def choose(
        self,
        request: ApiRequest,
        pool: Pool,
        workflow: Workflow | None,
        *,
        prompt_tokens: float | None = None,
        predicted_tokens: float | None = None,
    ) -> ChosenModel:
        """Chooses a model. Does not raise, and takes no longer than the router's deadline.

        Args:
            workflow: its record; None for none.
            prompt_tokens: None takes a quarter of the characters.
            predicted_tokens: output tokens of this request; None takes the mean of all.
        """
        try:
            system, prompt = request.texts
            if prompt_tokens is None:
                prompt_tokens = (len(system or "") + len(prompt or "")) / _CHARS_OF_A_TOKEN
            answer: RouterAnswer | Skipped | None = None
            if len(pool.models) > 1 and (routed := routed_prompt(system, prompt)):
                answer = await self._router.forecast(routed)
            last = workflow.last_place if workflow is not None else None
            last = last if isinstance(last, LastPlace) else None
            chosen = self._chosen(pool, answer, last, prompt_tokens, predicted_tokens)
            if workflow is not None and chosen.upstream_hint is not None:
                workflow.last_place = LastPlace(_Place(chosen.model, chosen.upstream_hint), prompt_tokens)
        except Exception as error:
            _log.error("no choice of a model in pool %s: %s", pool.name, type(error).__name__)
            chosen = ChosenModel(pool.default, None, ERROR)
        self.counts[pool.name, chosen.model, chosen.reason] += 1
        return chosen

    def _chosen(
        self,
        pool: Pool,
        answer: RouterAnswer | Skipped | None,
        last: LastPlace | None,
        prompt_tokens: float,
        predicted_tokens: float | None,
    ) -> ChosenModel:
        output = self._monitor.mean_output if predicted_tokens is None else predicted_tokens
        seconds = self._seconds(pool, last, prompt_tokens, output)
        soonest: dict[str, _Place] = {}
        for place in sorted(seconds, key=lambda place: seconds[place]):
            soonest.setdefault(place.model, place)
        by_model = {model: seconds[place] for model, place in soonest.items()}
        home = last.place.model if last is not None and last.place.model in soonest else None

        def to(model: str, reason: str, probabilities: Mapping[str, float] | None = None) -> ChosenModel:
            return ChosenModel(model, soonest[model].upstream, reason, probabilities or {}, by_model)

        if not soonest:
            return ChosenModel(pool.default, None, CLOSED)
        if len(soonest) == 1:
            return to(next(iter(soonest)), ONLY)
        unchanged = home or (pool.default if pool.default in soonest else next(iter(soonest)))
        if not isinstance(answer, RouterAnswer):
            return to(unchanged, NO_PROMPT if answer is None else _SKIPPED[answer])
        shares = {model: answer.probabilities[model] for model in pool.models if model in answer.probabilities}
        comparable = [model for model in pool.models if model in soonest and model in shares]
        if answer.far or len(comparable) < 2 or unchanged not in comparable:
            return to(unchanged, TOO_FAR if answer.far else UNKNOWN, shares)
        scores = {model: shares[model] - pool.costs.get(model, 0.0) for model in comparable}
        model, reason = self._by_rule(pool, {model: by_model[model] for model in comparable}, scores, home)
        return replace(to(model, reason, shares), fallback=answer.fallback)

    def _by_rule(
        self, pool: Pool, seconds: Mapping[str, float], scores: Mapping[str, float], home: str | None
    ) -> tuple[str, str]:
        if pool.rule == "price":
            return net_of_waiting(seconds, scores, pool.price)
        model, reason = within_slack(seconds, scores, pool.slack, pool.margin)
        if home is not None and model != home:
            soon = math.isinf(pool.slack) or seconds[home] <= (1 + pool.slack) * min(seconds.values())
            if soon and scores[model] < scores[home] + pool.margin:
                return home, STAYS
        return model, reason

    def _seconds(
        self, pool: Pool, last: LastPlace | None, prompt_tokens: float, output_tokens: float
    ) -> dict[_Place, float]:
        """Estimated seconds to the last token wherever the pool's models take requests."""
        self._monitor.refresh()
        by_place = {}
        for row in self._monitor.engines:
            if not row.open:
                continue
            for model in pool.models if not row.model else (row.model,):
                if model in pool.models:
                    place = _Place(model, row.name)
                    cached = last.prompt_tokens if last is not None and last.place == place else 0.0
                    by_place[place] = self._estimate_s(row, max(0.0, prompt_tokens - cached), output_tokens)
        return by_place

    def _estimate_s(self, row: FleetEngine, uncached_tokens: float, output_tokens: float) -> float:
        return last_token_s(row, uncached_tokens + self._monitor.prefill_tokens(row.name), output_tokens)
