"""One end of the control connection between the supervisor and an agent: whole messages, never blocking.

Owns the bytes on the wire, and the times of the peer's last message and of the next pulse. The caller decides what a
lost connection means.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from engine.core.frames import Frames, framed
from engine.process.control import MAX_CONTROL_BYTES

PULSES_A_TIMEOUT: Final = 4
# Bounds the wait until the last messages are sent.
CLOSE_WAIT_S: Final = 0.3
_READ_BYTES: Final = 1 << 16

Heard = TypeVar("Heard")


class LinkOver(Exception):
    """The connection is closed or broken; the text says which."""


class ControlLink(Generic[Heard]):
    """Sends structs and receives ``Heard``. ``fileno()`` is readable when the peer has sent something or is gone.

    After ``watch``, its ``timeout_s`` bounds the peer's silence. Times are on the monotonic clock.
    """

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], Heard]) -> None:
        self._connection = connection
        self._decode = decode
        self._frames = Frames("message", MAX_CONTROL_BYTES)
        self._fd = connection.fileno()
        self._timeout_s: float | None = None
        self._heard = 0.0
        self._pulsed = 0.0
        # Why sending failed, if it did.
        self.unsendable: str | None = None
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._fd

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. The socket's buffer holds far more than is ever in flight, unless the peer hangs."""
        frame = framed(msgspec.msgpack.encode(message))
        if self.unsendable is not None:
            return
        try:
            sent = self._connection.send(frame)
        except OSError as exc:
            self.unsendable = f"its connection broke: {exc.strerror or exc}"
            return
        if sent < len(frame):
            self.unsendable = "it does not read its messages"

    def receive(self, now: float) -> list[Heard]:
        """Read the messages that have arrived. Raises LinkOver when the connection has ended, BadFrameError for bytes
        that decode to no message.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise LinkOver(f"its connection broke: {exc.strerror or exc}") from exc
        if not data:
            raise LinkOver("its connection was closed")
        self._heard = now
        self._frames.add(data)
        return [self._decode(frame) for frame in iter(self._frames.next, None)]

    def watch(self, timeout_s: float, now: float) -> None:
        """Require from now on that the peer sends something every ``timeout_s`` seconds."""
        self._timeout_s, self._heard, self._pulsed = timeout_s, now, now

    def tend(self, now: float, pulse: Callable[[], msgspec.Struct]) -> str | None:
        """Send a pulse if it is due. Returns why the peer is lost, None while it is not."""
        if self.owes_pulse(now):
            self.send(pulse())
        if self.is_silent(now):
            return f"it was silent for {self._timeout_s} s: its machine is gone or the network path is cut"
        return self.unsendable

    def is_silent(self, now: float) -> bool:
        """Return whether the peer has been silent for too long and the socket has no unread bytes."""
        if self._timeout_s is None or now < self._heard + self._timeout_s:
            return False
        try:
            # This process may have been suspended itself while messages waited.
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False  # The next read reports the error.

    def owes_pulse(self, now: float) -> bool:
        """Return whether a pulse is due now, and count it as sent."""
        if self._timeout_s is None or now < self._pulsed + self._timeout_s / PULSES_A_TIMEOUT:
            return False
        self._pulsed = now
        return True

    def due(self) -> float | None:
        """Return when ``is_silent`` or ``owes_pulse`` can next become true."""
        if self._timeout_s is None:
            return None
        return min(self._heard + self._timeout_s, self._pulsed + self._timeout_s / PULSES_A_TIMEOUT)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._connection.close()

    def close_gently(self) -> None:
        """Close the connection after the peer has, waiting within a bound, so that the last messages arrive.

        Closing a socket with unread bytes resets the connection, and the peer loses what it has not read yet.
        """
        try:
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(CLOSE_WAIT_S)
            while self._connection.recv(_READ_BYTES):
                continue
        except OSError:
            pass
        self.close()
