"""Without vLLM a replay says how to get it."""

import importlib.util
from pathlib import Path

import pytest
from cli_samples import run


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_names_what_builds_it(tmp_path: Path) -> None:
    assert "make vllm-cpu" in run("replay", tmp_path).complaint
