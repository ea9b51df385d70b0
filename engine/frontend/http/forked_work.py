"""Runs long bodies and checks in worker processes, so that the event loop never stalls and their memory is freed.

A parent, forked before any thread or loop exists, forks a worker for each piece of work. It never reads the work, so
input that crashes a worker cannot crash it. A worker is limited in time and memory, and is killed if its caller is
cancelled; a parent that hangs is killed. Both die with the process that they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import heapq
import os
import re
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from multiprocessing import current_process
from pathlib import Path
from typing import Final, NoReturn, Protocol, Self

import msgspec

from engine.frontend.schema.errors import ApiError, ErrorDetail, ErrorType
from engine.process.inheritance import close_inherited_files
from engine.process.signals import leave_stops_to_the_supervisor
from lockstep.process_control import die_with_parent, name_process

# Bodies of all clients together use at most two cores and twice the memory of a worker; checks have two more workers.
WORKERS_AT_ONCE: Final = 2
# A worker that takes longer is killed. The longest body takes far less.
WORK_LIMIT_S: Final = 60.0
# A check that takes longer is killed to let shorter ones pass, and starts again in the queue of long ones.
QUICK_CHECK_S: Final = 1.0
CHECK_LIMIT_S: Final = 20.0
# The limit for the parent to fork, which takes milliseconds, or seconds on a busy core. One that hangs is killed
# sooner.
FORK_LIMIT_S: Final = 20.0
# In addition to a worker's memory at its fork. The longest body takes 60 bytes per byte, as measured.
MEMORY_BYTES: Final = 768 * 2**20
MEMORY_A_BYTE: Final = 64
RECEIVE_BYTES: Final = 2**18
# The kernel kills these processes first if the machine runs out of memory.
MOST_EXPENDABLE: Final = "1000"
# The niceness of workers: on a shared core streams take precedence over bodies.
NICENESS: Final = 10
_LENGTH: Final = struct.Struct("=Q")
# A worker's first message: its pid.
_PID: Final = struct.Struct("=q")
_ONE_MORE: Final = b"+"
STDERR: Final = 2


class WorkLostError(Exception):
    """A worker ended without an answer, or none could be forked."""


class WorkTooLargeError(WorkLostError):
    """A worker exceeded its time or memory, or its work crashed it."""


class ForkedWork:
    """Calls ``work`` on bytes in worker processes. ``fileno()`` is readable when their parent is gone.

    Kills a parent that hangs or is stopped for ``stuck_s`` seconds; 0: never. ``why_lost`` is the reason of its end.
    """

    def __init__(self, name: str, orders: socket.socket, parent_pid: int, stuck_s: float) -> None:
        self.why_lost = "it closed its socket to the front end"
        self._name = name
        self._orders = orders
        self.parent_pid = parent_pid
        self._stuck_s = stuck_s
        self._unanswered: asyncio.TimerHandle | None = None
        self._stopped: asyncio.TimerHandle | None = None
        self._slots = asyncio.Semaphore(WORKERS_AT_ONCE)
        self._quick_checks = _SmallestFirst()
        self._long_checks = asyncio.Semaphore(1)

    @classmethod
    def start(
        cls,
        name: str,
        work: Callable[[bytes], bytes],
        *,
        stuck_s: float = 0.0,
        prepare: Callable[[], object] = lambda: None,
    ) -> Self:
        """Fork the parent, which calls ``prepare`` before it forks workers. Call this before any thread starts."""
        ours, theirs = socket.socketpair()
        owner_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.fork()
        if parent_pid == 0:
            _run_parent(theirs, owner_pid, name, work, prepare)
        theirs.close()
        return cls(name, ours, parent_pid, stuck_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the parent is gone."""
        return self._orders.fileno()

    async def run(self, *parts: bytes, is_check: bool = False) -> bytes:
        """Return the result of the work. Raises WorkLostError if its worker ended without one. Cancellation kills the
        worker.

        The input is the concatenated parts; joining them here would copy a large body in the event loop. Checks may
        take any time, but most are short: the smallest waiting one goes first, and a long one queues with the other
        long ones.
        """
        if not is_check:
            async with self._slots:
                return await self._bounded(parts, WORK_LIMIT_S)
        async with self._quick_checks.turn(sum(map(len, parts))):
            with contextlib.suppress(WorkTooLargeError):
                return await self._bounded(parts, QUICK_CHECK_S)
        async with self._long_checks:
            return await self._bounded(parts, CHECK_LIMIT_S)

    def look_at_parent(self) -> None:
        """Kill the parent if it is stopped for too long, busy or not. Call this after SIGCHLD."""
        try:
            is_stopped = os.waitid(os.P_PID, self.parent_pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # It has ended, which its socket reports.
            is_stopped = False
        if not is_stopped and self._stopped is not None:
            self._stopped.cancel()
            self._stopped = None
        elif is_stopped and self._stopped is None and self._stuck_s:
            why = "it was stopped by a signal and did not continue within"
            self._stopped = asyncio.get_running_loop().call_later(self._stuck_s, self._end_parent, why)

    def close(self) -> None:
        """Kill the parent, and with it all its workers."""
        self._orders.close()
        os.kill(self.parent_pid, signal.SIGKILL)
        os.waitpid(self.parent_pid, 0)

    async def _bounded(self, parts: Sequence[bytes], limit_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            try:
                with theirs:
                    socket.send_fds(self._orders, [_ONE_MORE], [theirs.fileno()])
                async with asyncio.timeout(FORK_LIMIT_S):
                    worker = await self._begun(ours)
            except TimeoutError as exc:
                raise WorkLostError(f"engine-{self._name} did not fork a process within {FORK_LIMIT_S:g} s") from exc
            except OSError as exc:
                raise WorkLostError(f"engine-{self._name} could not fork a process: {exc}") from exc
            try:
                async with asyncio.timeout(limit_s):
                    for part in (_LENGTH.pack(sum(map(len, parts))), *parts):
                        await loop.sock_sendall(ours, part)
                    ours.shutdown(socket.SHUT_WR)
                    answer = bytearray()
                    while received := await loop.sock_recv(ours, RECEIVE_BYTES):
                        answer += received
            except TimeoutError as exc:
                raise WorkTooLargeError(f"the process did not finish within {limit_s:g} s") from exc
            except OSError as exc:
                raise WorkTooLargeError(f"the process crashed: {exc}") from exc
            finally:
                _end(worker)
        if (content := _whole(answer)) is None:
            raise WorkTooLargeError("the process ended without a result")
        return content

    async def _begun(self, connection: socket.socket) -> int:
        """Wait for the worker's pid and return its pidfd. The worker waits for its work, so the pid is not reused."""
        loop = asyncio.get_running_loop()
        if self._stuck_s and self._unanswered is None:
            self._unanswered = loop.call_later(self._stuck_s, self._end_parent, "it did not fork a process for")
        said = b""
        while len(said) < _PID.size:
            part = await loop.sock_recv(connection, _PID.size - len(said))
            if not part:
                raise WorkLostError("the process ended before it began")
            said += part
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None
        return os.pidfd_open(*_PID.unpack(said))

    def _end_parent(self, why: str) -> None:
        """Kill a parent that is stopped or hangs; its owner notices the closed socket."""
        self.why_lost = f"{why} {self._stuck_s:g} s (step_timeout_s), and was ended"
        os.kill(self.parent_pid, signal.SIGKILL)


def _end(worker: int) -> None:
    """Kill a worker by its pidfd; harmless when it has ended. The kernel reaps it."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(worker, signal.SIGKILL)
    os.close(worker)


class _SmallestFirst:
    """A lock whose waiters are served by size, smallest first, and equal ones in order of arrival."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        if self._is_taken:
            self._count += 1
            called = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, self._count, called))
            try:
                await called
            except asyncio.CancelledError:
                if not called.cancelled():
                    self._call_next()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._call_next()

    def _call_next(self) -> None:
        """Pass the lock to the smallest waiter, or release it without one."""
        while self._waiting:
            _, _, called = heapq.heappop(self._waiting)
            if not called.done():
                called.set_result(None)
                return
        self._is_taken = False


