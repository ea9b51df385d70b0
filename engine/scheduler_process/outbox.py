"""Where replies leave the scheduler process for the front end: the replies of one step in one frame.

Never blocks on the front end; when that is dead the supervisor ends this process, and what is queued with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from engine.messages import Aside, CacheEvent, Reply, encode
from engine.process.private_dir import RECONNECT_INTERVAL_MS
from engine.scheduler_process.inbox import UNBOUNDED


class ReplySocket:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, UNBOUNDED)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._socket.connect(address)

    def send(self, replies: Sequence[Reply | Aside]) -> None:
        self._socket.send(encode(tuple(replies)), zmq.NOBLOCK)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        self.send(events)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket, waiting up to ``linger_s`` seconds for the last replies to leave."""
        self._socket.close(linger=int(linger_s * 1000))
