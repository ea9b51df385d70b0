"""Transports of hidden states from one stage to the next: stream sockets, or torch.distributed.

A transport carries a tensor or a failure for each microbatch, in launch order, and never decides what to compute. The
receiver knows shape and type from the plan and the model, so a message's head is only a number and two lengths.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed

from engine.core.errors import ProcessDiedError, StepFailedError
from engine.core.plan import Microbatch
from engine.model.stage_slice import StageFacts
from engine.pipeline.channel import StageChannel
from engine.pipeline.wires import StageWires, accepted, connected, listening
from engine.process.control import STAGE_PREFIX

# A failed allocation: torch raises RuntimeError or its subclass OutOfMemoryError.
OUT_OF_MEMORY = (RuntimeError, MemoryError)
MAX_ERROR_BYTES: Final = 8_192

# The head of each socket message: the microbatch, the length of an error's text or 0, and the length of the body.
FRAME_HEAD: Final = struct.Struct("<qIQ")
_DRAIN_BYTES: Final = 1 << 16
_CPU: Final = torch.device("cpu")


class HiddenFailed(NamedTuple):
    """The failure of a microbatch on an earlier stage, sent instead of hidden states."""

    microbatch_id: int
    error: str


class HiddenTransport(ABC):
    """Point-to-point transfer from each stage to the next one, in launch order.

    The stage computes on ``device``; the transport's tensors are on ``outside``.
    """

    def __init__(self, stage: int, facts: StageFacts, device: torch.device, outside: torch.device) -> None:
        self._stage = stage
        self._hidden_size, self._dtype = facts.hidden_size, facts.dtype
        self._device, self._outside = device, outside

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        """Send hidden states [tokens, hidden size], or their failure, to the next stage."""
        try:
            if not isinstance(output, HiddenFailed):
                self._put(microbatch.id, 0, output.contiguous().to(self._outside))
                return
        except OUT_OF_MEMORY as exc:
            output = self._without_memory(microbatch, "hand on", exc)
        text = output.error.encode()[:MAX_ERROR_BYTES] or b"?"
        self._put(microbatch.id, len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._outside))

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        """Wait for the hidden states of ``microbatch`` from the stage before, or for their failure.

        Raises ProcessDiedError if they can never arrive, and StepFailedError for any other message: the stream is then
        out of step for good.
        """
        shape = microbatch.tokens, self._hidden_size
        number, error_bytes = self._take_head(microbatch)
        if number != microbatch.id:
            raise StepFailedError(
                f"hidden states must come in launch order, stage {self._stage} expects microbatch {microbatch.id}, "
                f"got {number}"
            )
        if error_bytes:
            text = torch.empty(error_bytes, dtype=torch.uint8, device=self._outside)
            self._take(text)
            return HiddenFailed(number, bytes(text.tolist()).decode(errors="ignore"))
        try:
            hidden = torch.empty(shape, dtype=self._dtype, device=self._outside)
        except OUT_OF_MEMORY as exc:
            # The body must be read from the socket anyway, or the next head is misread.
            self._drain(microbatch)
            return self._without_memory(microbatch, "take", exc)
        self._take(hidden)
        try:
            return hidden.to(self._device)
        except OUT_OF_MEMORY as exc:
            return self._without_memory(microbatch, "take", exc)

    @abstractmethod
    def close(self) -> None:
        """Release the transport's own resources."""

    @abstractmethod
    def _put(self, number: int, error_bytes: int, body: torch.Tensor) -> None:
        """Send a message to the next stage."""

    @abstractmethod
    def _take_head(self, microbatch: Microbatch) -> tuple[int, int]:
        """Wait for the next message's head: its microbatch, and the length of an error's text or 0."""

    @abstractmethod
    def _take(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with the body of the message."""

    @abstractmethod
    def _drain(self, microbatch: Microbatch) -> None:
        """Drop the hidden states of a microbatch without allocating memory for them."""

    def _without_memory(self, microbatch: Microbatch, verb: str, exc: BaseException) -> HiddenFailed:
        """Build the failure of a microbatch whose hidden states did not fit into memory; the process survives."""
        what = f"stage {self._stage} could not {verb} the hidden states of microbatch {microbatch.id}"
        return HiddenFailed(microbatch.id, f"{what}: {type(exc).__name__}: {exc}")

    def _bytes_of(self, microbatch: Microbatch) -> int:
        return microbatch.tokens * self._hidden_size * self._dtype.itemsize


class SocketTransport(HiddenTransport):
    """Raw bytes over a stream socket: a Unix one on one machine, else TCP.

    A tensor larger than the socket's buffer blocks its sender until the next stage reads it. The receiver compares the
    announced length with the plan before it waits for the body. ``scheduler`` is this stage's channel to the scheduler;
    when that breaks, a wait for hidden states ends.
    """

    def __init__(
        self,
        wires: StageWires,
        stage: int,
        facts: StageFacts,
        device: torch.device,
        scheduler: StageChannel | None = None,
    ) -> None:
        super().__init__(stage, facts, device, _CPU)
        self._scheduler = scheduler
        # The listener for the stage before, then the connections to the stages before and after.
        self._listener: socket.socket | None = None
        self._source: socket.socket | None = None
        self._target: socket.socket | None = None
        before = wires.before
        if isinstance(before, Path):
            self._listener = listening(before)
        if wires.after is not None:
            self._target = connected(wires.after)
        # Each stage connects to the next one before it accepts the one before, so the chain resolves from the last
        # stage on.
        if before is not None and not isinstance(before, Path):
            self._source = accepted(before, stage)

    def close(self) -> None:
        for end in (self._listener, self._source, self._target):
            if end is not None:
                end.close()

    def _put(self, number: int, error_bytes: int, body: torch.Tensor) -> None:
        """Send a small message in one call, to wake its reader once. The supervisor reports a stage that is gone."""
        assert self._target is not None, f"stage {self._stage} is the last; it has no next stage"
        payload = _bytes_in(body)
        start = FRAME_HEAD.pack(number, error_bytes, payload.nbytes)
        with contextlib.suppress(OSError):
            sent = self._target.sendmsg([start, payload])
            if sent < len(start):
                self._target.sendall(start[sent:])
            self._target.sendall(payload[max(0, sent - len(start)) :])

    def _take_head(self, microbatch: Microbatch) -> tuple[int, int]:
        if self._source is None:
            assert self._listener is not None, f"stage {self._stage} is the first; no stage comes before it"
            self._wait(self._listener)
            self._source, _ = self._listener.accept()
        self._wait(self._source)
        head = bytearray(FRAME_HEAD.size)
        self._fill(memoryview(head))
        number, error_bytes, follow = FRAME_HEAD.unpack(head)
        awaited = error_bytes or self._bytes_of(microbatch)
        if number == microbatch.id and (follow != awaited or error_bytes > MAX_ERROR_BYTES):
            what = f"an error of at most {MAX_ERROR_BYTES}" if error_bytes else f"hidden states of {awaited}"
            raise StepFailedError(
                f"stage {self._stage} cannot read the message of stage {self._stage - 1}: for microbatch "
                f"{microbatch.id} {what} bytes must follow, got {follow}"
            )
        return number, error_bytes

    def _take(self, tensor: torch.Tensor) -> None:
        self._fill(_bytes_in(tensor))

    def _drain(self, microbatch: Microbatch) -> None:
        spare, left = memoryview(bytearray(_DRAIN_BYTES)), self._bytes_of(microbatch)
        while left:
            self._fill(spare[:left])
            left -= min(left, _DRAIN_BYTES)

    def _wait(self, source: socket.socket) -> None:
        """Wait until ``source`` is readable. Raises ProcessDiedError if the scheduler's channel closes first."""
        poller = select.poll()
        poller.register(source, select.POLLIN)
        if self._scheduler is not None:
            poller.register(self._scheduler, 0)
        if source.fileno() not in dict(poller.poll()):
            raise ProcessDiedError("scheduler", "it closed its connection to the stages")

    def _fill(self, into: memoryview) -> None:
        """Fill a buffer. Raises ProcessDiedError when the previous stage is gone and all its bytes are read."""
        assert self._source is not None
        while into:
            try:
                count = self._source.recv_into(into)
            except OSError:
                count = 0
            if not count:
                raise ProcessDiedError(f"{STAGE_PREFIX}{self._stage - 1}", "it closed its connection to the next stage")
            into = into[count:]


class DistributedTransport(HiddenTransport):
    """torch.distributed's point-to-point calls (gloo or NCCL) over the caller's process group, rank = stage.

    ``most_tokens`` is the largest microbatch. Gloo's point-to-point calls take only CPU tensors, so hidden states of a
    GPU are copied to the CPU first.
    """

    def __init__(self, stage: int, facts: StageFacts, device: torch.device, *, most_tokens: int) -> None:
        on_cpu = device.type == "cpu" or torch.distributed.get_backend() == "gloo"
        super().__init__(stage, facts, device, _CPU if on_cpu else device)
        spare = (most_tokens if stage else 0, facts.hidden_size)
        self._spare = torch.empty(spare, dtype=facts.dtype, device=self._outside)

    def close(self) -> None:
        """Do nothing: the caller owns the process group."""

    def _put(self, number: int, error_bytes: int, body: torch.Tensor) -> None:
        head = torch.tensor([number, error_bytes], dtype=torch.int64, device=self._outside)
        torch.distributed.send(head, self._stage + 1)
        torch.distributed.send(body, self._stage + 1)

    def _take_head(self, microbatch: Microbatch) -> tuple[int, int]:  # noqa: ARG002 - its length is the plan's
        head = torch.empty(2, dtype=torch.int64, device=self._outside)
        self._take(head)
        number, error_bytes = head.tolist()
        return number, error_bytes

    def _take(self, tensor: torch.Tensor) -> None:
        try:
            torch.distributed.recv(tensor, self._stage - 1)
        except RuntimeError as exc:
            raise ProcessDiedError(f"{STAGE_PREFIX}{self._stage - 1}", f"its connection broke: {exc}") from exc

    def _drain(self, microbatch: Microbatch) -> None:
        self._take(self._spare[: microbatch.tokens])


def _bytes_in(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's memory as bytes, which works for every element type; numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data
