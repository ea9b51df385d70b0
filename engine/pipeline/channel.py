"""The connection between the scheduler and each stage: whole frames over a stream socket, both ways, in order.

Has no thread: a write wakes the other side directly, which halves the latency from the last stage's token to the next
plan. Each side sees the other's death as the end of the stream, after everything that was sent. The scheduler's side
never blocks on a slow stage: it buffers what the socket does not accept.
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
# Far more than a plan of the longest context with all its pages. A greater length means a broken frame.
MAX_FRAME_BYTES: Final = 1 << 28


class StageChannel:
    """A stage's end of the channel. Blocks, because a stage has nothing else to do. Any thread may send."""

    def __init__(self, address: Address) -> None:
        """Connect to the scheduler, waiting until it listens."""
        self._socket = connected(address)
        self._frames = Frames("frame", MAX_FRAME_BYTES)
        self._sending = Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor; a poll for errors alone shows when the scheduler is gone."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send one frame. Raises nothing if the scheduler is gone: the next ``receive`` reports it."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(framed(data))

    def receive(self) -> bytes | None:
        """Wait for the next frame. Returns None when the scheduler is gone and all its frames are read.

        Raises BadFrameError for a length above the limit: later frames cannot be found.
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
    """The scheduler's end of all channels. A stage that connects late gets the frames sent before.

    Frames to a stage that is gone are dropped: the supervisor reports its death. ``broken`` maps a stage to the reason
    why this side closed its connection, after a frame that could not be decoded.
    """

    def __init__(self, addresses: Sequence[Path | None], handed: socket.socket | None = None) -> None:
        """Listen at each stage's address. Another process accepts the connection of a stage without an address, and
        passes it on to ``handed`` with ``hand_over``.
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
        """Return a descriptor that is readable when ``receive`` has work."""
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
        """Wait up to ``timeout_s`` seconds for an event. Returns the complete frames, possibly none."""
        frames: list[bytes] = []
        for fd, events in self._epoll.poll(timeout_s):
            if self._handed is not None and fd == self._handed.fileno():
                self._take_handed()
                continue
            end = self._by_fd.get(fd)
            if end is None:  # closed by an earlier event of the same poll
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
        """Close all channels; bytes in a socket's buffer still reach its stage. Idempotent."""
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
        """Take one connection that was handed over, with its stage's number. The end of the source means that no more
        follow.
        """
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
        """Write unsent frames. While some remain, room in the socket wakes ``receive``."""
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
    """The scheduler's end of one channel: a listening socket, if any, then the connection. ``waits`` is True while
    ``unsent`` waits for room.
    """

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
    """Pass a stage's connection to the process at the other end of ``source``, a SOCK_SEQPACKET, and close it here.

    Raises nothing when that process is gone.
    """
    with connection, contextlib.suppress(OSError):
        socket.send_fds(source, [stage.to_bytes(LENGTH_BYTES, "little")], [connection.fileno()])


def _read(source: socket.socket) -> bytes:
    """Read up to READ_BYTES. Returns no bytes when the other side is gone."""
    try:
        return source.recv(READ_BYTES)
    except OSError:
        return b""
