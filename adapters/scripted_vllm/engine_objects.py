"""Makes vLLM's own objects as its engine does. Knows no search: standalone tests begin with this file."""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from scripted_vllm.connector import ScheduledConnector
from scripted_vllm.encoder_cache import OutsideImages
from scripted_vllm.grammar import Compiler

_HASH_BYTES: Final = 8
_WINDOW: Final = ("sliding_window", SlidingWindowSpec)


def new_scheduler(settings: Any, configured: Callable[[VllmConfig], VllmConfig] = copy.copy) -> Scheduler:
    config, kv_cache = configured(_config_of(settings)), _kv_cache_of(settings)
    kind = _kind_of(settings)
    structured = StructuredOutputManager(config)
    sizes = {"block_size": settings.scheduler_block_size, "hash_block_size": settings.hash_block_size}
    if settings.mamba_cache_mode == "none":
        sizes["hash_block_size"] = settings.scheduler_block_size
    # An engine with statistics learns of ended requests, as engines that share their load do.
    told = settings.log_stats
    scheduler = kind(config, kv_cache, structured, include_finished_set=told, log_stats=told, **sizes)
    if settings.structured_output:
        structured.backend = Compiler(scheduler.requests)
    if settings.encoder_cache_size:
        # vLLM asks the model how large its images are.
        scheduler.max_num_encoder_input_tokens = settings.encoder_compute_budget
        manager = EncoderDecoderCacheManager if settings.is_encoder_decoder else EncoderCacheManager
        scheduler.encoder_cache_manager = manager(settings.encoder_cache_size)
        scheduler.is_encoder_decoder = settings.is_encoder_decoder
    # vLLM's own property asks the environment and the graphics card.
    scheduler.use_v2_model_runner = settings.model_runner == 2
    return scheduler


def _kind_of(settings: Any) -> type[Scheduler]:
    """The class of the scheduler. Raises TypeError for one that does not fit the settings."""
    kind: type[Scheduler] = AsyncScheduler if settings.async_scheduling else Scheduler
    if not settings.scheduler_cls:
        return kind
    module, _, name = settings.scheduler_cls.partition(":")
    found: type[Scheduler] = getattr(importlib.import_module(module), name)
    if not issubclass(found, kind) or issubclass(found, AsyncScheduler) != settings.async_scheduling:
        raise TypeError(
            f"with async_scheduling={settings.async_scheduling} a scheduler_cls derives from {kind.__name__}, "
            f"got {settings.scheduler_cls}"
        )
    return found


@functools.cache
def request_hasher(settings: Any) -> Callable[[Any], list[Any]] | None:
    """Return the block hasher of requests; None without a prefix cache. Only equality of hashes matters."""
    if not settings.enable_prefix_caching:
        return None
    init_none_hash(sha256)
    # Since 0.33 a hash may cover the tokens that a drafter reads behind the block.
    ahead = getattr(_config_of(settings), "num_hash_lookahead_tokens", 0)
    hasher: Callable[[Any], list[Any]]
    hasher = get_request_block_hasher(settings.hash_block_size, _hash, *((ahead,) if ahead else ()))
    return hasher


def _hash(value: object) -> bytes:
    return hash(value).to_bytes(_HASH_BYTES, "little", signed=True)


def new_request(
    settings: Any,
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
    lora: int = 0,
    grammar: int = 0,
    session: bool = False,
    images: Sequence[tuple[int, int, str]] = (),
) -> Request:
    """Make a request as vLLM's front end does; only its own stop tokens end it.

    Each of ``images`` has its start, its tokens and its name; tokens of the prompt stand in for it.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens,
        extra_args={"kv_cache_report_mode": settings.kv_cache_report_mode},
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(json_object=True) if grammar else None,
    )
    return Request(
        request_id,
        list(prompt),
        sampling,
        None,
        arrival_time=arrival_time,
        priority=priority,
        lora_request=LoRARequest(f"lora-{lora}", lora, "nowhere") if lora else None,
        block_hasher=request_hasher(settings),
        resumable=session,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(start, count)) for start, count, name in images
        ],
    )


def result_of(plan: SchedulerOutput, tokens: Mapping[str, Sequence[int]], transferred: Any = None) -> ModelRunnerOutput:
    """Build the workers' result of a plan: the sampled tokens of each request, and the finished loads and saves."""
    names = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[list(tokens.get(name, ())) for name in names],
        kv_connector_output=transferred,
    )


@functools.cache
def _config_of(settings: Any) -> VllmConfig:
    config = VllmConfig(
        scheduler_config=_scheduler_config(settings),
        cache_config=CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching),
        # A released vLLM finds no device on a machine without a graphics card.
        device_config=DeviceConfig(device="cpu"),
    )
    # Decided by the platform otherwise, which would load a model for it.
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.scheduler_config.enable_chunked_prefill = settings.enable_chunked_prefill
    config.parallel_config.pipeline_parallel_size = settings.pipeline_parallel_size
    config.parallel_config.decode_context_parallel_size = settings.decode_context_parallel_size
    config.cache_config.num_gpu_blocks = settings.num_gpu_blocks
    config.model_config = ModelConfig(max_model_len=settings.max_model_len)
    if settings.has_mamba:
        config.cache_config.mamba_cache_mode = settings.mamba_cache_mode
        config.cache_config.mamba_block_size = settings.states[0]
        config.cache_config.enable_mamba_shared_prefix_checkpoint = settings.enable_mamba_shared_prefix_checkpoint
    if settings.log_stats:
        config.observability_config.kv_cache_metrics = True
        config.observability_config.kv_cache_metrics_sample = 1.0
        config.observability_config.enable_logging_iteration_details = True
        config.observability_config.per_request_spec_decode_metrics = "detailed"
    if settings.num_speculative_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings.num_speculative_tokens,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
        # A draft model would have to be loaded.
        config.speculative_config.method = settings.speculative_method
        config.speculative_config.disable_lookahead_block_hashes = settings.disable_lookahead_block_hashes
    if settings.max_loras:
        config.lora_config = LoRAConfig(max_loras=settings.max_loras, lora_dtype="float16")
    if settings.enable_kv_cache_events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    _connect(config, settings)
    return config


