"""The machine's settings, and SGLang's own scheduler with them, without a model.

The constructor is SGLang's. It runs on the CPU and loads a random one-layer Llama. A process's first scheduler makes
the process groups; later ones take a fraction of a second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal
from unittest import mock

import msgspec
from sglang.srt import runtime_context
from sglang.srt.distributed import bootstrap
from sglang.srt.managers import scheduler as managers_scheduler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import PortArgs, ServerArgs

from scripted.script.watchdog import unwatched
from scripted_sglang import host, transfers
from scripted_sglang.event_loop import MODEL

Policy = Literal["fcfs", "lpm", "lof", "dfs-weight"]
Mode = Literal["null", "prefill", "decode"]

# Arguments of a server without a GPU.
ON_CPU: Final = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "watchdog_timeout": 1e9,
    "random_seed": 0,
}
# The same, without tokenizer and weights.
_ARGUMENTS: Final = {**ON_CPU, "load_format": "dummy", "skip_tokenizer_init": True}
# Arguments for a scheduler with a role. Retracted KV goes to CPU tensors, because a pool needs a GPU.
_TRANSFERS: Final = {
    "disaggregation_transfer_backend": "mooncake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}


class SglangSettings(msgspec.Struct, frozen=True):
    """Arguments of SGLang's server that affect scheduling, by name. Sizes are in tokens."""

    page_size: int = 1
    max_total_tokens: int = 40
    chunked_prefill_size: int = 8
    max_running_requests: int = 4
    context_length: int = 40
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    enable_mixed_chunk: bool = False
    schedule_policy: Policy = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_priority_scheduling: bool = False
    max_queued_requests: int | None = None
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = 2.0
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    hicache_storage_backend: Literal["none", "dynamic"] = "none"
    hicache_host_memory_mode: Literal["cache", "buffer_only"] = "cache"
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete"] = "best_effort"
    # Part of the backend's own configuration.
    prefetch_threshold: int = 4
    # Whether operators may release the memory of weights and KV.
    enable_memory_saver: bool = False
    # The minimum output of each request, from the server's preferred_sampling_params.
    min_new_tokens: int = 0
    # Whether requests keep their clients' names, as in SGLang; otherwise no name is a prefix of another.
    client_rids: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.max_running_requests < 1:
            raise ValueError(
                "page_size and max_running_requests must be at least 1, "
                f"got {self.page_size} and {self.max_running_requests}"
            )
        if self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked_prefill_size must be at least page_size ({self.page_size}), got {self.chunked_prefill_size}"
            )
        if self.max_total_tokens < 4 * self.page_size:
            raise ValueError(
                f"max_total_tokens must be 4 pages of {self.page_size} or more, got {self.max_total_tokens}"
            )
        if self.max_queued_requests is not None and self.max_queued_requests < 1:
            raise ValueError(f"max_queued_requests must be at least 1, got {self.max_queued_requests}")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must not be negative, got {self.min_new_tokens}")
        if self.context_length < 16:
            raise ValueError(f"context_length must be at least 16, got {self.context_length}")
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ValueError("enable_hierarchical_cache needs a radix cache, disable_radix_cache=False")
        if self.has_storage and not self.enable_hierarchical_cache:
            raise ValueError("hicache_storage_backend needs enable_hierarchical_cache")
        if self.hicache_host_memory_mode == "buffer_only" and not self.has_storage:
            raise ValueError("hicache_host_memory_mode=buffer_only needs hicache_storage_backend")
        if self.hicache_ratio <= 0 or self.prefetch_threshold < 1:
            raise ValueError(
                "hicache_ratio must be positive and prefetch_threshold at least 1, "
                f"got {self.hicache_ratio} and {self.prefetch_threshold}"
            )

    @property
    def of_server(self) -> dict[str, Any]:
        """Return the settings that are arguments of SGLang's server."""
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _OWN}
        if not self.enable_hierarchical_cache:
            return {name: value for name, value in values.items() if name not in _OF_HOST}
        if not self.has_storage:
            return {**values, "hicache_storage_backend": None}
        extra = {**_STORAGE, "prefetch_threshold": self.prefetch_threshold}
        return {**values, "hicache_storage_backend_extra_config": json.dumps(extra)}

    @property
    def has_storage(self) -> bool:
        return self.hicache_storage_backend != "none"

    @property
    def kept_back(self) -> int:
        """The tokens that must be free besides the prompt for a request to begin."""
        return 0

    @property
    def room(self) -> int:
        """The most tokens of a request: SGLang holds back one of the context, and one more of prompt and output."""
        pool = self.max_total_tokens // self.page_size * self.page_size
        return min(self.context_length, pool) - 2 - self.kept_back

    @property
    def depth(self) -> int:
        """The most batches in flight: with the overlap schedule one is planned while another is computed."""
        return 1 if self.disable_overlap_schedule else 2