def _run_parent(
    orders: socket.socket, owner_pid: int, name: str, work: Callable[[bytes], bytes], prepare: Callable[[], object]
) -> NoReturn:
    """Fork a worker for each socket that the owner sends, until the owner is gone."""
    try:
        close_inherited_files([orders.fileno()])
        current_process().name = name
        name_process(name)
        leave_stops_to_the_supervisor()
        # With SIGCHLD ignored the kernel reaps the workers.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        die_with_parent(owner_pid, signal.SIGKILL)
        prepare()
        while True:
            word, files, _, _ = socket.recv_fds(orders, len(_ONE_MORE), 1)
            if not word:
                break
            _fork_worker(orders, files[0], work)
    except BaseException:  # noqa: BLE001 - no frame of the owner's stack may run twice
        os.write(STDERR, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _fork_worker(orders: socket.socket, file: int, work: Callable[[bytes], bytes]) -> None:
    """Fork a worker. If the fork fails, the owner notices the closed socket."""
    parent_pid = os.getpid()
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            orders.close()
            _run_worker(file, parent_pid, work)
    os.close(file)


def _run_worker(file: int, parent_pid: int, work: Callable[[bytes], bytes]) -> NoReturn:
    status, error_output = 1, STDERR
    try:
        die_with_parent(parent_pid, signal.SIGKILL)
        _limit_worker()
        # A client could fill the log with the output of a library that it crashes. Python's tracebacks still reach the
        # log.
        error_output = os.dup(STDERR)
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), STDERR)
        # Never closed explicitly, so that the traceback is written before the owner sees the end of the socket.
        connection = socket.socket(fileno=file)
        connection.sendall(_PID.pack(os.getpid()))
        received = bytearray()
        while part := connection.recv(RECEIVE_BYTES):
            received += part
        if (question := _whole(received)) is not None:  # Otherwise the owner left while it was sending.
            _limit_memory(len(question))
            answer = work(question)
            connection.sendall(_LENGTH.pack(len(answer)))
            connection.sendall(answer)
        status = 0
    except (BrokenPipeError, ConnectionResetError, MemoryError):  # The owner has left, or notices the worker's end.
        status = 0
    except BaseException:  # noqa: BLE001 - no frame of the parent's stack may run twice
        os.write(error_output, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _whole(received: bytearray) -> bytes | None:
    """Return the content after its length; None if the sender left before the end."""
    if len(received) < _LENGTH.size or _LENGTH.unpack_from(received)[0] != len(received) - _LENGTH.size:
        return None
    return bytes(memoryview(received)[_LENGTH.size :])


def _limit_worker() -> None:
    """Restrict a worker: no garbage collection, no core file, low priority, first to be killed, limited CPU time."""
    gc.disable()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_CPU, int(WORK_LIMIT_S) + 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE)


