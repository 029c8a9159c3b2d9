"""Runs of settings of their own come out as they would alone, in the order asked for."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")


from replay_samples import chain

from presage.replay.metrics import PolicyRun, gained
from presage.replay.policies import POLICIES
from presage.replay.runs import Setting, run_one, side_by_side, swept
from presage.replay.workload import Arrivals, PromptConvention
from presage.serving_hooks.engine_file import read_engine

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

OWN = PromptConvention("own-conversation", opening_tokens=40)
JOBS = tuple(chain(number, "pqrqrs", OWN, new=60 + number, output=20) for number in range(12))
SETTING = Setting(JOBS, OWN, Arrivals(6), read_engine("invented", 1600), "oracle")


def test_each_run_has_its_own_setting() -> None:
    larger = replace(SETTING, engine=read_engine("invented", 16000))
    tasks = [(SETTING, POLICIES["stock"], 0), (larger, POLICIES["stock"], 0), (SETTING, POLICIES["next-use"], 1)]
    told: list[str] = []
    done = side_by_side(tasks, 1, lambda doing, share: told.append(doing))
    assert done == [run_one(*task) for task in tasks]
    assert done[1].figures["hit_rate"] != done[0].figures["hit_rate"]
    assert set(told) == {"replaying 3 runs"}


def test_a_sweep_is_figures_by_point_and_gains_are_paired() -> None:
    points = {("at once", n): (replace(SETTING, arrivals=Arrivals(n)), POLICIES["stock"]) for n in (2, 6)}
    found = swept(points, range(2), 1)
    alone = [run_one(points["at once", 6][0], POLICIES["stock"], seed).figures for seed in range(2)]
    assert found["at once", 6] == alone
    gain = gained(found["at once", 2], alone)["hit_rate"]
    each = [one["hit_rate"] - other["hit_rate"] for one, other in zip(found["at once", 2], alone, strict=True)]
    assert gain["mean"] == pytest.approx(sum(each) / 2)
    assert gain["ci95"][1] - gain["mean"] == pytest.approx(12.7062 * abs(each[0] - each[1]) / 2, rel=1e-3)


def test_settings_of_the_hooks_make_another_policy() -> None:
    short = replace(POLICIES["next-use"], more={"horizon": 1, "gamma": 0.5})
    off = dict.fromkeys(("priority", "admission", "prefetch", "infer_workflows"), False)
    assert short.presage() == {**off, "eviction": True, "horizon": 1, "gamma": 0.5}
    assert run_one(SETTING, short, 0).off == ()


def test_a_run_is_told_request_by_request() -> None:
    runs: list[PolicyRun] = []
    run_one(SETTING, POLICIES["stock"], 0, on_run=runs.append)
    assert len(runs[0].asked) == sum(len(job.steps) for job in JOBS)
