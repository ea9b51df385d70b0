"""The resident part of a file's mappings in this process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resident_kib"]


def resident_kib(path: Path) -> int:
    """Return the resident memory by the kernel's account, in KiB."""
    found, own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.startswith("VmFlags"):
            own = line.endswith(str(path))
        elif own and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
