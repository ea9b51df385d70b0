"""The adapter ``sglang``: the scheduler of an installed SGLang, on a CPU, with a simulated worker.

Nothing else imports SGLang, and nothing of SGLang is kept here.
"""

from __future__ import annotations

import logging
import os
import warnings

from scripted.adapters.sglang import stubs
from scripted.core.refusals import ScriptDefinitionError

__all__ = ["ADAPTER"]

# SGLang reads them when it is imported. The tree of its prefix cache is Rust by default, which cannot be copied.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
_WITHOUT = stubs.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import sglang.srt.managers.scheduler  # noqa: F401 - whether it is there
    except ImportError as exc:
        raise ScriptDefinitionError(
            f"the adapter sglang needs an installed SGLang: {exc}; `make sglang` makes an environment with one that "
            "runs on the CPU"
        ) from exc
    # Retractions, refused flushes and aborts are answered, not logged, thousands of times; some by the root logger.
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "sglang" not in record.pathname)
    from scripted.adapters.sglang.adapter import ADAPTER
