"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, for tests.

It owns the nodes' processes and their folder; it connects to nothing, so no thread of Ray is in this process. Ray is an
optional extra and imported here alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import psutil

from engine.core.errors import StartupError
from engine.server.placement.ray_order import NICENESS
from lockstep.ray_environment import ray_defaults, reread_environment

# Ray's own sockets are in the folder, with names of 70 characters, and a socket's path may have 107.
SHORT_FOLDER: Final = "/tmp"  # noqa: S108 - a new folder is made in it
# The smallest object store that Ray accepts; stages share nothing through it.
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
GONE_TIMEOUT_S: Final = 10.0


class LocalCluster:
    """``nodes`` nodes of ``cpus`` CPUs each, the head among them."""

    def __init__(self, nodes: int, *, cpus: int = 1) -> None:
        """Raises StartupError where Ray is not installed."""
        before = set(_children())
        self._folder = tempfile.mkdtemp(prefix="ray-", dir=SHORT_FOLDER)
        self._nodes: dict[str, Any] = {}
        self._processes: list[psutil.Process] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            with _environment(self._folder):
                self._cluster: Any = _new_cluster()
                try:
                    with _quiet(), _own_sigterm():
                        self._start(nodes, cpus)
                finally:
                    self._processes = [one for one in _children() if one not in before]
            stack.pop_all()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def node_of(self, pid: int) -> str:
        """Return Ray's id of the node to which this process belongs."""
        raylets = {node.all_processes["raylet"][0].process.pid: node_id for node_id, node in self._nodes.items()}
        family = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
        return next(raylets[one] for one in family if one in raylets)

    def can_lose(self, node_id: str) -> bool:
        """Return whether the cluster survives the loss of this node: true for all but the head."""
        return self._cluster.head_node is not self._nodes[node_id]

    def kill_node(self, node_id: str) -> None:
        """Kill all processes of a node, as the loss of a machine does."""
        with _quiet():
            self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def close(self) -> None:
        """End all nodes, and remove what they wrote; idempotent."""
        with (
            _quiet(),
            contextlib.suppress(Exception),
        ):  # A node that cannot be stopped, or never started, must not keep the others alive.
            self._cluster.shutdown()
        _, left = psutil.wait_procs(self._processes, timeout=GONE_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=GONE_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, nodes: int, cpus: int) -> None:
        for number in range(nodes):
            # Not 127.0.0.1, which Ray's drivers replace by an address that other machines can reach.
            node = self._cluster.add_node(
                node_ip_address=f"127.0.0.{number + 2}",
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
            self._nodes[node.node_id] = node
        self._cluster.wait_for_nodes()


def _new_cluster() -> Any:
    """Make a cluster without nodes, under the nodes' environment, which decides whether they require tokens."""
    try:
        reread_environment()
        from ray.cluster_utils import Cluster
    except ImportError as exc:
        raise StartupError("a local cluster needs Ray, which is not installed; install lockstep-engine[ray]") from exc
    return Cluster()


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
    """Return the environment of the nodes' processes: their folder, the user's token, no reports and no metrics."""
    # Killed processes leave their files: those of agents are in the folder too.
    settings = {
        "TMPDIR": folder,
        "RAY_TMPDIR": folder,
        "RAY_enable_metrics_collection": "0",
        # Ray kills workers when the machine's memory is nearly full, whoever uses it.
        "RAY_memory_monitor_refresh_ms": "0",
        NICENESS: "0",
    }
    # The driver presents the user's token, and accepts only nodes that require it.
    settings |= ray_defaults()
    # Ray notes the address of the newest cluster there, for drivers without one.
    (Path(folder) / "ray").mkdir()
    with patch.dict(os.environ, settings):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of the garbage collector about Ray's sockets, which appear in unrelated tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore this process's handler of SIGTERM, which a node that starts replaces by Ray's.

    Without Ray's handler the nodes still end with this process: Ray starts a reaper beside each.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _children() -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children
