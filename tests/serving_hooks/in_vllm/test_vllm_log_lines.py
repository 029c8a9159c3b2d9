"""The lines that vLLM's own request logger writes are those that ingestion reads."""

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; this test writes its log")

from vllm import SamplingParams
from vllm.entrypoints.serve.utils import request_logger
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import DEFAULT_LOGGING_CONFIG
from vllm.logging_utils import NewLineFormatter
from vllm.lora.request import LoRARequest

from presage.datasets.adapters import open_request_logs

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]


def _from_the_server(record: logging.LogRecord) -> bool:
    record.vllm_process_name = "APIServer"
    return True


def test_what_vllm_logs_of_requests_becomes_a_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.FileHandler(tmp_path / "server.log")
    written: dict[str, Any] = DEFAULT_LOGGING_CONFIG["formatters"]["vllm"]
    formatter = NewLineFormatter(written["format"], datefmt=written["datefmt"])
    handler.setFormatter(formatter)
    handler.addFilter(_from_the_server)
    monkeypatch.setenv("VLLM_REQUEST_BODY_LOG_LEVEL", "DEBUG")
    logger = logging.Logger("vllm.requests", logging.DEBUG)
    logger.addHandler(handler)
    logger.info_once = logger.warning_once = logger.info  # type: ignore[attr-defined]
    monkeypatch.setattr(request_logger, "logger", logger)
    logs = RequestLogger(max_log_len=None)
    ids, messages = list(range(100)), [{"role": "system", "content": 'You plan.\nIt\'s "so".'}]
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": f"Question {turn}\n"}]
        content: dict[str, Any] = {"messages": messages, "model": "m"}
        dump = partial(lambda sent, **_: json.dumps(sent), content)
        body: Any = SimpleNamespace(request_id=f"{turn}abc", model_dump_json=dump)
        logs.log_request_body(body)
        params = SamplingParams(stop=["'], prompt_token_ids: [1], "], extra_args={"a": 1})
        lora = LoRARequest("tuned", 1, "/nowhere")
        logs.log_inputs(f"chatcmpl-{turn}abc", f'<s>it\'s "{turn}"\n', ids, None, params, lora)
        answer = [1000 * turn + token for token in range(30)]
        logs.log_outputs(f"chatcmpl-{turn}abc", f"Answer\n{turn}", answer, "stop")
        messages, ids = [*messages, {"role": "assistant", "content": f"Answer\n{turn}"}], [*ids, *answer, 7, 8, 9]
    handler.close()
    rows = [row for chunk in open_request_logs([tmp_path / "server.log"])() for row in chunk.table.to_pylist()]
    assert len({row["workflow_id"] for row in rows}) == 1
    assert [(row["step"], row["input_tokens"], row["output_tokens"]) for row in rows] == [
        (0, 100, 30),
        (1, 133, 30),
        (2, 166, 30),
    ]
    assert [row["output_text"] for row in rows] == [f"Answer\n{turn}" for turn in range(3)]
    assert {(row["system_prompt"], row["model"], row["finish_reason"]) for row in rows} == {
        ('You plan.\nIt\'s "so".', "tuned", "stop")
    }
    assert rows[0]["input_text"] == "Question 0\n"
