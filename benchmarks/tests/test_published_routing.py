"""Published routing policies: which engine a request goes to, and which requests wait."""

from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from published_routing import ModelByRule, PublishedChimera, StatisticalCapacity

from presage.serving_hooks.policies.routing.chimera import net_of_waiting, within_slack
from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, RoutingRequest
from presage.serving_hooks.policies.routing.placement import RoutingPolicy

MODELS = ("small", "large")
SCORES = {"small": 0.5, "large": 0.9}


class Gateway:
    """Reports to a policy what a gateway would; `engines` holds the engine of each placed request."""

    def __init__(self, policy: RoutingPolicy, fleet: Fleet) -> None:
        self.policy, self.fleet = policy, fleet
        self.engines: dict[tuple[int, int], int] = {}

    def sends(
        self,
        workflow: int,
        step: int = 0,
        tokens: int = 1000,
        cached_tokens: Callable[[int], int] = lambda engine: 0,
    ) -> int | None:
        request = RoutingRequest((workflow, step), f"w{workflow}", 0.0, tokens, cached_tokens=cached_tokens)
        self.fleet.arrived(request)
        placement = self.policy.decide(request, self.fleet, 0.0)
        if placement.engine is not None:
            self.places(request, placement.engine)
        return placement.engine

    def is_answered(self, workflow: int) -> None:
        """Its only step; it ends."""
        program = self.fleet.answered((workflow, 0), f"w{workflow}", 10, 0.0)
        self.policy.answered((workflow, 0), program, self.fleet, 0.0)
        self.fleet.ended(f"w{workflow}")
        for request, placement in self.policy.release(self.fleet, 0.0):
            assert placement.engine is not None
            self.places(request, placement.engine)

    def places(self, request: RoutingRequest, engine: int) -> None:
        self.fleet.place(request, engine)
        self.engines[request.id] = engine


def two_models() -> Fleet:
    return Fleet([FleetEngine("s", 10_000, 10, 0.01, 1e-4), FleetEngine("l", 10_000, 10, 0.04, 4e-4)])


def alike(count: int) -> Fleet:
    return Fleet([FleetEngine(f"e{number}", 1000, 8, 0.01, 1e-4) for number in range(count)])


def test_a_rule_weighs_the_confidence_of_an_engines_model_against_the_time_of_its_answer() -> None:
    # small: 1000 × 1e-4 + 100 × 0.01 = 1.1 s; large: 0.4 + 4 = 4.4 s
    for rule, engine in (
        (partial(within_slack, slack=2.9, margin=0.05), 0),
        (partial(within_slack, slack=3.1, margin=0.05), 1),
        (partial(net_of_waiting, price=0.12), 1),
        (partial(net_of_waiting, price=0.13), 0),
    ):
        policy = ModelByRule(MODELS, lambda request: SCORES, lambda request: 100.0, rule)
        assert Gateway(policy, two_models()).sends(0) == engine


def test_a_workflow_returns_to_its_model_while_its_prefix_is_worth_it() -> None:
    rule = partial(within_slack, slack=0.0, margin=0.05)
    policy = ModelByRule(MODELS, lambda request: dict.fromkeys(MODELS, 0.5), lambda request: 100.0, rule)
    gateway = Gateway(policy, two_models())
    gateway.fleet.engines[1].token_s = 0.01  # the models differ by their prefill only
    assert gateway.sends(0, cached_tokens=lambda engine: 1000 * engine) == 1
    gateway.fleet.engines[1].predicted_tokens = 500.0  # half a second of queue
    assert gateway.sends(1, cached_tokens=lambda engine: 1000 * engine) == 0


def test_published_chimera_sees_queues_only_and_never_leaves_a_model() -> None:
    gateway = Gateway(PublishedChimera(MODELS, lambda request: SCORES, lambda request: 100.0, slack=0.0), two_models())
    assert gateway.sends(0) == 1  # both queues are empty, so both are fastest
    gateway.fleet.engines[1].predicted_tokens = 10_000.0
    assert gateway.sends(0, step=1) == 1
    assert gateway.sends(1) == 0


def test_capacity_reserves_upper_bounds_and_holds_in_the_order_of_arrival() -> None:
    gateway = Gateway(StatisticalCapacity(lambda request, alpha: 1 / alpha, 0.08), alike(2))
    # 8 requests an iteration: α = 0.01, so each reserves its prompt and 100 tokens of 1000
    assert gateway.sends(0, tokens=800) == 0
    assert gateway.sends(1, tokens=700) == 1
    assert gateway.sends(2, tokens=200) is None
    assert gateway.sends(3, tokens=50) is None  # it would fit, but came later
    gateway.is_answered(1)
    assert (gateway.engines[2, 0], gateway.engines[3, 0]) == (1, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 300), st.booleans()), max_size=60), st.integers(1, 3))
def test_bounds_of_several_requests_never_pass_a_cache(events: list[tuple[int, int, bool]], count: int) -> None:
    bounds: dict[str, int] = {}
    gateway = Gateway(StatisticalCapacity(lambda request, alpha: bounds[request.program], 0.05), alike(count))
    reserved: dict[int, int] = {}  # by workflow
    for number, (tokens, bound, is_answered) in enumerate(events):
        bounds[f"w{number}"], reserved[number] = bound, tokens + bound
        gateway.sends(number, tokens=tokens)
        placed = [workflow for workflow in reserved if (workflow, 0) in gateway.engines]
        if is_answered and placed:
            del reserved[placed[0]]
            gateway.is_answered(placed[0])
        for engine in range(count):
            there = [tokens for workflow, tokens in reserved.items() if gateway.engines.get((workflow, 0)) == engine]
            assert len(there) <= 1 or (sum(there) <= 1000 and len(there) <= 8)
