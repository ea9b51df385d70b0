"""Continuous batching of transformers, a real model and a real manager: a request that waits forever.

Two requests need more blocks than there are. One is sent back to the queue, and no request starts until another one
ends: ``OffloadingManager.offload_requests`` sets ``block_new_requests``, which only a request that ends by itself
takes back. When the other one is cancelled instead, nothing is left that could end. Runs on a CPU, without weights.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import argparse
import time
from typing import Any

TIMEOUT_S = 5
REACHED_S = 30


def main() -> int:
    """Run the race: 0 where the request was answered, 1 where it waits forever."""
    # Here, because these take seconds to import, and the usage needs neither.
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **shape)).eval()
    config = ContinuousBatchingConfig(
        page_size=4, num_blocks=64, max_batch_tokens=64, use_cuda_graph=False, use_async_batching=False
    )
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=config
    )
    # Before the start, so that both are in the first batch.
    manager.add_request([1] * 16, request_id="first", max_new_tokens=200)
    manager.add_request([2] * 16, request_id="second", max_new_tokens=200)
    manager.start()
    wait_until(lambda: getattr(manager, "batch_processor", None) is not None)
    scheduler = manager.batch_processor.scheduler
    wait_until(lambda: scheduler.block_new_requests)
    (waiting,), (running,) = list(scheduler.waiting_requests), list(scheduler.active_requests)
    print(f"{waiting} was sent back to the queue; {running} is cancelled")
    manager.cancel_request(running)
    wait_until(lambda: not scheduler.active_requests)
    free = scheduler.cache.compute_free_capacity()
    answer = manager.get_result(waiting, timeout=TIMEOUT_S)
    if answer is None:
        print(f"{waiting} still waits after {TIMEOUT_S} s, with {free:.0%} of all blocks free and nothing running")
    else:
        print(f"{waiting} was answered with {len(answer.generated_tokens)} tokens")
    manager.stop(hard_stop=True)
    return int(answer is None)


def wait_until(holds: Any) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + REACHED_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the race was not reached")
        time.sleep(0.001)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    raise SystemExit(main())
