"""Transformers' batch processor over a cache without a model. Standalone tests begin with this file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.models.llama.configuration_llama import LlamaConfig

# The smallest shape whose blocks are whole sectors of the cache at every page size: 128 bytes a token.
_MODEL: Final = LlamaConfig(
    hidden_size=32, num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_hidden_layers=1, vocab_size=64
)
_ALONE: Final = SimpleNamespace(tp_size=1, tp_all_reduce_min=lambda tensor, on_cpu=False: tensor)  # noqa: ARG005


class BatchIO:
    """The part of ``ContinuousBatchingIOs`` that changes requests; ``bring`` gives it a result's tokens."""

    compute_stream = None

    def __init__(self) -> None:
        self._prepared: list[FutureRequestState] = []
        self._update: tuple[list[FutureRequestState], list[int], None] = ([], [], None)

    def prepare_batch_tensors(self, requests_in_batch: list[FutureRequestState], **_: Any) -> None:
        self._prepared = requests_in_batch

    def prepare_batch_update(self) -> tuple[list[FutureRequestState], list[int], None]:
        update, self._update = self._update, ([], [], None)
        return update

    @property
    def prepared(self) -> tuple[FutureRequestState, ...]:
        """Return the requests of the next batch."""
        return tuple(self._prepared)

    def launch(self) -> list[FutureRequestState]:
        """Launch the prepared batch: change its requests as creating its tensors would, and return them."""
        requests, self._prepared = self._prepared, []
        for future in requests:
            future.state.position_offset += future.query_length
            if future.has_new_token:
                future.state.tokens_to_process = [TMP_TOKEN_ID]
        return requests

    def bring(self, requests: list[FutureRequestState], tokens: list[int]) -> None:
        """Set the result for the next update: a token for each request in the batch that gets a new one."""
        self._update = (requests, tokens, None)


class Processor(ContinuousBatchProcessor):
    """The batch processor over a cache without a model; requests enter and leave only through its scheduler."""

    inputs_and_outputs: BatchIO

    def __init__(self, settings: Any) -> None:
        config = ContinuousBatchingConfig(
            page_size=settings.page_size,
            num_blocks=settings.num_blocks,
            max_batch_tokens=settings.max_batch_tokens,
            max_requests_per_batch=settings.max_requests_per_batch,
            max_blocks_per_request=0,
            max_memory_percent=0.9,
            allow_block_sharing=settings.allow_block_sharing,
            use_async_batching=settings.use_async_batching,
            scheduler_type=settings.scheduler_type,
        )
        self.cache = PagedAttentionCache(_MODEL, config, "cpu", _ALONE, dtype=torch.float16)
        self.scheduler = SCHEDULER_MAPPING[settings.scheduler_type](
            self.cache, settings.safety_margin, settings.max_requests_per_batch
        )
        self.max_batch_tokens = self.cache.max_batch_tokens
        self.use_async_batching = settings.use_async_batching
        self.ended: list[Any] = []
        self.output_router = SimpleNamespace(deliver_batch=self.ended.extend)
        self.logit_processor = None
        self.inputs_and_outputs = BatchIO()
        self.model_runner = SimpleNamespace(maybe_pad_inputs=lambda queries, keys, _: (queries, keys), pad_inputs=False)
        self.offloading_manager = OffloadingManager(
            self.cache, self.scheduler, 0.0, safety_threshold=1.0, compute_stream=None, distributed_helper=_ALONE
        )

    def __del__(self) -> None:
        """Release nothing: there is no device."""

    def _update_tp_group_state(self) -> bool:
        """Do nothing: requests and cancellations reach the scheduler directly, not through a queue."""
        return False
