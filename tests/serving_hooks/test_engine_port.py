"""What the port says of one request of the engine, whatever its other fields are."""

from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, can_be_repeated, completed, untouched

PLAIN: Final[dict[str, Any]] = {
    **{"num_computed_tokens": 0, "num_preemptions": 0, "resumable": False, "kv_transfer_params": None},
    **{"status": SimpleNamespace(name="WAITING"), "mm_features": [], "prompt_token_ids": [1], "prompt_embeds": None},
    **{"lora_request": None, "num_prompt_tokens": 64, "block_hashes": [b"%d" % n for n in range(4)]},
}


def request(**fields: Any) -> EngineRequest:
    return cast(EngineRequest, SimpleNamespace(**PLAIN | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_computed_tokens": 16},
        {"num_preemptions": 1},
        {"resumable": True},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"status": SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")},
    ],
)
def test_a_request_that_would_lose_something_is_never_held(fields: dict[str, Any]) -> None:
    assert untouched(request(**fields)) is (not fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mm_features": [object()]},
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"lora_request": object()},
        {"resumable": True},
        {"kv_transfer_params": {}},
    ],
)
def test_a_prompt_is_repeated_only_where_its_tokens_say_all(fields: dict[str, Any]) -> None:
    assert can_be_repeated(request(**fields)) is (not fields)


@pytest.mark.parametrize(
    ("reason", "done"),
    [("stop", True), ("length", True), ("repetition", True), ("abort", False), ("error", False), (None, False)],
)
def test_a_request_is_completed_with_its_last_token_alone(reason: str | None, done: bool) -> None:
    assert completed(request(get_finished_reason=lambda: reason)) is done


@pytest.mark.parametrize(
    ("lookahead", "tokens", "blocks"), [(0, 64, 3), (0, 65, 4), (1, 64, 3), (17, 80, 3), (0, 0, 0)]
)
def test_the_last_tokens_of_a_prompt_are_always_computed(lookahead: int, tokens: int, blocks: int) -> None:
    port = object.__new__(EnginePort)
    port.hash_tokens, port.hash_lookahead = 16, lookahead
    assert len(port.prompt_hashes(request(num_prompt_tokens=tokens))) == blocks
