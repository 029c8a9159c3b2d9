"""Inferred types in recordings: all workflows of an application have the one that it had at last."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from by_name import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_samples import Hands, Named, recorder
from typer.testing import CliRunner

from presage.applications import Applications
from presage.cli.presage import app
from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.datasets.recording import RECORDED_FINISHED
from presage.datasets.schema.names import NameMapping
from presage.datasets.store import read_store
from presage.serving_hooks.workflows.identity import scoped

PLANNER, RESEARCHER, WRITER, BUYER, SEARCHER = (f"{letter * 8}" for letter in "abcde")


class Gateway:
    """Records workflows of agents (8 hexadecimal digits each), with the types that a gateway gives them meanwhile."""

    def __init__(self, folder: Path, instance: str = "one") -> None:
        self.hands = Hands()
        self.to: Recorder = recorder(folder, self.hands, instance)
        self.applications: dict[str, Applications] = {}
        self.numbers = count()

    def serve(self, *agents: str, workflow_type: str = "", tenant: str = "") -> str:
        """One workflow; returns its type."""
        applications = self.applications.setdefault(tenant, Applications())
        workflow_type = workflow_type or applications.type_of(f"app-{agents[0]}")
        workflow_id = scoped(tenant, f"auto-{next(self.numbers)}")
        for place, agent in enumerate(agents):
            self.hands.on(1.0)
            if agent not in agents[:place]:
                applications.step(f"app-{agent}", workflow_type, begins=place == 0)
            request = f"{workflow_id}-{place}"
            self.to.begun(request, Named(workflow_id, f"agent-{agent}", workflow_type=workflow_type))
            self.to.completed(request, output_tokens=1, finish_reason="stop")
        self.to.ended(workflow_type, workflow_id, RECORDED_FINISHED)
        return workflow_type

    def split(self, tenant: str = "") -> None:
        """Workflows of one application that are of two types, until enough calls are seen."""
        self.serve(WRITER, tenant=tenant)
        for _ in range(3):
            self.serve(PLANNER, RESEARCHER, WRITER, tenant=tenant)

    def written(self) -> None:
        """What was served is on disk, and the gateway goes on."""
        self.to.writer.turn(self.hands.rising)
        self.hands.on(2.0)
        self.to.writer.turn(self.hands.rising)


def types(store: Path) -> list[str]:
    """The type of each workflow, in the order they began."""
    rows = read_store(store, columns=["workflow_type", "workflow_id", "step"]).to_pylist()
    runs = {int(row["workflow_id"].rpartition(".")[2]): row["workflow_type"] for row in rows if not row["step"]}
    assert len(runs) == sum(not row["step"] for row in rows), "each workflow is there once"
    return [workflow_type for _, workflow_type in sorted(runs.items())]


def test_types_of_one_application_become_the_one_that_it_had_at_last(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    gateway.split()
    gateway.to.close()
    assert set(read_traces(tmp_path / "r").table["workflow_type"].to_pylist()) == {f"app-{WRITER}", f"app-{PLANNER}"}
    answer = CliRunner().invoke(
        app, ["traces", "ingest", str(tmp_path / "r"), "--to", str(tmp_path / "s"), "--strict", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    told = f"workflow of the inferred type app-{WRITER}, of the application app-{PLANNER}"
    assert json.loads(answer.stdout)["notices"] == {told: 1}
    assert types(tmp_path / "s") == [f"app-{PLANNER}"] * 4


def test_two_applications_that_share_an_agent_stay_two_and_right_types_as_they_are(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    for _ in range(3):
        for agents in ((PLANNER, SEARCHER), (BUYER, SEARCHER)):
            gateway.serve(*agents)
    gateway.serve(SEARCHER)
    gateway.to.close()
    report = ingest([tmp_path / "r"], tmp_path / "s")
    assert types(tmp_path / "s") == [f"app-{PLANNER}", f"app-{BUYER}"] * 3 + [f"app-{SEARCHER}"]
    assert not report.notices
    assert read_store(tmp_path / "s").equals(read_traces(tmp_path / "r").table)


def test_types_that_a_client_or_a_file_of_names_gave_stay(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    gateway.serve(WRITER, workflow_type="support")
    gateway.serve(WRITER, workflow_type="app-support")
    gateway.split()
    gateway.to.close()
    names = NameMapping(workflow_types=((f"app-{WRITER}", "letters"),))
    named = ["support", "app-support", "letters", *[f"app-{PLANNER}"] * 3]
    for _ in range(2):
        ingest([tmp_path / "r"], tmp_path / "s", names=names)
        assert types(tmp_path / "s") == named
    ingest([tmp_path / "r"], tmp_path / "t")
    assert types(tmp_path / "t") == ["support", "app-support", *[f"app-{PLANNER}"] * 4]


def test_the_application_has_the_name_that_the_file_gives_its_type(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    gateway.split()
    gateway.to.close()
    ingest([tmp_path / "r"], tmp_path / "s", names=NameMapping(workflow_types=((f"app-{PLANNER}", "report"),)))
    assert types(tmp_path / "s") == ["report"] * 4


def test_what_one_tenant_calls_merges_no_types_of_another(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    gateway.split("key-0")
    gateway.serve(WRITER, tenant="key-1")
    gateway.to.close()
    ingest([tmp_path / "r"], tmp_path / "s")
    assert types(tmp_path / "s") == [*[f"app-{PLANNER}"] * 4, f"app-{WRITER}"]


def test_after_a_restart_what_was_seen_before_counts_too(tmp_path: Path) -> None:
    for number, instance in enumerate(("one", "two")):
        gateway = Gateway(tmp_path / "r", instance)
        gateway.hands.on(3600.0 * number)
        if instance == "one":
            gateway.split()
        else:
            assert gateway.serve(WRITER) == f"app-{WRITER}"
        gateway.to.close()
    ingest([tmp_path / "r"], tmp_path / "s")
    assert read_store(tmp_path / "s")["workflow_type"].unique().to_pylist() == [f"app-{PLANNER}"]


@pytest.mark.parametrize("rule", [(), ((f"app-{PLANNER}", "report"),)], ids=["without names", "with names"])
def test_what_an_earlier_night_named_stays_and_is_taken_once(tmp_path: Path, rule: tuple[tuple[str, str], ...]) -> None:
    gateway, names = Gateway(tmp_path / "r"), NameMapping(workflow_types=rule)
    gateway.serve(WRITER)
    gateway.written()
    ingest([tmp_path / "r"], tmp_path / "s", names=names)
    gateway.split()
    gateway.to.close()
    second = ingest([tmp_path / "r"], tmp_path / "s")
    assert (second.workflows, second.already_present, second.extended) == (4, 1, 0)
    merged = "report" if rule else f"app-{PLANNER}"
    assert types(tmp_path / "s") == [f"app-{WRITER}", *[merged] * 4]
    third = ingest([tmp_path / "r"], tmp_path / "s")
    assert (third.workflows, third.already_present) == (0, 5)


def test_a_store_of_earlier_nights_and_the_recording_are_one_source_of_each_workflow(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "r")
    gateway.serve(WRITER)
    gateway.written()
    ingest([tmp_path / "r"], tmp_path / "first")
    gateway.split()
    gateway.to.close()
    report = ingest([tmp_path / "first", tmp_path / "r", tmp_path / "r" / "engine-one"], tmp_path / "s")
    assert (report.workflows, report.repeated) == (5, 6)
    assert types(tmp_path / "s") == [f"app-{PLANNER}"] * 5


AGENTS = st.lists(st.sampled_from([PLANNER, RESEARCHER, WRITER, BUYER]), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.lists(AGENTS, min_size=1, max_size=15), st.lists(AGENTS, max_size=15))
def test_each_type_is_the_one_that_the_gateway_had_for_it_when_it_was_ingested(
    first: list[list[str]], second: list[list[str]]
) -> None:
    with TemporaryDirectory() as folder:
        gateway, expected = Gateway(Path(folder) / "r"), list[str]()
        for night in (first, second):
            recorded = [gateway.serve(*agents) for agents in night]
            expected += [gateway.applications[""].type_of(workflow_type) for workflow_type in recorded]
            gateway.written()
            ingest([Path(folder) / "r"], Path(folder) / "s")
            assert types(Path(folder) / "s") == expected
        gateway.to.close()