class ServedSettings(SglangSettings, frozen=True):
    """The settings of a fleet's server, which has a role."""

    disaggregation_mode: Mode = "null"
    num_reserved_decode_tokens: int = 4
    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_allocation_policy: Literal["early", "prefill_complete"] = "early"
    optimistic_prefill_attempts: int = 0
    # The router aborts a request at both servers when a client aborts it, or when it ends early at one of them.
    router_tells_both: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_reserved_decode_tokens < 0 or self.optimistic_prefill_attempts < 0:
            raise ValueError(
                "num_reserved_decode_tokens and optimistic_prefill_attempts must not be negative, "
                f"got {self.num_reserved_decode_tokens} and {self.optimistic_prefill_attempts}"
            )
        if (
            self.disaggregation_decode_allocation_policy == "prefill_complete"
            and self.disaggregation_decode_enable_radix_cache
        ):
            raise ValueError("the allocation policy prefill_complete allows no radix cache at decode servers")
        is_plain = self.hicache_write_policy == "write_back" and not self.has_storage
        if (
            self.disaggregation_decode_allocation_policy == "prefill_complete"
            and self.enable_hierarchical_cache
            and not is_plain
        ):
            raise ValueError(
                "the allocation policy prefill_complete allows only a write_back host tier without storage"
            )

    @property
    def of_server(self) -> dict[str, Any]:
        values = super().of_server
        if self.disaggregation_mode == "null":
            return {name: values[name] for name in SglangSettings().of_server}
        if self.disaggregation_mode == "decode":
            # Only prefill servers have a host tier.
            values = {name: value for name, value in values.items() if name not in _OF_HOST}
        return {**values, **_TRANSFERS}

    @property
    def kept_back(self) -> int:
        return self.num_reserved_decode_tokens if self.disaggregation_mode == "decode" else 0


_OWN: Final = ("client_rids", "router_tells_both", "prefetch_threshold", "min_new_tokens")
# The end tokens that the penalty for a minimum output suppresses; a server reads them from its tokenizer.
_TOKENIZER: Final = SimpleNamespace(eos_token_id=MODEL["eos_token_id"], additional_stop_token_ids=None)
_OF_HOST: Final = (
    "enable_hierarchical_cache", "hicache_ratio", "hicache_write_policy", "hicache_storage_backend",
    "hicache_storage_prefetch_policy", "hicache_host_memory_mode", "hicache_storage_backend_extra_config",
)  # fmt: skip
_STORAGE: Final = {
    "backend_name": "scripted",
    "module_path": "scripted_sglang.host",
    "class_name": "Storage",
    "interface_v1": 1,
}
_groups: dict[str, Any] = {}
# Nothing reads the published load or removes its shared memory file. The watchdog's thread never ends and keeps the
# whole scheduler alive: after 2,700 settings a garbage collection took seconds.
_left_out: Final[dict[str, Any]] = dict.fromkeys(
    ("create_load_snapshot_writer", "create_scheduler_watchdog"), lambda *_, **__: None
)


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the model's configuration and for sockets, which is removed with the process."""
    folder = tempfile.TemporaryDirectory(prefix="scripted-sglang-")
    (Path(folder.name) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


@contextlib.contextmanager
def _groups_of_the_process() -> Iterator[None]:
    """Make the process groups for the first scheduler, and give them to later ones."""
    if not _groups:
        yield
        _groups.update(runtime_context.get_parallel()._stamp)  # noqa: SLF001 - where SGLang keeps them
        return

    def known(**_: Any) -> None:
        runtime_context.get_parallel()._stamp.update(_groups)  # noqa: SLF001 - as above

    with mock.patch.object(bootstrap, "init_parallel_runtime", known):
        yield


def new_scheduler(settings: SglangSettings) -> tuple[runtime_context.RuntimeContext, Scheduler]:
    """Make SGLang's scheduler with these settings, and the context in which it must be used."""
    if "disaggregation_mode" in settings.of_server:
        transfers.install()
    if "enable_hierarchical_cache" in settings.of_server:
        host.install()
    # A flush ends with a garbage collection, which costs a hundred times as much as everything else in it.
    current_platform.empty_cache = lambda: None
    # A collection here costs more than the rest of a scheduler and frees nothing. A process's first scheduler waits for
    # disk and network, which takes long on a busy machine.
    watched = contextlib.nullcontext() if _groups else unwatched()
    with watched, mock.patch("gc.collect", return_value=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = _model_folder().name
        # The library that releases memory needs a GPU; without it, SGLang's own adapter for it does nothing.
        given = {**settings.of_server, "enable_memory_saver": False}
        args = ServerArgs(model_path=folder, **_ARGUMENTS, **given)
        with mock.patch.object(tempfile, "tempdir", folder):
            ports = PortArgs.init_new(args)
        context = runtime_context.create_context(
            args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        )
        with (
            runtime_context.use_context(context),
            _groups_of_the_process(),
            mock.patch.multiple(managers_scheduler, **_left_out),
        ):
            scheduler = Scheduler(args, ports)
    if settings.min_new_tokens:
        scheduler.tokenizer = _TOKENIZER
    return context, scheduler