def _limit_memory(question_bytes: int) -> None:
    """Limit the memory that a worker uses in addition to its memory at the fork."""
    status = Path("/proc/self/status").read_text().splitlines()
    has_bytes = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    _limit(resource.RLIMIT_DATA, has_bytes * 1024 + MEMORY_BYTES + MEMORY_A_BYTE * question_bytes)


def _limit(kind: int, bound: int) -> None:
    _, most = resource.getrlimit(kind)
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(kind, (bound, bound))


# The worst body of this length takes 11 ms in the event loop, as measured, as long as a fork; the goal for any body is
# 50 ms. An object or a list costs as much as BYTES_OF_AN_OBJECT bytes, because a template renders each message, tool
# and call. In a chat an entry of a schema or of arguments also costs more, because it is written again, and so does an
# exponent: 1e15 becomes 1000000000000000.0.
LONG_BODY_BYTES = 32_768
BYTES_OF_AN_OBJECT = 40
BYTES_OF_AN_ENTRY = 4
BYTES_OF_AN_EXPONENT = 16
_EXPONENT = re.compile(rb"\d[eE][+\d]")
# The first byte of a result.
_DONE = b"+"
_REFUSED = b"-"

_encode = msgspec.msgpack.Encoder().encode
_detail_decoder = msgspec.msgpack.Decoder(ErrorDetail)

BodyWork = Callable[[bytes], bytes]


def is_long(data: bytes, *, is_chat: bool = False) -> bool:
    """Estimate, without parsing, whether a body takes long. ``is_chat``: a template renders it."""
    # Counting in 16 MB blocks the event loop for 13 ms, as measured.
    if len(data) > LONG_BODY_BYTES:
        return True
    cost = len(data) + BYTES_OF_AN_OBJECT * (data.count(b"{") + data.count(b"["))
    if is_chat:
        cost += BYTES_OF_AN_ENTRY * data.count(b",") + BYTES_OF_AN_EXPONENT * len(_EXPONENT.findall(data))
    return cost > LONG_BODY_BYTES


def body_work(works: Mapping[str, BodyWork]) -> Callable[[bytes], bytes]:
    """Return the function that workers run: it selects the work by its kind. The work raises ApiError to refuse a
    body.
    """
    return functools.partial(_answer, works=works)


class Ask(Protocol):
    """``ForkedWork.run``."""

    def __call__(self, *parts: bytes, is_check: bool) -> Awaitable[bytes]: ...


class LongBodies:
    """Reads long bodies in worker processes. ``ask`` calls ``body_work`` in one."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def work_on(self, kind: str, data: bytes) -> memoryview:
        """Run the work of a kind on a body and return its result. Raises its ApiError, or 503 if the worker is lost."""
        try:
            return await self._answer_to(kind, data, is_check=False)
        except WorkLostError as exc:
            raise ApiError(
                ErrorType.UNAVAILABLE,
                f"the body of {len(data)} bytes must be read in a separate process, but {exc}; try again, or send a "
                "shorter one",
            ) from exc

    async def check(self, kind: str, data: bytes) -> None:
        """Run a check, short or long. Raises the check's ApiError.

        Raises WorkLostError if the worker was lost, WorkTooLargeError if it was killed.
        """
        await self._answer_to(kind, data, is_check=True)

    async def _answer_to(self, kind: str, data: bytes, *, is_check: bool) -> memoryview:
        answer = memoryview(await self._ask(f"{kind}\n".encode(), data, is_check=is_check))
        if answer[:1] == _REFUSED:
            raise ApiError.of_detail(_detail_decoder.decode(answer[1:]))
        return answer[1:]


def _answer(question: bytes, works: Mapping[str, BodyWork]) -> bytes:
    """Return the result for an input: the kind of work, a line feed and the body."""
    kind, _, data = question.partition(b"\n")
    try:
        return _DONE + works[kind.decode()](data)
    except ApiError as exc:
        return _REFUSED + _encode(exc.body.error)
