"""The report says what metrics.json says, names are data, and writing it never leaves half a file."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_model import Tiny

from presage.datasets.describe import describe
from presage.datasets.synthetic.workflows import generate
from presage.errors import OutputError
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.report import files
from presage.report.files import document, markdown, page, report_files, write_metrics, write_report
from presage.report.traces import document as described
from presage.training.next_agent.evaluate import evaluate

Json = dict[str, Any]
NASTY = "<script>alert('a|b')</script>&[x](javascript:y)"


@pytest.fixture(scope="module")
def metrics() -> Json:
    """An evaluation alone, as `presage evaluate --json` prints it: no traces, no curve, no configuration."""
    drawn = generate("retry", 40, 0, censored=0.3)
    prefixes = prefixes_of(drawn.table, Vocabulary.from_table(drawn.table), 2)

    def bayes(_: Prefixes, moment: Moment) -> NDArray[np.float32]:
        return drawn.forecasts[moment][:, :2].astype(np.float32)

    markov = BackoffNgram().fit(prefixes, prefixes)
    found = evaluate(bayes, prefixes, np.random.default_rng(0), baselines={markov.name: markov.predict}, resamples=20)
    return {**found.to_dict(), "model": "a|b", "data": {"split": "by task", "seed": 0}}


@pytest.fixture(scope="module")
def full(tiny: Tiny) -> Json:
    """The metrics of a training with all further evidence, its curve and states made up of the figures there are."""
    found = json.loads(json.dumps(tiny.training.metrics))
    moments, rival = found["moments"], found["baselines"]["markov-1"]

    def curve(of: Json) -> Json:
        return {
            moment: {
                "accuracy": [[0.5, 0.4, 0.25], of[moment]["accuracy"]],
                "ci95": [[[0.41, 0.62], [0.35, 0.44], [0.2, 0.3]], of[moment]["ci95"]],
                "spread": [[[0.45, 0.55], [0.39, 0.41], [0.2, 0.3]], [[a, a] for a in of[moment]["accuracy"]]],
            }
            for moment in moments
        }

    found["learning_curve"] = {
        "points": [{"tasks": 25, "workflows": 25.0, "draws": 3}, {"tasks": 64, "workflows": 64.0, "draws": 1}],
        "models": {"presage": curve(moments), "markov-1": curve(rival)},
        "left_out": [],
        "last_doubling": {
            "from": 25.0,
            "to": 64.0,
            "moments": {moment: {"difference": [0.031, 0.02, 0.01], "ci95": [[0.012, 0.05]] * 3} for moment in moments},
        },
    }
    without = {
        "moments": {moment: {**moments[moment], "accuracy": rival[moment]["accuracy"]} for moment in moments},
        "differences": found["differences"]["markov-1"],
    }
    found["ablation"] = dict.fromkeys(("GraphSAGE", "trees", "n-gram", "states"), without)
    return found


class Seen(HTMLParser):
    """What a reader of a page sees: its words, without style, scripts and the ticks of axes; and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._within: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in ("meta", "line", "rect", "circle", "path", "polygon", "polyline"):
            hidden = tag == "style" or "tick" in (found.get("class") or "")
            self._within.append("hidden" if hidden else tag)

    def handle_endtag(self, tag: str) -> None:
        if self._within and tag not in ("line", "rect", "circle", "path", "polygon", "polyline"):
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if "hidden" not in self._within and data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def marked(value: Any) -> Any:
    """The same JSON with a 7 as the third and last decimal of every figure."""
    if isinstance(value, dict):
        return {key: marked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [marked(one) for one in value]
    if isinstance(value, float):
        return math.copysign(math.floor(abs(value) * 100) / 100 + 0.007, value)
    return value


def test_the_page_of_the_file_is_the_page_of_the_training(full: Json, tmp_path: Path) -> None:
    write_metrics(tmp_path, full)
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert page(document(again)) == page(document(full)) == page(document(copy.deepcopy(full)))
    assert markdown(document(again)) == markdown(document(full))


def test_every_figure_is_copied_from_the_metrics_and_none_is_computed(full: Json) -> None:
    """A sum, a difference or a mean of figures that all end in 7 would end in something else."""
    studies = [{**full, "kind": "study", "study": name} for name in ("horizon", "learning-curve")]
    for metrics in (full, *studies):
        for text in (Seen(page(document(marked(metrics)))).text, markdown(document(marked(metrics)))):
            found = re.findall(r"\d*\.\d{3}(?!\d)", text)
            assert len(found) > 50
            assert {figure[-1] for figure in found} == {"7"}, [figure for figure in found if figure[-1] != "7"]


def test_what_a_reader_wants_is_there_in_two_minutes(full: Json) -> None:
    seen = Seen(page(document(full)))
    for title in (
        "What it learnt from",
        "Accuracy by steps ahead",
        "What each part adds",
        "By workflow type",
        "Learning curve",
        "Reliability",
        "Call graph",
        "Where it errs most",
    ):
        assert title in seen.words
    for figures in (*full["moments"].values(), *full["baselines"]["markov-1"].values()):
        if isinstance(figures, dict):
            for accuracy, (low, high) in zip(figures["accuracy"], figures["ci95"], strict=True):
                assert f"{accuracy:.3f} [{low:.3f}, {high:.3f}]" in seen.words
    assert any(attributes.get("class") == "marked" for tag, attributes in seen.tags if tag == "tr")
    assert full["data"]["split"] in seen.words
    pair = full["confusions"]["prefill"]["pairs"][0]
    assert {pair["forecast"], pair["came"]} <= set(seen.words)
    texts = markdown(document(full))
    assert all(f"## {title}" in texts for title in ("Learning curve", "Call graph", "Where it errs most"))


def test_nothing_is_fetched_and_nothing_runs(full: Json) -> None:
    text = page(document(full))
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in seen.tags}
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on") or name == "src"]
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_where_ours_does_not_lead_it_says_so_and_by_how_much(full: Json) -> None:
    beaten = copy.deepcopy(full)
    rival = beaten["baselines"]["markov-1"]["completion"]
    rival["accuracy"][1] = 0.987
    beaten["differences"]["markov-1"]["completion"]["difference"][1] = -0.123
    beaten["differences"]["markov-1"]["completion"]["ci95"][1] = [-0.234, -0.045]
    for text in (Seen(page(document(beaten))).text, markdown(document(beaten))):
        assert "It does not lead" in text
        assert "at completion, 2 steps ahead: −0.123 [−0.234, −0.045] to markov-1" in text
        assert "BEHIND" in text
    assert "BEHIND" not in markdown(document({**full, "baselines": {}, "rivals": {}}))
    assert "compared with no baseline" in markdown(document({**full, "baselines": {}, "rivals": {}}))


