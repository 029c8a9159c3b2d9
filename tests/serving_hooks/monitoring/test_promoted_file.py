"""The file of a promotion comes back as it was written, a broken one is none, and two kinds become one."""

import json

import pytest
from monitoring_samples import followed

from presage.errors import ArtefactError
from presage.serving_hooks.monitoring.promoted import (
    Promoted,
    merged_promoted,
    promoted_by_type,
    promoted_json,
    read_promoted,
)


def figures(*words: str, **more: object) -> dict[str, Promoted]:
    return promoted_by_type([followed(word, **more) for word in words * 10])  # type: ignore[arg-type]


AGENTS = figures("abc", "abbc")
LENGTHS = {**figures("ab", "ac", judged=0, within=8), **figures("ab", "ac", judged=0, within=8, workflow_type="u")}


def test_what_was_written_is_read_and_equal_figures_make_an_equal_file() -> None:
    by_type = {**LENGTHS, "é → 'x'": AGENTS["t"]}
    content = promoted_json(by_type)
    again = read_promoted(content.encode())
    assert {name: of.to_dict() for name, of in again.items()} == {name: of.to_dict() for name, of in by_type.items()}
    assert again["u"].ended
    assert promoted_json(dict(reversed(by_type.items()))) == content
    assert read_promoted(promoted_json({}).encode()) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"format_version": 99, "workflow_types": {}}',
        b'{"format_version": 1, "workflow_types": []}',
        b'{"format_version": 1, "workflow_types": {"t": {"workflows": 3}}}',
        promoted_json(AGENTS).encode()[:-1],
        json.dumps(json.loads(promoted_json(AGENTS))).replace("[0.0, 0.0,", "[7.0, 0.0,").encode(),
    ],
)
def test_a_broken_file_is_said_to_be_broken(content: bytes) -> None:
    with pytest.raises(ArtefactError, match="promote the version again"):
        read_promoted(content)


def test_of_both_kinds_the_call_graph_is_that_of_next_agents_and_coverage_that_of_lengths() -> None:
    found = merged_promoted(AGENTS, LENGTHS)
    assert found["u"] == LENGTHS["u"]
    assert found["t"].transitions is AGENTS["t"].transitions
    assert set(found["t"].figures) == {*AGENTS["t"].figures, "coverage at 0.9"}
    assert found["t"].figures["coverage at 0.9"] == LENGTHS["t"].figures["coverage at 0.9"]
    assert not any("'a' → 'c'" in name for name in found["t"].figures), "of another call graph"
    assert merged_promoted({}, LENGTHS) == LENGTHS
    assert merged_promoted(AGENTS, {}) == AGENTS
