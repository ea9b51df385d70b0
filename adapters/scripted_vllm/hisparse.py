"""The workers of HiSparse, which mirror rows into host memory, report the pages there and read some of them.

vLLM's own ``HiSparseConnector`` plans this; host block numbers follow the device block numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorMetadata,
    HiSparseConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from scripted.sdk import Load, Rows, Signal, Violation
from scripted_vllm.actions import HOLD, RELEASE
from scripted_vllm.config import VllmSettings, VllmSettingsError


class SparseHost:
    """Stands in for ``Transfers`` with this connector: it loads nothing, and no request waits for its saves.

    ``mirrored`` has the copies that follow the next batch. Nothing is restored from the host, which would need loads by
    another connector; no host block is copied, which would need hits within a block.
    """

    arrived: tuple[Load, ...] = ()
    is_unknown = False

    def __init__(self, settings: VllmSettings) -> None:
        if "residency_updates" not in HiSparseConnectorMetadata.__dataclass_fields__:
            raise VllmSettingsError(
                "hisparse_host_blocks needs vLLM 0.32 or newer, which tells its workers where each page is"
            )
        self.holds = False
        self.ended = False
        self.mirrored: tuple[Rows, ...] = ()
        self._size = settings.block_size
        self._host = settings.num_gpu_blocks
        self._steps = settings.kv_transfer_steps
        self._hot = settings.hisparse_hot_blocks
        self._now = 0
        # The device blocks of each request's pages; 0 for a page that is read from the host.
        self._resident: dict[str, dict[int, int]] = {}
        # The workers pick them up in the next step.
        self._given: list[int] = []
        # Each with the step in which it ends.
        self._enqueued: list[tuple[int, int]] = []

    @property
    def under_way(self) -> Sequence[object]:
        return (*self._given, *self._enqueued)

    @property
    def go_on(self) -> bool:
        return bool(self.under_way) and not self.holds

    def begin(self, step: int) -> None:
        self._now = step
        self.ended = False

    def take(self, signal: Signal) -> None:
        if signal.name in (HOLD, RELEASE):
            self.holds = signal.name == HOLD

    def run(self, plan: Any, requests: Mapping[str, Any]) -> KVConnectorOutput:
        """Take a plan; return the pages that its result reports."""
        for name in [name for name in self._resident if name not in requests]:
            del self._resident[name]
        asked = plan.kv_connector_metadata
        for name in plan.preempted_req_ids or ():
            self._resident.pop(name, None)
        for name, update in asked.residency_updates.items():
            pages = self._resident.setdefault(name, {})
            pages |= dict(zip(update.pages, update.block_ids[0], strict=True))
        transfers = asked.command.page_transfers if asked.command is not None else []
        enqueued, self._given = self._given, [one.transfer_id for one in transfers]
        self._enqueued += [(one, self._now + self._steps) for one in enqueued]
        done = [] if self.holds else [one for one, due in self._enqueued if due <= self._now]
        self._enqueued = [(one, due) for one, due in self._enqueued if one not in done]
        self.ended = bool(done)
        self.mirrored = tuple(
            [
                Rows(
                    source=one.source_starts[0] // self._size,
                    target=self._host + one.destination_start // self._size,
                    first=one.destination_start % self._size,
                    count=one.num_rows,
                )
                for mirrors in asked.row_mirrors.values()
                for one in mirrors
            ]
        )
        return KVConnectorOutput(
            kv_connector_worker_meta=HiSparseConnectorWorkerMetadata(
                enqueued_transfer_counts=dict.fromkeys(enqueued, 1), completed_transfer_counts=dict.fromkeys(done, 1)
            )
        )

    def read_from(self, name: str, tables: Sequence[Sequence[int]], start: int, end: int) -> tuple[int, ...]:
        """Return the blocks that a request's pages are read from and written to. Raises Violation.

        The first table is the host's, the last one the device region for host rows.
        """
        resident = self._resident.get(name, {})
        pages = range(-(-end // self._size))
        blocks = [resident.get(page) or self._host + tables[0][page] for page in pages if page < len(tables[0])]
        for page in pages[start // self._size :]:
            if not resident.get(page):
                raise Violation(f"positions {start} to {end - 1} are computed, but page {page} is on the host only")
        if any(block >= self._host for block in blocks) and len(tables[-1]) < self._hot:
            raise Violation(f"positions {start} to {end - 1} read pages of the host, and have no region for their rows")
        return tuple(blocks)
