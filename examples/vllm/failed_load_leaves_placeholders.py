"""vLLM's scheduler by itself: a KV load that fails under asynchronous scheduling leaves placeholders behind.

Needs vLLM 0.33 and nothing else of this repository. It prints the plans and exits with 1 if the defect is there.
"""

# ruff: noqa: T201, ARG002 - it prints what it sees; the arguments of the connector's methods are vLLM's.

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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

BLOCK_SIZE, BLOCKS, PROMPT = 4, 13, 9


class OfferingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM is not there for mypy
    """It has the first eight tokens of every prompt, and loads them before they are needed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading: list[tuple[str, list[int]]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, 8 - num_computed_tokens), False

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


def new_scheduler() -> AsyncScheduler:
    """Blocks of four tokens; two batches in flight; a load that fails is computed instead."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_model_len=24, is_encoder_decoder=False, max_num_batched_tokens=16, max_num_seqs=4
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.async_scheduling = True
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
    return AsyncScheduler(config, kv_cache, SimpleNamespace(accept_tokens=lambda *_: True), block_size=BLOCK_SIZE)


def main() -> int:
    """One request, whose load fails; 1 when a plan computes more positions than it has tokens, or nothing any more."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    init_none_hash(sha256)
    scheduler = new_scheduler()
    # vLLM's own property asks the environment and the graphics card.
    scheduler.use_v2_model_runner = True
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    request = Request("a", list(range(100, 100 + PROMPT)), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    in_flight: list[Any] = []
    wrong = False
    for step in range(1, 13):
        plan = scheduler.schedule()
        loaded, scheduler.connector.loading = scheduler.connector.loading, []
        cached = plan.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in plan.num_scheduled_tokens.items():
            print(f"step {step}: {name} computes positions {starts[name]} to {starts[name] + count - 1}")
            # Each batch before this one may bring one token more.
            has = request.num_tokens + len(in_flight)
            if starts[name] == 0 and count > request.num_tokens:
                print(f"        but {name} has {request.num_tokens} tokens")
                wrong = True
            assert wrong or starts[name] + count <= has
        invalid = {block for _, blocks in loaded for block in blocks[:2]}
        if invalid:
            print(f"        what {request.request_id} loads into the blocks {sorted(invalid)} does not arrive")
        in_flight.append((plan, KVConnectorOutput(invalid_block_ids=invalid)))
        if len(in_flight) == 2 or not plan.num_scheduled_tokens:
            done, said = in_flight.pop(0)
            names = list(done.num_scheduled_tokens)
            result = ModelRunnerOutput(
                names, {name: index for index, name in enumerate(names)}, [[7] for _ in names], kv_connector_output=said
            )
            for outputs in scheduler.update_from_output(done, result).values():
                for one in outputs.outputs:
                    print(f"        {one.request_id} is told {one.new_token_ids}, it ends: {one.finish_reason}")
        if not scheduler.requests:
            break
    else:
        print(f"step {step}: {request.request_id} waits for ever, with {request.num_output_placeholders} placeholders")
        wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
