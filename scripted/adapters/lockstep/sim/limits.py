"""The limits of the sim tier: the embedded model's facts, or those of any folder that holds a ``config.json``.

Needs no weights and no tokenizer, because nothing is loaded: the simulated pipeline makes its tokens from the KV alone.
"""

from __future__ import annotations

import functools
from typing import Final

from engine.config import EngineConfig, embedded_seed, require_lora_names
from engine.errors import ConfigError
from engine.limits import EMBEDDED_TOTAL_TOKENS, Limits, embedded_facts

# A gigabyte of records.
MOST_PAGES: Final = 1 << 22


@functools.lru_cache(maxsize=1024)
def simulated_limits(config: EngineConfig) -> Limits:
    """A configuration resolved as in the sim tier, whose KV holds at least one full context where it does not say.

    Raises CheckpointError for a model that is no folder with a configuration, ConfigError for what it cannot do.
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
