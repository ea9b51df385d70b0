"""KV events over ZMQ in vLLM's format: numbered batches of changes of the prefix cache, which can be replayed.

Each batch goes out as ``[topic, number, payload]``: the topic is empty, the number has 8 bytes, most significant first,
and the payload is a msgpack ``EventBatch``. A subscriber that missed batches sends the first missing number to the
replay endpoint (REQ or DEALER); it gets the kept batches, then an end with the number -1.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
import zmq

from engine.core.config import MAX_LORA_NAME_CHARS
from engine.core.errors import EngineError
from engine.core.frames import BadFrameError, decoder_of
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from engine.core.routing.cache_index import Batch
from engine.core.routing.load import MAX_COUNT, Count

MAX_KEPT_BATCHES: Final = 10_000
MAX_KEPT_BYTES: Final = 64 * 2**20
_NUMBER_BYTES: Final = 8
END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_TOPIC: Final = b""
_MAX_QUESTION_BYTES: Final = 256
# Sending one takes a few microseconds; an answer with all kept batches took 65 ms of the event loop.
_BATCHES_A_TURN: Final = 500
_SALT: Final = re.compile("[0-9a-f]{16}")
PageKey = Annotated[bytes, msgspec.Meta(max_length=64)]
_POOL, _HOST = "GPU", "CPU"

logger = logging.getLogger(__name__)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes of one step. ``ts`` is in seconds since 1970."""

    ts: Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)]
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Stored pages: ``medium`` is ``GPU`` for the KV cache on any device and ``CPU`` for the host tier.

    A page of the host tier has no tokens and a ``block_size`` of 0; its hash is the one of the page in the KV cache.
    """

    block_hashes: list[PageKey]
    parent_block_hash: PageKey | None
    token_ids: list[Count]
    block_size: Count
    lora_id: Count | None
    medium: str | None
    lora_name: Annotated[str, msgspec.Meta(max_length=MAX_LORA_NAME_CHARS)] | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[PageKey]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Both media are empty now."""


