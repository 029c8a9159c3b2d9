"""The validation split keeps tasks whole; configurations take what they know and name it when they do not."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.errors import ConfigurationError, TraceError
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.training.configuration import keys, read_configuration
from presage.training.next_agent.train import LIMITS
from presage.training.sets import tasks_apart


def apart(tasks: list[int], types: list[int], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of these workflows are held out."""
    return tasks_apart(np.array(tasks, np.int32), np.array(types, np.int32), fraction, seed)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=40), st.integers(0, 99), st.floats(0.05, 0.9))
def test_tasks_stay_whole_and_no_side_is_empty(tasks: list[int], seed: int, fraction: float) -> None:
    types = [0] * len(tasks)
    if len(set(tasks)) == 1:
        with pytest.raises(TraceError, match="a single task"):
            apart(tasks, types, fraction, seed)
        return
    held_out = apart(tasks, types, fraction, seed)
    train, validation = (set(np.array(tasks)[side]) for side in (~held_out, held_out))
    assert train
    assert train & validation == set()
    assert len(validation) == min(max(1, round(fraction * len(set(tasks)))), len(set(tasks)) - 1)


def test_every_workflow_type_is_held_out_in_proportion() -> None:
    types = [0] * 20 + [1] * 40 + [2] * 60
    held_out = apart(list(range(120)), types, 0.15, 3)
    assert np.bincount(np.array(types)[held_out]).tolist() == [3, 6, 9]


def test_the_choice_is_a_function_of_the_seed() -> None:
    first, again, other = (apart(list(range(50)), [0] * 50, 0.2, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_fraction_outside_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        apart([0, 1], [0, 0], fraction, 0)


@dataclass(frozen=True)
class Inner:
    epochs: int = 3
    rate: float = 0.1


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    refit: bool = True
    inner: Inner = field(default_factory=Inner)


def test_a_setting_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\n[inner]\nepochs = 5\nrate = 1\n')
    found = read_configuration(Outer, file, ["inner.epochs=7", "refit=false"])
    assert found == Outer("file", False, Inner(7, 1))
    assert read_configuration(Outer) == Outer()
    assert read_configuration(Outer, settings=["name=a word", 'name="quoted"']).name == "quoted"
    assert read_configuration(Outer, settings=["name=word"]).name == "word"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs=3", r"no key 'epochs'; the keys are name \(str\), refit \(bool\), inner\.epochs \(int\)"),
        ("inner.epoch=3", "no key 'inner.epoch'"),
        ("inner=3", r"inner is 3; it is a table, set its keys: inner\.epochs, inner\.rate"),
        ("inner.epochs=ten", r"inner\.epochs is 'ten' \(str\); a value of type int"),
        ("inner.epochs=3.5", r"inner\.epochs is 3\.5 \(float\); a value of type int"),
        ("refit=1", r"refit is 1 \(int\); a value of type bool"),
        ("inner.epochs=-1", "inner.epochs is -1; a finite number of at least 0"),
        ("inner.rate=nan", "inner.rate is nan"),
        ("inner.rate=2", r"inner\.rate is 2(\.0)?; a number from 0 to 1 is wanted"),
        ("name.x=1", r"name is \{'x': 1\}"),
        ("name", "--set 'name': wanted key=value"),
        ("=3", "wanted key=value"),
        ("a..b=3", "wanted key=value"),
    ],
)
def test_what_is_not_known_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_configuration(Outer, settings=[setting], limits={"inner.rate": (0, 1)})


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.toml: cannot be read \(No such file"):
        read_configuration(Outer, tmp_path / "gone.toml")
    (tmp_path / "bad.toml").write_text("epochs == 3")
    with pytest.raises(ConfigurationError, match=r"bad\.toml: not TOML"):
        read_configuration(Outer, tmp_path / "bad.toml")
    (tmp_path / "other.toml").write_text("epochs = 3")
    with pytest.raises(ConfigurationError, match=r"other\.toml: no key 'epochs'"):
        read_configuration(Outer, tmp_path / "other.toml")


def test_the_defaults_keep_to_the_limits_and_every_limit_is_of_a_key() -> None:
    known = [key for key, _ in keys(NextAgentConfig)]
    assert set(LIMITS) <= set(known)
    for key, (least, most) in LIMITS.items():
        value: object = NextAgentConfig()
        for part in key.split("."):
            value = getattr(value, part)
        assert least <= value <= most, key  # type: ignore[operator]
