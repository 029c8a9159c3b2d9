"""The report of a replay: its verdict, its drawings, and intervals that are cut."""

from typing import Any
from xml.etree.ElementTree import tostring

from presage.replay.metrics import over_seeds
from presage.replay.verdict import verdict
from presage.report.files import document, markdown, page

RUNS = {
    "stock": {0: 0.0, 1: 4.0, 2: 0.1},
    "a-policy-of-mine-with-a-long-name+stjf": {0: 3.0, 1: 3.1, 2: 3.2},
}


def metrics(runs: dict[str, dict[int, float]], with_pauses: bool = False) -> dict[str, Any]:
    keys = ("completion_mean_s", "completion_p95_s", "ttft_mean_s", "queueing_mean_s", "longest_wait_s", "makespan_s")
    keys += ("ttft_p50_s", "ttft_p99_s", "throughput_tokens_per_s", "preemptions", "recomputed_tokens")
    keys += ("evicted_blank", "evicted_retired", "evicted_active", "completion_p99_s")
    keys += ("start_delay_mean_s", "start_delay_p99_s", "later_ttft_mean_s", "later_ttft_p99_s")
    shares = {"hit_rate": 0.5, "reusable_share": 0.7, "recomputing_share": 0.5}
    figures = {
        name: {
            seed: shares | dict.fromkeys(keys, 5.0 + one) | {"queueing_mean_s": one} for seed, one in by_seed.items()
        }
        for name, by_seed in runs.items()
    }
    return {
        "kind": "replay",
        "workload": {
            "workflows": 3,
            "requests": 9,
            "concurrency": 2,
            "prompts": "history-first",
            "left_out": 0,
            "with_pauses": with_pauses,
        },
        "engine": {"cache_tokens": 160, "host_cache_tokens": 0, "cost": {"source": "a test"}},
        "forecasts": None,
        "seeds": 3,
        "interrupted": False,
        "policies": {name: over_seeds(list(by_seed.values())) for name, by_seed in figures.items()},
        "verdict": verdict(figures, (), 16, 100),
    }


def test_the_page_begins_with_the_verdict_and_draws_every_policy() -> None:
    found = metrics(RUNS)
    made = document(found)
    shown = page(made)
    assert shown.index(found["verdict"]["text"]) < shown.index("3 workflows, 9 requests")
    assert f"**{found['verdict']['text']} Stock spends 50% of its time on lost contexts: it thrashes" in markdown(made)
    completion, hit_rate, sooner = (tostring(panel.svg, "unicode") for panel in made.pictures()[0].panels)
    for drawn in (completion, hit_rate):
        assert all(name in drawn for name in RUNS)
    assert "stock" not in sooner


def test_an_interval_that_is_cut_shows_its_ends_and_another_its_half() -> None:
    table = next(section for section in document(metrics(RUNS)).sections if section.title.startswith("Policies"))
    stock, mine = table.blocks[0].rows  # type: ignore[union-attr]
    queueing = table.blocks[0].head.index("queueing s")  # type: ignore[union-attr]
    assert stock[queueing] == "1.37 (0.00 to 7.03)"
    assert mine[queueing] == "3.10 ± 0.25"


def test_a_single_run_is_drawn_without_interval() -> None:
    one = {name: {0: by_seed[0]} for name, by_seed in RUNS.items()}
    made = document(metrics(one))
    assert "interval s0" not in page(made)


def test_the_title_says_whether_pauses_count() -> None:
    for with_pauses, title in ((False, "times without pauses"), (True, "times with pauses")):
        assert any(title in section.title for section in document(metrics(RUNS, with_pauses)).sections)


def test_a_fleet_is_drawn_over_time_a_drawing_for_each_policy() -> None:
    found = metrics(RUNS)
    for scale, of in enumerate(found["policies"].values(), 1):
        series = {"a-1": [0.5] * 60, "a-2": [0.25 * scale] * 60}
        of["course"] = {"window_s": 2.0 * scale, "held": [1.0] * 60, "under_way": series, "cache_in_use": series}
    load, cache = (picture for picture in document(found).pictures() if picture.name.startswith("fleet-"))
    assert load.legend == ("held by the router", "a-1", "a-2")
    assert cache.legend == ("a-1", "a-2")
    for picture in (load, cache):
        assert [panel.title for panel in picture.panels] == list(RUNS)
        drawn = [tostring(panel.svg, "unicode") for panel in picture.panels]
        assert all(one.count("polyline") == len(picture.legend) for one in drawn)
        assert all(">250<" in one for one in drawn)  # the axes are those of the longer run
    assert "The fleet over time" in page(document(found))
