"""Fleet files: what they say, and one clear error for what they cannot say."""

from pathlib import Path

import pytest

from presage.errors import ConfigurationError
from presage.replay.fleet_file import read_fleet


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_tables_become_engines_with_names_sizes_and_times(tmp_path: Path) -> None:
    plan = read_fleet(
        written(
            tmp_path,
            '[[engines]]\ncount = 2\nname = "a"\ncache_tokens = 64000\n'
            '[[engines]]\nname = "b"\nengine = "h100-8b-datasheet"\npolicy = "next-use"\n'
            "added_s = 100\nload_s = 30\ndrained_s = 600\n",
        )
    )
    members = plan.engines
    assert [member.name for member in members] == ["a-1", "a-2", "b"]
    assert [member.engine.cache_tokens for member in members] == [64000, 64000, 400000]
    assert (members[2].opens_s, members[2].closes_s, members[2].policy.name) == (130.0, 600.0, "next-use")


def test_engine_files_lie_beside_the_fleet_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'cache_tokens = 3200\n[cost]\nsource = "mine"\niteration_s = 0.01\nprefill_token_s = 1e-4\n'
        "decode_token_s = 1e-4\ncontext_token_s = 1e-8\n"
    )
    assert read_fleet(written(tmp_path, '[[engines]]\nengine = "mine.toml"\n')).engines[0].engine.cache_tokens == 3200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "engines"),
        ("engines = 3", "engines"),
        ("[[engines]", "not valid TOML"),
        ("[[engines]]\ncount = 0", "count"),
        ("[[engines]]\ncolour = 1", "colour"),
        ('[[engines]]\npolicy = "belady"', "give one of stock"),
        ('[[engines]]\nscheduler = "best"', "stjf"),
        ('[[engines]]\nname = "a"\n[[engines]]\nname = "a"', "own name"),
        ("[[engines]]\ndrained_s = 10", "keep one"),
        ('[[engines]]\n[[engines]]\nname = "b"\nadded_s = 20\ndrained_s = 10', "drain it later"),
        ('[[engines]]\nengine = "nowhere.toml"', "no engine file"),
        ('[[engines]]\n[agents]\na = "m"', "give each table a model"),
        ('[[engines]]\nmodel = "m"\n[[engines]]\nname = "b"', "'b' has no model"),
        ('[[engines]]\nmodel = "m"\n[agents]\na = "n"', "'a' uses 'n', which no engine serves; there are m"),
        ('[[engines]]\nmodel = "m"\n[[engines]]\nname = "b"\nmodel = "n"', "no agent uses 'n'"),
        (
            '[[engines]]\nmodel = "m"\n[[engines]]\nname = "b"\nmodel = "n"\ndrained_s = 9\n[agents]\na = "n"',
            "every engine of 'n' is drained",
        ),
        ("[[engines]]\n[scaling]", "requests_per_engine"),
        ('[[engines]]\n[scaling]\nrequests_per_engine = 8\npolicy = "magic"', "policy"),
        ("[[engines]]\n[scaling]\nrequests_per_engine = 8\ncolour = 1", "colour"),
        ("[[engines]]\nadded_s = 9\n[scaling]\nrequests_per_engine = 8", "leave out added_s"),
        (
            '[[engines]]\nmodel = "m"\n[scaling]\nrequests_per_engine = 8\nleast = { m = 2 }',
            "at least 2 engines of 'm', and there are 1",
        ),
        ('[[engines]]\n[[engines]]\nname = "b"\nengine = "small.toml"', "block_tokens"),
    ],
)
def test_a_bad_file_is_one_error_that_says_what_to_do(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "small.toml").write_text(
        'cache_tokens = 3200\nblock_tokens = 32\n[cost]\nsource = "mine"\niteration_s = 0.01\nprefill_token_s = 1e-4\n'
        "decode_token_s = 1e-4\ncontext_token_s = 1e-8\n"
    )
    with pytest.raises(ConfigurationError, match=says):
        read_fleet(written(tmp_path, text))


def test_agents_use_the_model_that_the_file_names(tmp_path: Path) -> None:
    text = '[[engines]]\nmodel = "small"\n[[engines]]\nname = "b"\nmodel = "large"\n[agents]\nplanner = "large"\n'
    plan = read_fleet(written(tmp_path, text))
    assert [member.model for member in plan.engines] == ["small", "large"]
    assert plan.agents == {"planner": "large"}
    assert plan.scaling is None


def test_a_file_says_how_engines_are_added_and_drained(tmp_path: Path) -> None:
    text = '[[engines]]\ncount = 4\n[scaling]\npolicy = "reactive"\nrequests_per_engine = 12\nload_s = 60\n'
    scaling = read_fleet(written(tmp_path, text)).scaling
    assert scaling is not None
    assert (scaling.policy, scaling.requests_per_engine, scaling.load_s, scaling.keep_s) == ("reactive", 12, 60, 60)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_fleet(tmp_path / "none.toml")


def test_the_queue_of_an_engine_has_an_order(tmp_path: Path) -> None:
    text = '[[engines]]\nname = "a"\nscheduler = "stjf"\n[[engines]]\nname = "b"\nscheduler = "fcfs"\n'
    first, second = read_fleet(written(tmp_path, text)).engines
    assert (first.policy.name, first.policy.settings, first.policy.ranked) == ("stock+stjf", {"priority"}, "asked")
    assert (second.policy.settings, second.policy.ranked) == (None, None)
