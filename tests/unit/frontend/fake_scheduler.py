"""The other end of a front end's sockets: what it sent, and a way to answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from engine.core.messages import ClientMessage, Reply, decode_client_message, encode
from engine.process.private_dir import replies_address, requests_address

PATIENCE_S = 30.0


class FakeScheduler:
    def __init__(self, private_dir: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(requests_address(private_dir))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(replies_address(private_dir))

    async def receive(self) -> ClientMessage:
        return decode_client_message(await asyncio.wait_for(self._inbox.recv(), PATIENCE_S))

    async def reply(self, *replies: Reply) -> None:
        await self._outbox.send(encode(replies))

    async def send_garbage(self, frame: bytes) -> None:
        await self._outbox.send(frame)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
