"""The connection between the scheduler and each stage: whole frames over a stream socket, both ways, in order.

It has no thread. What one side writes wakes the other directly, which halves the way of a token from the last stage to
the next plan; the end of one side is seen by the other as the end of the stream, after everything that was sent. The
scheduler's side never waits for a stage to read: what the socket does not take is kept, and follows when it does.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final

from engine.core.frames import LENGTH_BYTES, BadFrameError, Frames, framed
from engine.pipeline.wires import Address, connected, listening

READ_BYTES: Final = 1 << 16
# A plan of the longest context with all its pages is far shorter. A greater length is a broken frame.
MAX_FRAME_BYTES: Final = 1 << 28


class StageChannel:
    """A stage's end. Blocks: a stage has nothing else to do. Frames may be sent from several threads."""

    def __init__(self, address: Address) -> None:
        """Connect to the scheduler, however long it takes to listen on this machine."""
        self._socket = connected(address)
        self._frames = Frames("frame", MAX_FRAME_BYTES)
        self._sending = Lock()

    def fileno(self) -> int:
        """Polled for errors alone, it shows when the scheduler is gone."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send one frame. No error when the scheduler is gone: the next ``receive`` shows that."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(framed(data))

    def receive(self) -> bytes | None:
        """Wait for the next frame; None when the scheduler is gone and nothing of it is left to read.

        Raises BadFrameError for a length beyond all bounds: nothing after it can be told apart.
        """
        while (frame := self._frames.next()) is None:
            data = _read(self._socket)
            if not data:
                return None
            self._frames.add(data)
        return frame

    def close(self) -> None:
        self._socket.close()


class StageChannels:
    """The scheduler's end of all channels. A stage may connect at any time; what was sent before reaches it then.

    A stage that is gone takes nothing and sends nothing: the supervisor knows why. ``broken`` says by
    stage why its connection was closed here, because what came on it could not be told apart any more.
    """

    def __init__(self, addresses: Sequence[Path | None], handed: socket.socket | None = None) -> None:
        """Without an address a stage's connection is one that another process takes.

        That process passes it on with ``hand_over``, to ``handed``.
        """
        self._epoll = select.epoll()
        self._ends = [_End(None if address is None else listening(address)) for address in addresses]
        self._by_fd: dict[int, _End] = {}
        self._handed = handed
        self.broken: dict[int, str] = {}
        for end in self._ends:
            if end.socket is not None:
                self._watch(end)
        if handed is not None:
            self._epoll.register(handed, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when ``receive`` has something to do."""
        return self._epoll.fileno()

    def send(self, stage: int, data: bytes) -> None:
        """Send one frame to a stage, without waiting for it."""
        self._send(self._ends[stage], framed(data))

    def broadcast(self, data: bytes) -> None:
        """Send one frame to every stage, without waiting for any."""
        frame = framed(data)
        for end in self._ends:
            self._send(end, frame)

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """Wait until something happens, and return the frames that came whole: none, too, and when the time is up."""
        frames: list[bytes] = []
        for fd, events in self._epoll.poll(timeout_s):
            if self._handed is not None and fd == self._handed.fileno():
                self._take_handed()
                continue
            end = self._by_fd.get(fd)
            if end is None:  # gone by what came before it in the same look
                continue
            if end.connection is None:
                self._accept(end)
                continue
            if events & select.EPOLLOUT:
                self._flush(end)
            if events & ~select.EPOLLOUT:
                frames += self._read(end)
        return frames

    def close(self) -> None:
        """Close all; what a socket has taken still reaches its stage. Idempotent."""
        for end in self._ends:
            end.close()
        if self._handed is not None:
            self._handed.close()
        self._epoll.close()

    def _watch(self, end: _End) -> None:
        assert end.socket is not None
        self._by_fd[end.socket.fileno()] = end
        self._epoll.register(end.socket, select.EPOLLIN)

    def _take_handed(self) -> None:
        """Take one connection that was handed over. The end of the source means that no more will come."""
        assert self._handed is not None
        number, fds, _, _ = socket.recv_fds(self._handed, LENGTH_BYTES, 1)
        if not fds:
            self._epoll.unregister(self._handed)
            return
        end, connection = self._ends[int.from_bytes(number, "little")], socket.socket(fileno=fds[0])
        self._connect(end, connection)

    def _accept(self, end: _End) -> None:
        if end.socket is None:
            return
        try:
            connection, _ = end.socket.accept()
        except BlockingIOError:
            return
        self._forget(end)
        self._connect(end, connection)

    def _connect(self, end: _End, connection: socket.socket) -> None:
        connection.setblocking(False)
        end.socket = end.connection = connection
        self._watch(end)
        if end.unsent:
            self._flush(end)

    def _send(self, end: _End, frame: bytes) -> None:
        if end.connection is None and not end.gone:
            self._accept(end)
        if end.gone:
            return
        end.unsent.append(memoryview(frame))
        if end.connection is not None and len(end.unsent) == 1:
            self._flush(end)

    def _flush(self, end: _End) -> None:
        """Write what is unsent; while the socket does not take all, its room wakes ``receive``."""
        assert end.connection is not None
        waited = end.waits
        try:
            while end.unsent:
                sent = end.connection.send(end.unsent[0])
                if sent == len(end.unsent[0]):
                    end.unsent.popleft()
                else:
                    end.unsent[0] = end.unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            end.unsent.clear()
        end.waits = bool(end.unsent)
        if end.waits is not waited:
            self._epoll.modify(end.connection, select.EPOLLIN | (select.EPOLLOUT if end.waits else 0))

    def _read(self, end: _End) -> list[bytes]:
        assert end.connection is not None
        data = _read(end.connection)
        if not data:
            self._forget(end)
            end.close()
            return []
        end.frames.add(data)
        frames: list[bytes] = []
        try:
            frames.extend(iter(end.frames.next, None))
        except BadFrameError as exc:
            self.broken[self._ends.index(end)] = str(exc)
            self._forget(end)
            end.close()
        return frames

    def _forget(self, end: _End) -> None:
        assert end.socket is not None
        del self._by_fd[end.socket.fileno()]
        self._epoll.unregister(end.socket)
        end.socket.close()


class _End:
    """One stage's: first a socket that listens, if any, then the connection. ``unsent`` waits for room if ``waits``."""

    def __init__(self, listener: socket.socket | None) -> None:
        self.socket = listener
        if listener is not None:
            listener.setblocking(False)
        self.connection: socket.socket | None = None
        self.frames = Frames("frame", MAX_FRAME_BYTES)
        self.unsent: deque[memoryview] = deque()
        self.waits = False
        self.gone = False

    def close(self) -> None:
        self.gone = True
        if self.socket is not None:
            self.socket.close()
        self.unsent.clear()


def hand_over(source: socket.socket, stage: int, connection: socket.socket) -> None:
    """Pass a stage's connection on to the process that has the other end of ``source``; this one's copy is closed.

    The pair is of SOCK_SEQPACKET. No error when the process is gone.
    """
    with connection, contextlib.suppress(OSError):
        socket.send_fds(source, [stage.to_bytes(LENGTH_BYTES, "little")], [connection.fileno()])


def _read(source: socket.socket) -> bytes:
    """What is there, as long as it is not too much; nothing when the other side is gone."""
    try:
        return source.recv(READ_BYTES)
    except OSError:
        return b""
