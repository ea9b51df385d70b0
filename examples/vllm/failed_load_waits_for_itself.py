"""vLLM's scheduler by itself: after a failed KV load one request waits for ever, beside an empty pool.

Needs vLLM 0.33 and nothing else of this repository. It prints the steps and exits with 1 if the defect is there.
"""

# ruff: noqa: T201, ARG002, SLF001 - it prints what it sees; the arguments of the connector's methods are vLLM's.

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

BLOCK_SIZE, BLOCKS, PROMPT = 4, 7, 16


class OfferingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM is not there for mypy
    """It has every prompt, and loads it while the scheduler goes on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading: list[tuple[str, list[int]]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = PROMPT - num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading.append((request.request_id, list(blocks.get_block_ids()[0])))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *arguments: Any, **more: Any) -> None: ...
    def wait_for_layer_load(self, *arguments: Any) -> None: ...
    def save_kv_layer(self, *arguments: Any, **more: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def new_scheduler() -> Scheduler:
    """Six blocks of four tokens; a load that fails is computed instead."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_model_len=24, is_encoder_decoder=False, max_num_batched_tokens=16, max_num_seqs=4
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = BLOCKS
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OfferingConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    config.model_config = SimpleNamespace(
        max_model_len=24,
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        return_sampling_mask=False,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        runner_type="generate",
    )
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
    kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], attention)])
    return Scheduler(config, kv_cache, SimpleNamespace(accept_tokens=lambda *_: True), block_size=BLOCK_SIZE)


def main() -> int:
    """One request, whose load fails; 1 when nothing of it is planned although all blocks are free."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    init_none_hash(sha256)
    scheduler = new_scheduler()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    scheduler.add_request(Request("a", list(range(100, 100 + PROMPT)), params, None, block_hasher=hasher))
    for step in range(1, 11):
        plan = scheduler.schedule()
        loaded, scheduler.connector.loading = scheduler.connector.loading, []
        for name, blocks in loaded:
            print(f"step {step}: {name} loads {PROMPT} tokens into the blocks {blocks}; none arrives")
        for name, count in plan.num_scheduled_tokens.items():
            print(f"step {step}: {name} computes {count} tokens")
        if plan.num_scheduled_tokens:
            return 0
        said = KVConnectorOutput(
            finished_recving={name for name, _ in loaded},
            invalid_block_ids={block for _, blocks in loaded for block in blocks},
        )
        scheduler.update_from_output(plan, ModelRunnerOutput([], {}, kv_connector_output=said))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    reserved = scheduler._inflight_prefill_reserved_blocks()
    print(f"step {step}: nothing was planned since; {free} of {BLOCKS - 1} blocks are free, {reserved} are reserved")
    return 1


if __name__ == "__main__":
    sys.exit(main())
