"""Silences vLLM's log where its scheduler runs alone: never in a server, which may be somebody's own."""

from __future__ import annotations

import logging


def silence() -> None:
    """Flushes that find a block in use and loads that fail are answered, not logged, thousands of times."""
    log = logging.getLogger("vllm")
    if log.level != logging.CRITICAL:
        log.setLevel(logging.CRITICAL)
