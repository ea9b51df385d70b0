"""Continuous batching of transformers with asynchronous batching: a cancel while a batch is in flight ends the loop.

The second batch is prepared before the first is updated. A request that was cancelled in between has lost its block
table, but not its status, so ``update_batch`` goes on with it: ``KeyError`` in ``mark_complete_blocks``. The generation
loop fails every request with it. The real loop needs a GPU; here its two calls run in their order, over the real
scheduler and cache, without a model.
"""

# ruff: noqa: T201 - it prints what it sees; arguments are those of transformers.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler


class TwoBatches:
    """What ``ContinuousBatchingAsyncIOs`` does to requests: the batch that is updated is the one before."""

    compute_stream = None

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def prepare_batch_tensors(self, requests_in_batch: Any, **_: Any) -> None:
        self.batches.append(requests_in_batch)
        for future in requests_in_batch:
            future.state.position_offset += future.query_length
            future.state.tokens_to_process = [-1]

    def prepare_batch_update(self) -> Any:
        requests = self.batches.pop(0)
        return requests, [7] * len(requests), None


class Processor(ContinuousBatchProcessor):
    """Without a device."""

    def __init__(self) -> None:
        alone = SimpleNamespace(tp_size=1)
        model = LlamaConfig(
            hidden_size=32, num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_hidden_layers=1
        )
        config = ContinuousBatchingConfig(page_size=4, num_blocks=12, max_batch_tokens=16, max_memory_percent=0.9)
        self.cache = PagedAttentionCache(model, config, "cpu", alone)
        self.scheduler = FIFOScheduler(self.cache, None, 4)
        self.max_batch_tokens, self.use_async_batching = 16, True
        self.inputs_and_outputs, self.logit_processor = TwoBatches(), None
        self.model_runner = SimpleNamespace(maybe_pad_inputs=lambda queries, keys, _: (queries, keys), pad_inputs=False)
        self.offloading_manager = SimpleNamespace(
            free_request_cpu_cache=lambda _: None, restore_scheduled_requests=lambda _: None
        )
        self.output_router = SimpleNamespace(deliver_batch=print)

    def __del__(self) -> None:
        pass

    def _update_tp_group_state(self) -> bool:
        return False


def main() -> int:
    """0 where the other request goes on, 1 where the loop ends."""
    processor = Processor()
    for name in ("first", "second"):
        processor.scheduler.add_waiting_request(RequestState(name, [1, 2, 3, 4], max_new_tokens=5))
    processor.prepare_next_batch()
    print("batch 1 is launched: first and second, a whole block each")
    processor.scheduler.set_request_cancellation("first")
    processor.prepare_next_batch()
    print("first is cancelled, and batch 2 is launched")
    try:
        processor.update_batch()
    except KeyError as exc:
        print(f"the result of batch 1 raises KeyError: {exc}")
        return 1
    print("the result of batch 1 was taken")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
