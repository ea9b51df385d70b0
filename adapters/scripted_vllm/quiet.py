"""Silences vLLM's log where its scheduler runs alone, never in a server, which may be in production."""

from __future__ import annotations

import logging


def silence() -> None:
    """Silence refused flushes and failed loads: a search sees thousands of them, and their callers get an answer."""
    log = logging.getLogger("vllm")
    if log.level != logging.CRITICAL:
        log.setLevel(logging.CRITICAL)
