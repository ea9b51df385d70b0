"""Ports over small pools, and peers of the test's own that say what they like to a port."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import PagesReceived, PagesSent, TransferEvent
from engine.core.plan import ReceivePages, SendPages
from engine.model.kv_pool import KVPool
from engine.model.page_image import PageImages
from engine.model.page_layout import KVOrigin, PageLayout
from engine.model.slot_record import SlotRecord
from engine.pipeline.kv_frames import (
    END,
    HEADER,
    KV_PROTOCOL,
    PAGE,
    Greeting,
    Verdict,
    decode_greeting,
    decode_verdict,
    read_frame,
    send_frame,
)
from engine.pipeline.kv_receiver import KVReceiver
from engine.pipeline.kv_sender import KVSender
from engine.process.kv_addresses import KVAddress

WAIT_S = 30.0
PAGES = 8
PAGE_TOKENS = 16
ORIGIN = KVOrigin(fields=(("hidden_size", "64"), ("rope_theta", "10000.0")), weights="1a")


class SmallStage:
    """A pool of eight pages with its record, and the port that a test opens over it."""

    def __init__(
        self,
        *,
        stage: int = 0,
        stages: int = 1,
        page_tokens: int = PAGE_TOKENS,
        dtype: torch.dtype = torch.bfloat16,
        sanitize: bool = True,
        layers: int = 2,
        origin: KVOrigin = ORIGIN,
    ) -> None:
        limits = Limits.of(
            EngineConfig(page_size=page_tokens, max_total_tokens=page_tokens * PAGES, context_length=64), EMBEDDED_FACTS
        )
        self.stage, self.stages, self.origin = stage, stages, origin
        self.pool = KVPool(
            limits, layers=layers, kv_heads=3, head_dim=8, dtype=dtype, device=torch.device("cpu"), pages_first=False
        )
        self.record = SlotRecord(self.pool, sanitize=sanitize)
        self.answers: queue.Queue[Any] = queue.Queue()

    def images(self) -> PageImages:
        return PageImages(self.pool, self.record, stage=self.stage, stages=self.stages, origin=self.origin)

    def fill(self, page: int, value: int) -> None:
        for part in (*self.pool.page(page), *map(torch.from_numpy, self.record.page(page))):
            part.fill_(value)

    def image(self, page: int) -> bytes:
        images = self.images()
        image = images.new_image()
        images.read(page, image)
        return bytes(image.numpy())

    def answer(self) -> TransferEvent:
        event = self.answers.get(timeout=WAIT_S)
        assert isinstance(event, PagesReceived | PagesSent)
        return event

    def receiver(self, folder: Path, **places: Any) -> KVReceiver:
        return KVReceiver(self.images, self.answers.put, folder, **places)

    def sender(self, **places: Any) -> KVSender:
        return KVSender(self.images, self.answers.put, **places)


class Prefiller:
    """A peer that brings KV as a test tells it."""

    def __init__(self, address: KVAddress, layout: PageLayout, *, connection: socket.socket | None = None) -> None:
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(address.place))
        connection.settimeout(WAIT_S)
        self.connection = connection
        send_frame(connection, Greeting(KV_PROTOCOL, address.run, layout))
        self.refusal = decode_verdict(read_frame(connection)).error

    def bring(self, transfer: int, place: int, image: bytes) -> None:
        self.connection.sendall(HEADER.pack(PAGE, transfer, place) + image)

    def end(self, transfer: int) -> str | None:
        """Say that this was all, and wait for what the other side says."""
        self.connection.sendall(HEADER.pack(END, transfer, 0))
        return decode_verdict(read_frame(self.connection)).error

    def is_closed(self) -> bool:
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.connection.close()


class Decoder:
    """A peer that takes a greeting, and then does what a test tells it; without that, it reads nothing any more."""

    def __init__(self, folder: Path, then: Callable[[socket.socket], object] | None = None) -> None:
        self.address = KVAddress(folder / "peer", "a-run")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.address.place))
        self._listener.listen()
        self.over, self.has_greeted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(then or (lambda _: self.over.wait(WAIT_S)),))
        self._thread.start()

    def _run(self, then: Callable[[socket.socket], object]) -> None:
        self._listener.settimeout(WAIT_S)
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            decode_greeting(read_frame(connection))
            with contextlib.suppress(OSError):
                send_frame(connection, Verdict(None))
                self.has_greeted.set()
                then(connection)

    def close(self) -> None:
        self.over.set()
        self._thread.join(WAIT_S)
        self._listener.close()


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    assert not left, left


def receive(number: int, *pages: int) -> ReceivePages:
    return ReceivePages(number, pages)


def send(number: int, address: object, *pages: int, to_transfer: int = 1, first: int = 0) -> SendPages:
    return SendPages(number, pages, (str(address),), to_transfer, first)


Open = Callable[[Any], Any]
Decode = tuple[SmallStage, KVReceiver]
Prefill = tuple[SmallStage, KVSender]


def images(stage: SmallStage, *pages: int) -> list[bytes]:
    return [stage.image(page) for page in pages]