def _scheduler_config(settings: Any) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=settings.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        policy=settings.policy,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
        scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
        watermark=settings.watermark,
        disable_chunked_mm_input=settings.disable_chunked_mm_input,
        prefill_schedule_interval=settings.prefill_schedule_interval,
    )


def _connect(config: VllmConfig, settings: Any) -> None:
    """Configure the connectors to outside KV and outside images."""
    if settings.hisparse_host_blocks:
        config.kv_transfer_config = KVTransferConfig(kv_connector="HiSparseConnector", kv_role="kv_both")
    if settings.has_connector:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ScheduledConnector",
            kv_connector_module_path=ScheduledConnector.__module__,
            kv_role=settings.kv_role,
            kv_load_failure_policy=settings.kv_load_failure_policy,
            kv_connector_extra_config={
                "offered": settings.kv_offered_tokens,
                "is_async": settings.kv_connector == "async",
                "saves": settings.kv_saves,
                "state_tokens": math.lcm(*settings.states) if settings.has_mamba else 0,
            },
        )
    if settings.ec_connector:
        config.ec_transfer_config = ECTransferConfig(
            ec_connector="OutsideImages",
            ec_connector_module_path=OutsideImages.__module__,
            ec_role="ec_both",
            ec_connector_extra_config={"steps": settings.ec_transfer_steps},
        )


@functools.cache
def _kv_cache_of(settings: Any) -> KVCacheConfig:
    """Return the groups: full attention, windows, Mamba's states, a ring, an encoder's output for its decoder."""
    shape = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    specs: dict[str, Any] = {"layer": FullAttentionSpec(**shape)}
    if settings.rswa_window:
        specs["layer"] = kv_cache_interface.RSWASpec(rswa_window=settings.rswa_window, **shape)
    for size, is_chunk in settings.windows:
        name, spec = ("attention_chunk_size", ChunkedLocalAttentionSpec) if is_chunk else _WINDOW
        specs[f"window {size}"] = spec(**{name: size}, **shape)
    if settings.swa_bounded_replay:
        window = {"sliding_window": settings.sliding_window, "bounded_replay": True}
        specs[f"window {settings.sliding_window}"] = kv_cache_interface.SlidingWindowMLASpec(**window, **shape)
    if settings.has_mamba:
        kept = {"num_speculative_blocks": settings.num_speculative_tokens}
        if settings.mamba_checkpoint_alignment:
            kept["num_prefill_checkpoint_blocks"] = 1
            kept["prefill_checkpoint_alignment"] = settings.mamba_checkpoint_alignment
        specs["mamba"] = MambaSpec(
            block_size=settings.states[0],
            shapes=((1,),),
            dtypes=(torch.float16,),
            mamba_cache_mode=settings.mamba_cache_mode,
            **kept,
        )
    if settings.rings:
        specs["ring"] = kv_cache_interface.CircularBufferSpec(**shape)
    if settings.is_encoder_decoder:
        specs["crossed"] = CrossAttentionSpec(**shape)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    more = {}
    if settings.hisparse_host_blocks:
        groups, more = _with_host(settings, specs["layer"]), {"hisparse_host_num_blocks": settings.hisparse_host_blocks}
    interval = settings.prefix_cache_retention_interval
    return KVCacheConfig(
        prefix_cache_retention_interval=None if interval < 0 else interval,
        num_blocks=settings.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        **more,
    )


def _with_host(settings: Any, spec: FullAttentionSpec) -> list[KVCacheGroupSpec]:
    """Return the groups of HiSparse: host pages, the indexer's, device pages, and the device region for host rows."""
    roles, sizes = kv_cache_interface.KVCacheGroupRole, {"block_size": settings.block_size, "page_size": 1}
    hot = kv_cache_interface.HiSparseHotSpec(blocks_per_request=settings.hisparse_hot_blocks, **sizes)
    return [
        KVCacheGroupSpec(["layer"], spec, role=roles.HISPARSE_SOURCE, host_resident=True),
        KVCacheGroupSpec(["indexer"], spec, role=roles.HISPARSE_INDEXER),
        KVCacheGroupSpec(["resident"], kv_cache_interface.HiSparseResidentSpec(**sizes), enable_kv_transfer=False),
        KVCacheGroupSpec(["hot"], hot, enable_kv_transfer=False),
    ]


class ModelConfig(SimpleNamespace):
    """The attributes of a text-generating model that the scheduler reads."""

    uses_mrope = False
    is_encoder_decoder = False
    is_diffusion = False
    return_sampling_mask = False
    supports_multimodal_inputs = False
    is_multimodal_model = False
    multimodal_config = None
    skip_tokenizer_init = True
    runner_type = "generate"
