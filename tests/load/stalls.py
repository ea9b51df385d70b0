"""How long processes of this machine waited for a core or a disk: no server can answer in that time.

Owns the reading of the kernel's counters.
"""

from __future__ import annotations

import re
from pathlib import Path

PRESSURE = Path("/proc/pressure")
KINDS = ("cpu", "io")


def stalled_s(folder: Path = PRESSURE) -> float:
    """The seconds, since the machine's start, in which some process had to wait; 0 where the kernel does not count."""
    files = [folder / kind for kind in KINDS]
    found = [re.search(r"^some .*total=(\d+)", file.read_text(encoding="ascii")) for file in files if file.exists()]
    return sum(int(one[1]) for one in found if one) / 1e6
