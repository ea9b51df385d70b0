"""Makes vLLM's own objects as its engine does, without the search: standalone tests begin with this file."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import functools
import importlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Final
from unittest import mock

import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from vllm import ModelRegistry, platforms
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_max_concurrency_for_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
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
_MOST_CONTEXT_TOKENS: Final = 1 << 24
_WINDOW: Final = ("sliding_window", SlidingWindowSpec)


def new_scheduler(settings: Any, configured: Callable[[VllmConfig], VllmConfig] = copy.copy) -> Scheduler:
    config, kv_cache = configured(_config_of(settings)), _kv_cache_of(settings)
    kind = _kind_of(settings)
    structured = StructuredOutputManager(config)
    sizes = {"block_size": settings.scheduler_block_size, "hash_block_size": settings.hash_block_size}
    if settings.mamba_cache_mode == "none":
        sizes["hash_block_size"] = settings.scheduler_block_size
    # With statistics, an engine learns of ended requests, as behind a load balancer.
    log_stats = settings.log_stats
    scheduler = kind(config, kv_cache, structured, include_finished_set=log_stats, log_stats=log_stats, **sizes)
    if settings.structured_output:
        structured.backend = Compiler(scheduler.requests)
    if settings.encoder_cache_size:
        # vLLM asks the model how large its images are.
        scheduler.max_num_encoder_input_tokens = settings.encoder_compute_budget
        manager = EncoderDecoderCacheManager if settings.is_encoder_decoder else EncoderCacheManager
        scheduler.encoder_cache_manager = manager(settings.encoder_cache_size)
        scheduler.is_encoder_decoder = settings.is_encoder_decoder
    # vLLM's own property looks at the environment and the GPU.
    scheduler.use_v2_model_runner = settings.model_runner == 2
    return scheduler


def _kind_of(settings: Any) -> type[Scheduler]:
    """Return the scheduler's class. Raises TypeError for a class that does not fit the settings."""
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
    # Since 0.33 a hash may cover the tokens after the block that a drafter reads.
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


def begun_in(plans: Iterable[SchedulerOutput], names: Iterable[str]) -> set[str]:
    """Return those of these requests whose load these plans have begun: a mended engine may begin one later."""
    begun: set[str] = {load.request_id for plan in plans for load in plan.kv_connector_metadata.loads}
    return begun.intersection(names)


