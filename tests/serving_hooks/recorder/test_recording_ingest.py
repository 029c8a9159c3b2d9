"""From a recording to a store, and on to a predictor: what is taken, what is cut, what waits, and never twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from by_name import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_samples import Hands, Named, recorder, serve, vector
from typer.testing import CliRunner

from presage.cli.presage import app
from presage.datasets.adapters import detect
from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.datasets.schema.names import NameMapping
from presage.datasets.store import read_store
from presage.datasets.synthetic.workflows import generate
from presage.errors import TraceError
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.workflows.identity import scoped, workflow_key
from presage.serving_hooks.workflows.metadata import read


def taken(path: Path) -> dict[str, tuple[str, bool]]:
    """Agents of each workflow, and whether it is complete."""
    found: dict[str, tuple[str, bool]] = {}
    for row in read_traces([path]).table.to_pylist():
        agents, _ = found.get(row["workflow_id"], ("", False))
        found[row["workflow_id"]] = (agents + row["agent"], row["complete"])
    return found


def test_a_recording_is_known_by_itself(tmp_path: Path) -> None:
    one = recorder(tmp_path / "r")
    serve(one, "w", "ab")
    one.close()
    assert detect(tmp_path / "r") == "recording"
    assert detect(tmp_path / "r" / "engine-one") == "recording"
    assert taken(tmp_path / "r" / "engine-one") == {"w@one.0": ("ab", True)}


def test_how_certain_an_identity_is_is_recorded_where_its_client_did_not_name_it(tmp_path: Path) -> None:
    one = recorder(tmp_path / "r")
    for number, (source, confidence) in enumerate(
        [("new", 1.0), ("quoted", 0.95), ("explicit", 1.0), ("session", 1.0)]
    ):
        one.begun(f"r{number}", Named("w", "a", source=source, confidence=confidence))
        one.completed(f"r{number}")
    one.ended("t", "w", RECORDED_FINISHED)
    one.close()
    confidences = read_traces([tmp_path / "r"]).table["identity_confidence"].to_pylist()
    assert confidences == [None, pytest.approx(0.95), None, 1.0]


@pytest.mark.parametrize(
    ("timeline", "parents"),
    [
        pytest.param("a( a) b( b) c( c)", [[], [0], [1]], id="one after the other"),
        pytest.param("p( p) a( b( a) b) w( w)", [[], [0], [0], [1, 2]], id="at once, by times alone"),
        pytest.param(
            "p( p) a( b( a) A(a b) A) w( w)", [[], [0], [0], [1], [2, 3]], id="an agent goes on beside another"
        ),
        pytest.param(
            "p( p) a( a) b( A(a A) b) w( w)", [[], [0], [0], [1], [2, 3]], id="one begins while another's tool runs"
        ),
        pytest.param("m( m) s( s) S(s S) M(m M)", [[], [0], [1], [2]], id="a sub-agent"),
        pytest.param("m( m) s( t( s) t) M(m M)", [[], [0], [0], [1, 2]], id="two sub-agents of one answer"),
        pytest.param("m( m) a(m b(m a) b) w( w)", [[], [0], [0], [1, 2]], id="two go on from one answer"),
        pytest.param("a( a) b(a b) c(b c) A(a A)", [[], [0], [1], [2]], id="a group chat, whose first speaks again"),
        pytest.param("a( a) b( b) A(a A) B(b B)", [[], [0], [1], [2]], id="two with histories of their own, in turn"),
        pytest.param('p( p) a( b( a) b) A("a B("b A) B) w("AB w)', [[], [0], [0], [1], [2], [3, 4]], id="two branches"),
        pytest.param('p( q( p) q) w("pq w) c("w c) W("pq W)', [[], [], [0, 1], [2], [3]], id="a draft sent back"),
        pytest.param("p( q( p) q)", [[], []], id="both at the beginning"),
    ],
)
def test_what_a_step_waited_for_is_worked_out_from_times_and_from_what_it_goes_on_from(
    tmp_path: Path, timeline: str, parents: list[list[int]]
) -> None:
    """`A(a` begins a step that goes on from the answer to `a`, `A("b` one that quotes that to `b`, `A)` ends it."""
    hands = Hands()
    one = recorder(tmp_path / "r", hands)
    for event in timeline.split():
        hands.on(1.0)
        name, begins, after = event.partition("(")
        if begins:
            before, _, quoted = after.partition('"')
            told = {"goes_on_from": ord(before or "\0"), "quotes": [ord(name) for name in quoted]}
            one.begun(name, Named("w", "agent"), number=ord(name), **told)
        else:
            one.completed(name.removesuffix(")"))
    one.ended("t", "w", RECORDED_FINISHED)
    one.close()
    assert read_traces([tmp_path / "r"]).table["parent_steps"].to_pylist() == parents


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=3)),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None)
def test_whatever_steps_say_they_wait_for_earlier_ones_alone(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int, list[int]]]
) -> None:
    """At the same time, without an end, after themselves and after later ones: every step is taken."""
    folder, hands = tmp_path_factory.mktemp("r"), Hands()
    one = recorder(folder, hands)
    for number, (pause, lasts, goes_on_from, quotes) in enumerate(steps, 1):
        hands.on(float(pause))
        one.begun(f"r{number}", Named(), number=number, goes_on_from=goes_on_from, quotes=quotes)
        for ended in range(max(1, number - lasts), number + (lasts == 0)):
            one.completed(f"r{ended}")
    for number in range(1, len(steps) + 1):
        one.completed(f"r{number}")
    one.ended("t", "w", RECORDED_FINISHED)
    one.close()
    rows = read_traces([folder]).table.to_pylist()
    assert [row["step"] for row in rows] == list(range(len(steps)))
    assert all(parent < row["step"] for row in rows for parent in row["parent_steps"])


def test_names_are_folded_for_the_models_recorded_as_sent_and_folded_again_by_the_store(tmp_path: Path) -> None:
    names = NameMapping(((r"(\w+)-\d+", r"\1"),), ((r"(\w+) run \d+", r"\1"),))
    one = recorder(tmp_path / "r")
    for number in range(2):
        for agent in ("plan", "check"):
            sent = {"workflow_type": f"crew run {number}", "workflow_id": f"w{number}", "agent": f"{agent}-{number}"}
            step = read(sent, None, EventCounts(), names)
            assert step is not None
            assert (step.workflow_type, step.agent, step.stats_key) == ("crew", agent, "crew")
            assert step.sent == (sent["workflow_type"], sent["agent"])
            assert step.workflow == workflow_key(sent["workflow_type"], sent["workflow_id"])
            one.begun(f"{number}-{agent}", step)
            one.completed(f"{number}-{agent}")
        one.ended(f"crew run {number}", f"w{number}", RECORDED_FINISHED)
    one.close()
    raw = read_traces(tmp_path / "r").table
    assert raw["agent"].to_pylist() == ["plan-0", "check-0", "plan-1", "check-1"]
    assert raw["workflow_type"].unique().to_pylist() == ["crew run 0", "crew run 1"]
    assert raw["complete"].to_pylist() == [True] * 4
    ingest([tmp_path / "r"], tmp_path / "store", names=names)
    assert read_store(tmp_path / "store")["agent"].to_pylist() == ["plan", "check"] * 2


def test_the_command_ingests_it(tmp_path: Path) -> None:
    one = recorder(tmp_path / "r")
    serve(one, "w", "ab")
    one.begun("s", Named("v", ""))
    one.completed("s")
    one.close()
    answer = CliRunner().invoke(app, ["traces", "ingest", str(tmp_path / "r"), "--to", str(tmp_path / "s"), "--json"])
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    assert (said["workflows"], said["steps"]) == (1, 2)
    assert said["skipped"] == {"step without a workflow type or an agent, or of an agent called END": 1}


def test_every_command_reads_it_and_says_what_it_left_out(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "ab")
    serve(one, "v", ["END"])
    one.close()
    answer = CliRunner().invoke(app, ["traces", "describe", str(tmp_path), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["steps"] == 2
    assert "skipped 1 × step without a workflow type or an agent, or of an agent called END" in answer.stderr


def test_the_steps_of_the_hooks_are_steps_here(tmp_path: Path) -> None:
    sent = {"workflow_type": "t", "workflow_id": "w", "agent": "a", "step": "0"}
    step = read(sent, None, EventCounts())
    assert step is not None
    one = recorder(tmp_path)
    one.begun("r", step)
    one.completed("r")
    one.ended(step.workflow_type, step.workflow_id, RECORDED_FINISHED)
    one.close()
    assert taken(tmp_path) == {"w@one.0": ("a", True)}


@pytest.mark.parametrize("layer", [None, 20])
def test_steps_with_states_say_of_which_layer_they_are(tmp_path: Path, layer: int | None) -> None:
    one = recorder(tmp_path / "r", states="both", state_layer=layer)
    for name, moments in (("a", ("prefill", "completion")), ("b", ("completion",)), ("c", ())):
        one.begun(name, Named("w", name))
        for moment in moments:
            one.states([name], moment, vector(1)[None])  # type: ignore[arg-type]
        one.completed(name)
    one.ended("t", "w", RECORDED_FINISHED)
    one.close()
    ingest([tmp_path / "r"], tmp_path / "s")
    assert read_store(tmp_path / "s")["state_layer"].to_pylist() == [layer, layer, None]


@pytest.mark.slow
def test_what_a_law_says_comes_back_as_it_was_and_trains(tmp_path: Path) -> None:
    from presage.predictors.next_agent.boosting import BoostingConfig
    from presage.predictors.next_agent.network_weights import NetworkConfig
    from presage.predictors.next_agent.parts import NextAgentConfig
    from presage.training.next_agent.train import train

    drawn = generate("retry", 60, 0, state_size=16, censored=0.2).table
    one = recorder(tmp_path / "r", states="both", queue_rows=10_000)
    rows = drawn.to_pylist()
    for i, row in enumerate(rows):
        step = Named(row["workflow_id"], row["agent"], row["step"], row["workflow_type"])
        one.begun(f"r{i}", step, input_tokens=row["input_tokens"])
        for moment in ("prefill", "completion"):
            if row[f"{moment}_state"] is not None:
                one.states([f"r{i}"], moment, np.array(row[f"{moment}_state"], np.float16)[None])  # type: ignore[arg-type]
        one.completed(f"r{i}", output_tokens=row["output_tokens"])
        last = i + 1 == len(rows) or rows[i + 1]["workflow_id"] != row["workflow_id"]
        if last and row["complete"]:
            one.ended(row["workflow_type"], row["workflow_id"], RECORDED_FINISHED)
    one.close()
    done = ingest([tmp_path / "r"], tmp_path / "s")
    assert (done.workflows, done.steps) == (60, drawn.num_rows)
    found = {(row["workflow_id"].split("@")[0], row["step"]): row for row in read_store(tmp_path / "s").to_pylist()}
    for row in rows:
        same = found[row["workflow_id"], row["step"]]
        for name in ("agent", "input_tokens", "output_tokens", "complete", "prefill_state", "completion_state"):
            assert same[name] == row[name], name
    config = NextAgentConfig(network=NetworkConfig(epochs=1), boosting=BoostingConfig(rounds=2))
    training = train(read_store(tmp_path / "s"), None, config, baselines=("markov-1",), name="recorded")
    assert training.predictor.source.kind == "captured"
    assert training.predictor.source.served_model == "m"


@pytest.mark.parametrize(
    ("how", "complete"), [(RECORDED_FINISHED, True), (RECORDED_EXPIRED, True), ("given up", False), (None, False)]
)
def test_only_a_workflow_that_ended_is_complete(tmp_path: Path, how: str | None, complete: bool) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "ab", ends=False)
    if how is not None:
        one.ended("t", "w", how)
    one.close()
    assert taken(tmp_path) == {"w@one.0": ("ab", complete)}


def test_what_still_runs_waits_and_nothing_is_taken_twice(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path / "r", hands)
    serve(one, "done", "ab")
    serve(one, "open", "ab", ends=False)
    flush(one, hands)
    first = ingest([tmp_path / "r"], tmp_path / "s")
    assert (first.workflows, first.skipped) == (1, {"workflow still running: left for a later ingestion": 1})
    serve(one, "open", "c", first=2)
    serve(one, "other", "a", ends=False)
    flush(one, hands)
    second = ingest([tmp_path / "r"], tmp_path / "s")
    assert (second.workflows, second.already_present) == (1, 1)
    one.close()
    third = ingest([tmp_path / "r"], tmp_path / "s")
    assert (third.workflows, third.already_present, third.skipped) == (1, 2, {})
    assert ingest([tmp_path / "r"], tmp_path / "s").workflows == 0
    assert taken(tmp_path / "s") == {
        "done@one.0": ("ab", True),
        "open@one.1": ("abc", True),
        "other@one.2": ("a", False),
    }


def flush(one: Recorder, hands: Hands) -> None:
    one.writer.turn(hands.rising)
    hands.on(2.0)
    one.writer.turn(hands.rising)


def test_a_recording_of_which_nothing_can_be_taken_yet_says_so(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands)
    serve(one, "w", "ab", ends=False)
    flush(one, hands)
    with pytest.raises(TraceError, match=r"without a usable workflow yet \(workflow still running.*: 1\)"):
        read_traces([tmp_path])
    one.close()


def test_two_engines_with_the_same_workflow_id_are_kept_apart(tmp_path: Path) -> None:
    one, other = recorder(tmp_path, instance="one"), recorder(tmp_path, instance="two")
    serve(one, "w", "ab")
    serve(other, "w", "ba")
    serve(one, "w", "a", ends=False)
    one.close()
    other.close()
    assert taken(tmp_path) == {"w@one.0": ("ab", True), "w@two.0": ("ba", True), "w@one.1": ("a", False)}


def test_a_workflow_two_engines_took_turns_at_teaches_no_false_step(tmp_path: Path) -> None:
    one, other = recorder(tmp_path, instance="one"), recorder(tmp_path, instance="two")
    serve(one, "w", "abd", numbers=[0, 1, 3], ends=True)
    serve(other, "w", "ce", numbers=[2, 4], ends=True)
    one.close()
    other.close()
    assert taken(tmp_path) == {"w@one.0": ("ab", False)}


@pytest.mark.parametrize(
    ("numbers", "agents", "complete"),
    [
        ([0, 1, 2], "abc", True),
        ([0, 2, 1], "abc", True),  # side by side: another order of arrival
        ([1, 2, 3], "", False),  # the recorder came late
        ([0, 1, 1], "abc", True),  # a retry: the numbers are no numbers
        ([0, None, 5], "abc", True),  # not all are numbered
        ([0, 1, 3], "ab", False),
    ],
)
def test_what_the_numbers_of_a_client_are_good_for(
    tmp_path: Path, numbers: list[int | None], agents: str, complete: bool
) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "abc", numbers=numbers)
    serve(one, "v", "a")
    one.close()
    wanted = {"w@one.0": (agents, complete)} if agents else {}
    assert taken(tmp_path) == {"v@one.1": ("a", True), **wanted}


@pytest.mark.parametrize("agent", ["", " ", "END"])
def test_an_agent_no_trace_can_have_cuts_its_workflow_and_no_other(tmp_path: Path, agent: str) -> None:
    one = recorder(tmp_path)
    serve(one, "w", ["a", agent, "c"])
    serve(one, "v", "ab")
    one.close()
    assert taken(tmp_path) == {"v@one.1": ("ab", True), "w@one.0": ("a", False)}


def test_the_oldest_files_may_be_removed(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path / "r", hands, rows_per_file=3)
    serve(one, "w", "ab")
    serve(one, "v", "a", ends=False)
    flush(one, hands)
    serve(one, "v", "b", first=1)
    serve(one, "u", "ab")
    flush(one, hands)
    one.close()
    ingest([tmp_path / "r"], tmp_path / "s")
    for path in (tmp_path / "r").glob("engine-*/*-000001.arrows"):
        path.unlink()
    again = ingest([tmp_path / "r"], tmp_path / "s")
    assert (again.workflows, again.already_present) == (0, 1)
    assert again.skipped == {"workflow of which the first step was not recorded": 1}


def test_states_of_two_models_go_into_two_stores(tmp_path: Path) -> None:
    for name, size in (("one", 4), ("two", 6)):
        engine = recorder(tmp_path / "r", instance=name, states="prefill")
        engine.begun("r", Named())
        engine.states(["r"], "prefill", vector(0, size)[None])
        engine.completed("r")
        engine.close()
    with pytest.raises(TraceError, match="mixed state sizes"):
        ingest([tmp_path / "r"], tmp_path / "s")
    for name, size in (("one", 4), ("two", 6)):
        ingest([tmp_path / "r" / f"engine-{name}"], tmp_path / name)
        assert read_store(tmp_path / name).schema.field("prefill_state").type.list_size == size


def test_a_step_of_a_server_with_several_keys_is_recorded_by_the_name_that_its_client_sent(tmp_path: Path) -> None:
    one = recorder(tmp_path / "r")
    for tenant in ("", "key-0", "key-1"):
        serve(one, scoped(tenant, "w"), "ab")
    one.close()
    assert not one.status().losing
    recorded = pa.ipc.open_stream((tmp_path / "r" / "engine-one" / "steps-000001.arrows").read_bytes()).read_all()
    pairs = zip(recorded["workflow_id"].to_pylist(), recorded["tenant"].to_pylist(), strict=True)
    assert [*pairs] == [("w", tenant) for tenant in (None, "key-0", "key-1") for _ in "ab"]
    ingest([tmp_path / "r"], tmp_path / "s")
    traces = read_store(tmp_path / "s")
    assert sorted(set(traces["workflow_id"].to_pylist())) == ["w@one.0", "w@one.1", "w@one.2"]
    assert all(traces["complete"].to_pylist())


def test_the_tools_that_an_answer_calls_are_recorded_where_it_was_parsed_in_time(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path / "r", hands)
    for number, agent in enumerate("abc"):
        one.begun(f"r{number}", Named(agent=agent, number=number))
        one.completed(f"r{number}")
        if agent == "a":
            one.answered("r0", ["search", "line\nbreak", "read"])
        flush(one, hands)
        if agent == "b":
            one.answered("r1", ["late"])
    one.answered("never seen", [])
    one.ended("t", "w", RECORDED_FINISHED)
    one.close()
    ingest([tmp_path / "r"], tmp_path / "s")
    assert read_store(tmp_path / "s")["tools_called"].to_pylist() == [["search", "read"], None, None]


def test_a_recorder_that_loses_most_steps_says_so_until_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = recorder(tmp_path)
    for number in range(60):
        serve(one, f"w{number}", "a")
    for _ in range(70):
        serve(one, "a name\nof two lines", "a")
    assert one.status().losing
    assert [record.getMessage()[:26] for record in caplog.records] == ["the recorder has lost 61 o"]
    for number in range(200):
        serve(one, f"v{number}", "a")
    assert not one.status().losing
    assert len(caplog.records) == 1


def test_another_version_is_refused(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", "ab")
    one.close()
    path = tmp_path / "engine-one" / "steps-000001.arrows"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    later = table.schema.with_metadata({**table.schema.metadata, b"presage.recording_version": b"99"})
    with pa.ipc.new_stream(str(path), later) as sink:
        sink.write_table(table.cast(later))
    with pytest.raises(TraceError, match="recording version 99, this release reads versions 1, 2, 3"):
        read_traces([tmp_path])


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recording"):
        ingest([tmp_path], tmp_path / "s", source_format="recording")


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_dropped_the_rest_is_a_true_beginning(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Workflows with a law of their own, served side by side through a queue that overflows now and then."""
    root = tmp_path_factory.mktemp("drops")
    hands = Hands()
    one = recorder(root, hands, queue_rows=data.draw(st.integers(1, 6)), rows_per_file=data.draw(st.integers(1, 8)))
    left = {f"w{i}": data.draw(st.integers(1, 6)) for i in range(4)}
    lengths, served = dict(left), dict.fromkeys(left, 0)
    while left:
        name = data.draw(st.sampled_from(sorted(left)))
        serve(one, name, [f"agent {served[name]}"], ends=False, first=served[name])
        served[name] += 1
        left[name] -= 1
        if not left[name]:
            del left[name]
            if data.draw(st.booleans()):
                one.ended("t", name, RECORDED_FINISHED)
        if data.draw(st.booleans()):
            flush(one, hands)
    one.close()
    try:
        found = read_traces([root]).table.to_pylist()
    except TraceError:
        found = []
    for name, length in lengths.items():
        rows = [row for row in found if row["workflow_id"].startswith(f"{name}@")]
        assert [row["agent"] for row in rows] == [f"agent {i}" for i in range(len(rows))]
        if rows and rows[0]["complete"]:
            assert len(rows) == length
    shutil.rmtree(root)


def test_a_recording_of_unnamed_steps_alone_has_no_usable_workflow(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    serve(one, "w", ["END"])
    one.close()
    with pytest.raises(TraceError, match="without a usable workflow"):
        read_traces([tmp_path])
