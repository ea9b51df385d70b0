"""One real engine with a role, and the real parts of the imaginary engine at the other end of its transfers.

Transfers end as in the sim tier, with the same number of pages. A prefill engine of its own computes the prompts that a
decode engine wants; the pages that a prefill engine sends are taken and checked.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import msgspec
import zmq

from engine.core.messages import (
    ClientMessage,
    Generate,
    PagesSent,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    SamplingParams,
    TransferEvent,
)
from engine.core.plan import ReceivePages, SendPages, StopTransfer
from engine.core.scheduler import Scheduler, Step, StepResult
from engine.frontend.sessions.prefill_bodies import PREFILL as PREFILL_PATH
from engine.pipeline.kv_frames import HEADER
from scripted.core.violation import Violation
from scripted.script.clients import ClientView
from scripted_lockstep.actions.bodies import view_of
from scripted_lockstep.actions.client_requests import DECODE_ENGINE, PREFILL_ENGINE, of_role
from scripted_lockstep.simulated.transfers import GONE
from scripted_lockstep.tiers.server.fleet_wires import RealWires
from scripted_lockstep.tiers.server.remote import FleetClients, RemoteWorld
from scripted_lockstep.tiers.server.wire import EnginePlace

# The record that goes with a page's KV: each slot's token and position, and with the sanitizer its fingerprint.
_NOTED_BYTES: Final = 4
_FINGERPRINT_BYTES: Final = 8
_UPDATE: Final = "/update_weights_from_disk"


class RolePeer(RealWires):
    """The other end. ``model`` is the path of the initial weights.

    ``prefill_url`` is the engine that computes a decode engine's prompts.
    """

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(folder)
        self.prefill_url = ""
        self._model = model
        self._weights = ""
        # Pages that a prefill engine has sent: for transfers that may end, and for transfers whose peer is gone.
        self._ends: dict[Any, asyncio.Event] = {}
        self._broken: set[Any] = set()

    # -- of a decode engine --

    def compute(self, wanted: PrefillWanted) -> None:
        """Fetch all pages of a prompt."""
        call = self._calls[DECODE_ENGINE, wanted.transfer]
        # The initial weights have a path too, which identifies them after the engine's first update.
        if (path := call.body["weights"] or self._model) != (self._weights or self._model):
            self._weights = path
            self._do(self._http.post(f"{self.prefill_url}{_UPDATE}", json={"model_path": path}))
        to = self.addresses(PREFILL_ENGINE, DECODE_ENGINE)
        body = call.body | {"to": to, "weights": self._weights}
        self._loop.call_soon_threadsafe(lambda: self._ask(call, f"{self.prefill_url}{PREFILL_PATH}", body))
        self._wait(DECODE_ENGINE, lambda: call.answer is not None, f"{wanted} to be computed")
        assert call.answer is not None
        if call.answer[0] != httpx.codes.OK:
            raise Violation(f"the prefill engine answered the decode engine with {call.answer}")

    def deliver(self, number: int, count: int) -> None:
        """Give the stages the first ``count`` pages of a transfer."""
        keys = sorted(key for key in self._pages if key[2] == number)
        images: dict[int, bytes] = {}
        for key in keys:
            for stage, pages in self._pages.pop(key).items():
                images[stage] = images.get(stage, b"") + pages
        cut = {stage: pages[: count * self._size(stage)] for stage, pages in images.items()}
        if count and keys and any(errors := self._do(self._send_pages(keys[0], cut))):
            raise Violation(f"the stages of the decode engine answered the pages with {errors}")

    def end(self, number: int) -> None:
        """Answer the decode engine's front end, if it still waits: all pages have arrived."""
        call = self._calls[DECODE_ENGINE, number]
        if call.shown is None:
            self._show(call, call.answer)

    # -- of a prefill engine --

    def receive(self, order: SendPages, prompt: Generate) -> Iterator[str]:
        """Wait for the pages of an order, and return the pages whose record has other tokens."""
        self.take(PREFILL_ENGINE, order)
        assert prompt.deliver is not None
        first = prompt.deliver.first_page + order.first
        for stage, pages in self._pages.pop(_key(order)).items():
            layout, size = self._layouts[PREFILL_ENGINE, DECODE_ENGINE, stage], self._size(stage)
            noted = 2 * layout.page_size
            fingerprints = 0 if layout.sanitizer_root is None else layout.page_size * _FINGERPRINT_BYTES
            for index, end in enumerate(range(size, len(pages) + 1, size), first):
                positions = range(index * layout.page_size, (index + 1) * layout.page_size)
                start = end - fingerprints - noted * _NOTED_BYTES
                found = struct.unpack_from(f"={noted}i", pages, start)
                if found != (*prompt.prompt_ids[positions.start : positions.stop], *positions):
                    yield f"page {index} of {prompt.rid} was sent with these tokens and positions: {found}"

    def finish(self, order: SendPages, *, is_gone: bool) -> None:
        """Confirm the pages of an order, or close the connection. Does not wait for unsent pages."""
        if is_gone:
            self._broken.add(_key(order))
        self._loop.call_soon_threadsafe(self._end_of(_key(order)).set)

    async def _confirm(self, key: Any) -> None:
        if self.worlds[PREFILL_ENGINE].limits.prefills:
            await self._end_of(key).wait()
        if key in self._broken:
            raise ConnectionResetError("the decode engine is gone")

    def _end_of(self, key: Any) -> asyncio.Event:
        return self._ends.setdefault(key, asyncio.Event())

    async def _drop_pages(self) -> None:
        if self.prefill_url:
            # It is never reset and keeps its connections. It answered when all pages were here.
            self._pages.clear()
            return
        await super()._drop_pages()
        for end in self._ends.values():
            end.set()
        self._ends.clear()
        self._broken.clear()

    def _size(self, stage: int) -> int:
        return HEADER.size + self._layouts[PREFILL_ENGINE, DECODE_ENGINE, stage].image_bytes