def test_behind_and_ahead_are_told_apart_from_not_shown(full: Json) -> None:
    for gain, ends, verdict in (
        (0.1, [0.05, 0.2], "leads"),
        (0.1, [-0.1, 0.2], "ahead, not shown: the interval holds 0"),
        (0.0, [-0.1, 0.1], "level"),
        (-0.1, [-0.2, 0.1], "BEHIND, not shown: the interval holds 0"),
    ):
        changed = copy.deepcopy(full)
        of = changed["differences"]["markov-1"]["prefill"]
        of["difference"][0], of["ci95"][0] = gain, ends
        row = next(
            line for line in markdown(document(changed)).splitlines() if line.startswith("| prefill, 1 step | mar")
        )
        assert row.endswith(f"| {verdict} |")


def nasty(metrics: Json) -> Json:
    """The same metrics of an application whose agents and workflow type have names that are anything but names."""
    text = json.dumps(metrics)
    for name in ("planner", "coder", "retry"):
        text = text.replace(f'"{name}"', json.dumps(f"{name}{NASTY}"))
    found: Json = json.loads(text)
    return found


def test_names_of_agents_are_escaped_everywhere(full: Json) -> None:
    for text in (page(document(nasty(full))), page(described(nasty(full)["traces"]))):
        assert "<script" not in text
        assert "&lt;script&gt;alert(" in text
        assert any("<script>alert" in word for word in Seen(text).words), "a reader sees the name as it is"
    told = markdown(document(nasty(full)))
    assert "<script" not in told
    assert "](javascript" not in told
    for table in (block for block in told.split("\n\n") if block.startswith("|")):
        assert len({row.replace("\\|", "").count("|") for row in table.splitlines()}) == 1


