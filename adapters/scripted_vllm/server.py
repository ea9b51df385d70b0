"""``vllm serve`` with the adapter's settings: its arguments, its command line, and the changed settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from scripted.core.server_description import ServeLine, ServerDescription
from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import arguments_of, default_arguments

# Settings that are not server arguments: properties of the model, a connector's behaviour, and timing.
_OF_MODEL: Final = (
    "sliding_window", "attention_chunk_size", "swa_bounded_replay", "mamba_checkpoint_alignment", "rswa_window",
    "circular_buffer_tokens", "is_encoder_decoder", "encoder_cache_size", "encoder_compute_budget",
    "hisparse_host_blocks", "hisparse_hot_blocks",
)  # fmt: skip
_OF_SIMULATION: Final = (
    "kv_offered_tokens", "kv_transfer_steps", "kv_saves", "kv_saves_aborted", "grammar_steps", "ec_transfer_steps",
    "checks_sessions", "structured_output", "kv_cache_report_mode", "model_runner",
)  # fmt: skip
# Parts of documents that name the simulated connectors.
_SIMULATED: Final = (
    "kv_connector_module_path", "kv_connector_extra_config", "ec_connector_module_path", "ec_connector_extra_config",
)  # fmt: skip


class VllmServer(ServerDescription[VllmSettings]):
    """vLLM's OpenAI server. Scheduling is asynchronous there by default."""

    defaults: ClassVar = {"async_scheduling": True}
    sizes: ClassVar = (
        "block_size", "num_gpu_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_offered_tokens",
        "kv_transfer_steps", "grammar_steps", "ec_transfer_steps", "encoder_compute_budget", "log_stats",
        "structured_output", "checks_sessions",
    )  # fmt: skip
    token_counts: ClassVar = (
        "block_size", "max_model_len", "max_num_batched_tokens", "long_prefill_token_threshold", "sliding_window",
        "attention_chunk_size", "rswa_window", "kv_offered_tokens", "prefix_match_unit",
    )  # fmt: skip
    block_size: ClassVar = "block_size"
    switches: ClassVar = ("async_scheduling",)
    issue_form: ClassVar = (
        ("Your current environment", ("environment", "flags")),
        (
            "Describe the bug",
            ("what happens", "what should happen", "script", "cause", "who is affected", "what is known upstream"),
        ),
    )

    def command(self, config: VllmSettings) -> ServeLine:
        given = {name: _as_typed(value) for name, value in arguments_of(config).items()}
        defaults = default_arguments()
        words = ["vllm", "serve", "MODEL"]
        for name, value in given.items():
            words += _flag(name, value)
        changed = tuple(f"{name}={_text(value)} (default {_text(defaults[name])})" for name, value in given.items())
        return ServeLine(" ".join(words), changed, tuple(_beside(config)))


def _as_typed(value: object) -> object:
    """Remove a document's parts that only the simulation needs, and insert placeholders for the user's choices."""
    if not isinstance(value, Mapping):
        return value
    chosen = {"kv_connector": "CONNECTOR", "ec_connector": "CONNECTOR", "model": "DRAFT_MODEL"}
    return {name: chosen.get(name, one) for name, one in value.items() if name not in _SIMULATED}


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", shlex.quote(_text(value))]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _beside(config: VllmSettings) -> list[str]:
    given, default = (msgspec.structs.asdict(one) for one in (config, VllmSettings()))
    changed = [name for name in (*_OF_MODEL, *_OF_SIMULATION) if given[name] != default[name]]
    return [f"{'model' if name in _OF_MODEL else 'simulation'}: {name}={given[name]}" for name in changed]
