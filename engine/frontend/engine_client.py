"""The front end's side of the scheduler: sends client messages, hands each reply to the call that waits for it.

Owns the registry of open requests: a rid enters when its request is sent and leaves exactly when its terminal reply is
processed, whether or not its client is still there. Never tokenizes and never speaks HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import zmq

from engine.frames import BadFrameError
from engine.frontend.errors import ApiError, ErrorType
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    ClientMessage,
    EngineStats,
    Generate,
    GetStats,
    PauseGeneration,
    PauseMode,
    Refusal,
    Reply,
    StatsAnswer,
    TokenOutput,
    decode_reply,
    encode,
)
from engine.process.private_dir import RECONNECT_INTERVAL_MS, replies_address, requests_address
from engine.scheduler_process.inbox import UNBOUNDED

__all__ = ["EngineClient", "HandOver", "OpenRequest"]

MAX_OPEN_CALLS = 1024
# Replies of this many steps are handed out before the event loop turns.
_FRAMES_A_TURN = 4

# Takes an output of a request, or why it was refused or broken off. It must not raise.
HandOver = Callable[[TokenOutput | ApiError], None]

logger = logging.getLogger(__name__)


class OpenRequest:
    """One request that was sent and has no terminal reply yet. Who sent it sets ``hand_over``."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.done = False
        # An abort of it was sent: its rid is free for what is sent after that.
        self.is_ending = False
        self.hand_over: HandOver = _drop

    def put(self, output: TokenOutput | ApiError, *, last: bool) -> None:
        """Hand over an output or a failure; ``last`` says that nothing follows."""
        self.done = last
        self.hand_over(output)


