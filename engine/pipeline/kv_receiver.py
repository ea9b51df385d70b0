"""The port of a decode engine's stage: receives pages of KV from prefill engines and writes them as ordered.

One thread listens, and each connection has its own. A peer that is gone, slow or wrong loses only its own connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Final

import torch

from engine.core.errors import StepFailedError
from engine.core.frames import BadFrameError
from engine.core.messages import PagesReceived
from engine.core.plan import ReceivePages, StopTransfer, TransferOrder
from engine.model.page_image import PageImages
from engine.model.page_layout import PageLayout
from engine.pipeline.kv_frames import (
    END,
    HEADER,
    KV_PROTOCOL,
    MAX_ERROR_CHARS,
    PAGE,
    ConnectionOver,
    Verdict,
    bound_waits,
    decode_greeting,
    fill,
    read_frame,
    send_frame,
)
from engine.pipeline.wires import listening
from engine.process.kv_addresses import KVAddress, forget_kv_address, kv_socket, note_kv_address
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import LinkListener, bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret

# A peer greets, and reads verdicts, at once, so this is for the network.
GREETING_TIMEOUT_S: Final = 5.0
# How long a page waits for its order, which queues behind this stage's microbatches, while the other engine may send
# the page at once.
EARLY_WAIT_S: Final = 8.0
# How long a TCP peer may acknowledge nothing.
SILENCE_S: Final = 10.0
# More than any fleet has prefill engines.
MAX_CONNECTIONS: Final = 256
_CLOSE_WAIT_S: Final = 1.0
_RUN_BYTES: Final = 8

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Receiving:
    """An open transfer: its pages in order, and the indices of the pages that have arrived."""

    images: PageImages
    pages: tuple[int, ...]
    come: set[int] = field(default_factory=set)

    @property
    def whole(self) -> int:
        """Count the pages that have arrived without a gap, from the first on."""
        return next((place for place in range(len(self.pages)) if place not in self.come), len(self.pages))


class KVReceiver:
    """Listens in ``private_dir``, or at ``endpoint`` for peers that prove ``secret``. ``answer`` may be called by any
    thread, once for each ``ReceivePages``.
    """

    def __init__(
        self,
        images: Callable[[], PageImages],
        answer: Callable[[PagesReceived], None],
        private_dir: Path,
        endpoint: Endpoint | None = None,
        secret: Secret | None = None,
    ) -> None:
        self._images = images
        self._answer = answer
        self._private_dir = private_dir
        self._stage = images().layout.stage
        self._run = secrets.token_hex(_RUN_BYTES)
        # Held while a page is written, so that a stopped transfer writes no more.
        self._lock = Condition()
        # Transfers are numbered in the order of their orders: a number beyond the last is still to be ordered.
        self._last = 0
        self._open: dict[int, _Receiving] = {}
        self._connections: set[socket.socket] = set()
        # Includes threads that are ending because their connections are closed.
        self._threads: list[Thread] = []
        self._is_closed = False
        self._listener: socket.socket | LinkListener
        if endpoint is None:
            path = kv_socket(private_dir, self._stage)
            self._listener = listening(path, backlog=MAX_CONNECTIONS)
            self._listener.setblocking(False)
            self.address = KVAddress(path, self._run)
        else:
            assert secret is not None, "KV over TCP needs a secret"
            port = endpoint.port + self._stage if endpoint.port else 0
            bound = bound_at(Endpoint(endpoint.host, port), "the endpoint of KV")
            self._listener = LinkListener(bound, secret, silence_s=SILENCE_S)
            self.address = KVAddress(Endpoint(endpoint.host, self._listener.endpoint.port), self._run)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = Thread(target=self._listen, name="kv-listener", daemon=True)
        self._thread.start()
        note_kv_address(private_dir, self._stage, self.address)

    def order(self, order: TransferOrder) -> None:
        """Begin or end a transfer. Waits for a page that is being written, never for a peer."""
        if isinstance(order, StopTransfer):
            with self._lock:
                stopped = self._open.pop(order.transfer, None)
            if stopped is not None:
                self._answer(PagesReceived(transfer=order.transfer, pages=stopped.whole))
            return
        assert isinstance(order, ReceivePages), f"a decode engine sends nothing, got {order}"
        images = self._images()
        try:
            images.require(order.pages)
        except StepFailedError as exc:
            logger.warning("stage %d cannot receive transfer %d: %s", self._stage, order.transfer, exc)
            self._answer(PagesReceived(transfer=order.transfer, pages=0))
            return
        with self._lock:
            self._last = order.transfer
            self._open[order.transfer] = _Receiving(images, order.pages)
            self._lock.notify_all()

    def forget(self) -> None:
        """Restart the numbers of transfers: pages that arrive before their order wait for it."""
        with self._lock:
            self._last = 0
            self._open.clear()

    def close(self) -> None:
        """End all threads without another write or answer; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._open.clear()
            self._lock.notify_all()
            connections = set(self._connections)
        forget_kv_address(self._private_dir, self._stage)
        os.eventfd_write(self._wake, 1)
        for connection in connections:
            # Wakes the thread that reads there; an error means that the peer closed first.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *self._threads):
            thread.join(_CLOSE_WAIT_S)
        os.close(self._wake)
        if isinstance(self.address.place, Path):
            self.address.place.unlink(missing_ok=True)

    # -- the listening thread --

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not self._is_closed:
            due = self._listener.due() if isinstance(self._listener, LinkListener) else None
            poller.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)
            for connection, peer in self._taken():
                self._serve(connection, peer)
        self._listener.close()

    def _taken(self) -> Sequence[tuple[socket.socket, str]]:
        """Accept the new connections, each with its peer's name."""
        if not isinstance(self._listener, LinkListener):
            try:
                return [(self._listener.accept()[0], "a prefill engine of this machine")]
            except OSError as exc:
                # The peer is gone; or no descriptor is left, and the connection keeps the listener readable.
                if not isinstance(exc, BlockingIOError | ConnectionError):
                    logger.warning("a connection for KV cannot be accepted: %s", exc)
                    time.sleep(0.1)
                return []
        taken = []
        for link in self._listener.take(time.monotonic()):
            if link.claim == Claim(Role.KV, self._stage):
                taken.append((link.connection, link.peer))
            else:
                logger.warning(
                    "dropped %s, which claims to be %s where stage %d receives KV", link.peer, link.claim, self._stage
                )
                link.connection.close()
        return taken

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with self._lock:
            is_one_too_many = self._is_closed or len(self._connections) >= MAX_CONNECTIONS
            if not is_one_too_many:
                thread = Thread(target=self._converse, args=(connection, peer), name="kv-receiver", daemon=True)
                self._connections.add(connection)
                thread.start()
                self._threads = [*filter(Thread.is_alive, self._threads), thread]
        if is_one_too_many:
            logger.warning("dropped %s, because %d others are connected for KV", peer, MAX_CONNECTIONS)
            connection.close()

    # -- a connection's thread --

    def _converse(self, connection: socket.socket, peer: str) -> None:
        try:
            self._take_all(connection)
        except ConnectionOver:
            pass
        except (OSError, BadFrameError) as exc:
            if not self._is_closed:
                logger.warning("closed the KV connection of %s: %s", peer, exc)
        except Exception:  # any error of a device ends this connection; its transfers time out
            logger.exception("closed the KV connection of %s", peer)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _take_all(self, connection: socket.socket) -> None:
        connection.settimeout(GREETING_TIMEOUT_S)
        greeting = decode_greeting(read_frame(connection))
        images = self._images()
        refusal = self._refusal_of(greeting.protocol, greeting.run, greeting.layout, images.layout)
        bound_waits(connection, send_s=GREETING_TIMEOUT_S)
        send_frame(connection, Verdict(refusal))
        if refusal is not None:
            logger.warning("refused a prefill engine: %s", refusal)
            return
        image, header = images.new_image(), bytearray(HEADER.size)
        room = image.numpy().data
        error: str | None = None
        dropped: int | None = None
        while True:
            fill(connection, memoryview(header), is_first=True)
            kind, transfer, place = HEADER.unpack(header)
            if kind == END:
                send_frame(connection, Verdict(error))
                error = None
            elif kind == PAGE:
                fill(connection, room)
                page_error = self._take(transfer, place, greeting.layout, image)
                error = error or page_error
                if page_error is not None and dropped != transfer:
                    dropped = transfer
                    logger.info("dropped pages: %s", page_error)
            else:
                raise BadFrameError(f"a header must begin with {PAGE!r} or {END!r}, got {kind!r}")

    def _refusal_of(self, protocol: int, run: str, theirs: PageLayout, ours: PageLayout) -> str | None:
        if protocol != KV_PROTOCOL:
            return f"protocol must be {KV_PROTOCOL}, got {protocol}: run the same version on both engines"
        if run != self._run:
            return f"the decode engine must be run {run!r}, but has restarted and is {self._run!r} now"
        difference = ours.difference(theirs)
        return None if difference is None else difference[:MAX_ERROR_CHARS]

    def _take(self, number: int, place: int, layout: PageLayout, image: torch.Tensor) -> str | None:
        """Write one page, once it is ordered. Returns the reason if not, for a transfer that is over.

        Raises BadFrameError for a page that was not ordered.
        """
        with self._lock:
            self._lock.wait_for(lambda: number <= self._last or self._is_closed, EARLY_WAIT_S)
            receiving = self._open.get(number)
            if receiving is None:
                return f"stage {self._stage} has no open transfer {number}"
            if (difference := receiving.images.layout.difference(layout)) is not None:
                return difference[:MAX_ERROR_CHARS]
            if place >= len(receiving.pages) or place in receiving.come:
                what = (
                    "came twice"
                    if place in receiving.come
                    else f"is beyond the {len(receiving.pages)} pages of the order"
                )
                raise BadFrameError(f"page {place} of transfer {number} {what}")
            receiving.images.write(receiving.pages[place], image)
            receiving.come.add(place)
            if len(receiving.come) < len(receiving.pages):
                return None
            del self._open[number]
        self._answer(PagesReceived(transfer=number, pages=len(receiving.pages)))
        return None
