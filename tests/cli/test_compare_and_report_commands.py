"""`presage compare` and `presage report open`: what was kept of trainings, in a registry and in folders."""

from __future__ import annotations

import copy
import math
import re
import webbrowser
from pathlib import Path

import pytest
from cli_samples import Ran, run
from registry_database import new_database
from tiny_model import Tiny

from presage.features.input_profiles import as_served
from presage.registry.connect import open_registry
from presage.registry.gates import Compared, Verdict, no_worse, plain
from presage.registry.package import register
from presage.registry.promote import promote
from presage.report.files import report_files


@pytest.fixture(scope="module")
def uri(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registry with two versions of "tiny", the first the champion; the second has other test traces."""
    made = new_database(tmp_path_factory.mktemp("registry") / "mlflow.db")
    registry = open_registry(made)
    other = copy.deepcopy(tiny.training.metrics)
    other["data"]["digest of the test traces"] = "sha256:others"
    served = other["profiles"]["engine"]["moments"]["prefill"]
    served["accuracy"], served["ci95"] = [0.5, *served["accuracy"][1:]], [[0.4, 0.6], *served["ci95"][1:]]
    example = [{"workflow_type": "x", "workflow_id": "w", "step": 0, "agent": "a"}]
    files = report_files(tiny.folder)
    for metrics in (tiny.training.metrics, other):
        register(
            registry, tiny.folder, name="tiny", metrics=metrics, params={}, tags={}, input_example=example, report=files
        )
    registry.client.set_registered_model_alias("tiny", "champion", "1")
    return made


def compare(uri: str, *arguments: object) -> Ran:
    return run("compare", *arguments, "--tracking-uri", uri)


def test_two_versions_stand_side_by_side_with_unpaired_intervals(uri: str, tiny: Tiny) -> None:
    found = compare(uri, 1, 2, "--json").json
    assert [(one["version"], one["aliases"]) for one in found["models"]] == [(1, ["champion"]), (2, [])]
    assert (found["same_test_data"], found["same_training_data"], found["paired"]) == (False, True, None)
    of, kept = found["figures"]["prefill_accuracy_1"], as_served(tiny.training.metrics)["moments"]["prefill"]
    assert of["values"] == [kept["accuracy"][0], 0.5]
    assert of["ci95"] == [list(kept["ci95"][0]), [0.4, 0.6]]
    assert of["difference"] == 0.5 - kept["accuracy"][0]
    low, high = kept["ci95"][0]
    ends = [-math.hypot(0.1, high - kept["accuracy"][0]), math.hypot(0.1, kept["accuracy"][0] - low)]
    assert of["difference_ci95"] == pytest.approx([of["difference"] + end for end in ends])
    assert found["figures"]["latency_us"]["difference_ci95"] is None
    shown = compare(uri, 1, 2)
    assert shown.code == 0
    assert "tiny 1 (champion)" in shown.out
    assert "NOT judged on the same test data" in shown.out
    assert "trained on the same data" in shown.out
    for line in shown.out.splitlines():
        decimals = {len(part) for part in re.findall(r"\d\.(\d+)", line)}
        assert len(decimals) <= 1, line


def test_a_version_and_a_folder_of_the_same_training_differ_in_nothing(uri: str, tiny: Tiny) -> None:
    found = compare(uri, "models:/tiny@champion", tiny.folder, "--json").json
    assert found["same_test_data"] is True
    assert {of["difference"] for of in found["figures"].values()} == {0.0}
    assert "Both were judged on the same test data" in compare(uri, 1, tiny.folder).out


def test_the_verdict_on_one_against_the_other_gives_the_paired_intervals(uri: str) -> None:
    worse = no_worse(
        "accuracy-prefill-1", Compared(0.5, 0.6, (-0.2, -0.05)), "the champion's 0.6", higher_is_better=True
    )
    registry = open_registry(uri)
    judged = Verdict("tiny", 2, (worse, plain("schema", True, "as before")))
    promote(registry, judged, against=1, data_digest="sha256:held")
    for pair in ((1, 2), (2, 1)):
        paired = compare(uri, *pair, "--json").json["paired"]
        assert (paired["version"], paired["against"], paired["data_digest"]) == (2, 1, "sha256:held")
        assert list(paired["gates"]) == ["accuracy-prefill-1"]
        assert "95 % interval [-0.2000, -0.0500]" in paired["gates"]["accuracy-prefill-1"]
    assert "Paired, on the same held-out data: version 2 against version 1" in compare(uri, 1, 2).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 7), "has version 1 and 7; models: tiny"),
        (("models:/tiny/7", 1), "has no version 7"),
        ((1, "nowhere"), "nowhere/metrics.json: no such file"),
    ],
)
def test_what_is_not_there_is_named(uri: str, arguments: tuple[object, ...], message: str) -> None:
    assert message in compare(uri, *arguments).complaint


def test_metrics_of_something_else_are_refused(uri: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"kind": "replay"}')
    assert "not the metrics of a training" in compare(uri, 1, tmp_path).complaint


def test_the_page_of_a_version_or_a_folder_is_found_and_opened(
    uri: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda page: not shown.append(page))
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    registered = run("report", "open", "models:/tiny@champion", "--tracking-uri", uri, "--json").json
    assert Path(registered["page"]).read_bytes() == (tiny.folder / "report.html").read_bytes()
    assert (registered["opened"], shown) == (False, [])
    last = run("report", "open", "--tracking-uri", uri, "--json").json
    assert last["model"] in ("models:/tiny/1", "models:/tiny/2")
    monkeypatch.setenv("DISPLAY", ":0")
    found = run("report", "open", tiny.folder)
    assert (found.code, found.out.strip()) == (0, str(tiny.folder / "report.html"))
    assert shown == [(tiny.folder / "report.html").as_uri()]
    assert "no such file" in run("report", "open", tiny.store).complaint
