"""How hidden states get from one stage to the next: stream sockets, or torch.distributed.

Carries a tensor or a typed failure for each microbatch, in launch order; never decides what to compute. Used by a stage
between its forward and the next stage's.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
import torch.distributed

from engine.errors import ProcessDiedError, StepFailedError
from engine.frames import BadFrameError
from engine.messages import encode
from engine.pipeline.channel import StageChannel
from engine.pipeline.wire import (
    HiddenDtype,
    HiddenFailed,
    HiddenHeader,
    HiddenStates,
    decode_hidden_header,
)
from engine.pipeline.wires import StageWires, accepted, connected, listening
from engine.plan import Microbatch
from engine.process.control import STAGE_PREFIX

# How an allocation fails: torch raises RuntimeError, of which its OutOfMemoryError is one.
OUT_OF_MEMORY = (RuntimeError, MemoryError)

_ERROR_BYTES = 512
# Before each message: the sizes of its header and of its payload.
_SIZES: Final = struct.Struct("<IQ")
_DRAIN_BYTES: Final = 1 << 16
# A header is some 100 bytes, or the text of an error, which is cut to fit.
MAX_HEADER_BYTES: Final = 1 << 16
MAX_ERROR_CHARS: Final = 8_192
_ELEMENT_BYTES: Final = {HiddenDtype.FLOAT32: 4, HiddenDtype.BFLOAT16: 2, HiddenDtype.FLOAT16: 2}


class TransportKind(StrEnum):
    """Which transport the stages of one engine use."""

    SOCKET = "socket"
    DISTRIBUTED = "distributed"


class HiddenTransport(Protocol):
    """Point-to-point from each stage to the next one, in launch order."""

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        """Hand hidden states [tokens, hidden size], or their failure, to the next stage."""

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        """Wait for the hidden states of ``microbatch`` from the stage before, or for their failure.

        Raises ProcessDiedError when they can never come, StepFailedError when what came is something else: nothing
        after it can be trusted.
        """

    def close(self) -> None: ...


class SocketTransport:
    """A typed header and raw bytes a microbatch, over a stream socket: a Unix one on one machine, else TCP.

    A tensor that is larger than what the socket takes keeps its sender until the next stage reads it. What is announced
    is held against the plan before a byte of it is awaited. ``scheduler`` is
    this stage's channel to it; when that breaks, a wait for hidden states ends.
    """

    def __init__(
        self,
        wires: StageWires,
        *,
        stage: int,
        hidden_size: int,
        device: torch.device,
        scheduler: StageChannel | None = None,
    ) -> None:
        self._stage = stage
        self._hidden_size = hidden_size
        self._device = device
        self._scheduler = scheduler
        # The stage before, first as it is awaited, then as it is connected; and the next one.
        self._listener: socket.socket | None = None
        self._source: socket.socket | None = None
        self._target: socket.socket | None = None
        before = wires.before
        if isinstance(before, Path):
            self._listener = listening(before)
        if wires.after is not None:
            self._target = connected(wires.after)
        # From the last stage to the first each one connects to the next and then listens: a chain without a circle.
        if before is not None and not isinstance(before, Path):
            self._source = accepted(before, stage)

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        # The bytes view works for every element type; numpy has no bfloat16.
        try:
            payload = None if isinstance(output, HiddenFailed) else output.contiguous().cpu().view(torch.uint8).numpy()
        except OUT_OF_MEMORY as exc:
            output, payload = without_memory(self._stage, microbatch, "hand on", exc), None
        if isinstance(output, HiddenFailed) or payload is None:
            assert isinstance(output, HiddenFailed)
            self._write(encode(msgspec.structs.replace(output, error=output.error[:MAX_ERROR_CHARS])), memoryview(b""))
            return
        header = HiddenStates(
            microbatch_id=microbatch.id,
            dtype=HiddenDtype(str(output.dtype).removeprefix("torch.")),
            tokens=output.shape[0],
            hidden_size=output.shape[1],
        )
        self._write(encode(header), payload.data.cast("B"))

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        if self._source is None:
            assert self._listener is not None, f"stage {self._stage} is the first; it has no stage before"
            self._wait(self._listener)
            self._source, _ = self._listener.accept()
        source = self._source
        self._wait(source)
        header, payload_bytes = self._read_header(source, microbatch)
        if isinstance(header, HiddenFailed):
            return header
        try:
            tensor, raw = _tensor(header)
        except OUT_OF_MEMORY as exc:
            # What was sent must be taken off the wire all the same, or the next one is misread.
            for taken in range(0, payload_bytes, _DRAIN_BYTES):
                self._read(source, min(_DRAIN_BYTES, payload_bytes - taken))
            return without_memory(self._stage, microbatch, "take", exc)
        self._fill(source, raw)
        try:
            return tensor.to(self._device)
        except OUT_OF_MEMORY as exc:
            return without_memory(self._stage, microbatch, "take", exc)

    def close(self) -> None:
        for end in (self._listener, self._source, self._target):
            if end is not None:
                end.close()

    def _read_header(self, source: socket.socket, microbatch: Microbatch) -> tuple[HiddenHeader, int]:
        """What is announced, and how many bytes follow: those of this microbatch's hidden states, or none."""
        header_bytes, payload_bytes = _SIZES.unpack(self._read(source, _SIZES.size))
        if header_bytes > MAX_HEADER_BYTES:
            raise self._unreadable(f"a header has at most {MAX_HEADER_BYTES} bytes, got {header_bytes}")
        try:
            header = decode_hidden_header(self._read(source, header_bytes))
        except BadFrameError as exc:
            raise self._unreadable(f"a header must be one of hidden states, but {exc}") from exc
        if header.microbatch_id != microbatch.id:
            raise StepFailedError(
                f"hidden states must come in launch order, stage {self._stage} expects microbatch {microbatch.id}, "
                f"got {header.microbatch_id}"
            )
        shape, awaited = (0, 0), 0
        if isinstance(header, HiddenStates):
            shape, awaited = (microbatch.tokens, self._hidden_size), _bytes_of(header)
            if (header.tokens, header.hidden_size) != shape:
                raise self._unreadable(f"microbatch {microbatch.id} has hidden states of {shape}, got {header}")
        if payload_bytes != awaited:
            raise self._unreadable(f"hidden states of {shape} must have {awaited} bytes, got {payload_bytes}")
        return header, payload_bytes

    def _unreadable(self, why: str) -> StepFailedError:
        return StepFailedError(f"stage {self._stage} cannot read what stage {self._stage - 1} sent it: {why}")

    def _write(self, header: bytes, payload: memoryview) -> None:
        """Small messages go in one call, so their reader is woken once. The supervisor knows why a stage is gone."""
        assert self._target is not None, f"stage {self._stage} is the last; it has no next stage"
        start = _SIZES.pack(len(header), payload.nbytes) + header
        with contextlib.suppress(OSError):
            sent = self._target.sendmsg([start, payload])
            if sent < len(start):
                self._target.sendall(start[sent:])
            self._target.sendall(payload[max(0, sent - len(start)) :])

    def _wait(self, source: socket.socket) -> None:
        """Until ``source`` has something; polled for errors only, the scheduler's channel tells when that is gone."""
        poller = select.poll()
        poller.register(source, select.POLLIN)
        if self._scheduler is not None:
            poller.register(self._scheduler, 0)
        if source.fileno() not in dict(poller.poll()):
            raise ProcessDiedError("scheduler", "it closed its connection to the stages")

    def _read(self, source: socket.socket, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(source, memoryview(data))
        return data

    def _fill(self, source: socket.socket, into: memoryview) -> None:
        """Raises ProcessDiedError when the stage before is gone and nothing of it is left to read."""
        while into:
            try:
                count = source.recv_into(into)
            except OSError:
                count = 0
            if not count:
                raise ProcessDiedError(f"{STAGE_PREFIX}{self._stage - 1}", "it closed its connection to the next stage")
            into = into[count:]


class DistributedTransport:
    """torch.distributed's point-to-point (gloo or NCCL); the process group is the caller's, rank = stage.

    The receiver knows the shape from the plan, so that only the length of an error text goes ahead of the tensor.
    ``most_tokens`` is the largest microbatch. Gloo's point-to-point knows the memory of CPUs alone: what a GPU computes
    goes through it.
    """

    def __init__(
        self, *, stage: int, hidden_size: int, most_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stage = stage
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._computes_on = device
        # Where tensors are handed over.
        on_cpu = device.type == "cpu" or torch.distributed.get_backend() == "gloo"
        self._device = torch.device("cpu") if on_cpu else device
        # What was sent must be taken off the wire even when there is no memory for it, or the next one is misread.
        self._drain = torch.empty((most_tokens if stage else 0, hidden_size), dtype=dtype, device=self._device)

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        try:
            whole = output if isinstance(output, HiddenFailed) else output.contiguous().to(self._device)
        except OUT_OF_MEMORY as exc:
            whole = without_memory(self._stage, microbatch, "hand on", exc)
        if isinstance(whole, HiddenFailed):
            text = whole.error.encode()[:_ERROR_BYTES]
            body = torch.frombuffer(bytearray(text or b"?"), dtype=torch.uint8).to(self._device)
            self._send_pair(microbatch, len(body), body)
        else:
            self._send_pair(microbatch, 0, whole)

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        head = torch.empty(2, dtype=torch.int64, device=self._device)
        self._recv(head)
        microbatch_id, error_bytes = (int(number) for number in head.tolist())
        if microbatch_id != microbatch.id:
            raise StepFailedError(
                f"hidden states must come in launch order, stage {self._stage} expects microbatch {microbatch.id}, "
                f"got {microbatch_id}"
            )
        if error_bytes:
            text = torch.empty(error_bytes, dtype=torch.uint8, device=self._device)
            self._recv(text)
            return HiddenFailed(microbatch_id, bytes(text.tolist()).decode(errors="replace"))
        try:
            hidden = torch.empty((microbatch.tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        except OUT_OF_MEMORY as exc:
            self._recv(self._drain[: microbatch.tokens])
            return without_memory(self._stage, microbatch, "take", exc)
        self._recv(hidden)
        try:
            return hidden.to(self._computes_on)
        except OUT_OF_MEMORY as exc:
            return without_memory(self._stage, microbatch, "take", exc)

    def close(self) -> None:
        """See ``HiddenTransport``; the process group stays with its maker."""

    def _send_pair(self, microbatch: Microbatch, error_bytes: int, body: torch.Tensor) -> None:
        head = torch.tensor([microbatch.id, error_bytes], dtype=torch.int64, device=self._device)
        torch.distributed.send(head, self._stage + 1)
        torch.distributed.send(body, self._stage + 1)

    def _recv(self, tensor: torch.Tensor) -> None:
        try:
            torch.distributed.recv(tensor, self._stage - 1)
        except RuntimeError as exc:
            raise ProcessDiedError(f"{STAGE_PREFIX}{self._stage - 1}", f"its connection broke: {exc}") from exc


def without_memory(stage: int, microbatch: Microbatch, verb: str, exc: BaseException) -> HiddenFailed:
    """What a stage makes of hidden states that there is no memory for: their microbatch fails, not the process."""
    what = f"stage {stage} could not {verb} the hidden states of microbatch {microbatch.id}"
    return HiddenFailed(microbatch.id, f"{what}: {type(exc).__name__}: {exc}")


def _bytes_of(header: HiddenStates) -> int:
    return header.tokens * header.hidden_size * _ELEMENT_BYTES[header.dtype]


def _tensor(header: HiddenStates) -> tuple[torch.Tensor, memoryview]:
    """An empty tensor for hidden states, and its memory as bytes."""
    tensor = torch.empty((header.tokens, header.hidden_size), dtype=getattr(torch, header.dtype.value))
    return tensor, tensor.view(torch.uint8).numpy().reshape(-1).data
