"""The command of a live vLLM: its own OpenAI server on loopback, a tiny random model, and our hook as a plugin of it.

vLLM loads the plugins of its documented group ``vllm.general_plugins`` in each of its processes. The private folder has
the metadata of one, and is on their path; nothing of vLLM is edited.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.adapters.vllm.config import VllmSettings
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.live.launch import ServerCommand

PORT_VARIABLE: Final = "SCRIPTED_VLLM_PORT"
SETTINGS_VARIABLE: Final = "SCRIPTED_VLLM_SETTINGS"
# What vLLM's attention on a CPU computes in one go.
_BLOCK_SIZE: Final = 32
# Settings that only the simulated runner understands.
_SIMULATED: Final = (
    *("pipeline_parallel_size", "num_speculative_tokens", "sliding_window", "enable_kv_cache_events"),
    *("kv_connector", "async_scheduling", "structured_output", "max_loras"),
)
_FLAGS: Final = ("enable_prefix_caching", "enable_chunked_prefill", "scheduler_reserve_full_isl")
_VALUES: Final = (
    *("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("long_prefill_token_threshold", "watermark"),
)


def launch(settings: VllmSettings, folder: Path, port: int) -> ServerCommand:
    """Raises ScriptDefinitionError for settings that a live vLLM on a CPU does not have."""
    _check(settings)
    _write_plugin(folder)
    values = {name: getattr(settings, name) for name in _VALUES}
    values |= {"num_gpu_blocks_override": settings.num_gpu_blocks, "scheduling_policy": settings.policy}
    flags = [f"--{'' if getattr(settings, name) else 'no-'}{name.replace('_', '-')}" for name in _FLAGS]
    command = [
        *(sys.executable, "-m", "scripted.adapters.vllm.live.serve", str(folder / "model")),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--enforce-eager", "--no-async-scheduling", "--disable-log-stats"),
        *(word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))),
        *flags,
    ]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        PORT_VARIABLE: str(port),
        SETTINGS_VARIABLE: _words(settings),
        # /reset_prefix_cache, /pause and /resume are routes of its development mode.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The engine and its worker need not import vLLM again.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return ServerCommand(command, environment)


def _check(settings: VllmSettings) -> None:
    default = VllmSettings()
    strange = [name for name in _SIMULATED if getattr(settings, name) != getattr(default, name)]
    if strange:
        raise ScriptDefinitionError(
            f"a live vLLM on a CPU runs one synchronous stage, without guesses, windows, events and connectors, and "
            f"this script sets {', '.join(strange)}; run it with --tier sim"
        )
    if settings.block_size % _BLOCK_SIZE:
        raise ScriptDefinitionError(
            f"vLLM's attention on a CPU takes a block_size that is a multiple of {_BLOCK_SIZE}, got "
            f"{settings.block_size}; set one, or run this script with --tier sim"
        )


def _words(settings: Any) -> str:
    return msgspec.json.encode(settings).decode()


def _write_plugin(folder: Path) -> None:
    metadata = folder / "scripted_live-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-live\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nscripted_live = scripted.adapters.vllm.live.hook:install\n"
    )
