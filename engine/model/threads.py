"""The number of threads that compute one stage: as configured, or by cores, stages and the model's size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.model.checkpoint import resolve_folder
from engine.model.weight_sizes import weight_bytes

_QUOTA: Final = "sys/fs/cgroup/cpu.max"
_SIBLINGS: Final = "sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"


class ThreadRule(NamedTuple):
    """The number of threads that a backend can use: ``fewest``, and one more for each ``bytes_each`` of weights."""

    fewest: int
    bytes_each: int

    def threads(self, cores: int, stages: int, weights: int) -> int:
        """Return the threads for each of ``stages`` processes on ``cores``, for a model of ``weights`` bytes.

        A single stage may take all cores, including the front end's; several stages share them.
        """
        if stages > 1:
            return max(1, cores // stages)
        return min(cores, self.fewest + weights // self.bytes_each)


# On two cores OpenVINO served a model of 10 MiB 1.1 to 1.4 times as fast with two threads as with one, and one of
# 1.1 GiB 1.4 to 1.8 times.
OPENVINO_THREADS: Final = ThreadRule(fewest=2, bytes_each=8 << 20)
# Torch's threads spin while they wait for each other: a step of a small model took 3 ms with one thread; with two it
# took 3 ms alone and 16 ms beside a busy process.
TORCH_THREADS: Final = ThreadRule(fewest=1, bytes_each=64 << 20)


def stage_threads(config: EngineConfig, limits: Limits, rule: ThreadRule) -> int:
    """Return the configured number, or the rule's, but at most ``OMP_NUM_THREADS``."""
    if config.threads is not None:
        return config.threads
    threads = rule.threads(usable_cores(), limits.pp_size, weight_bytes(resolve_folder(config)))
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
