"""Data and figures that prove little are called so, and ordinary ones are not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tiny_model import Tiny

from presage.datasets.describe import describe
from presage.datasets.schema import conform
from presage.datasets.synthetic.workflows import generate
from presage.report.data_warnings import description_warnings, figure_warnings, training_warnings
from presage.report.next_agent import data


def described(*words: str, output_tokens: int | None = None, workflow_type: str = "t") -> dict[str, Any]:
    """A workflow a word, a step a letter."""
    rows = [
        {"workflow_type": workflow_type, "workflow_id": f"w{number:03}", "step": step, "agent": agent}
        | ({} if output_tokens is None else {"output_tokens": output_tokens})
        for number, word in enumerate(words)
        for step, agent in enumerate(word)
    ]
    return describe(conform(pa.Table.from_pylist(rows), "test"))


VARIED = ("abc", "ab", "acb", "abcb", "ba") * 4


def test_ordinary_traces_and_figures_are_not_warned_about(tiny: Tiny) -> None:
    assert description_warnings(described(*VARIED)) == {}
    assert description_warnings(describe(generate("triage", 60, 0, state_size=16).table)) == {}
    assert training_warnings(tiny.training.metrics) == {}


def test_workflows_with_one_step_are_counted() -> None:
    found = description_warnings(described(*VARIED, *("a",) * 5))
    assert found.keys() == {"one-step-workflows"}
    assert "t 20% of 25 workflows" in found["one-step-workflows"]
    assert "record the same workflow_id" in found["one-step-workflows"]
    assert description_warnings(described(*VARIED, "a")) == {}, "below a tenth"


@pytest.mark.parametrize(
    ("words", "tokens", "why"),
    [
        (("aa", "aaa") * 10, None, "t: a is the only agent"),
        (("abc",) * 20, None, "t: the same agent always follows each agent and every workflow has 3 steps"),
        (("abc", "acb") * 10, None, "t: every workflow has 3 steps"),
        (VARIED, 7, "t: every output has 7 tokens"),
    ],
)
def test_what_never_varies_is_named(words: tuple[str, ...], tokens: int | None, why: str) -> None:
    found = description_warnings(described(*words, output_tokens=tokens))
    assert found.keys() == {"constant-targets"}
    assert why in found["constant-targets"]


def test_a_handful_of_equal_workflows_is_no_surprise() -> None:
    assert description_warnings(described(*("abc",) * 9)) == {}


def moments(accuracy: float, positions: int, ends: int, end_errors: int) -> dict[str, Any]:
    of = {"accuracy": [accuracy], "positions": [positions], "ends": [ends], "end_errors": [end_errors]}
    return {"moments": {"completion": of}}


def test_perfect_figures_are_suspicious() -> None:
    assert "all 400 next steps at completion" in figure_warnings(moments(1.0, 400, 60, 0))["perfect-completion"]
    found = figure_warnings(moments(0.8, 400, 60, 0))
    assert "END is forecast at all 60 ends at completion and nowhere else" in found["perfect-completion"]
    assert figure_warnings(moments(0.8, 400, 60, 1)) == {}
    assert figure_warnings(moments(0.8, 400, 29, 0)) == figure_warnings(moments(1.0, 29, 9, 0)) == {}


def test_a_router_is_warned_of_models_that_solve_all_or_none() -> None:
    by_model = {"large": {"labels": 40, "base_rate": 1.0}, "small": {"labels": 40, "base_rate": 0.4}}
    found = figure_warnings({"macro_map": 1.0, "prompts": 40, "by_model": by_model})
    assert found.keys() == {"perfect-order", "constant-labels"}
    assert "large all of 40 prompts." in found["constant-labels"]
    assert figure_warnings({"macro_map": 0.9, "prompts": 40, "by_model": {"small": by_model["small"]}}) == {}


def test_the_report_shows_them_first_where_it_tells_what_was_learnt_from(tiny: Tiny) -> None:
    section = data({**tiny.training.metrics, "traces": described(*("abc",) * 20)})
    assert section is not None
    assert section.blocks[0].text.startswith("Warning: targets that never vary: t: ")  # type: ignore[union-attr]