class KvEvents:
    """Publishes on ``endpoint`` and replays on ``replay_endpoint`` if given. Never waits for a subscriber."""

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._published: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._published = self._bound(zmq.PUB, endpoint, "kv_events_endpoint")
            self._replay = self._bound(zmq.ROUTER, replay_endpoint, "kv_events_replay_endpoint")
        except EngineError:
            self.close()
            raise
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._number = 0
        # Who is being answered, and the number of the next batch to send.
        self._answering: tuple[bytes, int] | None = None

    def publish(self, events: Sequence[CacheEvent]) -> None:
        payload = self._encode(EventBatch(time.time(), [to_wire(event) for event in events]))
        if self._published is not None:
            self._published.send_multipart((_TOPIC, written(self._number), payload), zmq.NOBLOCK)
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        self._number += 1
        while len(self._kept) > MAX_KEPT_BATCHES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer replay requests while the loop runs."""
        if self._replay is not None:
            descriptor = self._replay.getsockopt(zmq.FD)
            assert isinstance(descriptor, int), "the descriptor of a ZMQ socket is a number"
            loop.add_reader(descriptor, self._answer)
            loop.call_soon(self._answer)

    def close(self) -> None:
        """Close the sockets; unsent batches are lost."""
        for opened in (self._published, self._replay):
            if opened is not None:
                opened.close(linger=0)
        self._context.term()

    def _bound(self, kind: int, endpoint: str, setting: str) -> zmq.Socket[bytes] | None:
        if not endpoint:
            return None
        opened = self._context.socket(kind)
        opened.set_hwm(MAX_KEPT_BATCHES + 1)
        opened.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        try:
            opened.bind(endpoint)
        except zmq.ZMQError as exc:
            opened.close(linger=0)
            raise EngineError(f"{setting} {endpoint!r} cannot be bound: {exc}; choose another one") from exc
        return opened

    def _answer(self) -> None:
        """Send a part of one answer and leave the rest to later turns of the loop, so that no peer delays the streams.

        The descriptor is edge-triggered, so the socket is read until nothing is left.
        """
        assert self._replay is not None, "only a replay socket gets requests"
        if self._replay.closed:
            return
        if self._answering is None:
            try:
                who, *_, first = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(first) == _NUMBER_BYTES:
                self._answering = who, int.from_bytes(first, "big")
            else:
                logger.warning(
                    "dropped a request for KV events of %d bytes, which must be a number of 8 bytes", len(first)
                )
        if self._answering is not None:
            self._answering = self._answered(self._replay, *self._answering)
        asyncio.get_running_loop().call_soon(self._answer)

    def _answered(self, replay: zmq.Socket[bytes], who: bytes, wanted: int) -> tuple[bytes, int] | None:
        """Send the next kept batches from ``wanted`` on; return what is left to send, None after the end."""
        oldest = self._number - len(self._kept)
        skipped = min(max(0, wanted - oldest), len(self._kept))
        part = tuple(itertools.islice(self._kept, skipped, skipped + _BATCHES_A_TURN))
        for number, payload in part:
            replay.send_multipart((who, b"", _TOPIC, written(number), payload), zmq.NOBLOCK)
        if len(part) == _BATCHES_A_TURN:
            return who, part[-1][0] + 1
        replay.send_multipart((who, b"", b"", END, b""), zmq.NOBLOCK)
        return None


def written(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def to_wire(event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case PagesStored():
            version, salt = event.kv_key
            return BlockStored(
                block_hashes=list(event.keys),
                parent_block_hash=event.parent,
                token_ids=list(event.tokens),
                block_size=len(event.tokens) // len(event.keys),
                lora_id=version or None,
                medium=_HOST if event.on_host else _POOL,
                lora_name=event.lora_name or None,
                extra_keys=[(f"{salt:016x}",)] * len(event.keys) if salt else None,
            )
        case PagesRemoved():
            return BlockRemoved(block_hashes=list(event.keys), medium=_HOST if event.on_host else _POOL)
        case CacheCleared():
            return AllBlocksCleared()


_decode: Callable[[bytes], EventBatch] = decoder_of(EventBatch)


def is_end(parts: Sequence[bytes]) -> bool:
    """Return whether this message ends a replay."""
    return len(parts) > 1 and parts[-2] == END


def batch_in(parts: Sequence[bytes]) -> Batch:
    """Decode the batch in the last two parts of a message. Raises BadFrameError."""
    if len(parts) < 2 or len(parts[-2]) != _NUMBER_BYTES:
        raise BadFrameError(
            f"a batch must have a number of {_NUMBER_BYTES} bytes and a payload, got {len(parts)} parts"
        )
    number = int.from_bytes(parts[-2], "big")
    if number > MAX_COUNT:
        raise BadFrameError(f"a batch must have a number up to {MAX_COUNT}, got {number}")
    message = _decode(parts[-1])
    try:
        return Batch(number, message.ts, [from_wire(event) for event in message.events])
    except ValueError as exc:
        raise BadFrameError(str(exc)) from exc


def from_wire(event: BlockStored | BlockRemoved | AllBlocksCleared) -> CacheEvent:
    match event:
        case BlockStored():
            return PagesStored(
                parent=event.parent_block_hash,
                keys=tuple(event.block_hashes),
                tokens=tuple(event.token_ids),
                kv_key=(event.lora_id or 0, _salt_of(event)),
                lora_name=event.lora_name or "",
                on_host=event.medium == _HOST,
            )
        case BlockRemoved():
            return PagesRemoved(keys=tuple(event.block_hashes), on_host=event.medium == _HOST)
        case AllBlocksCleared():
            return CacheCleared()


def _salt_of(event: BlockStored) -> int:
    salt = event.extra_keys[0] if event.extra_keys else None
    if not salt:
        return 0
    if _SALT.fullmatch(salt[0]) is None:
        raise ValueError(f"a salt's key must be {_SALT.pattern}, got {salt[0][:64]!r}")
    return int(salt[0], 16)
