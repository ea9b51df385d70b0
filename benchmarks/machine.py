"""The machine that a benchmark runs on: its processor's features and the class that its numbers belong to.

Numbers of two classes are never compared. Reads system information; measures nothing.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import msgspec
import psutil
from rich.console import Console, RenderableType

__all__ = ["Machine", "print_with_machine"]

_CPUINFO: Final = Path("/proc/cpuinfo")
_GIB: Final = 2**30
# The features that decide a model's speed on a processor, under Linux's names: x86, then ARM.
_FEATURES: Final = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
)
# The classes with the features that they require, the best one first.
_CLASSES: Final = (
    ("AVX-512 with AMX", ("avx512f", "amx_bf16")),
    ("AVX-512 with bf16", ("avx512f", "avx512_bf16")),
    ("AVX-512", ("avx512f",)),
    ("AVX2", ("avx2",)),
    ("ARM with bf16", ("asimd", "bf16")),
    ("ARM", ("asimd",)),
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A processor and its load: ``load`` is the load average over the last minute."""

    model: str
    cores: int
    memory_gib: float
    features: tuple[str, ...]
    load: float
    system: str

    @classmethod
    def here(cls) -> Machine:
        """Return the current state of this machine."""
        lines = _CPUINFO.read_text().splitlines() if _CPUINFO.is_file() else []
        described = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        flags = set(described.get("flags", described.get("Features", "")).split())
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(
            model=described.get("model name", platform.processor() or platform.machine()),
            cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
            memory_gib=round(psutil.virtual_memory().total / _GIB, 1),
            features=tuple(feature for feature in _FEATURES if feature in flags),
            load=round(os.getloadavg()[0], 1),
            system=platform.system(),
        )

    @property
    def processor_class(self) -> str:
        """Return the processor's class; its architecture if its features are unknown."""
        for name, needed in _CLASSES:
            if set(needed) <= set(self.features):
                return name
        return platform.machine()

    def __str__(self) -> str:
        features = ", ".join(self.features) or "no known features"
        return f"{self.cores} cores of {self.model} ({features}), {self.memory_gib:g} GiB, load {self.load:g}"


def print_with_machine(table: RenderableType) -> None:
    """Print a table, and below it the machine."""
    console = Console(width=120)
    console.print(table)
    console.print(f"{Machine.here().processor_class}: {Machine.here()}")
