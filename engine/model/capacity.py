"""The KV capacity that the weights leave, measured on the device before anything is loaded.

Used if the configuration does not set ``max_total_tokens``. Never opens a device context in the calling process, which
must still fork.
"""

from __future__ import annotations

import os
import sys
from fractions import Fraction
from typing import Final

import msgspec
import psutil

from engine.core.config import EngineConfig, embedded_seed
from engine.core.errors import ConfigError
from engine.core.limits import Limits, ModelFacts
from engine.model.arithmetic import stage_devices
from engine.model.backend import why_not_openvino
from engine.model.checkpoint import resolve_folder
from engine.model.checkpoint_files import stored_tensors
from engine.model.threads import TORCH_THREADS, stage_threads
from engine.model.weight_sizes import held_weight_bytes, value_types, weight_bytes

# KV's share of the memory that is free after loading the weights. The rest is for activations and, on a CPU, for other
# processes.
KV_SHARE_CUDA: Final = 0.85
KV_SHARE_CPU: Final = 0.4

# Lower bounds on the bytes of bookkeeping for each slot and each page, in all processes together.
_BOOKS_BYTES_PER_SLOT: Final = 8
_BOOKS_BYTES_PER_PAGE: Final = 64

# A LoRA has a pair of matrices for each matrix of a layer.
_LAYER: Final = ".layers."
_MATRIX: Final = 2


