"""Runs units of a campaign on Ray: on many machines, or on a local Ray that lives as long as the campaign.

Knows nothing about the search: a unit describes its work. Ray is an optional extra, imported only here.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import psutil

from lockstep.ray_environment import ray_defaults, reread_environment
from scripted.core.refusals import ScriptDefinitionError

if TYPE_CHECKING:
    from scripted.search.units import SearchPlan, Unit, UnitResult

LOCAL: Final = "local"
_LOOPBACK: Final = "127.0.0.1"
_CLIENT_SCHEME: Final = "ray://"
_GRACE_S: Final = 10.0
_QUIET: Final[dict[str, object]] = {"log_to_driver": False, "logging_level": "ERROR"}


class RayPool:
    """Runs units on the Ray that this process is connected to, which has ``cores`` CPUs."""

    def __init__(self, ray: Any) -> None:
        self._run = ray.remote(num_cpus=1)(_run_switched_on)
        self.cores = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, unit: Unit, plan: SearchPlan) -> Future[UnitResult]:
        future: Future[UnitResult] = self._run.remote(unit, plan).future()
        return future


@contextmanager
def ray_pool(address: str, jobs: int) -> Iterator[RayPool]:
    """Connect to the cluster at ``address``; for 'local', start one of ``jobs`` CPUs on loopback and end it again.

    Raises ScriptDefinitionError if Ray is not installed or no cluster answers there.
    """
    # Ray knows the token of a cluster that it starts.
    defaults = ray_defaults()
    if address == LOCAL:
        defaults.pop("RAY_AUTH_MODE", None)
    os.environ.update(defaults | os.environ)
    try:
        import ray

        reread_environment()
    except ModuleNotFoundError as exc:
        raise ScriptDefinitionError(
            f"--ray {address} needs Ray, which is not installed; install lockstep-engine[ray], or use --jobs"
        ) from exc
    with _local(ray, jobs) if address == LOCAL else _cluster(ray, address):
        yield RayPool(ray)


@contextmanager
def _local(ray: ModuleType, jobs: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        own: dict[str, object] = {"include_dashboard": False, "_temp_dir": folder, "_node_ip_address": _LOOPBACK}
        ray.init(num_cpus=jobs, **_QUIET, **own)
        try:
            yield
        finally:
            started = [child for child in psutil.Process().children(recursive=True) if _is_of(child, folder)]
            ray.shutdown()
            # Ray returns before its processes have ended, and they write into the folder until then.
            _, left = psutil.wait_procs(started, timeout=_GRACE_S)
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=_GRACE_S)


@contextmanager
def _cluster(ray: ModuleType, address: str) -> Iterator[None]:
    try:
        _knock(address)
        ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError, ValueError) as exc:
        raise ScriptDefinitionError(
            f"--ray must be 'local', 'auto' or the address of a Ray cluster that answers, got {address!r}: {exc}"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, where Ray itself would keep trying for minutes."""
    host, colon, port = address.removeprefix(_CLIENT_SCHEME).rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_GRACE_S).close()


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False


def _run_switched_on(unit: Unit, plan: SearchPlan) -> UnitResult:
    from scripted.search.units import run_unit

    with plan.switched_on():
        return run_unit(unit, plan)
