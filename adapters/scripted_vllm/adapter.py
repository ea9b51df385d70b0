"""vLLM's scheduler as an adapter for the search: its declarations, its copies and its mutants."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from vllm.config import (
    CacheConfig,
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from scripted.core.action import Action
from scripted.core.mutant import read_mutants
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk import Capabilities, Copier, Limits, SchedulerAdapter
from scripted.sdk.flight.frames import FlightHeader
from scripted.sdk.fresh import Fresh
from scripted.sdk.workloads import read_workloads
from scripted_vllm.actions import ACTIONS, NEEDED_BY_SETTINGS, ReleaseCompilation, ReleaseConnector
from scripted_vllm.config import VllmSettings
from scripted_vllm.flight.machine import VllmOfFlight
from scripted_vllm.flight.outside import LORAS
from scripted_vllm.flight.settings import OTHER_GROUP
from scripted_vllm.live.launch import launch
from scripted_vllm.machine import PAUSE_MODES, SLEEP_LEVELS, SLEEP_MODES, SLEEP_PARTS, new_machine
from scripted_vllm.prefix_cache import KnownBlocks
from scripted_vllm.server import VllmServer
from scripted_vllm.standalone import VllmStandalone
from scripted_vllm.versions import installed_version

TRIED_VERSIONS: Final = ("0.33.0", "0.32.0", "0.31.0")
CONTRACT: Final = read_workloads(Path(__file__).with_name("connector_workloads.txt"), "connector-")[0]
MUTANTS: Final = read_mutants(Path(__file__).with_name("mutants.toml"))
_KEPT_IMAGES: Final = (
    *(f"encoder_cache_manager.{name}" for name in ("cached", "num_embeds_by_hash", "freeable", "freed")),
    "machine._images.",
    "ec_connector.due",
)
# Orders for requests that never arrive: a connector keeps them.
_TOLD: Final = ("connector.offered_to", "_transfers._let_go", "_transfers._failing_of")
# The tags of a wake: either part of the memory, or neither.
WAKE_PARTS: Final = ("weights", "kv_cache", "scheduling")

COPIER: Final = Copier(
    shared=(
        # Constant after the scheduler is made.
        VllmConfig, SchedulerConfig, CacheConfig, ParallelConfig, SpeculativeConfig, ObservabilityConfig,
        KVTransferConfig, KVEventsConfig, ECTransferConfig, LoRAConfig, SamplingParams, StructuredOutputsParams,
        MultiModalFeatureSpec, KVCacheConfig, KVCacheSpec, SimpleNamespace, torch.dtype,
        # A plan's masks are read before another plan is made.
        torch.Tensor,
        # The error of a grammar that does not compile; the lock of a pending answer, which no other thread takes.
        ValueError, threading.Condition,
        # Plans and results do not change once handed over, except the guesses of a plan that samples later.
        SchedulerOutput, ModelRunnerOutput, KVConnectorOutput, KnownBlocks, Fresh,
    ),
    uniform=True,
)  # fmt: skip


def _limits(settings: VllmSettings) -> Limits:
    return Limits(
        block_size=settings.kv_block_size,
        blocks=settings.num_gpu_blocks - 1 + settings.hisparse_host_blocks,
        batch_tokens=settings.max_num_batched_tokens,
        prompt_tokens=min(
            settings.max_num_batched_tokens, settings.long_prefill_token_threshold or settings.max_num_batched_tokens
        ),
        batch_requests=settings.max_num_seqs,
        context_tokens=settings.max_model_len,
        depth=settings.depth,
    )


def _capabilities(settings: VllmSettings) -> Capabilities:
    return Capabilities(
        flush=True,
        forced_flush=True,
        pause_modes=PAUSE_MODES,
        # A failed batch ends vLLM's engine.
        fail=False,
        chunked=settings.enable_chunked_prefill,
        preemption=True,
        priority=settings.policy == "priority",
        speculative_tokens=settings.num_speculative_tokens,
        grammars=settings.structured_output,
        sessions=True,
        images=settings.encoder_cache_size,
        images_beside=settings.is_encoder_decoder,
        loras=LORAS if settings.max_loras else 0,
        loras_together=settings.max_loras,
        sleep_modes=SLEEP_MODES if settings.enable_sleep_mode else (),
        sleep_levels=SLEEP_LEVELS,
        sleep_parts=SLEEP_PARTS if settings.enable_sleep_mode else (),
        wake_parts=WAKE_PARTS if settings.enable_sleep_mode else (),
        wakes_resume=True,
    )


def _import_from_here(name: str) -> type:
    """Import MODULE:CLASS, also from the working folder. Raises ScriptDefinitionError."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, _, kind = name.partition(":")
    try:
        found: type = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ScriptDefinitionError(f"the class {name!r} cannot be imported: {exc}; write MODULE:CLASS") from exc
    return found


def _of_scheduler(name: str) -> dict[str, str]:
    return {"scheduler_cls": name, "async_scheduling": str(issubclass(_import_from_here(name), AsyncScheduler)).lower()}


def _of_connector(names: str) -> dict[str, str]:
    for name in names.split(","):
        _import_from_here(name)
    return {"connector_cls": names}


