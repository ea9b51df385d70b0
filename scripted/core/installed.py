"""Installed adapters, found by entry points, and which source files belong to the harness.

Imports no adapter: it knows their names and packages alone.
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
    """The adapters that installed distributions offer, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)}


@functools.cache
def harness_packages() -> frozenset[str]:
    """The top-level packages of the harness: ``scripted`` and those of installed adapters."""
    return frozenset(("scripted", *(point.module.partition(".")[0] for point in installed_adapters().values())))


@functools.cache
def harness_folders() -> tuple[str, ...]:
    """Their folders, each with a separator at its end; code in them is the harness's and not a script's."""
    found = (importlib.util.find_spec(package) for package in sorted(harness_packages()))
    return tuple(f"{folder}{os.sep}" for spec in found if spec for folder in spec.submodule_search_locations or ())


def is_in_harness(file: str) -> bool:
    """Whether a source file belongs to the harness or to an installed adapter."""
    return file.startswith(harness_folders())