class _RoleClients(FleetClients):
    """Clients that also act as a decode engine, which requests prompts from a prefill engine."""

    scheduler: Scheduler
    addresses: Sequence[str]

    def generate(self, rid: str, body: dict[str, Any], first_page: int | None = None) -> ClientView:
        if first_page is None:
            return super().generate(rid, body)
        asked = Generate(
            rid=rid,
            prompt_ids=tuple(body["input_ids"]),
            sampling=SamplingParams(max_new_tokens=0),
            priority=body["priority"],
            cache_salt=body.get("cache_salt"),
        )
        prompt = of_role(asked, self.scheduler, first_page, next(self._deliveries))
        assert prompt.deliver is not None
        wanted = {
            "to": self.addresses,
            "transfer": prompt.deliver.transfer,
            "first_page": prompt.deliver.first_page,
            "weights": prompt.deliver.weights,
            "page_size": self.scheduler.limits.page_size,
            "prompt_ids": prompt.prompt_ids,
            "priority": prompt.priority,
            "cache_salt": prompt.cache_salt,
            "rid": rid,
        }
        return self._post(PREFILL_PATH, view_of(rid, body), wanted)

    def forget(self) -> None:
        super().forget()
        self._deliveries = itertools.count(1)


class RoleWorld(RemoteWorld):
    """The world of the engine; ``peer`` is the other end."""

    clients: _RoleClients
    clients_type: ClassVar = _RoleClients

    def __init__(
        self, place: EnginePlace, context: zmq.Context[Any], pause: Callable[[float], object], peer: RolePeer
    ) -> None:
        super().__init__(place, context, pause)
        self._peer = peer
        self.clients.choose_prefill = lambda: PREFILL_ENGINE

    def start(self, scheduler: Scheduler) -> None:
        """Begin a script on this scheduler."""
        self._corruptions: list[str] = []
        self.forget()
        self._peer.begin({PREFILL_ENGINE: self, DECODE_ENGINE: self})
        self.urls = {PREFILL_ENGINE: self._peer.urls_for(DECODE_ENGINE)[0]}
        self.addresses = {DECODE_ENGINE: self._peer.addresses(PREFILL_ENGINE, DECODE_ENGINE)}
        self.clients.scheduler, self.clients.addresses = scheduler, self.addresses[DECODE_ENGINE]

    def _start_over(self) -> None:
        super()._start_over()
        # Pages of aborted prompts may have been on their way until now.
        self._peer.drop_pages()

    def take_messages(self) -> list[ClientMessage]:
        return [_as_imagined(message) for message in super().take_messages()]

    def corruptions(self) -> Sequence[str]:
        return self._corruptions

    def carry_out(self, step: Step, result: StepResult) -> None:
        for event in step.events:
            if isinstance(event, PrefillFailed):
                self._peer.break_off(self, event)
        super().carry_out(step, result)
        for reply in result.replies:
            if isinstance(reply, PrefillWanted | PrefillDropped):
                self._peer.leave(self, reply)
            if isinstance(reply, PrefillWanted):
                self._peer.compute(reply)

    def _note_orders(self, result: StepResult) -> None:
        super()._note_orders(result)
        for order in result.transfers:
            if isinstance(order, StopTransfer) and isinstance(self._ordered.get(order.transfer), ReceivePages):
                self._peer.deliver(order.transfer, self._transfers.comes(order.transfer))

    def _bring_about(self, event: TransferEvent, order: SendPages | ReceivePages, prompts: Sequence[Generate]) -> None:
        if isinstance(event, PagesSent):
            assert isinstance(order, SendPages)
            if event.error is None:
                numbers = {prompt.deliver.transfer: prompt for prompt in prompts if prompt.deliver is not None}
                self._corruptions += self._peer.receive(order, numbers[order.to_transfer])
            self._peer.finish(order, is_gone=event.error == GONE)
        elif event.pages == len(order.pages):
            self._peer.deliver(event.transfer, event.pages)
            self._peer.end(event.transfer)

    def _shape(self, event: TransferEvent | None) -> object:
        return (event.transfer, event.error is None) if isinstance(event, PagesSent) else event


def _key(order: SendPages) -> Any:
    return PREFILL_ENGINE, DECODE_ENGINE, order.to_transfer, order.first


def _as_imagined(message: ClientMessage) -> ClientMessage:
    """Return a message with the imaginary engine's name, as in the sim tier."""
    if not isinstance(message, Generate) or message.deliver is None:
        return message
    to = (DECODE_ENGINE,) * len(message.deliver.to)
    return msgspec.structs.replace(message, deliver=msgspec.structs.replace(message.deliver, to=to))
