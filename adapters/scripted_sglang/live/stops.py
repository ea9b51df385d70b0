"""The stops of SGLang's event loops: at the start of a turn, and where they wait for a result."""

from __future__ import annotations

import dataclasses
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    sock_recv,
)

from scripted.sdk.live.stops import HeldQueue, LoopStops
from scripted.sdk.messages import Share
from scripted_sglang.scheduler_view import shares_of

# The messages of scripts, and the end; all other messages from the front end pass.
_HELD: Final = (
    AbortReq, ContinueGenerationReqInput, FlushCacheReqInput, PauseGenerationReqInput, TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput, ShutdownReq,
)  # fmt: skip


class SglangStops(LoopStops):
    """Stops ``event_loop_normal`` and ``event_loop_overlap``.

    ``shares`` were launched in the last step; ``said`` has the messages to the front end.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(lambda message: isinstance(message.of, ShutdownReq))
        self.shares: tuple[Share, ...] = ()
        self.said: list[Any] = []
        self._has_turned = self._has_launched = False
        self._processed = 0
        receiver = scheduler.request_receiver
        mailbox = Mailbox(receiver.recv_from_tokenizer, self.inbox)
        self._receiver = dataclasses.replace(receiver, recv_from_tokenizer=mailbox)
        scheduler.request_receiver = self
        channels = scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            self._follow(sender)
        self._note_launches(scheduler.model_worker, scheduler.page_size)
        self._stop_at_results(scheduler)

    def begin_step(self) -> None:
        self.shares, self.said = (), []
        self._has_turned = self._has_launched = False

    def is_released(self, batch_id: int) -> bool:
        # A loop that has launched a batch waits: its next work belongs to the next step.
        return not self._has_launched and super().is_released(batch_id)

    # -- in the loop's thread --

    def recv_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the receiver, which the loop calls once per turn."""
        if self._has_turned:
            self.gate.stop_at("turn")
        self._has_turned = True
        return self._receiver.recv_requests(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def _follow(self, sender: Any) -> None:
        send: Callable[..., Any] = sender.send_output

        def send_output(output: Any, recv_obj: Any = None) -> None:
            self.said.append(output)
            send(output, recv_obj)

        sender.send_output = send_output

    def _note_launches(self, worker: Any, page_size: int) -> None:
        forward = worker.forward_batch_generation

        def forward_batch_generation(batch: Any, **kwargs: Any) -> Any:
            self.batches += 1
            self._has_launched = True
            self.shares = tuple(shares_of(batch, page_size))
            return forward(batch, **kwargs)

        worker.forward_batch_generation = forward_batch_generation

    def _stop_at_results(self, scheduler: Any) -> None:
        process = scheduler.process_batch_result

        def process_batch_result(batch: Any, result: Any) -> Any:
            self._processed += 1
            self.await_release(self._processed)
            return process(batch, result)

        scheduler.process_batch_result = process_batch_result


class _Message:
    """A message as it came over the socket, and its content."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.of = sock_recv(self)

    def recv(self, flags: int = 0) -> bytes:
        del flags
        return self.data

    def recv_pyobj(self, flags: int = 0) -> Any:
        return pickle.loads(self.recv(flags))  # noqa: S301 - as the engine reads its own socket


class Mailbox:
    """Stands in for the scheduler's socket, which a thread reads."""

    def __init__(self, socket: zmq.Socket[bytes], inbox: HeldQueue) -> None:
        self._socket = socket
        self._inbox = inbox
        threading.Thread(target=self._read, name="scripted-mailbox", daemon=True).start()

    def recv(self, flags: int = 0) -> bytes:
        return self._next().recv(flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        return self._next().recv_pyobj(flags)

    def _next(self) -> _Message:
        try:
            message: _Message = self._inbox.get(block=False)
        except queue.Empty:
            raise zmq.Again from None
        return message

    def _read(self) -> None:
        while True:
            message = _Message(self._socket.recv())
            if isinstance(message.of, _HELD):
                self._inbox.put(message)
            else:
                self._inbox.wake(message)