def test_pictures_are_whole_files_without_names_that_run(full: Json, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    write_report(tmp_path, nasty(full))
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["call-graph.svg", "learning-curve.svg", "reliability.svg"]
    for name in pictures:
        text = (tmp_path / name).read_text()
        assert "<script" not in text
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert f"]({name})" in (tmp_path / "report.md").read_text()


def test_an_evaluation_alone_makes_a_report(metrics: Json) -> None:
    text = markdown(document(metrics))
    for figures in (*metrics["moments"].values(), metrics["baselines"]["markov-3"]["completion"]):
        for accuracy, (low, high) in zip(figures["accuracy"], figures["ci95"], strict=True):
            assert f"{accuracy:.3f} [{low:.3f}, {high:.3f}]" in text
    assert f"Judged on {metrics['workflows']} workflows, {metrics['steps']} steps" in text
    assert "- split: by task\n- seed: 0" in text
    assert "Without states at prefill and completion" in text
    assert "Learning curve" not in text
    assert "What each part adds" not in text
    assert "a|b" in Seen(page(document(metrics))).text


def test_what_was_not_judged_is_a_dash(metrics: Json) -> None:
    gone = json.loads(json.dumps(metrics))
    prefill = gone["moments"]["prefill"]
    prefill.update(accuracy=[0.5, None], ci95=[[0.4, 0.6], [None, None]], reliability=[prefill["reliability"][0], []])
    assert "| **a\\|b (ours)** | **0.500 [0.400, 0.600]** | **–** |" in markdown(document(gone))
    page(document(gone))


def test_agents_training_never_saw_are_mentioned_where_there_are_any(metrics: Json) -> None:
    assert "never saw" not in markdown(document(metrics))
    some = json.loads(json.dumps(metrics))
    some["moments"]["prefill"]["unseen"] = [0.25, 0.0]
    assert "never saw: 0.250 / 0.000" in markdown(document(some))


def test_the_ablation_tells_what_each_part_adds(full: Json) -> None:
    text = markdown(document(full))
    for part in ("GraphSAGE", "trees", "n-gram", "states"):
        assert f"what {part} adds" in text


def test_a_report_opens_with_the_comparisons_it_lost(metrics: Json) -> None:
    lost = {
        "baseline": "markov-3",
        "at": "1 step ahead before the output",
        "by": 0.0712,
        "ci95": [0.05, 0.09],
        "of": 0.8,
    }
    text = markdown(document({**metrics, "behind": [lost]}))
    lead, first = text.index("LOST: in 1 comparison a baseline (markov-3)"), text.index("Where a baseline is better")
    assert lead < first < text.index("Accuracy by steps ahead")
    assert "| markov-3 | 1 step ahead before the output | 0.0712 | 0.05 to 0.09 |" in text
    assert "LOST: in" not in markdown(document({**metrics, "behind": []}))


@pytest.mark.parametrize(
    ("ends", "answer"),
    [
        ([0.012, 0.05], "Yes, more traces would help"),
        ([-0.012, 0.05], "Not clear"),
        ([-0.012, 0.004], "No, more traces would hardly help"),
    ],
)
def test_the_learning_curve_answers_its_question_first(full: Json, ends: list[float], answer: str) -> None:
    moments = {"prefill": {"difference": [0.001], "ci95": [[-0.002, 0.004]]}}
    moments["completion"] = {"difference": [0.003], "ci95": [ends]}
    curve = {**full["learning_curve"], "last_doubling": {"from": 25.0, "to": 64.0, "moments": moments}}
    study = document({**full, "kind": "study", "study": "learning-curve", "learning_curve": curve})
    assert study.lead.startswith(answer)
    assert "From 25 to 64 training workflows, one step ahead: +0.001 [−0.002, +0.004] at prefill" in study.lead
    curve["last_doubling"] = None
    alone = document({**full, "kind": "study", "study": "learning-curve", "learning_curve": curve})
    assert alone.lead.startswith("Not known")


def test_the_report_has_the_profiles_side_by_side(full: Json) -> None:
    text = markdown(document(full))
    for profile in ("ids", "ids+tokens", "+text", "+states", "**engine**"):
        assert f"| {profile} |" in text


def test_a_description_is_a_page_with_the_call_graph(tiny: Tiny) -> None:
    found = describe(generate("triage", 60, 0).table)
    text = page(described(found))
    seen = Seen(text)
    assert text == page(described(json.loads(json.dumps(found))))
    assert {"triage", "greeter", "END", "Call graph"} <= set(seen.words)
    assert str(found["workflows"]) in seen.words
    probability = found["workflow_types"]["triage"]["call_graph"]["greeter"]["user"]["probability"]
    assert f"{probability:.2f}" in seen.words
    assert "not read" not in text
    told = page(described({**found, "notices": {"span that is <not> read": 1234}}))
    assert {"span that is <not> read", "1,234"} <= set(Seen(told).words)


def test_files_are_written_and_replaced(metrics: Json, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for _ in range(2):
        write_metrics(folder, metrics)
        write_report(folder, metrics)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["metrics.json", "reliability.svg", "report.html", "report.md"]
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert (folder / "report.md").read_text() == markdown(document(metrics))
    assert (folder / "report.html").read_text() == page(document(metrics))
    assert {path.name for path in report_files(folder)} == {"report.html", "report.md", "reliability.svg"}


def test_a_full_disk_leaves_the_earlier_file(metrics: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(tmp_path, metrics)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OutputError, match=r"metrics\.json: cannot be written \(No space left"):
        write_metrics(tmp_path, {**metrics, "model": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text())["model"] == "a|b"


def test_a_folder_that_is_a_file_is_named(metrics: Json, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_report(tmp_path / "out", metrics)


def test_importing_the_report_loads_nothing_heavy() -> None:
    code = "import sys, presage.report.files; sys.exit(any(m in sys.modules for m in ('matplotlib', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
