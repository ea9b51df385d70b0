"""An asyncio loop in its own thread, and a wait from which it can wake another thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import zmq

_CLOSE_TIMEOUT_S: Final = 20.0
_WAKE_BYTES: Final = 4096
_T = TypeVar("_T")


def poll(sources: Mapping[Any, Callable[[], object]], timeout_s: float) -> bool:
    """Wait until one of these sources is readable, and call its callback. Returns whether one was."""
    poller = zmq.Poller()
    for source in sources:
        poller.register(source, zmq.POLLIN)
    readable = poller.poll(int(timeout_s * 1000) + 1 if timeout_s else 0)
    for source, _ in readable:
        sources[source]()
    return bool(readable)


class LoopThread:
    """Runs the loop. ``fileno()`` is readable when something has happened since the last ``clear``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread = self._started()

    def fileno(self) -> int:
        return self._ours.fileno()

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(_WAKE_BYTES):
                continue

    def stop(self) -> None:
        """Stop the thread between two turns of the loop; its connections stay open."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def go_on(self) -> None:
        """Start the thread again, in the current process."""
        self._thread = self._started()

    def close(self) -> None:
        """End the thread and its connections within a bound."""
        with contextlib.suppress(TimeoutError):
            self._spawn(self._end()).result(_CLOSE_TIMEOUT_S)
        self.stop()
        if not self._thread.is_alive():
            self._loop.close()
        self._ours.close()
        self._theirs.close()

    async def _end(self) -> None:
        """Cancel running tasks, and close the connections."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b".")

    def _started(self) -> threading.Thread:
        # A daemon: a failed script must not keep its process alive.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        # A function of this module: a thread's start function distinguishes the harness's own threads from a script's.
        self._loop.run_forever()
