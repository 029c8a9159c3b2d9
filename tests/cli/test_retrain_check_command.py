"""`presage retrain-check`: exit codes, what it prints, and what it is given wrongly."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from cli_samples import run
from tiny_model import Tiny

from presage.datasets.ingest import append
from presage.datasets.synthetic.workflows import generate
from presage.features.lengths import LengthEncoder, length_rows
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.train import LengthTexts


def renamed(table: pa.Table, old: str, new: str) -> pa.Table:
    """The same trace with an agent of another name."""
    names = [new if agent == old else agent for agent in table["agent"].to_pylist()]
    at = table.schema.get_field_index("agent")
    return table.set_column(at, table.schema.field("agent"), pa.array(names))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrain") / "held-out"
    append(generate("retry", 200, 11, state_size=16).table, folder)
    return folder


def test_the_same_law_is_not_due_and_exits_with_0(tiny: Tiny, held_out: Path, tmp_path: Path) -> None:
    append(generate("retry", 150, 12, state_size=16).table, tmp_path / "since")
    ran = run("retrain-check", tmp_path / "since", "--model", tiny.folder, "--promoted-on", held_out, "--json")
    assert ran.code == 0, ran.err
    of = ran.json["workflow_types"]["retry"]
    assert (ran.json["due"], of["due"], of["alarm"], of["workflows"], of["watched"]) == (False, False, None, 150, 150)
    assert set(of["latest"]["no version"]["moments"]) == {"prefill", "completion"}


def test_a_new_agent_makes_it_due_and_exits_with_3(tiny: Tiny, held_out: Path, tmp_path: Path) -> None:
    append(renamed(generate("retry", 150, 12, state_size=16).table, "tester", "auditor"), tmp_path / "since")
    ran = run("retrain-check", tmp_path / "since", "--model", tiny.folder, "--promoted-on", held_out, "--json")
    assert ran.code == 3, ran.err
    assert ran.json["due"]
    reasons = [reason["figure"] for reason in ran.json["workflow_types"]["retry"]["alarm"]["reasons"]]
    assert "agents never seen" in reasons
    told = run("retrain-check", tmp_path / "since", "--model", tiny.folder, "--promoted-on", held_out)
    assert told.code == 3
    assert "DUE" in told.out
    assert "agents never seen" in told.out


def test_without_promoted_traces_the_oldest_workflows_are_what_others_are_held_against(
    tiny: Tiny, tmp_path: Path
) -> None:
    old = generate("retry", 350, 12, state_size=16).table
    new = renamed(generate("retry", 100, 13, state_size=16).table, "tester", "auditor")
    for name in ("started_at", "ended_at"):
        later = pc.add(new[name], pa.scalar(10**12, pa.duration("us")))
        new = new.set_column(new.schema.get_field_index(name), new.schema.field(name), later)
    append(pa.concat_tables([old, new]), tmp_path / "since")
    ran = run("retrain-check", tmp_path / "since", "--model", tiny.folder, "--json")
    assert ran.code == 3, ran.err
    assert ran.json["workflow_types"]["retry"]["watched"] == 150


def test_what_is_given_wrongly_is_said_in_one_line(tiny: Tiny, held_out: Path) -> None:
    twice = run("retrain-check", held_out, "--model", tiny.folder, "--model", tiny.folder)
    assert "one of each" in twice.complaint
    seen = run("retrain-check", tiny.store, "--model", tiny.folder)
    assert "workflows left out: a model was trained on them" in seen.err


def test_longer_outputs_make_lengths_due_and_nothing_is_said_of_agents(held_out: Path, tmp_path: Path) -> None:
    table = generate("retry", 200, 21, state_size=16).table
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    encoder, rows = texts.fit(encoder, relevant=False, seed=0, size=4)
    config, held = QuantileConfig(estimator="forest", refit=False), rows.task % 5 == 0
    RemainingLengthPredictor(config, 0).fit(rows.take(~held), rows.take(held), encoder=encoder).save(tmp_path / "model")
    since = generate("retry", 150, 22, state_size=16).table
    at, longer = since.schema.get_field_index("output_tokens"), pc.multiply(since["output_tokens"], 3)
    append(since.set_column(at, since.schema.field(at), pc.cast(longer, pa.int32())), tmp_path / "since")
    ran = run("retrain-check", tmp_path / "since", "--model", tmp_path / "model", "--promoted-on", held_out, "--json")
    assert ran.code == 3, ran.err
    of = ran.json["workflow_types"]["retry"]
    assert {reason["figure"].split(" at ")[0] for reason in of["alarm"]["reasons"]} == {"coverage"}
    assert set(of["latest"]["no version"]) == {"coverage", "coverage_ci95", "steps"}