def measure_kv_tokens(config: EngineConfig, facts: ModelFacts, *, stages_here: int | None = None) -> int | None:
    """Return the KV capacity in tokens; None for the embedded model, whose capacity is fixed.

    It never exceeds the use of all running requests at full length. ``stages_here`` is the number of stages on this
    machine, by default all. Raises ConfigError, with the sizes in bytes, if the weights leave no room for a single
    page.
    """
    if embedded_seed(config.model, config.seed) is not None:
        return None
    cuda = _cuda_memory(config)
    free = psutil.virtual_memory().available if cuda is None else cuda.free_bytes
    share = KV_SHARE_CPU if cuda is None else KV_SHARE_CUDA
    part = Fraction(1)
    has_own_gpu = cuda is not None and cuda.gpu_a_stage
    if stages_here is not None or (has_own_gpu and not config.speculative_draft_model):
        # The stages with the most layers fill their device first. A draft model is not divided: one stage holds it.
        here = 1 if has_own_gpu or stages_here is None else stages_here
        part = min(part, Fraction(-(-facts.num_layers // config.pp_size) * here, facts.num_layers))
    limits = Limits.of(config, facts, sys.maxsize)
    device_type = "cpu" if cuda is None else "cuda"
    weights = int(_weights_held(config, limits, device_type) * part)
    if config.speculative_draft_model and embedded_seed(config.speculative_draft_model, config.seed) is None:
        weights += _weights_held(config.draft_config(), limits, device_type)
    weights += _scratch_bytes(limits, facts)
    if config.most_loras:
        weights += int((config.most_loras + 1) * _lora_bytes(config, device_type) * part)
    # The host tier takes no GPU memory.
    on_host = 0 if cuda is not None else config.host_kv_tokens * facts.kv_bytes_per_token
    tokens = _tokens_in(int(int((free - weights - on_host) * share) / part), config, facts)
    if tokens < config.page_size:
        host = f" and {on_host} bytes of host_kv_tokens" if on_host else ""
        raise ConfigError(
            f"max_total_tokens must be set: of {free} bytes free on the device, {weights} bytes of weights"
            f"{' and loras' if config.most_loras else ''}{host} leave no room for a page of "
            f"{config.page_size} tokens at "
            f"{facts.kv_bytes_per_token + facts.window_kv_bytes_per_token} bytes each; free memory or "
            f"use a smaller model{' or a smaller max_loras or max_lora_rank' if config.most_loras else ''}"
        )
    return min(tokens, config.max_running_requests * (config.context_length or facts.context_length))


def require_memory(config: EngineConfig, facts: ModelFacts, limits: Limits, *, stages_here: int | None = None) -> None:
    """Raise ConfigError for a KV capacity above this machine's total memory.

    ``stages_here`` is the number of stages on this machine, by default all. With a GPU only the bookkeeping counts
    against the machine's memory; the device itself reports when it is full.
    """
    slots = limits.total_pages * limits.page_size
    books = _BOOKS_BYTES_PER_SLOT * slots + _BOOKS_BYTES_PER_PAGE * limits.total_pages
    window_slots = limits.window_pages * limits.page_size
    kv = slots * facts.kv_bytes_per_token + window_slots * facts.window_kv_bytes_per_token
    host = limits.host_pages * limits.page_size * (facts.kv_bytes_per_token + _BOOKS_BYTES_PER_SLOT)
    if stages_here is not None:
        kv = kv * stages_here // config.pp_size
        host = host * stages_here // config.pp_size
    needed = books + host + (kv + _scratch_bytes(limits, facts) if _cuda_memory(config) is None else 0)
    present = psutil.virtual_memory().total
    if needed > present >= needed - host:
        raise ConfigError(
            f"host_kv_tokens must fit into memory beside the KV cache, got {config.host_kv_tokens}: they take "
            f"{host} of the {needed} bytes needed, this machine has {present}; lower it"
        )
    if needed > present:
        raise ConfigError(
            f"max_total_tokens must fit into memory, got {config.max_total_tokens}: {slots} tokens of KV and their "
            f"bookkeeping take {needed} bytes, this machine has {present}; lower it or leave it unset"
        )


def _tokens_in(room: int, config: EngineConfig, facts: ModelFacts) -> int:
    """Return the tokens of KV that fit into ``room`` bytes. The window pool grows only to what all rows can use."""
    full, window = facts.kv_bytes_per_token, facts.window_kv_bytes_per_token
    both = room // (full + window)
    if not window:
        return both
    most = Limits.of(config, facts, sys.maxsize).window_pages * config.page_size
    if both <= most:
        return both
    return (room - most * window) // full if full else sys.maxsize


def _scratch_bytes(limits: Limits, facts: ModelFacts) -> int:
    """Return the bytes of a draft model's guesses beyond the pages of requests."""
    return limits.draft_scratch_pages * limits.page_size * facts.draft_kv_bytes_per_token


def _weights_held(config: EngineConfig, limits: Limits, device_type: str) -> int:
    """Return the bytes of the weights in all stages. For OpenVINO, which packs them its own way, return the size of the
    files.
    """
    if config.backend == "openvino" or (config.backend == "auto" and why_not_openvino(config) is None):
        return weight_bytes(resolve_folder(config))
    threads = stage_threads(config, limits, TORCH_THREADS)
    return held_weight_bytes(config, device_type=device_type, threads=threads)


def _lora_bytes(config: EngineConfig, device_type: str) -> int:
    """Return an upper bound on the bytes of a LoRA of maximum rank: two matrices for each matrix of the layers.

    The caller counts one LoRA more than the limit: a new one is read before another makes room for it.
    """
    shapes = [
        shape for name, _, shape in stored_tensors(resolve_folder(config)) if _LAYER in name and len(shape) == _MATRIX
    ]
    _, computed = value_types(config, device_type)
    return sum(config.max_lora_rank * sum(shape) * computed.itemsize for shape in shapes)


class _CudaMemory(msgspec.Struct, frozen=True):
    """The smallest free memory of the stages' GPUs, and whether each stage has its own GPU."""

    free_bytes: int
    gpu_a_stage: bool


def _cuda_memory(config: EngineConfig) -> _CudaMemory | None:
    """Ask a forked child for the GPUs' memory, because a process that has used the driver must not fork. Returns None
    without a CUDA device.
    """
    if config.device == "cpu":
        return None
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _report_cuda_memory(writer, config)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return msgspec.msgpack.decode(answer, type=_CudaMemory) if answer else None


def _report_cuda_memory(writer: int, config: EngineConfig) -> None:
    """Write the memory of the GPUs, if any, and exit; never return into the caller's stack."""
    try:
        import torch

        if torch.cuda.is_available():
            devices = stage_devices(config.device, config.pp_size, torch.cuda.device_count())
            free = min(torch.cuda.mem_get_info(index)[0] for index in set(devices))
            os.write(writer, msgspec.msgpack.encode(_CudaMemory(free, len(set(devices)) == config.pp_size)))
    finally:
        os._exit(0)
