"""The adapter of transformers: what it declares, and how its machine is copied."""

from __future__ import annotations

import threading
from typing import Final

import torch
from transformers import PretrainedConfig

from scripted.adapters.transformers.machine import TransformersMachine, TransformersSettings
from scripted.adapters.transformers.standalone import TransformersStandalone
from scripted.sdk import Capabilities, Copier, Limits, SchedulerAdapter

_TIGHT: Final = "num_blocks=6"
_ASYNC: Final = "use_async_batching=True"
_GROWING: Final = "1 start a prompt=9 new=10; 2 start b prompt=10 seed=1 new=10; 3 start c prompt=5 seed=2 new=8"
_TWINS: Final = "1 start a prompt=12 new=8; 3 start b prompt=12 new=8; 6 start c prompt=12 shared=8 tail=3 new=8"
_CHUNKS: Final = "1 start a prompt=20 new=4; 2 start b prompt=18 seed=1 new=5; 3 start c prompt=6 seed=2 new=6"
_WORKLOADS: Final = {
    "growing": f"{_TIGHT}; {_GROWING}",
    "growing-async": f"{_TIGHT} {_ASYNC}; {_GROWING}",
    "growing-prefill-first": f"{_TIGHT} scheduler_type=prefill_first; {_GROWING}",
    "growing-without-sharing": f"{_TIGHT} allow_block_sharing=False; {_GROWING}",
    "twins": f"default; {_TWINS}",
    "twins-async": f"{_ASYNC}; {_TWINS}",
    "chunks": f"max_batch_tokens=8; {_CHUNKS}",
    "chunks-async": f"max_batch_tokens=8 {_ASYNC}; {_CHUNKS}",
}


def _limits(settings: TransformersSettings) -> Limits:
    return Limits(
        block_size=settings.page_size,
        blocks=settings.num_blocks,
        batch_tokens=settings.max_batch_tokens,
        batch_requests=settings.max_requests_per_batch,
        context_tokens=settings.page_size * settings.num_blocks,
        depth=settings.depth,
    )


ADAPTER: Final = SchedulerAdapter(
    "transformers",
    config=TransformersSettings,
    machine=TransformersMachine,
    limits=_limits,
    # Its cache is never emptied while it serves, and a cancelled request gets no last output.
    can=lambda _: Capabilities(flush=False, answers_aborts=False),
    workloads={f"transformers-{name}": text for name, text in _WORKLOADS.items()},
    settings={"use_async_batching": (True,), "scheduler_type": ("prefill_first",), "allow_block_sharing": (False,)},
    # With asynchronous batching the last batch is updated when another has been prepared.
    may_grow=("machine._in_flight", "machine._results"),
    packages=("transformers",),
    standalone=TransformersStandalone(),
    copier=Copier(shared=(torch.Tensor, torch.dtype, PretrainedConfig, type(threading.Lock()))),
)
