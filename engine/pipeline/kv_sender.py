"""The port of a prefill engine's stage: sends pages of KV to decode engines.

Each decode engine has a thread. A peer that is gone, slow or wrong fails only the orders for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Final

import torch

from engine.core.errors import ConfigError, EngineError, StepFailedError
from engine.core.messages import PagesSent
from engine.core.plan import SendPages, StopTransfer, TransferOrder
from engine.model.page_image import PageImages
from engine.model.page_layout import PageLayout
from engine.pipeline.kv_frames import (
    END,
    HEADER,
    KV_PROTOCOL,
    PAGE,
    ConnectionOver,
    Greeting,
    bound_waits,
    decode_verdict,
    read_frame,
    send_frame,
)
from engine.process.kv_addresses import KVAddress, parse_kv_address
from engine.process.links.connection import LinkAddress
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret

# A send that makes no progress, or a peer that does not confirm, fails after this time.
PROGRESS_TIMEOUT_S: Final = 10.0
# An idle thread and its connection end after this time.
IDLE_S: Final = 300.0
_CLOSE_WAIT_S: Final = 1.0

logger = logging.getLogger(__name__)


class _RefusedError(EngineError):
    """The other side has refused this connection."""


@dataclass(frozen=True, eq=False)
class _Sending:
    order: SendPages
    images: PageImages


class KVSender:
    """Any thread may call ``answer``, once for each ``SendPages``. Decode engines on TCP require ``secret``."""

    def __init__(
        self, images: Callable[[], PageImages], answer: Callable[[PagesSent], None], secret: Secret | None = None
    ) -> None:
        self._images = images
        self._answer = answer
        self._secret = secret
        self._stage = images().layout.stage
        # Held while a page is read, so that a stopped transfer reads no more.
        self._lock = Lock()
        self._open: set[int] = set()
        self._lanes: dict[str, _Lane] = {}

    def order(self, order: TransferOrder) -> None:
        """Begin or end a transfer. Waits for a page that is being read, never for a peer."""
        if isinstance(order, StopTransfer):
            self.end(order.transfer, "the transfer was stopped")
            return
        assert isinstance(order, SendPages), f"a prefill engine receives nothing, got {order}"
        images = self._images()
        try:
            images.require(order.pages)
            address = _own(order.to, images.layout)
            parsed = parse_kv_address(address)
        except (StepFailedError, ConfigError) as exc:
            self._answer(PagesSent(transfer=order.transfer, error=f"stage {self._stage}: {exc}"))
            return
        with self._lock:
            self._open.add(order.transfer)
            lane = self._lanes.get(address)
            if lane is None:
                lane = self._lanes[address] = _Lane(self, parsed, self._stage, self._secret)
            lane.orders.put(_Sending(order, images))

    def forget(self) -> None:
        """Close all connections without another read or answer; the next order opens a new one."""
        self.close()

    def close(self) -> None:
        """End all threads without another read or answer; idempotent."""
        with self._lock:
            self._open.clear()
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    # -- for its threads --

    def read(self, sending: _Sending, page: int, image: torch.Tensor) -> bool:
        """Read a page of an order; return False, without a read, if the order is over."""
        with self._lock:
            if sending.order.transfer not in self._open:
                return False
            sending.images.read(page, image)
            return True

    def is_open(self, number: int) -> bool:
        return number in self._open

    def end(self, number: int, error: str | None) -> None:
        """Answer an order once."""
        with self._lock:
            if number not in self._open:
                return
            self._open.remove(number)
        self._answer(PagesSent(transfer=number, error=None if error is None else f"stage {self._stage}: {error}"))

    def retire(self, lane: _Lane) -> bool:
        """Let an idle thread end; False if it has just received an order."""
        with self._lock:
            if not lane.orders.empty():
                return False
            self._lanes = {address: one for address, one in self._lanes.items() if one is not lane}
            return True


def _own(to: tuple[str, ...], layout: PageLayout) -> str:
    """Return the address of the same stage. Raises ConfigError if the number of stages differs."""
    if len(to) != layout.stages:
        raise ConfigError(f"the decode engine must have {layout.stages} stages, as this engine has, got {len(to)}")
    return to[layout.stage]


class _Lane:
    """The thread and connection to one stage of one run of a decode engine. Its failure also fails waiting orders."""

    def __init__(self, sender: KVSender, address: KVAddress, stage: int, secret: Secret | None) -> None:
        self.orders: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._sender = sender
        self._address = address
        self._stage = stage
        self._secret = secret
        self._connection: socket.socket | None = None
        # The layout that the other side accepted.
        self._layout: PageLayout | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self.orders.put(None)
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_WAIT_S)

    def _run(self) -> None:
        while (sending := self._next()) is not None:
            self._carry_out(sending)
        self._disconnect()

    def _next(self) -> _Sending | None:
        while True:
            try:
                return self.orders.get(timeout=IDLE_S)
            except queue.Empty:
                if self._sender.retire(self):
                    return None

    def _carry_out(self, sending: _Sending) -> None:
        number = sending.order.transfer
        if not self._sender.is_open(number):
            return
        try:
            error = self._send(sending)
        except BlockingIOError:
            self._fail(sending, f"it has accepted or confirmed nothing for {PROGRESS_TIMEOUT_S} s")
        except ConnectionOver:
            self._fail(sending, "it closed the connection")
        except (OSError, EngineError) as exc:
            self._fail(sending, str(exc))
        except Exception as exc:  # any error of a device ends this order, not the stage
            logger.exception("KV could not be sent to %s", self._address)
            self._fail(sending, f"{type(exc).__name__}: {exc}")
        else:
            self._sender.end(number, error)

    def _fail(self, sending: _Sending, why: str) -> None:
        """Fail an order and all orders that wait behind it; the next order gets a new connection."""
        self._disconnect()
        waiting = [sending]
        while not self.orders.empty():
            if (other := self.orders.get()) is None:
                self.orders.put(None)
                break
            waiting.append(other)
        for one in waiting:
            self._sender.end(one.order.transfer, f"KV could not be sent to {self._address}: {why}")

    def _send(self, sending: _Sending) -> str | None:
        """Send the pages of one order until it is over. Returns the receiver's verdict."""
        order, images = sending.order, sending.images
        if self._connection is None or self._layout != images.layout:
            self._disconnect()
            self._connect(images.layout)
        connection = self._connection
        assert connection is not None
        image = images.new_image()
        data = image.numpy().data
        for place, page in enumerate(order.pages, order.first):
            if not self._sender.read(sending, page, image):
                break
            connection.sendall(HEADER.pack(PAGE, order.to_transfer, place))
            connection.sendall(data)
        connection.sendall(HEADER.pack(END, order.to_transfer, 0))
        return decode_verdict(read_frame(connection)).error

    def _connect(self, layout: PageLayout) -> None:
        place = self._address.place
        if isinstance(place, Path):
            connection = self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound_waits(connection, send_s=PROGRESS_TIMEOUT_S, receive_s=PROGRESS_TIMEOUT_S)
            connection.connect(str(place))
        elif self._secret is None:
            raise ConfigError(
                "an engine on another machine accepts KV only from peers with its secret, and none was given"
            )
        else:
            claim = Claim(Role.KV, self._stage)
            connection = self._connection = LinkAddress(place, self._secret, claim, PROGRESS_TIMEOUT_S).connect()
            bound_waits(connection, send_s=PROGRESS_TIMEOUT_S, receive_s=PROGRESS_TIMEOUT_S)
        if self._is_closed:
            raise ConnectionOver
        send_frame(connection, Greeting(KV_PROTOCOL, self._address.run, layout))
        refusal = decode_verdict(read_frame(connection)).error
        if refusal is not None:
            raise _RefusedError(refusal)
        self._layout = layout

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._layout = None
