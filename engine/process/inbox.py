"""The queue of client messages that wait for a step.

Owns the socket and the bound on what one step takes; decides nothing about any message. A frame that is not a message
is logged and dropped: it must never crash the loop.
"""

from __future__ import annotations

import logging
import math

import zmq

from engine.core.frames import BadFrameError
from engine.core.messages import ClientMessage, decode_client_message

MAX_MESSAGES_A_STEP = 1024
MAX_LOGGED_BYTES = 80
UNBOUNDED = 0

logger = logging.getLogger(__name__)


class Inbox:
    """Client messages in arrival order. A gate waits on ``socket``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PULL)
        # Unbounded, because the front end bounds the requests that it accepts: its messages must neither be lost nor
        # block it.
        self.socket.setsockopt(zmq.RCVHWM, UNBOUNDED)
        self.socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def drain(self, limit: int = MAX_MESSAGES_A_STEP) -> list[ClientMessage]:
        """Return all messages that have arrived, up to ``limit`` frames, without waiting."""
        messages: list[ClientMessage] = []
        for _ in range(limit):
            # Polled first: most steps find nothing, and the exception of an empty socket costs three times as much.
            if not self._poller.poll(0):
                break
            frame = self.socket.recv(zmq.NOBLOCK)
            try:
                messages.append(decode_client_message(frame))
            except BadFrameError as exc:
                shown = frame[:MAX_LOGGED_BYTES]
                logger.warning(
                    "dropped a frame of %d bytes that is not a client message (%s): %r", len(frame), exc, shown
                )
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a message; False if none arrived within ``timeout_s`` seconds (None: no limit)."""
        return bool(self.socket.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))

    def close(self) -> None:
        """Close the socket; messages that were not drained are lost."""
        self.socket.close(linger=0)
