"""A CPU worker for vLLM's ``OffloadingConnector``: a transfer takes several steps and copies at its end.

A store must read its blocks as they were when it began: nothing may write them before it ends.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from scripted.sdk import Violation

# A transfer ends at this poll for finished transfers.
_STEPS: Final = 3


class _Job:
    """A transfer: device blocks, their places on the host, and the blocks' content when a store began."""

    def __init__(self, blocks: list[int], places: list[int], before: torch.Tensor | None) -> None:
        self.blocks, self.places, self.before = blocks, places, before
        self.left = _STEPS


class CheckedWorker(OffloadingWorker):
    def __init__(self, memory: torch.Tensor) -> None:
        # One row of bytes per block.
        self._memory = memory
        self._host: dict[int, torch.Tensor] = {}
        self._jobs: dict[int, _Job] = {}
        self._finished: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        blocks = src_spec.block_ids.tolist()
        self._jobs[job_id] = _Job(blocks, dst_spec.block_ids.tolist(), self._memory[blocks].clone())
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = _Job(dst_spec.block_ids.tolist(), src_spec.block_ids.tolist(), None)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id, job in list(self._jobs.items()):
            job.left -= 1
            if not job.left:
                self._finish(job_id)
        finished, self._finished = self._finished, []
        return [TransferResult(job_id, success=True) for job_id in finished]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            self._finish(job_id)

    def _finish(self, job_id: int) -> None:
        """Copy the blocks. Raises Violation for a store whose blocks were written in the meantime."""
        job = self._jobs.pop(job_id)
        self._finished.append(job_id)
        for place, (block, chunk) in enumerate(zip(job.blocks, job.places, strict=True)):
            if job.before is None:
                self._memory[block] = self._host[chunk]
                continue
            if not torch.equal(self._memory[block], job.before[place]):
                raise Violation(f"block {block} was written while a store of the offloading connector still reads it")
            self._host[chunk] = job.before[place]


class CheckedSpec(CPUOffloadingSpec):
    """vLLM's own manager of host memory, with this worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CheckedWorker(kv_caches.tensors[0].tensor)
