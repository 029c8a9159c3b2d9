"""A second tier without a worker: it has all blocks that finished requests had, and says when a load is done."""

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class MadeUpTier(KVConnectorBase_V1):
    """Loads take so many iterations as a test says.

    Attributes:
        takes: iterations of a load, drawn from these.
        loading: iterations that each load still takes, by request id.
        loaded: blocks, of each request id.
        has: hashes of its blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.takes: tuple[int, ...] = (0,)
        self.loading: dict[str, int] = {}
        self.loaded: dict[str, int] = {}
        self._draw = random.Random(0)
        self.has: set[bytes] = set()

    def done(self) -> set[str]:
        """An iteration is over: the loads that are done with it."""
        over = {name for name, left in self.loading.items() if not left}
        self.loading = {name: left - 1 for name, left in self.loading.items() if left}
        return over

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = num_computed_tokens // 16
        for known in request.block_hashes[found : request.num_prompt_tokens // 16]:
            if known not in self.has:
                break
            found += 1
        tokens = found * 16 - num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading[request.request_id] = self._draw.choice(self.takes)
            self.loaded[request.request_id] = num_external_tokens // 16

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if request.status.name != "FINISHED_ABORTED":
            self.has.update(request.block_hashes)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
