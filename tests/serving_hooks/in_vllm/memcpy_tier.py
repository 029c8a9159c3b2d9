"""A second tier for vLLM's offloading connector where there is no GPU: its blocks are copied to and fro in memory."""

import time
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):
    """Copies when it is told to, and says afterwards that it has.

    Attributes:
        copied: blocks stored and loaded, of all workers of this process.
    """

    copied: ClassVar[Counter[str]] = Counter()

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self.near = [cache.tensor for cache in kv_caches.tensors]
        self.far = [torch.empty((chunks, *cache.shape[1:]), dtype=cache.dtype) for cache in self.near]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copied["stored"] += len(src_spec.block_ids)
        return self._copy(job_id, self.near, src_spec.block_ids, self.far, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copied["loaded"] += len(src_spec.block_ids)
        return self._copy(job_id, self.far, src_spec.block_ids, self.near, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _copy(self, job_id: int, source: Any, taken: Any, target: Any, put: Any) -> bool:
        began, moved = time.perf_counter(), 0
        at, to = (torch.as_tensor(ids.astype(np.int64)) for ids in (taken, put))
        for one, other in zip(source, target, strict=True):
            other[to] = one[at]
            moved += one[0].numel() * one.element_size() * len(at)
        self.done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True


class MemcpySpec(CPUOffloadingSpec):
    """vLLM's own, with these copies for its transfers."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            self._worker = Copies(kv_caches, self.num_chunks)
        return self._worker
