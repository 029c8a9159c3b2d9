"""Names with ids in them: what a mapping folds, what it refuses, and that a store keeps it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from dataset_samples import NAMES as ANY_NAME
from dataset_samples import row, trace
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.describe import describe, generated_names_warning
from presage.datasets.ingest import append, ingest
from presage.datasets.read import read_traces
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.datasets.store import read_store
from presage.datasets.store.parts import MANIFEST, load
from presage.errors import ConfigurationError, TraceError

IDS = NameMapping((("lead-1", "lead-1"), (r"(.+)-\d+", r"\1")), ((r"run \d+", "run"),))


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def run_with_ids(number: int, begin: float = 0.0) -> list[dict[str, object]]:
    kind, agents = f"run {number}", (f"planner-{number}", f"writer-{number}-7", "lead-1")
    times = [{"start_time": begin + number * 100 + step, "end_time": begin + number * 100 + step} for step in range(3)]
    return [row(f"w{number}", step, agent, kind, **times[step]) for step, agent in enumerate(agents)]


def test_the_first_pattern_of_the_whole_name_folds_it_until_none_changes_it() -> None:
    names = ("planner-7", "a-1-2-3", "lead-1", "lead-2", "planner", "-7", "x planner-7 y", "")
    assert [IDS.agent(name) for name in names] == ["planner", "a", "lead-1", "lead", "planner", "-7", names[6], ""]
    assert (IDS.workflow_type("run 3"), IDS.workflow_type("my run 3"), IDS.agent("run 3")) == (
        "run",
        "my run 3",
        "run 3",
    )
    assert not NO_NAMES
    assert NO_NAMES.agent("planner-7") == "planner-7"


@given(st.lists(ANY_NAME | st.from_regex(r"[ab]{1,3}(-\d){0,3}", fullmatch=True), max_size=8))
def test_a_column_is_folded_as_its_names_are_and_once_is_as_good_as_twice(names: list[str]) -> None:
    column = pa.chunked_array([names[:3], names[3:]], pa.string())
    folded = IDS.column("agents", column)
    assert folded.to_pylist() == [IDS.agent(name) for name in names]
    assert IDS.column("agents", folded).to_pylist() == folded.to_pylist()


def test_blanks_around_what_is_left_go_and_tools_keep_their_names() -> None:
    mapping = NameMapping(((r"(.*)for .*", r"\1"), ("search-.*", "search")))
    assert mapping.agent("Expert for trains") == "Expert"
    table = mapping.table(trace(row("w", 0, "search-1"), row("w", 1, "search-1", kind="tool")))
    assert table["agent"].to_pylist() == ["search", "search-1"]


def test_a_server_folds_any_name_in_linear_time_and_remembers_a_bounded_number() -> None:
    mapping = NameMapping((("(a+)+b", "c"), (r"(x.*)", r"\1\1"), (r"t-(.*)", r"\1")))
    begun = time.perf_counter()
    assert mapping.agent("a" * 250) == "a" * 250
    assert time.perf_counter() - begun < 1
    assert [mapping.agent(name) for name in ("x", "t-", "\udc80")] == ["x", "t-", "\udc80"]  # these fold to no name
    for number in range(5000):
        mapping.agent(f"t-{number}")
    assert len(mapping.remembered) <= 4096


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("researcher", "no pattern and name; expected REGEX=NAME"),
        ("=x", "no pattern and name; expected REGEX=NAME"),
        ("(=x", "Invalid regular expression: missing )"),
        ("a)|(b=x", "Invalid regular expression"),
        ("(?!a)b=x", "Invalid regular expression: invalid perl operator"),
        (r"a=\1", "Invalid replacement string"),
        ("a-.*= ", "'' is no name"),
        ("a-.*=b\x07", "is no name"),
    ],
)
def test_patterns_that_are_none_are_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        NameMapping.read([pattern])
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "name", "complaint"),
    [((r"t-(.*)", r"\1"), "t-", "to ''"), (("(.+)", r"\1!"), "t", "without end"), (("(.+)", r"\1\1"), "t", "1 to 256")],
)
def test_names_that_fold_to_none_are_refused(rule: tuple[str, str], name: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ingest([written(tmp_path / "t.jsonl", row(agent=name))], tmp_path / "s", names=NameMapping((rule,)))
    assert not (tmp_path / "s").exists()


def test_a_file_has_patterns_of_agents_and_workflow_types_in_their_order(tmp_path: Path) -> None:
    toml, other = tmp_path / "names.toml", tmp_path / "names.json"
    toml.write_text("[workflow_types]\n'run \\d+' = 'run'\n[agents]\n'lead-1' = 'lead-1'\n'(.+)-\\d+' = '\\1'\n")
    other.write_text(json.dumps({name: dict(of) for name, of in IDS.to_dict().items()}))
    assert NameMapping.read((), toml) == NameMapping.read((), other) == IDS == NameMapping.from_dict(IDS.to_dict())
    assert NameMapping.read(["b-.* = b"], toml).agents == (("b-.*", "b"), *IDS.agents)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "found nothing"),
        ("[agent]\na = 'b'", "found 'agent'"),
        ("agents = 'a=b'", "agents is 'a=b'"),
        ("[agents]\na = 1", "agents is {'a': 1}"),
        ('[agents]\na = "\\1"', "'single quotes' in TOML"),
        ("[agents]\n'(' = 'b'", "Invalid regular expression"),
    ],
)
def test_files_that_are_no_mapping_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "names.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        NameMapping.read((), path)
    assert complaint in str(refused.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        NameMapping.read((), tmp_path / "absent.toml")


def test_a_store_keeps_its_mapping_and_the_next_ingestion_folds_by_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = written(tmp_path / "1.jsonl", *(one for number in range(3) for one in run_with_ids(number)))
    second = written(tmp_path / "2.jsonl", *(one for number in range(2, 6) for one in run_with_ids(number)))
    done = ingest([first], store, names=IDS)
    assert done.notices == {"name folded by patterns: agent": 6, "name folded by patterns: workflow type": 3}
    again = ingest([second], store, strict=True)
    assert (again.workflows, again.already_present) == (3, 1)
    assert load(store).names == IDS
    table = read_store(store)
    assert table["workflow_type"].unique().to_pylist() == ["run"]
    assert table["agent"].unique().to_pylist() == ["planner", "writer", "lead-1"]
    described = describe(read_traces(store).table)
    assert described["names"] == IDS.to_dict()
    assert described["workflow_types"]["run"]["agents"] == {"lead-1": 6, "planner": 6, "writer": 6}


def test_a_store_without_one_has_none_and_a_manifest_from_before_too(tmp_path: Path) -> None:
    append(trace(row()), tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / MANIFEST).read_text())
    assert manifest.pop("names") == {"agents": [], "workflow_types": []}
    (tmp_path / "s" / MANIFEST).write_text(json.dumps(manifest))
    assert load(tmp_path / "s").names == NO_NAMES == NameMapping.of(read_traces(tmp_path / "s").table)


def test_another_mapping_goes_into_another_store(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    given = written(tmp_path / "1.jsonl", *run_with_ids(0), *run_with_ids(1))
    ingest([given], old, names=IDS)
    more = NameMapping((("planner", "leader"), ("lead-.*", "leader")))
    with pytest.raises(TraceError, match=r"leave patterns out.*presage traces ingest \S+ --to NEW"):
        ingest([given], old, names=more)
    ingest([given], old, names=IDS)  # the same is no other
    ingest([old], new, names=more)
    both = load(new).names
    assert both == IDS.and_then(more) == IDS.and_then(both)
    assert read_store(new)["agent"].to_pylist() == ["leader", "writer", "lead-1"] * 2  # kept by the first mapping
    assert ingest([given], new).already_present == 2
    with pytest.raises(TraceError, match="folded differently"):
        read_traces([old, new])


def test_what_is_read_beside_a_store_is_folded_as_it_is(tmp_path: Path) -> None:
    ingest([written(tmp_path / "1.jsonl", *run_with_ids(0))], tmp_path / "s", names=IDS)
    bad = {**row("w2", 0, "planner-2", "run 2"), "input_tokens": "many"}
    beside = written(tmp_path / "2.jsonl", *run_with_ids(1), bad, row("w2", 1, "writer", "run"))
    traces = read_traces([tmp_path / "s", beside], skip_bad=True)
    assert traces.table["workflow_id"].unique().to_pylist() == ["w0", "w1"]  # w2 lost a row under its type's raw name
    assert traces.table["workflow_type"].unique().to_pylist() == ["run"]
    assert NameMapping.of(traces.table) == IDS


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ([f"researcher-{n:04x}" for n in range(12)], "researcher-.*=researcher"),
        ([f"Topic {n} Senior Data Researcher" for n in range(12)], ".* Senior Data Researcher=Senior Data Researcher"),
        ([f"Expert (EU) on {n}" for n in range(12)], r"Expert \(EU\) on .*=Expert (EU) on"),
        ([f"{chr(97 + n)}{n}" for n in range(12)], "REGEX=NAME"),
    ],
)
def test_the_warning_of_generated_names_suggests_a_pattern_that_folds_them(names: list[str], pattern: str) -> None:
    runs = [one for n, name in enumerate(names) for one in (row(f"w{n}", 0, "planner"), row(f"w{n}", 1, name))]
    told = generated_names_warning(describe(trace(*runs)))
    assert told is not None
    assert f"--agent-pattern '{pattern}'" in told
    if pattern != "REGEX=NAME":
        mapping = NameMapping.read([pattern])
        assert len({mapping.agent(name) for name in names}) == 1
        assert generated_names_warning(describe(mapping.table(trace(*runs)))) is None
    types = generated_names_warning(describe(trace(*(row(f"w{n}", 0, "a", name) for n, name in enumerate(names)))))
    assert types is not None
    assert "[workflow_types]\\n'" + "' = '".join(pattern.rsplit("=", 1)) + "'" in types
