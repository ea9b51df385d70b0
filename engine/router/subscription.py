"""One engine's KV events as they come over ZMQ, and asked for again where some are missing.

Owns the sockets. What the batches mean, and which are missing, the picture says.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.frontend.kv_events import END, batch_of, written
from engine.routing import Batch, FollowedCache

# An engine answers at once, with 64 MiB at most.
ANSWER_S: Final = 5.0
# A picture is right after one answer, or after two where the engine is another one. It goes on meanwhile.
MOST_QUESTIONS: Final = 4

logger = logging.getLogger(__name__)


class Subscription:
    """Keeps ``cache`` right. ``gaps`` counts how often batches were missing."""

    def __init__(self, endpoint: str, replay_endpoint: str, cache: FollowedCache) -> None:
        self.cache = cache
        self.gaps = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._asking = asyncio.Lock()

    async def run(self) -> None:
        with self._context, self._context.socket(zmq.SUB) as live:
            live.setsockopt(zmq.LINGER, 0)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            live.connect(self._endpoint)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._watch(monitor))
                    while True:
                        _, number, payload = await live.recv_multipart()
                        if self._misses(number, payload):
                            self.gaps += 1
                            tasks.create_task(self.ask())
            finally:
                live.disable_monitor()
                monitor.close(linger=0)

    async def ask(self) -> None:
        """Ask for what is missing, and for what may be: also when all is right, so that nothing is late for long."""
        async with self._asking:
            for _ in range(MOST_QUESTIONS):
                first = self.cache.wanted
                try:
                    async with asyncio.timeout(ANSWER_S):
                        batches = await self._answer(first)
                except TimeoutError:
                    logger.warning("%s did not answer within %g s", self._replay_endpoint, ANSWER_S)
                    self.cache.doubt()
                    return
                except (msgspec.DecodeError, zmq.ZMQError) as exc:
                    logger.warning("%s did not answer with KV events: %s", self._replay_endpoint, exc)
                    self.cache.doubt()
                    return
                if self.cache.answered(first, batches):
                    return

    def _misses(self, number: bytes, payload: bytes) -> bool:
        """Take a batch as it is published. Returns whether it shows that others are missing."""
        was_right = self.cache.is_right
        try:
            return not self.cache.live(batch_of(number, payload)) and was_right
        except msgspec.DecodeError as exc:
            logger.warning("%s published no KV events: %s", self._endpoint, exc)
            self.cache.doubt()
            return was_right

    async def _answer(self, first: int) -> list[Batch]:
        """What is kept from a number on. The socket is of this question alone, so no answer is another one's."""
        batches: list[Batch] = []
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 0)
            asking.connect(self._replay_endpoint)
            await asking.send_multipart((b"", written(first)))
            while True:
                *_, number, payload = await asking.recv_multipart()
                if number == END:
                    return batches
                batches.append(batch_of(number, payload))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Learn when the connection ends: what comes after that may be of another life of the engine."""
        while True:
            parse_monitor_message(await monitor.recv_multipart())
            self.cache.doubt()
