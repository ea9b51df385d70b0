"""Silences vLLM's log where its scheduler runs alone, and never in a server, which may be somebody else's."""

from __future__ import annotations

import logging


def silence() -> None:
    """Silence refused flushes and failed loads: they are answered, and a search has thousands of them."""
    log = logging.getLogger("vllm")
    if log.level != logging.CRITICAL:
        log.setLevel(logging.CRITICAL)
