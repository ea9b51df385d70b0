"""Checks a server for growth around the scheduler: descriptors of its processes, registries of its front end.

It runs in the test's process, between two scripts, when the engine is idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Set
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import psutil

from engine.process.control import Serving
from engine.server.placement.ray_order import RAY
from scripted.core.violation import Violation

# A front end that has just sent a final message has not closed the connection yet. On a busy machine it may not run for
# seconds.
SETTLE_TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 30.0
_INTERVAL_S: Final = 0.005
# It answers at once: it does not ask the scheduler, which stands still between two scripts.
_PATH: Final = "/server_info?timeout=0"
# Linux's tables of connections. Reading one takes milliseconds, because the kernel walks its whole hash table.
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"
_SCHEDULER: Final = "scheduler"
_IDLE: Final = "the server is idle, but it has grown"


class _Registries(msgspec.Struct):
    """The sizes of the front end's registries in the answer of ``/server_info``."""

    open_requests: int
    open_calls: int


class ServerGrowth:
    """Compares an idle server with its state when this object was made, before the first script."""

    def __init__(self, serving: Serving) -> None:
        address = urlsplit(serving.base_url)
        assert address.port is not None, f"the address of a server has its port, got {serving.base_url}"
        self._address, self._port = address.netloc, address.port
        front_end = psutil.Process(serving.pids["frontend"])
        readers = {f"{child.name()} of the front end": child for child in front_end.children()}
        # Ray's driver has connections and threads of Ray's own.
        ours = {name: psutil.Process(pid) for name, pid in serving.pids.items() if name != RAY}
        self._processes = ours | readers
        self._before = _descriptors(self._processes, self._port)

    def leave_out(self, name: str) -> None:
        """Exclude a process, because the harness keeps descriptors in it from now on."""
        self._processes.pop(name, None)

    def check(self, spare: int = 0) -> None:
        """Raise Violation that names the growth, or says that the front end does not answer.

        A process may have ``spare`` more descriptors, for open connections to other engines.
        """
        _settle(self._grown_registries, _IDLE)
        _settle(lambda: self._grown_descriptors(spare), _IDLE)

    def check_scheduler(self) -> None:
        """Raise Violation for descriptors that a script has left in the process that it ran in.

        Requests of the script may still be open, so the other processes are not checked.
        """
        if _SCHEDULER in self._processes:
            _settle(lambda: self._grown_descriptors(0, only=_SCHEDULER), "the script has left files open")

    def _grown_registries(self) -> list[str]:
        found = msgspec.structs.asdict(self._registries())
        return [f"the front end has {size} {name.replace('_', ' ')}" for name, size in found.items() if size]

    def _registries(self) -> _Registries:
        connection = HTTPConnection(self._address, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("GET", _PATH)
            return msgspec.json.decode(connection.getresponse().read(), type=_Registries)
        except (OSError, HTTPException, msgspec.DecodeError) as exc:
            raise Violation(f"the front end does not report its registries, {_PATH} failed: {exc}") from exc
        finally:
            connection.close()

    def _grown_descriptors(self, spare: int, *, only: str | None = None) -> list[str]:
        most = {name: before + spare for name, before in self._before.items()}
        looked_at = {name: process for name, process in self._processes.items() if only in (None, name)}
        grown = {name: one for name, one in looked_at.items() if one.num_fds() > most[name]}
        # The tables of connections are read only for processes that seem to have grown.
        return [
            f"{name} has {count} open descriptors, at first {self._before[name]}"
            for name, count in _descriptors(grown, self._port).items()
            if count > most[name]
        ]


def _descriptors(processes: Mapping[str, psutil.Process], port: int | None) -> Mapping[str, int]:
    """Count the open descriptors of each process, without connections that clients keep open to ``port``.

    Up to 64 of those are the harness's, others a test's. The client's end of a connection that the front end has
    closed for idleness stays open until the next request. The front end's own end counts as soon as its client has
    left.
    """
    kept = _kept_sockets(port) if processes and _TABLES[0].exists() else None
    return {name: process.num_fds() - _kept_by(process, port, kept) for name, process in processes.items()}


def _kept_sockets(port: int | None) -> Set[str]:
    """Find the sockets of such connections, as descriptor links name them, for all processes at once."""
    kept = set()
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            _, _, remote, state, _, _, _, _, _, inode, *_ = line.split()
            if state == _ESTABLISHED or int(remote.rpartition(":")[2], 16) == port:
                kept.add(f"socket:[{inode}]")
    return kept


def _kept_by(process: psutil.Process, port: int | None, kept: Set[str] | None) -> int:
    if kept is not None:
        return sum(link in kept for link in _links_of(process))
    return sum(
        connection.status == psutil.CONN_ESTABLISHED or connection.raddr[1:] == (port,)
        for connection in process.net_connections("tcp")
    )


def _links_of(process: psutil.Process) -> Iterator[str]:
    """Yield the targets of a process's descriptors. Meanwhile the process may close some, or end."""
    with contextlib.suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield str(descriptor.readlink())


def _settle(grown: Callable[[], list[str]], what: str) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while found := grown():
        if time.monotonic() > deadline:
            raise Violation(f"{what}: {'; '.join(found)}")
        time.sleep(_INTERVAL_S)