def arguments_of(settings: Any) -> dict[str, Any]:
    """Return the non-default arguments of ``vllm serve`` for these settings, by their names in ``EngineArgs``."""
    given: dict[str, Any] = {
        "block_size": settings.block_size,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "watermark": settings.watermark,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "long_prefill_token_threshold": settings.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": settings.long_prefill_token_threshold_adaptive,
        "scheduler_reserve_full_isl": settings.scheduler_reserve_full_isl,
        "disable_chunked_mm_input": settings.disable_chunked_mm_input,
        "prefill_schedule_interval": settings.prefill_schedule_interval,
        "async_scheduling": settings.async_scheduling,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "decode_context_parallel_size": settings.decode_context_parallel_size,
        "enable_sleep_mode": settings.enable_sleep_mode,
    }
    given |= {"num_gpu_blocks_override": settings.num_gpu_blocks, "scheduling_policy": settings.policy}
    # Context-parallel ranks are the ranks of tensor parallelism.
    given["tensor_parallel_size"] = settings.decode_context_parallel_size
    if settings.has_mamba:
        given |= {
            "mamba_cache_mode": settings.mamba_cache_mode,
            "prefix_match_unit": settings.prefix_match_unit or None,
        }
        given["enable_mamba_shared_prefix_checkpoint"] = settings.enable_mamba_shared_prefix_checkpoint
    if settings.log_stats:
        given |= {"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0, "enable_logging_iteration_details": True}
        given["per_request_spec_decode_metrics"] = "detailed" if settings.num_speculative_tokens else "none"
    if settings.max_loras:
        given |= {"enable_lora": True, "max_loras": settings.max_loras}
    given |= {name: value for name, value in _documents(settings).items() if value}
    defaults = default_arguments()
    # A server has all three by default, without an argument.
    usual = {**defaults, "enable_prefix_caching": True, "enable_chunked_prefill": True, "async_scheduling": True}
    return {name: value for name, value in given.items() if value != usual[name]}


@functools.cache
def default_arguments() -> dict[str, Any]:
    return {one.name: getattr(EngineArgs, one.name, None) for one in dataclasses.fields(EngineArgs)}


def _documents(settings: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments that are JSON documents, without empty ones."""
    guesses: dict[str, Any] = {}
    if settings.num_speculative_tokens:
        guesses = {"method": settings.speculative_method, "num_speculative_tokens": settings.num_speculative_tokens}
        drafters = {"eagle": {"model": _model_folder()}, "mtp": {}}
        guesses |= drafters.get(settings.speculative_method, {"prompt_lookup_max": 2, "prompt_lookup_min": 1})
    return {
        "speculative_config": guesses,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}
        if settings.enable_kv_cache_events
        else {},
        "kv_transfer_config": _transfers(settings),
        "ec_transfer_config": _images_outside(settings),
    }


def _transfers(settings: Any) -> dict[str, Any]:
    if not settings.has_connector:
        return {}
    return {
        "kv_connector": "ScheduledConnector",
        "kv_connector_module_path": ScheduledConnector.__module__,
        "kv_role": settings.kv_role,
        "kv_load_failure_policy": settings.kv_load_failure_policy,
        "kv_connector_extra_config": {
            "offered": settings.kv_offered_tokens,
            "is_async": settings.kv_connector == "async",
            "saves": settings.kv_saves,
            "saves_aborted": settings.kv_saves_aborted,
            "state_tokens": math.lcm(*settings.states) if settings.has_mamba else 0,
        },
    }


def _images_outside(settings: Any) -> dict[str, Any]:
    if not settings.ec_connector:
        return {}
    return {
        "ec_connector": "OutsideImages",
        "ec_connector_module_path": OutsideImages.__module__,
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"steps": settings.ec_transfer_steps},
    }


class Model(torch.nn.Module):
    """Stands in for a text-generating model: vLLM asks its class what it supports, and creates none."""

    supports_pp = supports_lora = supports_eagle3 = True
    # Since 0.33 vLLM refuses LoRAs for a model without these.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del vllm_config, prefix

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> None: ...

    def compute_logits(self, hidden_states: Any) -> None: ...

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: Any) -> None: ...


@functools.cache
def _model_folder() -> str:
    """Make a folder with the model's configuration, which is removed with the process."""
    folder = tempfile.mkdtemp(prefix="scripted-vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("", "Eagle"):
        ModelRegistry.register_model(f"{name}ScriptedForCausalLM", Model)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    shape["max_position_embeddings"] = _MOST_CONTEXT_TOKENS
    model = LlamaConfig(architectures=["ScriptedForCausalLM"], num_hidden_layers=8, dtype="float16", **shape)
    model.save_pretrained(folder)
    return folder


class _AnyPlatform(Platform):
    """A platform without preferences, so that configurations equal a GPU server's."""

    _enum = PlatformEnum.UNSPECIFIED
    device_name = device_type = "cpu"

    def is_sleep_mode_available(self) -> bool:
        return True


@functools.cache
def _platform_modules() -> list[ModuleType]:
    vllm = [module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"]
    return [platforms, *(one for one in vllm if isinstance(vars(one).get("current_platform"), Platform))]


@functools.cache
def _config_of(settings: Any) -> VllmConfig:
    """Make the configuration of a server with these arguments. Raises vLLM's own error for refused arguments."""
    # This sets vLLM's log level again and would undo `quiet.silence`.
    variables = {"VLLM_USE_V2_MODEL_RUNNER": str(settings.model_runner - 1), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    # Settings that vLLM would derive from the device and the model are given.
    stated = {
        "async_scheduling": settings.async_scheduling,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_prefix_caching": settings.enable_prefix_caching,
    }
    given = {"load_format": "dummy", "skip_tokenizer_init": True, **arguments_of(settings), **stated}
    if settings.has_modules:
        # The stand-in model has no MTP modules, so the configuration is made with EAGLE's drafter.
        given["speculative_config"] = {**given["speculative_config"], "method": "eagle", "model": _model_folder()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for module in _platform_modules():
            stack.enter_context(mock.patch.object(module, "current_platform", _AnyPlatform()))
        # Its model runner belongs to a device: none is made here.
        stack.enter_context(mock.patch.object(sys.modules["vllm.config.vllm"], "HAS_TRITON", new=True))
        config = EngineArgs(model=_model_folder(), **given).create_engine_config()
    decided = {**stated, "enable_prefix_caching": config.cache_config.enable_prefix_caching}
    decided |= {name: getattr(config.scheduler_config, name) for name in ("async_scheduling", "enable_chunked_prefill")}
    if decided != stated:
        raise ValueError(f"vLLM turned {stated} into {decided}")
    if settings.has_modules:
        _add_modules(config.speculative_config)
    if settings.hisparse_host_blocks:
        # vLLM accepts it only with a GPU, and derives it from the model.
        config.kv_transfer_config = KVTransferConfig(kv_connector="HiSparseConnector", kv_role="kv_both")
    # Otherwise the model's profile decides it.
    config.cache_config.num_gpu_blocks = settings.num_gpu_blocks
    config.cache_config.block_size = settings.block_size
    if settings.has_mamba:
        config.cache_config.mamba_cache_mode = settings.mamba_cache_mode
        config.cache_config.mamba_block_size = settings.states[0]
    # The engine core calls it before it makes the scheduler.
    config.validate_block_size()
    return config


def _add_modules(guesses: Any) -> None:
    """Make a speculative configuration MTP's, with a module for each guess."""
    guesses.method = "mtp"
    guesses.draft_model_config.hf_config.num_nextn_predict_layers = guesses.num_speculative_tokens


@functools.cache
def _kv_cache_of(settings: Any) -> KVCacheConfig:
    """Return the groups: full attention, windows, Mamba's states, a ring, an encoder's output for its decoder."""
    shape = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    specs: dict[str, Any] = {"layer": FullAttentionSpec(**shape)}
    if settings.rswa_window:
        specs["layer"] = kv_cache_interface.RSWASpec(rswa_window=settings.rswa_window, **shape)
    # vLLM adds it to the windows of all layers: what modules of a drafter after the first compute again.
    retained = {"extra_retained_tokens": max(0, _config_of(settings).num_prefill_lookahead_tokens - 1)}
    for size, is_chunk in settings.windows:
        name, spec = ("attention_chunk_size", ChunkedLocalAttentionSpec) if is_chunk else _WINDOW
        specs[f"window {size}"] = spec(**{name: size}, **({} if is_chunk else retained), **shape)
    if settings.swa_bounded_replay:
        window = {"sliding_window": settings.sliding_window, "bounded_replay": True, **retained}
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
    made = KVCacheConfig(
        prefix_cache_retention_interval=None if interval < 0 else interval,
        num_blocks=settings.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        **more,
    )
    _check_one_request_fits(settings, made)
    return made


def _check_one_request_fits(settings: Any, made: KVCacheConfig) -> None:
    """Raise ValueError for a pool with which a server does not start: one request of max_model_len must fit."""
    config = _config_of(settings)
    if settings.is_encoder_decoder:
        config = copy.copy(config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        # The model's own number, by which vLLM counts what its decoder reads.
        config.scheduler_config.max_num_encoder_input_tokens = settings.encoder_compute_budget
    # No request gets the null block.
    usable = dataclasses.replace(made, num_blocks=made.num_blocks - 1)
    requests = get_max_concurrency_for_kv_cache_config(config, usable)
    if requests < 1:
        raise ValueError(
            f"vLLM starts only if its pool holds a request of max_model_len ({settings.max_model_len} tokens), which "
            f"needs {round(usable.num_blocks / requests)} blocks; num_gpu_blocks={settings.num_gpu_blocks} has "
            f"{usable.num_blocks} beside the null block: raise it, or lower max_model_len"
        )


def _with_host(settings: Any, spec: FullAttentionSpec) -> list[KVCacheGroupSpec]:
    """Return HiSparse's groups: host pages, the indexer's, device pages, and the device region for host rows."""
    roles, sizes = kv_cache_interface.KVCacheGroupRole, {"block_size": settings.block_size, "page_size": 1}
    hot = kv_cache_interface.HiSparseHotSpec(blocks_per_request=settings.hisparse_hot_blocks, **sizes)
    return [
        KVCacheGroupSpec(["layer"], spec, role=roles.HISPARSE_SOURCE, host_resident=True),
        KVCacheGroupSpec(["indexer"], spec, role=roles.HISPARSE_INDEXER),
        KVCacheGroupSpec(["resident"], kv_cache_interface.HiSparseResidentSpec(**sizes), enable_kv_transfer=False),
        KVCacheGroupSpec(["hot"], hot, enable_kv_transfer=False),
    ]
