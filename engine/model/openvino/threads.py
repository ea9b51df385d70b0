"""OpenVINO's threads for a stage: as configured, or by the cores, the stages and the model's size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.model.capacity import weight_bytes
from engine.model.checkpoint import resolve_folder

# A small model has no work for many threads: two, and one more for each of these bytes of its weights.
_FEWEST: Final = 2
_BYTES_A_THREAD: Final = 8 << 20
_QUOTA: Final = "sys/fs/cgroup/cpu.max"
_SIBLINGS: Final = "sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"


def forward_threads(cores: int, stages: int, weights: int) -> int:
    """Return the threads of each of ``stages`` processes on a machine of ``cores``, for a model of ``weights`` bytes.

    One stage takes all cores, the front end's too: on two of them it served a model of 10 MiB 1.1 to 1.4 times as fast
    with two threads as with one, and one of 1.1 GiB 1.4 to 1.8 times. Several stages share them.
    """
    if stages > 1:
        return max(1, cores // stages)
    return min(cores, _FEWEST + weights // _BYTES_A_THREAD)


def stage_threads(config: EngineConfig, limits: Limits) -> int:
    """Return the configured number, or the rule's, but at most ``OMP_NUM_THREADS``."""
    if config.threads is not None:
        return config.threads
    threads = forward_threads(usable_cores(), limits.pp_size, weight_bytes(resolve_folder(config)))
    most = os.environ.get("OMP_NUM_THREADS", "")
    return min(threads, int(most)) if most.isdecimal() and int(most) else threads


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use: by its affinity, without hyperthreads, within its quota."""
    cores = len({_read(root / _SIBLINGS.format(cpu=cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)})
    quota, _, period = _read(root / _QUOTA).partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _read(path: Path) -> str:
    """Read a file of the kernel; empty without one."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
