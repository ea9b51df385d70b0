"""The plugin in vLLM's group ``vllm.general_plugins``, which vLLM calls in each of its processes, maybe twice."""

from __future__ import annotations

import logging
import os


def install() -> None:
    """Record this process's scheduler if LOCKSTEP_RECORD names a folder; otherwise import nothing."""
    if not os.environ.get("LOCKSTEP_RECORD"):
        return
    try:
        from scripted_vllm.flight.hook import hook_engine

        hook_engine()
    except Exception:
        # A server should rather start without its recorder than not at all.
        logging.getLogger(__name__).exception("nothing is recorded")
