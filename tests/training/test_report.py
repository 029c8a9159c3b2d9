"""The report says what metrics.json says, and writing it never leaves half a file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from presage.datasets.law import generate
from presage.errors import OutputError
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.ngram import BackoffNgram
from presage.training import report as report_module
from presage.training.evaluate import evaluate
from presage.training.report import report, write_metrics, write_report


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    drawn = generate("retry", 40, 0, censored=0.3)
    prefixes = prefixes_of(drawn.table, Vocabulary.from_table(drawn.table), 2)

    def bayes(_: Prefixes, moment: Moment) -> NDArray[np.float32]:
        return drawn.forecasts[moment][:, :2].astype(np.float32)

    markov = BackoffNgram().fit(prefixes, prefixes)
    found = evaluate(
        bayes, prefixes, np.random.default_rng(0), baselines={markov.name: markov.predict}, model="a|b", resamples=20
    )
    return {**found.to_dict(), "data": {"split": "by task", "seed": 0}}


def test_every_accuracy_and_interval_stands_in_the_report(metrics: dict[str, Any]) -> None:
    text = report(metrics)
    for figures in (*metrics["moments"].values(), metrics["baselines"]["markov-3"]["completion"]):
        for accuracy, (low, high) in zip(figures["accuracy"], figures["ci95"], strict=True):
            assert f"{accuracy:.3f} [{low:.3f}, {high:.3f}]" in text
    assert f"Judged on {metrics['workflows']} workflows, {metrics['steps']} steps." in text
    assert "- split: by task\n- seed: 0" in text
    assert "Without states at prefill and completion" in text


def test_tables_are_whole_whatever_the_names(metrics: dict[str, Any]) -> None:
    tables = [block for block in report(metrics).split("\n\n") if block.startswith("|")]
    assert len(tables) == 8
    for table in tables:
        assert len({row.replace("\\|", "").count("|") for row in table.splitlines()}) == 1


def test_what_was_not_judged_is_a_dash(metrics: dict[str, Any]) -> None:
    gone = json.loads(json.dumps(metrics))
    prefill = gone["moments"]["prefill"]
    prefill.update(accuracy=[0.5, None], ci95=[[0.4, 0.6], [None, None]], reliability=[prefill["reliability"][0], []])
    assert "| a\\|b | 0.500 [0.400, 0.600] | – |" in report(gone)


def test_agents_training_never_saw_are_mentioned_where_there_are_any(metrics: dict[str, Any]) -> None:
    assert "never saw" not in report(metrics)
    some = json.loads(json.dumps(metrics))
    some["moments"]["prefill"]["unseen"] = [0.25, 0.0]
    assert "never saw: 0.250 / 0.000" in report(some)


def test_files_are_written_and_replaced(metrics: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for _ in range(2):
        write_metrics(folder, metrics)
        write_report(folder, metrics)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "reliability.png", "report.md"]
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert (folder / "report.md").read_text() == report(metrics)
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_leaves_the_earlier_file(
    metrics: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(tmp_path, metrics)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_module.os, "fsync", full)
    with pytest.raises(OutputError, match=r"metrics\.json: cannot be written \(No space left"):
        write_metrics(tmp_path, {**metrics, "model": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text())["model"] == "a|b"


def test_a_folder_that_is_a_file_is_named(metrics: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_report(tmp_path / "out", metrics)


def test_importing_the_report_does_not_load_matplotlib() -> None:
    code = "import sys, presage.training.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
