"""The command of a live vLLM: its own OpenAI server, with our hook in its documented plugin group."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.live.launch import MODEL, Plugin, ServerCommand, check_simulated, option_words, server_command
from scripted_vllm.config import VllmSettings

# vLLM calls it in each of its processes.
_PLUGIN: Final = Plugin("vllm.general_plugins", "scripted_vllm.live.hook:install")
# The block size of vLLM's CPU attention.
_BLOCK_SIZE: Final = 32
# Settings that only the simulated runner understands.
_SIMULATED: Final = (
    "pipeline_parallel_size", "num_speculative_tokens", "sliding_window", "enable_kv_cache_events", "kv_connector",
    "async_scheduling", "structured_output", "max_loras",
)  # fmt: skip
_FLAGS: Final = ("enable_prefix_caching", "enable_chunked_prefill", "scheduler_reserve_full_isl")
_VALUES: Final = (
    "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold",
    "watermark",
)  # fmt: skip
_RUNS: Final = "a live vLLM on a CPU runs one synchronous stage, without guesses, windows, events or connectors"


def launch(settings: VllmSettings, folder: Path, port: int) -> ServerCommand:
    """Return the command. Raises ScriptDefinitionError for settings that a live vLLM on a CPU lacks."""
    check_simulated(settings, _SIMULATED, _RUNS)
    if settings.block_size % _BLOCK_SIZE:
        raise ScriptDefinitionError(
            f"vLLM's attention on a CPU takes a block_size that is a multiple of {_BLOCK_SIZE}, got "
            f"{settings.block_size}; set one, or run this script with --tier sim"
        )
    models = folder / MODEL
    values = {name: getattr(settings, name) for name in _VALUES}
    values |= {"num_gpu_blocks_override": settings.num_gpu_blocks, "scheduling_policy": settings.policy}
    values |= {
        "host": "127.0.0.1",
        "port": port,
        "model": models / "0",
        "served_model_name": "tiny",
        "dtype": "float32",
    }
    flags = [f"--{'' if getattr(settings, name) else 'no-'}{name.replace('_', '-')}" for name in _FLAGS]
    command = [
        "scripted.sdk.live.model", str(models), "vllm.entrypoints.openai.api_server", "--enforce-eager",
        "--no-async-scheduling", "--disable-log-stats", *option_words(values), *flags,
    ]  # fmt: skip
    environment = {
        # /reset_prefix_cache, /pause and /resume are routes of its development mode.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The engine and its worker need not import vLLM again.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return server_command(settings, folder, port, _PLUGIN, command, environment)
