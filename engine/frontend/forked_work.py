"""Runs each piece of work in a process of its own: the event loop goes on, and the memory returns when it ends.

A parent is forked before there is a thread or a loop, and forks a process for each piece. It reads nothing of the work,
so what breaks a worker leaves it whole. Both die with the process that they work for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing import current_process
from pathlib import Path
from typing import NoReturn, Self

from engine.process.inheritance import close_inherited_files, die_with_parent, name_process

__all__ = ["ForkedWork", "WorkLostError"]

# All clients together can make it use at most two cores and twice the memory of one piece.
WORKERS_AT_ONCE = 2
# The longest body takes far less. A piece that takes longer is given up.
MAX_CPU_S = 60
MAX_WAIT_S = 120.0
RECEIVE_BYTES = 2**18
# The kernel ends these processes first when the machine runs out of memory.
MOST_EXPENDABLE = "1000"
# Streams take precedence over bodies on a shared core.
NICENESS = 10
_LENGTH = struct.Struct("=Q")
_ONE_MORE = b"+"
STDERR = 2


class WorkLostError(Exception):
    """A worker ended without an answer, or none could be forked."""


class ForkedWork:
    """Calls ``work`` on bytes in processes of their own. ``fileno()`` is readable when their parent is gone."""

    def __init__(self, orders: socket.socket, parent_pid: int) -> None:
        self._orders = orders
        self._parent_pid = parent_pid
        self._slots = asyncio.Semaphore(WORKERS_AT_ONCE)

    @classmethod
    def start(cls, name: str, work: Callable[[bytes], bytes]) -> Self:
        """Fork the parent. Call it before this process starts a thread."""
        ours, theirs = socket.socketpair()
        owner_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.fork()
        if parent_pid == 0:
            _run_parent(theirs, owner_pid, name, work)
        theirs.close()
        return cls(ours, parent_pid)

    def fileno(self) -> int:
        """The file descriptor to wait on for the parent's end."""
        return self._orders.fileno()

    async def run(self, data: bytes) -> bytes:
        """The work's answer. Raises WorkLostError when its process ended without one."""
        async with self._slots:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    return await self._exchange(data)
            except (OSError, TimeoutError) as exc:
                raise WorkLostError(
                    f"the process of this work could not finish it: {exc or 'it took too long'}"
                ) from exc

    def close(self) -> None:
        """End the parent, and with it all its children."""
        self._orders.close()
        os.kill(self._parent_pid, signal.SIGKILL)
        os.waitpid(self._parent_pid, 0)

    async def _exchange(self, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._orders, [_ONE_MORE], [theirs.fileno()])
            ours.setblocking(False)
            await loop.sock_sendall(ours, data)
            ours.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while part := await loop.sock_recv(ours, RECEIVE_BYTES):
                answer += part
        if len(answer) < _LENGTH.size or _LENGTH.unpack_from(answer)[0] != len(answer) - _LENGTH.size:
            raise WorkLostError("the process of this work ended without an answer")
        return bytes(memoryview(answer)[_LENGTH.size :])


def _run_parent(orders: socket.socket, owner_pid: int, name: str, work: Callable[[bytes], bytes]) -> NoReturn:
    """Fork a worker for each socket that comes, until the owner is gone."""
    try:
        close_inherited_files([orders.fileno()])
        current_process().name = name
        name_process(name)
        # It ends with its owner: what is sent to a whole group, Ctrl-C or the SIGTERM of a service's stop, must not end
        # it while its owner drains.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The kernel reaps its workers.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        die_with_parent(owner_pid, signal.SIGKILL)
        while True:
            word, files, _, _ = socket.recv_fds(orders, len(_ONE_MORE), 1)
            if not word:
                break
            _fork_worker(orders, files[0], work)
    except BaseException:  # noqa: BLE001 - nothing of the owner's stack may run twice
        os.write(STDERR, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _fork_worker(orders: socket.socket, file: int, work: Callable[[bytes], bytes]) -> None:
    """Fork a worker. When the machine has no process left, the closed socket tells the owner."""
    parent_pid = os.getpid()
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            orders.close()
            _run_worker(file, parent_pid, work)
    os.close(file)


def _run_worker(file: int, parent_pid: int, work: Callable[[bytes], bytes]) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent_pid, signal.SIGKILL)
        _limit_worker()
        # Closed by the end of this process: a cause of death is written before its owner hears of the death.
        connection = socket.socket(fileno=file)
        question = bytearray()
        while part := connection.recv(RECEIVE_BYTES):
            question += part
        answer = work(bytes(question))
        connection.sendall(_LENGTH.pack(len(answer)))
        connection.sendall(answer)
        status = 0
    except BrokenPipeError:  # Its owner waits no longer.
        status = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent's stack may run twice
        os.write(STDERR, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _limit_worker() -> None:
    """Bound a worker: no garbage collection, no core file, low priority, first to be killed, limited CPU time."""
    gc.disable()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    bound_s = MAX_CPU_S if most_s == resource.RLIM_INFINITY else min(MAX_CPU_S, most_s)
    resource.setrlimit(resource.RLIMIT_CPU, (bound_s, bound_s))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE)