class VllmAdapter(SchedulerAdapter):
    """An SDK adapter that knows the vLLM versions it was tested with."""

    def version_check(self) -> tuple[bool, str]:
        """Return whether this adapter was tested with the installed version, and a sentence that says so."""
        installed, tried = installed_version(), ", ".join(TRIED_VERSIONS)
        if installed in TRIED_VERSIONS:
            return True, f"vLLM {installed} is installed; this adapter was tested with it"
        return False, f"vLLM {installed} is installed; this adapter was tested with {tried} and may not fit"

    def version(self) -> str:
        return installed_version()

    def flight_machine(self, header: FlightHeader) -> VllmOfFlight:
        """Make vLLM's scheduler from a flight's settings. Raises ScriptDefinitionError for unsupported layers."""
        others = [note for note in header.notes if note.startswith(OTHER_GROUP)]
        if others:
            raise ScriptDefinitionError(
                f"the flight records a model with {', '.join(others)}, which this adapter does not support"
            )
        settings = self.read_config({name: str(value) for name, value in header.config.items()})
        return VllmOfFlight(settings, *self.limits_of(settings))

    @property
    def class_settings(self) -> dict[str, Callable[[str], dict[str, str]]]:
        return {"scheduler": _of_scheduler, "connector": _of_connector}

    def variant(self, name: str, defaults: Mapping[str, str]) -> Self:
        """Return a variant; with the user's own connector, the connector contract's workloads come first."""
        made = super().variant(name, defaults)
        if defaults.get("connector_cls"):
            made.workloads = {**CONTRACT, **made.workloads}
        return made

    def may_grow_of(self, config: VllmSettings) -> tuple[str, ...]:
        """Return the parts that may grow: the user's own connector may keep its stored blocks."""
        return (*super().may_grow_of(config), *(("connector",) if config.connector_cls else ()))

    def obstacle(self, run: Any) -> Action | None:
        """Return the machine's obstacle."""
        undo: Action | None = run.machine.obstacle(run)
        return undo or super().obstacle(run)


ADAPTER: Final = VllmAdapter(
    "vllm",
    config=VllmSettings,
    machine=new_machine,
    limits=_limits,
    can=_capabilities,
    workloads=read_workloads(Path(__file__).with_name("workloads.txt"), "vllm-")[0],
    settings={
        # Too few blocks for two growing requests.
        "num_gpu_blocks": (9, 10),
        "sliding_window": (3, 5, 6),
        "attention_chunk_size": (8, 4, 12),
        "long_prefill_token_threshold": (1, 5),
        "num_speculative_tokens": (2, 3),
        "prefix_cache_retention_interval": (0, 8),
        "prefix_match_unit": (2, 1),
        "mamba_checkpoint_alignment": (1, 2),
        "rswa_window": (3, 5),
        "circular_buffer_tokens": (2, 4),
        "decode_context_parallel_size": (2,),
        "hisparse_host_blocks": (10, 14, 24),
        "hisparse_hot_blocks": (1, 2),
        "encoder_cache_size": (8, 6, 12),
    },
    actions=ACTIONS,
    needed={
        "loras": {"max_loras": (1, 2)},
        "images": {"encoder_cache_size": (8, 6, 12)},
        "encoder_compute_budget": {"encoder_cache_size": (8, 6, 12)},
        "long_prefill_token_threshold_adaptive": {"long_prefill_token_threshold": (1, 5)},
        "disable_chunked_mm_input": {"encoder_cache_size": (8, 6, 12)},
        "ec_connector": {"encoder_cache_size": (8, 6, 12)},
        "ec_transfer_steps": {"ec_connector": (True,)},
        "is_encoder_decoder": {
            "encoder_cache_size": (8, 6, 12),
            "enable_prefix_caching": (False,),
            "enable_chunked_prefill": (False,),
            "max_num_batched_tokens": (32,),
            "num_gpu_blocks": (16, 20),
        },
        "sliding_window": {"num_gpu_blocks": (20, 16, 28)},
        "attention_chunk_size": {"num_gpu_blocks": (24, 20, 28)},
        "prefix_cache_retention_interval": {"sliding_window": (3, 5, 6)},
        "hisparse_host_blocks": {"num_gpu_blocks": (20, 24, 16), "max_num_batched_tokens": (8,)},
        "hisparse_hot_blocks": {"hisparse_host_blocks": (10, 14, 24)},
        "swa_bounded_replay": {"sliding_window": (3, 6)},
        "speculative_method": {"num_speculative_tokens": (1, 2, 3)},
        "prefill_schedule_interval": {"max_num_batched_tokens": (8,)},
        "prefix_match_unit": {"mamba_cache_mode": ("align",), "block_size": (4, 2)},
        "mamba_cache_mode": {"num_gpu_blocks": (16, 20, 28)},
        "mamba_checkpoint_alignment": {"mamba_cache_mode": ("align",)},
        "enable_mamba_shared_prefix_checkpoint": {"mamba_cache_mode": ("align",), "prefix_match_unit": (2, 1)},
        "circular_buffer_tokens": {"num_gpu_blocks": (14, 16, 20)},
        "kv_cache_report_mode": {"enable_kv_cache_events": (True,), "sliding_window": (0, 3, 5)},
        **NEEDED_BY_SETTINGS,
    },
    # Too few blocks for two growing requests, with one batch in flight or several, with and without a drafter.
    crowded={
        "num_gpu_blocks": (9, 10, 12),
        "pipeline_parallel_size": (1, 1, 2),
        "async_scheduling": (False, True),
        "num_speculative_tokens": (0, 0, 1, 2),
        "speculative_method": ("ngram_gpu", "ngram_gpu", "eagle", "mtp"),
    },
    undoing=(ReleaseConnector(), ReleaseCompilation()),
    mutants=MUTANTS,
    packages=("vllm",),
    standalone=VllmStandalone(installed_version),
    live=launch,
    server=VllmServer(),
    # Events are published with the next result, and there is none after the last flush.
    # Encoded images stay cached until their room is needed.
    may_grow=("block_pool.kv_event_queue", "kv_event_publisher.said", *_KEPT_IMAGES, *_TOLD),
    copier=COPIER,
)
