"""Runs commands that compute, bounded by their CPU time: on a busy machine they take any multiple of it."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

# A command that neither computes nor ends is killed after this multiple of its CPU time.
_WALL_TIMES: Final = 20
# The kernel first sends a signal, then kills.
_GRACE_S: Final = 5


def run_bounded(
    command: Sequence[str], cpu_s: int, *, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a folder; return its status and output. A signal ends one that takes too long."""
    with subprocess.Popen(  # noqa: S603 - this project's own commands
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_s, cpu_s + _GRACE_S))
        try:
            said, errors = process.communicate(timeout=_WALL_TIMES * cpu_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)
