"""Everything that can be wrong with spans: one clear error, or a counted, explained skip that costs its workflow."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from span_samples import Recorder, agent, chat, collected, envelope, raw_spans, steps, write_lines

from presage.datasets.adapters.spans.reader import read_spans
from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.errors import TraceError

Spans = list[dict[str, Any]]
BAD, GOOD = f"{1:032x}", f"{2:032x}"


def two_traces() -> dict[str, Any]:
    """Trace 1 (root span 1, requests 2 and 3) and trace 2 (root span 4, requests 5 and 6)."""
    recorder = Recorder()
    for at in (0, 100):
        with recorder.span("invoke_agent bot", at, at + 9, attributes=agent("bot")) as root:
            for start in (at + 1, at + 3):
                recorder.add("chat m", start, start + 1, root, chat(**{"gen_ai.usage.input_tokens": 5}))
    return envelope(recorder.spans)


def of(document: dict[str, Any], number: int) -> dict[str, Any]:
    return next(span for span in raw_spans(document) if span["spanId"] == f"{number:016x}")


def set_attribute(span: dict[str, Any], key: str, value: dict[str, Any]) -> None:
    span["attributes"] = [pair for pair in span["attributes"] if pair["key"] != key] + [{"key": key, "value": value}]


def tokens(value: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda document: set_attribute(of(document, 2), "gen_ai.usage.input_tokens", value)


def cycle(document: dict[str, Any]) -> None:
    of(document, 1)["parentSpanId"] = of(document, 2)["spanId"]


def backwards(document: dict[str, Any]) -> None:
    of(document, 2)["endTimeUnixNano"] = "1767225600000000001"


BREAKS: list[tuple[Callable[[dict[str, Any]], Any], str, str]] = [
    (tokens({"intValue": "five"}), r"span 0+2: a number or a list in it or in its reso", "span that is no OTLP"),
    (lambda document: of(document, 2).pop("startTimeUnixNano"), r"span 0+2: no start time", "without a start time"),
    (lambda document: of(document, 2).pop("spanId"), r"line 1: a span without a span id", "without a span id"),
    (cycle, r"line 1, span 0+[12]: it is its own ancestor", "cycle of spans"),
]  # fmt: skip


DROPPED: list[tuple[str, dict[str, Any], str]] = [
    ("gen_ai.usage.input_tokens", {"stringValue": "many"}, "of a wrong type"),
    ("gen_ai.usage.input_tokens", {"stringValue": "5.5"}, "of a wrong type"),
    ("gen_ai.usage.input_tokens", {"doubleValue": 5.5}, "of a wrong type"),
    ("gen_ai.usage.input_tokens", {"boolValue": True}, "of a wrong type"),
    ("gen_ai.usage.input_tokens", {"intValue": "-5"}, "out of range"),
    ("gen_ai.usage.input_tokens", {"intValue": "5000000000"}, "out of range"),
    ("gen_ai.agent.name", {"boolValue": True}, "of a wrong type"),
    ("gen_ai.agent.name", {"arrayValue": {"values": [{"stringValue": "a"}, {"stringValue": "b"}]}}, "of a wrong type"),
    ("gen_ai.response.finish_reasons", {"arrayValue": {"values": [{"intValue": "1"}]}}, "of a wrong type"),
]


@pytest.mark.parametrize(("name", "value", "reason"), DROPPED)
def test_a_value_that_cannot_be_read_is_dropped_and_counted(
    tmp_path: Path, name: str, value: dict[str, Any], reason: str
) -> None:
    document = two_traces()
    set_attribute(of(document, 2), name, value)
    found = read_traces([write_lines(tmp_path / "t.json", document)])
    assert found.notices == {f"value dropped: {name} {reason}": 1}
    expected = [None, 5, 5, 5] if name == "gen_ai.usage.input_tokens" else [5] * 4
    assert found.table["input_tokens"].to_pylist() == expected
    assert set(found.table["agent"].to_pylist()) == {"bot"}


@pytest.mark.parametrize(
    ("value", "tokens_read"),
    [
        ({"stringValue": "120"}, 120),
        ({"stringValue": " 120.0 "}, 120),
        ({"doubleValue": 120.0}, 120),
        ({"intValue": "-1"}, None),
        ({"stringValue": "-1"}, None),
        ({"stringValue": "none"}, None),
        ({"intValue": "0"}, None),  # no request is empty
    ],
)
def test_counts_in_the_types_that_are_written(tmp_path: Path, value: dict[str, Any], tokens_read: int | None) -> None:
    document = two_traces()
    set_attribute(of(document, 2), "gen_ai.usage.input_tokens", value)
    found = read_traces([write_lines(tmp_path / "t.json", document)])
    assert found.notices == {}
    assert found.table["input_tokens"].to_pylist() == [tokens_read, 5, 5, 5]


@pytest.mark.parametrize("nanoseconds_per_unit", [10**9, 10**6, 10**3, 1])
def test_times_of_otlp_in_another_unit(tmp_path: Path, nanoseconds_per_unit: int) -> None:
    document = two_traces()
    for span in raw_spans(document):
        for key in ("startTimeUnixNano", "endTimeUnixNano"):
            span[key] = str(int(span[key]) // nanoseconds_per_unit)
    found = read_traces(write_lines(tmp_path / "spans.json", document)).table
    assert found == read_traces(write_lines(tmp_path / "nanoseconds.json", two_traces())).table


def test_a_name_is_text_without_blanks_around_it(tmp_path: Path) -> None:
    document = two_traces()
    set_attribute(of(document, 1), "session.id", {"intValue": "42"})
    set_attribute(of(document, 4), "session.id", {"stringValue": "undefined"})
    for number, name in ((2, " planner\n"), (3, "senior\n  coder "), (5, "None"), (6, "  ")):
        set_attribute(of(document, number), "gen_ai.agent.name", {"stringValue": name})
    table = read_traces([write_lines(tmp_path / "t.json", document)]).table
    assert steps(table, "workflow_id", "agent") == [
        (GOOD, "bot"), (GOOD, "bot"), ("42", "planner"), ("42", "senior coder"),
    ]  # fmt: skip


def test_of_two_reports_of_a_span_the_one_that_ended_counts(tmp_path: Path) -> None:
    document = two_traces()
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    early = json.loads(json.dumps(of(document, 2)))
    del early["endTimeUnixNano"]
    set_attribute(early, "gen_ai.usage.input_tokens", {"intValue": "1"})
    for reports in ([*spans, early], [early, *spans]):
        document["resourceSpans"][0]["scopeSpans"][0]["spans"] = reports
        found = read_traces([write_lines(tmp_path / "t.json", document)])
        assert found.table["input_tokens"].to_pylist() == [5] * 4
        assert found.notices == {"span reported again: its last report counts": 1}


def test_a_span_that_ends_before_it_starts_ends_where_it_starts(tmp_path: Path) -> None:
    document = two_traces()
    backwards(document)
    found = read_traces([write_lines(tmp_path / "t.json", document)])
    assert found.table["started_at"][0] == found.table["ended_at"][0]
    assert found.notices == {"span that ends before it starts: its end is its start": 1}


@pytest.mark.parametrize(("breaks", "words", "reason"), BREAKS)
def test_one_error_or_one_skip(
    tmp_path: Path, breaks: Callable[[dict[str, Any]], Any], words: str, reason: str
) -> None:
    document = two_traces()
    breaks(document)
    path = write_lines(tmp_path / "t.json", document)
    with pytest.raises(TraceError, match=words) as error:
        list(read_spans(path))
    assert str(path) in str(error.value)
    table, skipped, spoiled = collected(read_spans(path, skip_bad=True))
    assert set(table["workflow_id"].to_pylist()) == {GOOD}
    assert sum(skipped.values()) == 1
    assert reason in next(iter(skipped))
    assert spoiled == {("bot", BAD)}
    # Through the command's reader the good workflow stays whole.
    assert read_traces([path], skip_bad=True).table.num_rows == 2


def test_a_resource_that_cannot_be_read_costs_the_traces_of_its_spans(tmp_path: Path) -> None:
    document = two_traces()
    bad = {"attributes": [{"key": "gen_ai.workflow.name", "value": {"intValue": "q"}}]}
    spans = {trace: [span for span in raw_spans(document) if span["traceId"] == trace] for trace in (GOOD, BAD)}
    document["resourceSpans"] = [
        {"scopeSpans": [{"spans": spans[GOOD]}]},
        {"scopeSpans": [{"spans": spans[BAD][:2]}]},
        {"resource": bad, "scopeSpans": [{"spans": spans[BAD][2:]}]},
    ]
    path = write_lines(tmp_path / "t.json", document)
    with pytest.raises(TraceError, match=r"line 1: span 0+1: a number or a list in it or in its resource is not valid"):
        read_traces(path)
    assert set(read_traces(path, skip_bad=True).table["workflow_id"].to_pylist()) == {GOOD}


def test_a_trace_id_that_is_missing_spoils_the_trace_before_it(tmp_path: Path) -> None:
    document = two_traces()
    del of(document, 3)["traceId"]
    path = write_lines(tmp_path / "t.json", document)
    with pytest.raises(TraceError, match="a span without a trace id"):
        list(read_spans(path))
    _, skipped, spoiled = collected(read_spans(path, skip_bad=True))
    assert skipped == {"span without a trace id": 1}
    assert spoiled == {("bot", BAD)}


def test_a_batch_cut_in_the_middle(tmp_path: Path) -> None:
    """Every trace that the torn line still names may have lost spans in it."""
    recorder = Recorder()
    for at in (0, 100, 200):
        with recorder.span("invoke_agent bot", at, at + 9, attributes=agent("bot")) as root:
            recorder.add("chat m", at + 1, at + 2, root, chat())
    whole, torn = envelope(recorder.spans[:4]), json.dumps(envelope(recorder.spans[2:]))
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole) + "\n" + torn[: len(torn) - 40], encoding="utf-8")
    with pytest.raises(TraceError, match=r"line 2: not JSON; .*was the file cut"):
        list(read_spans(path))
    table, skipped, spoiled = collected(read_spans(path, skip_bad=True))
    assert set(table["workflow_id"].to_pylist()) == {f"{1:032x}"}
    assert skipped == {"line with no JSON": 1}
    assert spoiled == {("bot", f"{2:032x}")}


def test_files_named_one_by_one_are_put_together_as_a_folder_is(tmp_path: Path) -> None:
    document = two_traces()
    first, second = json.loads(json.dumps(document)), json.loads(json.dumps(document))
    scope = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    first["resourceSpans"][0]["scopeSpans"][0]["spans"] = scope[:1]
    second["resourceSpans"][0]["scopeSpans"][0]["spans"] = scope[1:]
    (tmp_path / "folder").mkdir()
    files = [write_lines(tmp_path / "folder" / f"{n}.json", half) for n, half in enumerate((first, second))]
    whole = read_traces([tmp_path / "folder"]).table
    assert read_traces(files).table.equals(whole)
    ingest(files, tmp_path / "store")
    assert read_traces([tmp_path / "store"]).table.equals(whole)


def test_the_trace_after_a_torn_line_may_have_lost_spans_too(tmp_path: Path) -> None:
    spans = two_traces()["resourceSpans"][0]["scopeSpans"][0]["spans"]
    lines = [
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": part}]}]})
        for part in (spans[:3], spans[3:4], spans[4:])
    ]
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n", encoding="utf-8")
    _, _, spoiled = collected(read_spans(path, skip_bad=True))
    assert {workflow for _, workflow in spoiled} == {BAD, GOOD}


def test_spans_printed_over_several_lines_are_explained(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add("chat m", 0, 1, attributes=chat())
    recorder.add("chat m", 2, 3, attributes=chat())
    path = tmp_path / "console.json"
    path.write_text("".join(span.to_json() + "\n" for span in recorder.spans), encoding="utf-8")
    with pytest.raises(TraceError, match="indent=None"):
        read_traces([path])


def test_what_was_skipped_is_told_where_nothing_is_left(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "spans.jsonl", {"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": 7}]}]}]})
    with pytest.raises(TraceError, match="line that is no OTLP: 1"):
        ingest([path], tmp_path / "store", skip_bad=True)


def test_logs_without_spans_are_named(tmp_path: Path) -> None:
    """Claude Code, as most installations run it, exports its requests as log records."""
    record = {"body": {"stringValue": "claude_code.api_request"}, "attributes": []}
    path = write_lines(tmp_path / "logs.jsonl", {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    with pytest.raises(TraceError, match=r"logs or metrics of OpenTelemetry, and no spans: .* export these too"):
        ingest([path], tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_gzip_that_was_cut(tmp_path: Path) -> None:
    document = two_traces()
    noise = {"resourceLogs": [{"noise": os.urandom(2000).hex()}]}
    text = "".join(json.dumps(line) + "\n" for line in (document, noise, document))
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text.encode())[:-600])
    with pytest.raises(TraceError, match="the gzip data are cut after this line"):
        list(read_spans(path))
    _, skipped, spoiled = collected(read_spans(path, skip_bad=True))
    assert list(skipped) == ["line with cut gzip data after it"]
    assert spoiled  # the trace before the cut


def test_zstd_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\x00\x00\x01\x00\x28\xb5\x2f\xfd" + b"x" * 20)
    with pytest.raises(TraceError, match="compressed with zstd"):
        list(read_spans(path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"birds": 1}', "a JSON object with the keys birds, neither OTLP"),
        ("3", "a JSON number, neither OTLP"),
        ('{"resourceSpans": {"a": 1}}', "not valid OTLP: Expected `array"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 3}]}]}]}', "Expected `str`, got `int`"),
        ('{"context": {"trace_id": "t", "span_id": "s"}, "name": "x", "start_time": "noon"}', "times cannot be read"),
    ],
)  # fmt: skip
def test_lines_that_hold_no_spans(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(f"{json.dumps(two_traces())}\n{line}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=r"line 2: .*" + words):
        list(read_spans(path))
    _, skipped, _ = collected(read_spans(path, skip_bad=True))
    assert sum(skipped.values()) == 1


def test_texts_never_enter_an_error(tmp_path: Path) -> None:
    document = two_traces()
    set_attribute(of(document, 2), "gen_ai.usage.input_tokens", {"stringValue": "my secret"})
    set_attribute(of(document, 2), "gen_ai.input.messages", {"stringValue": "my secret"})
    with pytest.raises(TraceError, match="--strict") as error:
        ingest([write_lines(tmp_path / "t.json", document)], tmp_path / "store", strict=True)
    assert "secret" not in str(error.value)
    assert not (tmp_path / "store").exists()


def test_a_spoiled_trace_costs_its_whole_conversation(tmp_path: Path) -> None:
    document = two_traces()
    for number in (1, 4):
        set_attribute(of(document, number), "gen_ai.conversation.id", {"stringValue": "c"})
    del of(document, 3)["startTimeUnixNano"]
    table, _, spoiled = collected(read_spans(write_lines(tmp_path / "t.json", document), skip_bad=True))
    assert table.num_rows == 0
    assert spoiled == {("bot", "c")}


def test_a_span_reported_twice_counts_once(tmp_path: Path) -> None:
    """A collector sends a batch again when it is not sure that it arrived."""
    document = two_traces()
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", document, document)))
    assert table.num_rows == 4


def test_spans_without_usage_have_none(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add("chat m", 0, 1, attributes=chat())
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, "input_tokens", "output_tokens", "cached_input_tokens") == [(None, None, None)]


def test_a_child_before_its_parent_keeps_the_order(tmp_path: Path) -> None:
    document = two_traces()
    of(document, 2)["startTimeUnixNano"] = "1767225599000000000"  # a second before its trace begins
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", document)))
    first = table.filter([name == BAD for name in table["workflow_id"].to_pylist()])
    assert first["parent_steps"].to_pylist() == [[], [0]]
    assert first["started_at"].cast("int64")[0].as_py() == 1767225600 * 10**6


def test_spans_without_a_single_step(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add("GET /", 0, 1, attributes={"http.request.method": "GET"})
    path = write_lines(tmp_path / "t.json", envelope(recorder.spans))
    with pytest.raises(TraceError, match=r"1 spans, but not one request to a model.*docs/traces.md"):
        list(read_spans(path))


def test_an_empty_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a folder without"):
        list(read_spans(tmp_path))
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_spans(tmp_path / "gone.json"))


def test_temporary_files_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tmp_path / "held"
    held.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(held))
    path = write_lines(tmp_path / "t.json", two_traces())
    reading = read_spans(path)
    next(reading)
    assert list(held.iterdir())
    reading.close()  # type: ignore[attr-defined]  # it is a generator
    assert not list(held.iterdir())
    assert collected(read_spans(path))[0].num_rows == 4
    assert not list(held.iterdir())


@pytest.mark.slow
def test_sixty_thousand_spans_of_one_trace(tmp_path: Path) -> None:
    """One long-running agent that never ends: read as one workflow, in bounded chunks."""
    count = 60_000
    lines = []
    for batch in range(0, count, 10_000):
        spans = [
            {
                "traceId": "a" * 32, "spanId": f"{number + 1:016x}", "parentSpanId": "f" * 16, "name": "chat m",
                "startTimeUnixNano": str(10**18 + 10 * number), "endTimeUnixNano": str(10**18 + 10 * number + 5),
                "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}],
            }
            for number in range(batch, batch + 10_000)
        ]  # fmt: skip
        lines.append({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    path = write_lines(tmp_path / "t.json", *lines)
    rows = 0
    for chunk in read_spans(path):
        numbers = chunk.table["step"].to_pylist()
        assert numbers == list(range(rows, rows + len(numbers)))
        assert len(numbers) <= 16_384
        rows += len(numbers)
    assert rows == count
