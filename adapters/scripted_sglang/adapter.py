"""SGLang's scheduler as an adapter for the search: its declarations and its copies."""

from __future__ import annotations

import contextlib
import functools
import weakref
from array import array
from collections.abc import Iterator, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.managers.scheduler_components.load_publisher import SchedulerLoadPublisher
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.runtime_context import RuntimeContext
from sglang.srt.server_args import ServerArgs
from torch.distributed import ProcessGroup

from scripted.core.action import Action
from scripted.core.forks import Frozen
from scripted.core.mutant import read_mutants
from scripted.core.states import UnreadableState
from scripted.sdk import Capabilities, Copier, Limits, SchedulerAdapter
from scripted.sdk.flight.frames import FlightHeader
from scripted.sdk.workloads import read_workloads
from scripted_sglang.actions import ACTIONS, NEEDED_BY_SETTINGS, ReleaseTiers
from scripted_sglang.config import SglangSettings
from scripted_sglang.flight.machine import SglangOfFlight
from scripted_sglang.live.launch import launch
from scripted_sglang.machine import PAUSE_MODES, SglangMachine, check_loops
from scripted_sglang.server import SglangServer
from scripted_sglang.standalone import SglangStandalone

check_loops()
MUTANTS: Final = read_mutants(Path(__file__).with_name("mutants.toml"))
# Constant after the scheduler is made, or used only for counters and publishing.
_SHARED: Final = (
    ServerArgs, ModelConfig, RuntimeContext, GroupCoordinator, ProcessGroup, TpModelWorker, KVCache, KVArgs,
    contextlib.nullcontext, slice, torch.dtype, torch.device, torch.cpu.Stream, torch.cpu.StreamContext, np.generic,
    SchedulerMetricsReporter, SchedulerKvEventsPublisher, SchedulerLoadPublisher, SchedulerProfilerManager,
    SchedulerDPAttnAdapter,
)  # fmt: skip


# A batch keeps its parts until the next one replaces it, the last batch forever. The last thousand pauses are kept;
# the tree of the policy lpm is rebuilt on demand; a chunk whose abort was overtaken by a pause is forgotten in the next
# turn. Storage keeps its pages.
_NEVER_EMPTY: Final = (
    "running_batch.", "_pause_intervals", "waiting_queue_radix_tree", "_pending_chunked_abort_req",
    "storage_backend.numbers", "storage_existence_cache",
)  # fmt: skip


COPIER: Final = Copier(
    shared=_SHARED,
    copied={torch.Tensor: torch.Tensor.clone, np.ndarray: np.ndarray.copy, array: lambda numbers: numbers[:]},
    rebuilt={weakref.ref: (lambda reference: [reference()], lambda _, items: weakref.ref(items[0]))},
    uniform=True,
)


@functools.lru_cache(maxsize=256)
def _first(settings: SglangSettings) -> Frozen[SglangMachine]:
    """Keep the first machine with these settings: copying it takes a hundredth of the time of making another."""
    return Frozen(SglangMachine(settings), COPIER)


def _machine(settings: SglangSettings) -> SglangMachine:
    return _first(settings).thaw()


def _limits(settings: SglangSettings) -> Limits:
    return Limits(
        block_size=settings.page_size,
        blocks=settings.max_total_tokens // settings.page_size,
        batch_tokens=settings.chunked_prefill_size + settings.max_running_requests,
        prompt_tokens=settings.chunked_prefill_size,
        batch_requests=settings.max_running_requests,
        context_tokens=settings.room,
        depth=settings.depth,
    )


def _capabilities(settings: SglangSettings) -> Capabilities:
    return Capabilities(
        flush=True,
        pause_modes=PAUSE_MODES,
        # The front end takes a lock for each pause.
        pauses_in_turn=True,
        # PrefillBudget.reserve counts a page more than a prompt has. Of pages of one token nobody waits for it.
        spare_blocks=int(settings.page_size > 1),
        preemption=True,
        priority=settings.enable_priority_scheduling,
        # The abort of a running request takes effect with its next result.
        late_launches=settings.depth,
        sleep_modes=("",) if settings.enable_memory_saver else (),
        sleep_parts=tuple(GPU_MEMORY_ALL_TYPES) if settings.enable_memory_saver else (),
        wake_parts=tuple(GPU_MEMORY_ALL_TYPES),
    )


class SglangAdapter(SchedulerAdapter):
    """An SDK adapter whose machine does not list its parts."""

    def digests(self, run: Any) -> Iterator[bytes]:
        """Yield no digests: tensors are not read, and each request holds its arrival time."""
        del run
        raise UnreadableState("a scheduler of SGLang holds tensors and times")

    def version(self) -> str:
        return installed_version("sglang")

    def flight_machine(self, header: FlightHeader) -> SglangOfFlight:
        """Make SGLang's scheduler from the settings of a flight."""
        settings = self.read_config(header.words)
        return SglangOfFlight(settings, *self.limits_of(settings))

    def obstacle(self, run: Any) -> Action | None:
        """Return the machine's obstacle."""
        undo: Action | None = run.machine.obstacle(run)
        return undo or super().obstacle(run)


def adapter_of(name: str, config: type[SglangSettings], *, may_grow: Sequence[str] = (), **more: Any) -> SglangAdapter:
    """Make the adapter for schedulers with settings of this type."""
    return SglangAdapter(
        name,
        config=config,
        machine=_machine,
        limits=_limits,
        can=_capabilities,
        may_grow=(*_NEVER_EMPTY, *may_grow),
        packages=("sglang",),
        server=SglangServer(),
        copier=COPIER,
        **more,
    )


ADAPTER: Final = adapter_of(
    "sglang",
    SglangSettings,
    workloads=read_workloads(Path(__file__).with_name("workloads.txt"), "sglang-")[0],
    settings={"page_size": (4,), "schedule_conservativeness": (0.1, 0.3), "hicache_ratio": (0.5, 1.0)},
    actions=ACTIONS,
    needed=NEEDED_BY_SETTINGS,
    undoing=(ReleaseTiers(),),
    crowded={"max_total_tokens": (28, 32, 40), "context_length": (28,), "page_size": (1, 1, 4)},
    # Evicted prompts come back while other requests wait for pages. SGLang loads ten
    # tokens or more.
    scenes={
        "tiers": {
            "enable_hierarchical_cache": ("other",),
            "requests": ("several", "many"),
            "sharing": ("turns", "all"),
            "arrival": ("together", "in-line"),
        },
        "rounds": {
            "enable_hierarchical_cache": ("other",),
            "requests": ("rounds",),
            "prompts": ("long",),
            "sharing": ("rounds",),
            "event-abort": ("on",),
        },
    },
    mutants=MUTANTS,
    live=launch,
    standalone=SglangStandalone(),
)
