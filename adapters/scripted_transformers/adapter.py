"""The adapter for transformers: its declarations, and the copies of its machine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import torch
from transformers import PretrainedConfig

from scripted.core.mutant import read_mutants
from scripted.sdk import Capabilities, Copier, Limits, SchedulerAdapter
from scripted.sdk.workloads import read_workloads
from scripted_transformers.machine import KnownHashes, TransformersMachine, TransformersSettings
from scripted_transformers.server import TransformersServer
from scripted_transformers.standalone import TransformersStandalone

MUTANTS: Final = read_mutants(Path(__file__).with_name("mutants.toml"))


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
    workloads=read_workloads(Path(__file__).with_name("workloads.txt"), "transformers-")[0],
    settings={"use_async_batching": (True,), "scheduler_type": ("prefill_first",), "allow_block_sharing": (False,)},
    # With asynchronous batching, the last batch is updated once another has been prepared.
    may_grow=("machine._in_flight", "machine._results"),
    packages=("transformers",),
    standalone=TransformersStandalone(),
    server=TransformersServer(),
    mutants=MUTANTS,
    copier=Copier(shared=(torch.Tensor, torch.dtype, PretrainedConfig, KnownHashes, type(threading.Lock()))),
)
