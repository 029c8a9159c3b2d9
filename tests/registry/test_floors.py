"""A version that lost to a trained baseline is not promoted to where it lost."""

from typing import Any

from presage.registry.gates import floor_gates, forgetting_gates, lost_by_target, lost_tags


def lost(baseline: str, by: float, of: float) -> dict[str, Any]:
    return {"baseline": baseline, "at": "1 step ahead before the output", "by": by, "ci95": [by / 2, 2 * by], "of": of}


def metrics(workflows: int = 80, **behind: list[dict[str, Any]]) -> dict[str, Any]:
    profiles = {name: {"behind": behind.get(target, [])} for target, name in TARGETS.items()}
    baselines: dict[str, Any] = {"markov-3": {}, "trees": {}}
    return {"workflows": workflows, "baselines": baselines, "profiles": profiles, "behind": []}


TARGETS = {"engine": "engine", "gateway": "+text", "full": "+states"}


def passed(of: dict[str, Any], target: str) -> dict[str, bool]:
    return {gate.name: gate.passed for gate in floor_gates(of, target)}


def test_each_trained_baseline_is_a_floor_under_the_profile_that_is_promoted_to() -> None:
    found = metrics(gateway=[lost("markov-3", 0.07, 0.86)])
    assert passed(found, "engine") == {"floor-markov-3": True, "floor-trees": True}
    assert passed(found, "gateway") == {"floor-markov-3": False, "floor-trees": True}
    assert lost_by_target(lost_tags(found)) == {"engine": 0, "gateway": 1, "full": 0}
    (refused,) = (gate for gate in floor_gates(found, "gateway") if not gate.passed)
    assert "better 1 step ahead before the output by 0.07" in refused.reason


def test_what_has_no_input_profiles_lost_under_none() -> None:
    router = {"prompts": 80, "baselines": {"knn": {}}, "behind": [lost("knn", 0.1, 0.5)]}
    assert lost_by_target(lost_tags(router)) == {"full": 1}


def test_a_margin_below_a_hundredth_of_the_figure_is_no_reason_to_refuse() -> None:
    assert passed(metrics(engine=[lost("trees", 0.003, 0.97)]), "engine")["floor-trees"]
    assert not passed(metrics(engine=[lost("trees", 0.02, 0.97)]), "engine")["floor-trees"]


def test_every_lost_comparison_counts_not_the_largest_alone() -> None:
    """Beside a large figure a difference may be small, beside a small one it is not."""
    found = metrics(engine=[lost("trees", 5.0, 900.0), lost("trees", 2.0, 40.0)])
    assert not passed(found, "engine")["floor-trees"]


def test_one_baseline_that_won_often_hides_no_other() -> None:
    often = [lost("markov-3", 0.1, 0.5) for _ in range(60)]
    found = metrics(engine=[*often, lost("trees", 0.05, 0.5)])
    assert passed(found, "engine") == {"floor-markov-3": False, "floor-trees": False}


def test_a_dozen_test_workflows_refuse_nothing_and_the_gate_says_so() -> None:
    found = metrics(workflows=12, engine=[lost("trees", 0.08, 0.6)])
    (gate,) = (gate for gate in floor_gates(found, "engine") if gate.name == "floor-trees")
    assert gate.passed
    assert "judged on 12, and fewer than 30 are too few to refuse by" in gate.reason
    assert not passed(metrics(workflows=30, engine=[lost("trees", 0.08, 0.6)]), "engine")["floor-trees"]


def test_a_version_without_baselines_says_so() -> None:
    (gate,) = floor_gates({}, "engine")
    assert gate.passed
    assert "no baseline was kept with this version" in gate.reason


def test_training_without_baselines_takes_no_floor_away() -> None:
    (gate,) = floor_gates({"workflows": 80, "baselines": {}}, "engine")
    assert (gate.name, gate.passed) == ("baselines", False)
    assert "train it again with --baselines" in gate.reason


def test_a_version_that_was_trained_further_warns_of_what_it_has_forgotten() -> None:
    started: dict[str, Any] = {"model": "models:/next-agent/3"}
    (unknown,) = forgetting_gates({"started_from": started})
    assert (unknown.name, unknown.passed, unknown.warning) == ("forgotten", True, True)
    assert "models:/next-agent/3" in unknown.reason
    assert "--old-test" in unknown.reason
    started["old_test"] = {
        "workflows": 40,
        "moments": {"completion": {"accuracy": [0.9, 0.8, 0.7, 0.6]}},
        "forgotten": {
            "completion": {
                "difference": [0.05, 0.05, 0.01, None],
                "ci95": [[0.02, 0.08], [-0.01, 0.1], [0.001, 0.02], None],
            }
        },
    }
    (lost,) = forgetting_gates({"started_from": started})
    assert (lost.name, lost.passed, lost.warning) == ("forgotten-completion-1", True, True), (
        "only beyond interval and 1 %"
    )
    assert "on 40 workflows of older traces it has 0.9000" in lost.reason
    assert "0.9500: 0.0500 less, 95 % interval [0.0200, 0.0800]" in lost.reason
    assert not forgetting_gates({"started_from": None}), "trained anew"
    assert not forgetting_gates({})
