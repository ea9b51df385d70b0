"""Finds installed adapters by entry points, and tells source files of the harness from others.

Imports no adapter: names and packages are enough.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

# The group of entry points under which a distribution offers its adapters: ``name = "package.module:ADAPTER"``.
GROUP: Final = "scripted.adapters"


@functools.cache
def installed_adapters() -> Mapping[str, EntryPoint]:
    """Return the entry points of all installed adapters, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)}


@functools.cache
def harness_packages() -> frozenset[str]:
    """Return the top-level packages of the harness: ``scripted`` and the packages of installed adapters."""
    return frozenset(("scripted", *(point.module.partition(".")[0] for point in installed_adapters().values())))


@functools.cache
def harness_folders() -> tuple[str, ...]:
    """Return the folders of ``harness_packages``, each with a trailing separator."""
    found = (importlib.util.find_spec(package) for package in sorted(harness_packages()))
    return tuple(f"{folder}{os.sep}" for spec in found if spec for folder in spec.submodule_search_locations or ())


def is_in_harness(file: str) -> bool:
    """Return whether a source file belongs to the harness or to an installed adapter."""
    return file.startswith(harness_folders())
