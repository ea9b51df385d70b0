"""The adapter ``sglang``: an installed SGLang's scheduler, on a CPU, with a simulated worker.

Nothing else imports SGLang. No code of SGLang is copied here. In a recorded server's process this package changes no
variable, module or log level, and provides no adapter.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from importlib.metadata import version
from typing import Final

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight.recorder import FOLDER_VARIABLE
from scripted.sdk.live.launch import PORT_VARIABLE
from scripted_sglang import stubs

__all__ = ["ADAPTER"]

if importlib.util.find_spec("sglang") is None:
    raise ScriptDefinitionError(
        "the adapter sglang needs an installed SGLang; `make sglang` makes an environment with SGLang for the CPU"
    )
_IS_RECORDED: Final = FOLDER_VARIABLE in os.environ and "sglang.srt.managers.scheduler" in sys.modules
if not _IS_RECORDED:
    # SGLang reads these on import. By default its prefix tree is in Rust and cannot be copied.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    # torch.compile would look for Triton, find a stub, and log 200 lines.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    stubs.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from scripted_sglang.adapter import ADAPTER
        except (ImportError, AttributeError) as exc:
            raise ScriptDefinitionError(
                f"the adapter sglang does not fit the installed SGLang {version('sglang')}: {exc}; it was tested with "
                "0.5.23; `make sglang` installs that version with its requirements"
            ) from exc
    if PORT_VARIABLE not in os.environ:
        # A search causes thousands of retractions, refused flushes and aborts; the root logger gets some of them.
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(lambda record: "sglang" not in record.pathname)