class EngineClient:
    """Requests and calls in flight between this process and the scheduler."""

    def __init__(self, private_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replies = self._context.socket(zmq.PULL)
        self._replies.setsockopt(zmq.RCVHWM, UNBOUNDED)
        self._replies.bind(replies_address(private_dir))
        # Sending into an unbounded queue never waits, so an abort needs no coroutine to be sent.
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, UNBOUNDED)
        self._requests.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._requests.connect(requests_address(private_dir))
        self._open: dict[str, OpenRequest] = {}
        # Earlier lives of a rid that is used again before their terminal replies are here, oldest first.
        self._ending: dict[str, deque[OpenRequest]] = {}
        self._calls: dict[str, asyncio.Future[CallAnswer | StatsAnswer]] = {}
        self._call_numbers = itertools.count()
        self._broken: ApiError | None = None
        self._closed: ApiError | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def broken(self) -> ApiError | None:
        """Why the engine is gone; None while it is there."""
        return self._broken

    @property
    def closed(self) -> ApiError | None:
        """Why no further request is accepted; None while they are. Open requests may go on."""
        return self._broken or self._closed

    @property
    def open_requests(self) -> int:
        """Requests without a terminal reply."""
        return len(self._open) + sum(map(len, self._ending.values()))

    @property
    def open_calls(self) -> int:
        """Calls and questions that are not answered."""
        return len(self._calls)

    def start(self, message: Generate) -> OpenRequest:
        """Send a request. Raises ApiError: 409 for a rid that is live, 503 when closed or when the engine is gone.

        A rid is free again as soon as an abort of its request was sent: the scheduler sees that first.
        """
        if self.closed is not None:
            raise self.closed
        before = self._open.get(message.rid)
        if before is not None and not before.is_ending:
            raise ApiError.rid_is_live(message.rid)
        if before is not None:
            self._ending.setdefault(message.rid, deque()).append(before)
        request = OpenRequest(message.rid)
        self._open[message.rid] = request
        self._quiet.clear()
        self._send(message)
        return request

    def abort(self, request: OpenRequest, message: Abort) -> None:
        """Ask for the end of a request; it stays registered until the scheduler's terminal reply."""
        superseded = self._open.get(request.rid) is not request
        if not request.done and not superseded and self._broken is None:
            self._send(message)

    async def call(self, make: Callable[[str], ClientMessage]) -> CallAnswer:
        """Send an administrative message, made from the call id it is given, and wait for its answer.

        Waits as long as the engine lives: a frozen scheduler answers when it goes on. Raises ApiError when it is gone.
        """
        answer = await self._ask(make)
        assert isinstance(answer, CallAnswer), f"expected a CallAnswer, got {answer}"
        return answer

    async def stats(self, timeout_s: float) -> EngineStats | None:
        """The scheduler's counters; None when it did not answer in time or is gone."""
        try:
            answer = await asyncio.wait_for(self._ask(lambda call_id: GetStats(call_id=call_id)), timeout_s)
        except (TimeoutError, ApiError):
            return None
        assert isinstance(answer, StatsAnswer), f"expected a StatsAnswer, got {answer}"
        return answer.stats

    def break_off(self, reason: ApiError) -> None:
        """End every open request and call with an error, and refuse all further ones. The first reason stays."""
        if self._broken is not None:
            return
        self._broken = reason
        for request in (*self._open.values(), *chain.from_iterable(self._ending.values())):
            request.put(reason, last=True)
        self._open.clear()
        self._ending.clear()
        self._quiet.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(reason)
        self._calls.clear()

    def close_to_requests(self, reason: ApiError) -> None:
        """Refuse all further requests; calls are still sent."""
        self._closed = reason

    async def wait_quiet(self) -> None:
        """Wait until no request is open."""
        await self._quiet.wait()

    async def deliver_replies(self) -> None:
        """Hand out replies as they come, until cancelled."""
        loop = asyncio.get_running_loop()
        descriptor = self._replies.getsockopt(zmq.FD)
        assert isinstance(descriptor, int), "the descriptor of a ZMQ socket is a number"
        arrived = asyncio.Event()
        loop.add_reader(descriptor, arrived.set)
        try:
            while True:
                # The descriptor tells of an arrival once, so all is taken before the next wait.
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
            replies = decode_reply(frame)
        except BadFrameError as exc:
            logger.warning("dropped a frame of %d bytes that is no tuple of replies: %s", len(frame), exc)
            return
        for reply in replies:
            self._deliver(reply)

    def close(self) -> None:
        """Close the sockets; what is not sent by then is lost."""
        self._replies.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()

    async def _ask(self, make: Callable[[str], ClientMessage]) -> CallAnswer | StatsAnswer:
        self._require_working()
        if len(self._calls) >= MAX_OPEN_CALLS:
            raise ApiError(
                429, ErrorType.BUSY, f"at most {MAX_OPEN_CALLS} administrative calls may wait; wait for answers first"
            )
        call_id = f"call-{next(self._call_numbers)}"
        future: asyncio.Future[CallAnswer | StatsAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(make(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _require_working(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _send(self, message: ClientMessage) -> None:
        for request in self._ended_by(message):
            request.is_ending = True
        self._requests.send(encode(message), zmq.NOBLOCK)

    def _ended_by(self, message: ClientMessage) -> Iterable[OpenRequest]:
        match message:
            case Abort():
                return [self._open[message.rid]] if message.rid in self._open else []
            case AbortAll() | PauseGeneration(mode=PauseMode.ABORT):
                return self._open.values()
        return []

    def _deliver(self, reply: Reply) -> None:
        match reply:
            case TokenOutput():
                self._to_request(reply.rid, reply, last=reply.finish_reason is not None)
            case Refusal():
                self._to_request(reply.rid, ApiError.of_refusal(reply), last=True)
            case CallAnswer() | StatsAnswer():
                future = self._calls.get(reply.call_id)
                if future is not None and not future.done():
                    future.set_result(reply)

    def _to_request(self, rid: str, output: TokenOutput | ApiError, *, last: bool) -> None:
        # A refusal is about the newest life: an older one was admitted.
        older = None if isinstance(output, ApiError) else self._ending.get(rid)
        request = older[0] if older else self._open.get(rid)
        if request is None:
            return
        if last and older:
            older.popleft()
            if not older:
                del self._ending[rid]
        elif last:
            del self._open[rid]
        if not self.open_requests:
            self._quiet.set()
        request.put(output, last=last)


def _drop(_: TokenOutput | ApiError) -> None:
    """Take nothing: the request was sent a moment ago, and no reply can have come."""
