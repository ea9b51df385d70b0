"""The extras: whether what they bring is installed, and what a command says that needs it.

The harness and the simulated tier do without it. Imports none of what it looks for.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INSTALL_SERVE: Final = "pip install 'lockstep-engine[serve]'"
INSTALL_TRACING: Final = "pip install 'lockstep-engine[tracing]'"
TRACE_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_EXIT_WRONG: Final = 2
_MODULES: Final = frozenset(
    (
        "fastapi",
        "fastapi_offline",
        "httpx",
        "huggingface_hub",
        "prometheus_client",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "transformers",
        "uvicorn",
        "yaml",
        "zmq",
    )
)


def is_importable(module: str) -> bool:
    """Whether a module can be found; no module is. Only the packages that it is in are imported."""
    try:
        return not module or importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def serve_is_installed() -> bool:
    """Whether servers can be started here."""
    return all(importlib.util.find_spec(name) is not None for name in _MODULES)


@contextmanager
def naming_the_extra(command: str) -> Iterator[None]:
    """Run a command of this name. Raises SystemExit, with one line on stderr, when it lacks a package of the extra."""
    try:
        yield
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in _MODULES:
            raise
        sys.stderr.write(f"{command}: this needs the package {missing}, which is not installed; {INSTALL_SERVE}\n")
        raise SystemExit(_EXIT_WRONG) from None
