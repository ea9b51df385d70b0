"""Optional extras: whether their packages are installed, and the error of a command that needs a missing one.

The harness and the simulated tier need none. Imports no package that it looks for.
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
SERVE_MODULES: Final = frozenset(
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
    """True if a module can be found; an empty name always is. Imports its parent packages alone."""
    try:
        return not module or importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def serve_is_installed() -> bool:
    """True if a server can be started here."""
    return all(importlib.util.find_spec(name) is not None for name in SERVE_MODULES)


@contextmanager
def naming_the_extra(command: str) -> Iterator[None]:
    """Run the command ``command``. Exits with one line on stderr if a package of the extra is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in SERVE_MODULES:
            raise
        sys.stderr.write(f"{command}: this needs the package {missing}, which is not installed; {INSTALL_SERVE}\n")
        raise SystemExit(_EXIT_WRONG) from None
