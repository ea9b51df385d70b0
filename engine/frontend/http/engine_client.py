"""The sockets to the scheduler: sends messages, and hands each reply to its request or call.

Owns the open calls; ``Sessions`` owns the requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import zmq

from engine.core.frames import BadFrameError
from engine.core.messages import (
    CacheEvent,
    CallAnswer,
    ClientMessage,
    Generate,
    GetStats,
    PrefillDropped,
    PrefillWanted,
    Refusal,
    Reply,
    RequestTrace,
    StatsAnswer,
    TokenOutput,
    decode_replies,
    encode,
)
from engine.core.routing.prefills import Prefills
from engine.core.stats import EngineStats
from engine.frontend.http.kv_events import KvEvents
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.sessions.sessions import Sessions
from engine.process.inbox import UNBOUNDED
from engine.process.private_dir import RECONNECT_INTERVAL_MS, replies_address, requests_address

if TYPE_CHECKING:
    from engine.frontend.http.prefill_client import PrefillClient
    from engine.frontend.http.tracing import Tracing

MAX_OPEN_CALLS = 1024
# The replies of this many steps are handed out in one turn of the event loop.
_FRAMES_A_TURN = 4

logger = logging.getLogger(__name__)


class EngineClient:
    """The client of one scheduler."""

    def __init__(self, private_dir: Path, tracing: Tracing | None = None, prefills: Prefills | None = None) -> None:
        self._tracing = tracing
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replies = self._context.socket(zmq.PULL)
        self._replies.setsockopt(zmq.RCVHWM, UNBOUNDED)
        self._replies.bind(replies_address(private_dir))
        # Sending into an unbounded queue never waits, so sending an abort needs no coroutine.
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, UNBOUNDED)
        self._requests.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._requests.connect(requests_address(private_dir))
        self.sessions = Sessions(self._send, prefills)
        self._calls: dict[str, asyncio.Future[CallAnswer | StatsAnswer]] = {}
        self._call_numbers = itertools.count()
        self._quiet = asyncio.Event()
        # Publishes the changes of the prefix cache; None without KV events.
        self.kv_events: KvEvents | None = None
        # The client of the prefill engines; None unless this is a decode engine.
        self.prefill_client: PrefillClient | None = None

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    async def call(self, make: Callable[[str], ClientMessage]) -> CallAnswer:
        """Send the administrative message that ``make`` builds for a call id, and wait for its answer.

        Waits as long as the engine lives: a frozen scheduler answers when it continues. Raises ApiError if it is gone.
        """
        answer = await self._ask(make)
        assert isinstance(answer, CallAnswer), f"expected a CallAnswer, got {answer}"
        return answer

    async def stats(self, timeout_s: float) -> EngineStats | None:
        """Return the scheduler's counters; None if it is silent or gone."""
        try:
            answer = await asyncio.wait_for(self._ask(lambda call_id: GetStats(call_id=call_id)), timeout_s)
        except (TimeoutError, ApiError):
            return None
        assert isinstance(answer, StatsAnswer), f"expected a StatsAnswer, got {answer}"
        return answer.stats

    def break_off(self, reason: ApiError) -> None:
        """End every open request and call with an error, and refuse new ones. Only the first reason counts."""
        self.sessions.break_off(reason)
        if self.prefill_client is not None:
            self.prefill_client.break_off()
        self._quiet.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(reason)
        self._calls.clear()

    async def wait_quiet(self) -> None:
        while self.sessions.open_requests:
            self._quiet.clear()
            await self._quiet.wait()

    async def deliver_replies(self) -> None:
        """Hand out replies as they arrive, until cancelled."""
        loop = asyncio.get_running_loop()
        descriptor = self._replies.getsockopt(zmq.FD)
        assert isinstance(descriptor, int), "the descriptor of a ZMQ socket is a number"
        arrived = asyncio.Event()
        loop.add_reader(descriptor, arrived.set)
        try:
            while True:
                # The descriptor is edge-triggered, so everything is read before the next wait.
                for number, frame in enumerate(self._arrived_frames(), start=1):
                    self._take_frame(frame)
                    if number % _FRAMES_A_TURN == 0:
                        await asyncio.sleep(0)
                await arrived.wait()
                arrived.clear()
        finally:
            loop.remove_reader(descriptor)

    def _arrived_frames(self) -> Iterator[bytes]:
        while True:
            try:
                yield self._replies.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _take_frame(self, frame: bytes) -> None:
        try:
            replies = decode_replies(frame)
        except BadFrameError as exc:
            logger.warning("dropped a frame of %d bytes that is not a tuple of replies: %s", len(frame), exc)
            return
        if replies and isinstance(replies[0], CacheEvent):
            # They arrive in a separate frame.
            if self.kv_events is not None:
                self.kv_events.publish(cast(tuple[CacheEvent, ...], replies))
            return
        for reply in replies:
            self._deliver(cast(Reply | RequestTrace, reply))

    def close(self) -> None:
        """Close the sockets; unsent messages are lost."""
        self._replies.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()

    async def _ask(self, make: Callable[[str], ClientMessage]) -> CallAnswer | StatsAnswer:
        if self.sessions.broken is not None:
            raise self.sessions.broken
        if len(self._calls) >= MAX_OPEN_CALLS:
            raise ApiError(
                ErrorType.BUSY, f"at most {MAX_OPEN_CALLS} administrative calls may be open; wait for replies first"
            )
        call_id = f"call-{next(self._call_numbers)}"
        future: asyncio.Future[CallAnswer | StatsAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.sessions.send(make(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _send(self, message: ClientMessage) -> None:
        if self._tracing is not None and isinstance(message, Generate):
            self._tracing.sent(message)
        self._requests.send(encode(message), zmq.NOBLOCK)

    def _deliver(self, reply: Reply | RequestTrace) -> None:
        if isinstance(reply, TokenOutput | Refusal):
            self.sessions.take(reply)
            if not self.sessions.open_requests:
                self._quiet.set()
            return
        if isinstance(reply, RequestTrace):
            if self._tracing is not None:
                self._tracing.ended(reply)
            return
        if isinstance(reply, PrefillWanted | PrefillDropped):
            if self.prefill_client is not None:
                self.prefill_client.take(reply)
            return
        future = self._calls.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)
