"""The verdict claims what the intervals support, and gives the reason where nothing can be gained."""

import math

import pytest

from presage.replay.verdict import saved, verdict

Runs = dict[int, dict[str, float]]


def runs(
    *completion_s: float, hit: float = 0.5, reusable: float = 0.8, retired: int = 3, active: int = 4, lost: float = 0.2
) -> Runs:
    figures = {"hit_rate": hit, "reusable_share": reusable, "evicted_retired": retired, "evicted_active": active}
    figures |= {"recomputing_share": lost}
    return {seed: figures | {"completion_mean_s": one} for seed, one in enumerate(completion_s)}


def of(bounds: tuple[str, ...] = ("oracle",), longest: int = 500, **policies: Runs) -> dict:
    return verdict({name.replace("_", "+"): one for name, one in policies.items()}, bounds, 16, longest)


STOCK = runs(10.0, 12.0, 11.0)


def test_the_best_policy_is_named_with_its_interval() -> None:
    found = of(stock=STOCK, full=runs(6.5, 7.7, 7.2, hit=0.6), lifecycle=runs(10.1, 11.9, 11.0))
    assert (found["best"], found["against"]) == (["full"], "stock")
    low, high = found["sooner"]["full"]["ci95"]
    assert low < found["sooner"]["full"]["mean"] < high
    assert found["text"] == f"Best: full, 35 % sooner than stock (95 % interval {100 * low:.0f} to {100 * high:.0f} %)."


def test_time_saved_is_a_paired_ratio_that_stays_below_all_of_it() -> None:
    found = saved(runs(1.0, 8.0), runs(10.0, 10.0))
    assert found is not None
    assert found["mean"] == pytest.approx(1 - math.sqrt(0.1 * 0.8))
    assert found["ci95"][1] < 1
    assert saved({3: STOCK[0]}, STOCK) is None  # an interrupted replay has no seed of both


def test_policies_that_do_not_differ_from_the_best_are_named_too() -> None:
    found = of(stock=STOCK, full=runs(5.0, 6.1, 5.4, hit=0.6), **{"next-use": runs(5.1, 6.0, 5.5)})
    assert found["best"] == ["full", "next-use"]
    assert "not distinguishable from next-use" in found["text"]


def test_an_interval_around_zero_is_no_gain() -> None:
    found = of(stock=STOCK, full=runs(8.0, 13.0, 11.5, hit=0.6))
    assert found["best"] == []
    assert found["text"] == "No policy is better than stock: no 95 % interval of the time saved lies above 0."


def test_a_slower_policy_is_called_later() -> None:
    assert of(stock=STOCK, full=runs(12.0, 14.5, 13.2, hit=0.6))["text"].endswith("; later than stock: full.")


def test_a_bound_is_never_the_best() -> None:
    found = of(stock=STOCK, full=runs(9.0, 10.9, 9.9, hit=0.6), oracle=runs(5.0, 6.1, 5.4))
    assert found["best"] == ["full"]
    assert "with the future known, oracle is 50 % sooner" in found["text"]
    alone = of(stock=STOCK, oracle=runs(5.0, 6.1, 5.4, hit=0.7))
    assert alone["best"] == []
    assert "only bounds" in alone["text"].lower()


def test_one_run_of_each_supports_no_claim() -> None:
    found = of(stock=runs(10.0), full=runs(5.0, hit=0.6))
    assert found["best"] == []
    assert "on one run of each (full 50 % sooner)" in found["text"]


def test_one_policy_has_nothing_to_be_compared_with() -> None:
    assert "name more with --policy" in of(lifecycle=STOCK)["text"]


def test_schedulers_are_compared_with_first_come_first_served() -> None:
    assert of(stock_fcfs=STOCK, stock_stjf=runs(6.5, 7.7, 7.2))["text"].startswith("Best: stock+stjf, 35 % sooner")


@pytest.mark.parametrize(
    ("longest", "figures", "reason"),
    [
        (15, {"reusable": 0.0, "hit": 0.0}, "every prompt is shorter than a block of 16 tokens"),
        (99, {"reusable": 0.0, "hit": 0.0}, "no prompt repeats a whole block"),
        (99, {"retired": 0, "active": 0}, "the cache holds everything"),
        (99, {"hit": 0.8}, "all that prompts repeat is found in the cache already"),
        (99, {"hit": 0.0}, "has been evicted before they come"),
        (99, {"active": 0}, "evicts blocks of ended workflows only"),
        (99, {}, "every policy replayed has the same hit rate"),
    ],
)
def test_where_nothing_can_be_gained_the_reason_is_given(longest: int, figures: dict, reason: str) -> None:
    same = runs(10.0, 12.0, 11.0, **figures)
    found = of(stock=same, full=same, longest=longest)
    assert reason in found["nothing_to_gain"]
    assert found["text"] == f"Nothing to gain here: {found['nothing_to_gain']}."


def test_order_can_gain_where_the_cache_cannot() -> None:
    found = of(stock=runs(10.0, 12.0, 11.0, retired=0, active=0), full=runs(6.5, 7.7, 7.2, retired=0, active=0))
    assert found["text"].startswith("Best: full, 35 % sooner")
    assert found["text"].endswith("nothing to gain from the cache: the cache holds everything.")


def test_different_hit_rates_can_gain() -> None:
    assert of(stock=STOCK, full=runs(10.0, 12.0, 11.0, hit=0.6))["nothing_to_gain"] is None


@pytest.mark.parametrize(
    ("lost", "name", "said"),
    [
        (0.63, "thrashing", "63 % of its time on lost contexts: it thrashes"),
        (0.4, "thrashing", "holding workflows back gains most."),
        (0.25, "eviction gains", "a better order of free blocks gains."),
        (0.1, "no headroom", "Stock spends 10% of its time on lost contexts: no policy can gain much."),
    ],
)
def test_the_regime_is_that_of_vllm_alone(lost: float, name: str, said: str) -> None:
    regime = of(stock=runs(10.0, 12.0, lost=lost), full=runs(5.0, 6.0, lost=0.0))["regime"]
    assert (regime["name"], regime["recomputing_share"]) == (name, pytest.approx(lost))
    assert said.replace(" %", "%") in regime["text"]
