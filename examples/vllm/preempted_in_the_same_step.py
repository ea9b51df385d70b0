"""vLLM's scheduler by itself: a plan that is withdrawn leaves blocks in the prefix cache that were never computed.

Needs vLLM 0.32 or 0.33, nothing else of this repository. It prints plans, and exits with 1 if the defect is there.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

BLOCK_SIZE, BLOCKS, MAX_MODEL_LEN = 2, 12, 20


def new_scheduler() -> Scheduler:
    """Priorities, chunks of at most 4 tokens beside others, 11 blocks of 2 tokens."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            max_num_batched_tokens=8,
            max_num_seqs=4,
            policy="priority",
            long_prefill_token_threshold=4,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = BLOCKS
    config.model_config = SimpleNamespace(
        max_model_len=MAX_MODEL_LEN,
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
    structured = SimpleNamespace(accept_tokens=lambda *_: True)
    return Scheduler(config, kv_cache, structured, block_size=BLOCK_SIZE)


def new_request(name: str, prompt: range, priority: int, arrival: int) -> Request:
    """One token of output. The lowest priority number goes first."""
    return Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=1, ignore_eos=True),
        None,
        arrival_time=float(arrival),
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> int:
    """Run four steps; 1 when a request is resumed on tokens that no step computed."""
    init_none_hash(sha256)
    scheduler = new_scheduler()
    scheduler.add_request(new_request("low", range(100, 115), 1, 0))
    computed = {"low": 0, "high": 0}
    for step in range(1, 5):
        if step == 2:
            scheduler.add_request(new_request("high", range(200, 207), 0, 1))
        plan = scheduler.schedule()
        cached = plan.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in plan.num_scheduled_tokens.items():
            print(f"step {step}: {name} computes positions {starts[name]} to {starts[name] + count - 1}")
            if starts[name] > computed[name]:
                print(f"        but of {name}, positions {computed[name]} to {starts[name] - 1} were never computed")
                return 1
            computed[name] = starts[name] + count
        if plan.preempted_req_ids:
            print(f"        preempted: {', '.join(plan.preempted_req_ids)}")
        names = list(plan.num_scheduled_tokens)
        done = [[7] if computed[name] == scheduler.requests[name].num_tokens else [] for name in names]
        result = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, done)
        scheduler.update_from_output(plan, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
