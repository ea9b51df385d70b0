"""Configurations of the engine as text in a schedule, and their limits in the sim tier.

Nothing is loaded, neither weights nor a tokenizer, because the simulated pipeline derives tokens from the KV.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from engine.core.config import EngineConfig, embedded_seed, require_lora_names
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_TOTAL_TOKENS, Limits, embedded_facts

# The records of this many pages take a gigabyte.
MOST_PAGES: Final = 1 << 22


def config_values(config: EngineConfig) -> dict[str, Any]:
    """Return the values that are not at their defaults."""
    fields = type(config).model_fields
    return {name: value for name, value in config.model_dump().items() if value != fields[name].default}


@functools.lru_cache(maxsize=1024)
def limits_of(config: EngineConfig) -> Limits:
    """Resolve a configuration as in the sim tier, where the KV holds at least one full context by default.

    Raises CheckpointError for a model without a configuration, ConfigError for impossible settings.
    """
    require_lora_names(config.lora, config.model)
    kept = {"max_total_tokens": config.max_total_tokens or 0, "host_kv_tokens": config.host_kv_tokens}
    for name, tokens in kept.items():
        if tokens > MOST_PAGES * config.page_size:
            raise ConfigError(
                f"{name} must be at most {MOST_PAGES} pages of page_size={config.page_size} tokens in the sim tier, "
                f"which keeps a record of each, got {tokens}; lower it or use larger pages"
            )
    if embedded_seed(config.model, config.seed) is not None:
        return Limits.of(config, embedded_facts(config.model))
    from engine.model.checkpoint import read_configured_facts  # seconds of import, for a folder only

    facts = read_configured_facts(config)
    context = config.context_length or facts.context_length
    return Limits.of(config, facts, total_tokens=max(EMBEDDED_TOTAL_TOKENS, context))


def smaller_configs(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yield configurations with one setting at its default, or with a number closer to it, halved or one lower."""
    values = config_values(config)
    for name, value in values.items():
        default = EngineConfig.model_fields[name].default
        smaller = [default]
        if type(value) is int and value > 1:
            smaller += [default + (value - default) // 2] if isinstance(default, int) and value > default else []
            smaller += [value // 2, value - 1]
        for less in dict.fromkeys(smaller):
            if less != value:
                with suppress(ConfigError):
                    yield EngineConfig(**{**values, name: less})
