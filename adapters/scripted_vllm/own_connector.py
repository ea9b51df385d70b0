"""The user's own connectors, with both of their sides: the worker's side copies real memory, whose content is checked.

The memory of the only layer holds a fingerprint in each slot, as the simulated runner's does, and contains the blocks
of all ranks. A connector must load the fingerprints of the request's tokens, or report the load as failed.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from scripted.core.tokens import links_of, root_of
from scripted.sdk import Load, Signal, Violation
from scripted_vllm.config import VllmSettings
from scripted_vllm.ids import rid_of

_LAYER: Final = "layer"
# For vLLM's OffloadingConnector, whose own worker needs a GPU; other connectors ignore it.
_OFFLOADING: Final = {
    "spec_name": "CheckedSpec",
    "spec_module_path": "scripted_vllm.checked_offload",
    "cpu_bytes_to_use": 2**20,
}


def transfer_config(settings: VllmSettings, folder: str) -> KVTransferConfig:
    """Configure the connector ``MODULE:CLASS``; several, separated by commas, are parts of vLLM's MultiConnector.

    Each finds a folder for its files as ``shared_storage_path`` in its extra configuration.
    """
    extra = {"shared_storage_path": folder, **_OFFLOADING, **json.loads(settings.connector_extra or "{}")}
    children: list[dict[str, Any]] = []
    for name in settings.connector_cls.split(","):
        module, _, kind = name.partition(":")
        place = {"kv_connector": kind, "kv_connector_module_path": module}
        children.append({**place, "kv_role": settings.kv_role, "kv_connector_extra_config": extra})
    policy = {"kv_load_failure_policy": settings.kv_load_failure_policy}
    if len(children) == 1:
        return KVTransferConfig(**children[0], **policy)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=settings.kv_role,
        kv_connector_extra_config={"connectors": children},
        **policy,
    )


class _Asked:
    """Notes the answers of the scheduler's side: the positions that each request will load.

    Each question is asked twice, because vLLM's scheduler polls.
    """

    def __init__(self, connector: Any) -> None:
        self._matched = connector.get_num_new_matched_tokens
        self._allocated = connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self.matched
        connector.update_state_after_alloc = self.allocated
        # By request: the first and last position to load, and whether the load is asynchronous.
        self.loads: dict[str, tuple[int, int, bool]] = {}
        self._last: dict[str, tuple[int, bool]] = {}

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self._matched(request, computed)
        again = self._matched(request, computed)
        if again != answer:
            raise Violation(
                f"asked twice for the tokens of {rid_of(request.request_id)} after {computed}, the connector "
                f"answers {answer} and then {again}"
            )
        count, is_async = answer
        if count is not None and not 0 <= count <= request.num_tokens - computed:
            raise Violation(
                f"the connector offers {count} tokens of {rid_of(request.request_id)} after {computed}, of "
                f"{request.num_tokens} in all"
            )
        self._last[request.request_id] = (computed, is_async)
        return answer

    def forget(self, requests: Mapping[str, Any]) -> None:
        """Forget the questions about requests that are gone."""
        self._last = {name: last for name, last in self._last.items() if name in requests}

    def allocated(self, request: Any, blocks: Any, count: int) -> None:
        computed, is_async = self._last.pop(request.request_id, (0, False))
        if count:
            self.loads[request.request_id] = (computed, computed + count, is_async)
        self._allocated(request, blocks, count)


class OwnTransfers:
    """Takes the place of ``Transfers`` for the user's own connector."""

    holds = False
    is_unknown = False

    def __init__(self, settings: VllmSettings, scheduler: Any, worker: Any, memory: torch.Tensor) -> None:
        self.arrived: tuple[Load, ...] = ()
        self.ended = False
        self._settings = settings
        self._scheduler = scheduler
        self._worker = worker
        self._memory = memory
        self._asked = _Asked(scheduler.connector)
        self._tokens: dict[str, tuple[int, ...]] = {}

    @property
    def under_way(self) -> list[str]:
        """Asynchronous loads, and ended requests whose blocks are still being sent."""
        loading = [name for name, (_, _, is_async) in self._asked.loads.items() if is_async]
        return [*loading, *(name for name, one in self._scheduler.requests.items() if one.is_finished())]

    @property
    def go_on(self) -> bool:
        # vLLM's engine keeps stepping while a connector pushes, even without a request.
        return bool(self.under_way) or self._scheduler.connector.has_pending_push_work()

    def begin(self, step: int) -> None:
        del step
        self.arrived, self.ended = (), False

    def take(self, signal: Signal) -> None:
        """Ignore a signal: schedules do not act on the user's own connector."""

    def run(self, plan: Any, requests: Mapping[str, Any]) -> KVConnectorOutput:
        """Do the worker's part of a step. Raises Violation for memory that contradicts the connector's reports."""
        context = self._context(plan)
        worker, before = self._worker, plan.has_sync_kv_loads
        worker.handle_preemptions(plan.kv_connector_metadata)
        worker.bind_connector_metadata(plan.kv_connector_metadata)
        if before:
            worker.start_load_kv(context)
        if plan.num_scheduled_tokens:
            worker.wait_for_layer_load(_LAYER)
            self._write(plan, requests)
            worker.save_kv_layer(_LAYER, self._memory, context.attn_metadata[_LAYER])
        if not before:
            worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(plan.finished_req_ids)
        lost = set(worker.get_block_ids_with_load_errors())
        more = self._of_all_ranks(worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        self._take_loads(plan, requests, results, lost)
        self._asked.forget(requests)
        self.ended = bool(results.finished_sending or results.finished_recving)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=lost,
            kv_connector_worker_meta=more,
        )

    def _of_all_ranks(self, report: Any) -> Any:
        """Merge one report per rank, as vLLM's executor does: a connector may wait until all have answered.

        The single worker copies the blocks of all ranks, so every rank reports the same.
        """
        ranks = self._scheduler.vllm_config.parallel_config.world_size
        merged = report
        for _ in range(ranks - 1):
            merged = merged and merged.aggregate(copy.deepcopy(report))
        return merged

    def _context(self, plan: Any) -> SimpleNamespace:
        slots = [
            slot for name, start, count in _parts_of(plan) for slot in self._slots(name, range(start, start + count))
        ]
        attention = SimpleNamespace(slot_mapping=torch.tensor(slots, dtype=torch.int64))
        layer = SimpleNamespace(kv_cache=self._memory)
        return SimpleNamespace(attn_metadata={_LAYER: attention}, no_compile_layers={_LAYER: layer}, virtual_engine=0)

    def _write(self, plan: Any, requests: Mapping[str, Any]) -> None:
        """Compute a plan: write the fingerprint of each position into its slot."""
        for name, start, count in _parts_of(plan):
            prints, positions = _fingerprints(requests[name], start + count), range(start, start + count)
            for position, slot in zip(positions, self._slots(name, positions), strict=True):
                self._put(slot, prints[position])

    def _take_loads(self, plan: Any, requests: Mapping[str, Any], results: Any, lost: set[int]) -> None:
        over = set(results.finished_recving) | set(results.failed_recving)
        loads = []
        for name, (start, end, is_async) in list(self._asked.loads.items()):
            is_over = name in over if is_async else name in plan.num_scheduled_tokens
            request = requests.get(name)
            if request is None or request.is_finished():
                # Nobody reads it any more.
                if not is_async or is_over or request is None:
                    del self._asked.loads[name]
                continue
            if not is_over:
                continue
            del self._asked.loads[name]
            table = tuple(self._scheduler.kv_cache_manager.get_block_ids(name)[0])
            failed = lost if name not in results.failed_recving else set(table)
            missing = self._missing(request, range(start, end), failed)
            tokens = tuple(request.all_token_ids[:end])
            loads.append(Load(rid=rid_of(name), start=start, token_ids=tokens, block_ids=table, missing=missing))
        self.arrived = tuple(loads)

    def _missing(self, request: Any, positions: range, lost: set[int]) -> tuple[int, ...]:
        """Return the blocks that did not arrive. Raises Violation for one that is not reported."""
        size, name = self._settings.kv_block_size, request.request_id
        prints = _fingerprints(request, positions.stop)
        table = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
        missing = dict.fromkeys(table[place // size] for place in positions if table[place // size] in lost)
        for position, slot in zip(positions, self._slots(name, positions), strict=True):
            block = slot // size
            if block not in missing and self._at(slot) != prints[position]:
                raise Violation(
                    f"the connector says that it loaded positions {positions.start} to {positions.stop - 1} of "
                    f"{rid_of(name)}, but block {block} does not hold its position {position}"
                )
        return tuple(missing)

    # -- memory --

    def _slots(self, name: str, positions: range) -> list[int]:
        size = self._settings.kv_block_size
        table = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
        return [table[position // size] * size + position % size for position in positions]

    def _put(self, slot: int, value: int) -> None:
        size = self._settings.kv_block_size
        self._memory[slot // size, 0, slot % size, 0] = value

    def _at(self, slot: int) -> int:
        size = self._settings.kv_block_size
        return int(self._memory[slot // size, 0, slot % size, 0])


def _parts_of(plan: Any) -> list[tuple[str, int, int]]:
    """Return a plan's requests, each with its first position and its number of positions."""
    starts = {one.req_id: one.num_computed_tokens for one in plan.scheduled_new_reqs}
    cached = plan.scheduled_cached_reqs
    starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(name, starts[name], count) for name, count in plan.num_scheduled_tokens.items()]


def _fingerprints(request: Any, end: int) -> list[int]:
    lora = request.lora_request.lora_int_id if request.lora_request else 0
    return links_of(root_of(lora), tuple(request.all_token_ids[:end]))[1:]


class Connected:
    """The files, the memory and the worker's side of one machine's connector."""

    def __init__(self, settings: VllmSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scripted-connector-")
        self._settings = settings
        self._sides: list[Any] = []

    def configured(self, config: Any) -> Any:
        """Return vLLM's configuration with the connector."""
        own = copy.copy(config)
        # With one group of layers it makes no difference, and few connectors support several.
        own.scheduler_config = copy.copy(config.scheduler_config)
        own.scheduler_config.disable_hybrid_kv_cache_manager = True
        own.model_config = copy.copy(config.model_config)
        own.model_config.model = "model"  # a folder of this process, which names no files
        own.kv_transfer_config = transfer_config(self._settings, self._folder.name)
        return own

    def transfers(self, scheduler: Any) -> OwnTransfers:
        """Make the worker's side beside the scheduler's."""
        config, kv_cache = scheduler.vllm_config, scheduler.kv_cache_config
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache)
        memory = torch.zeros((self._settings.num_gpu_blocks, 1, self._settings.kv_block_size, 1), dtype=torch.int32)
        worker.register_kv_caches({_LAYER: memory})
        self._sides = [scheduler.connector, worker]
        return OwnTransfers(self._settings, scheduler, worker, memory)

    def close(self) -> None:
        for side in self._sides:
            side.shutdown()
        self._folder.cleanup()
