"""How hidden states get from one stage to the next: ZMQ frames on one machine, torch.distributed elsewhere.

Carries a tensor or a typed failure for each microbatch, in launch order; never decides what to compute. Used by a stage
between its forward and the next stage's.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.errors import ProcessDiedError, StepFailedError
from engine.messages import encode
from engine.pipeline.channel import StageChannel
from engine.pipeline.wire import (
    HiddenDtype,
    HiddenFailed,
    HiddenStates,
    decode_hidden_header,
    hidden_address,
)
from engine.plan import Microbatch

__all__ = [
    "DistributedTransport",
    "HiddenTransport",
    "TransportKind",
    "ZmqTransport",
]

RECONNECT_INTERVAL_MS = 5
LINGER_MS = 200
# Microbatches in flight are bounded by the scheduler's depth, so these queues are too; a mark of zmq's own would only
# turn a stopped stage into a blocked scheduler.
UNBOUNDED = 0

# How an allocation fails: torch raises RuntimeError, of which its OutOfMemoryError is one.
OUT_OF_MEMORY = (RuntimeError, MemoryError)

_ERROR_BYTES = 512


class TransportKind(StrEnum):
    """Which transport the stages of one engine use."""

    ZMQ = "zmq"
    DISTRIBUTED = "distributed"


class HiddenTransport(Protocol):
    """Point-to-point from each stage to the next one, in launch order."""

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        """Hand hidden states [tokens, hidden size], or their failure, to the next stage."""
        ...

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        """Wait for the hidden states of ``microbatch`` from the stage before, or for their failure.

        Raises ProcessDiedError when they can never come, StepFailedError when they are another microbatch's.
        """
        ...

    def close(self) -> None:
        """Release sockets; idempotent."""
        ...


class ZmqTransport:
    """One header frame and one frame of raw bytes a microbatch, over ipc sockets in the engine's private folder.

    ``scheduler`` is this stage's channel to it; when that breaks, a wait for hidden states ends.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        private_dir: Path,
        *,
        stage: int,
        pp_size: int,
        device: torch.device,
        scheduler: StageChannel | None = None,
    ) -> None:
        self._stage = stage
        self._device = device
        self._open = ExitStack()
        self._source: zmq.Socket[bytes] | None = None
        self._target: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        if stage > 0:
            self._source = _connection(context, zmq.PULL, self._open)
            self._upstream = _watch_disconnects(self._source, self._open)
            self._source.bind(hidden_address(private_dir, stage))
            for socket in (self._source, self._upstream):
                self._poller.register(socket, zmq.POLLIN)
            if scheduler is not None:
                # Plans that come meanwhile must not wake it.
                self._poller.register(scheduler.fileno(), zmq.POLLERR)
        if stage < pp_size - 1:
            self._target = _connection(context, zmq.PUSH, self._open)
            self._target.connect(hidden_address(private_dir, stage + 1))

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        """See ``HiddenTransport``."""
        assert self._target is not None, f"stage {self._stage} is the last; it has no next stage"
        # The bytes view works for every element type; numpy has no bfloat16.
        try:
            payload = None if isinstance(output, HiddenFailed) else output.contiguous().cpu().view(torch.uint8).numpy()
        except OUT_OF_MEMORY as exc:
            output, payload = without_memory(self._stage, microbatch, "hand on", exc), None
        if isinstance(output, HiddenFailed) or payload is None:
            self._target.send(encode(output))
            return
        header = HiddenStates(
            microbatch_id=microbatch.id,
            dtype=HiddenDtype(str(output.dtype).removeprefix("torch.")),
            tokens=output.shape[0],
            hidden_size=output.shape[1],
        )
        self._target.send_multipart([encode(header), payload.data], copy=False)

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        """See ``HiddenTransport``."""
        assert self._source is not None, f"stage {self._stage} is the first; it has no stage before"
        self._wait(self._source)
        frames = self._source.recv_multipart(copy=False)
        header = decode_hidden_header(frames[0].bytes)
        if header.microbatch_id != microbatch.id:
            raise StepFailedError(
                f"hidden states must come in launch order, stage {self._stage} expects microbatch {microbatch.id}, "
                f"got {header.microbatch_id}"
            )
        if isinstance(header, HiddenFailed):
            return header
        try:
            return _tensor(header, frames[1].buffer).to(self._device)
        except OUT_OF_MEMORY as exc:
            return without_memory(self._stage, microbatch, "take", exc)

    def close(self) -> None:
        """See ``HiddenTransport``."""
        self._open.close()

    def _wait(self, source: zmq.Socket[bytes]) -> None:
        while source not in (readable := dict(self._poller.poll())):
            if self._upstream not in readable:
                raise ProcessDiedError("scheduler", "it closed its connection to the stages")
            if _disconnected(self._upstream):
                # The last message may have arrived together with the news that its sender is gone.
                if source.poll(0):
                    return
                raise ProcessDiedError(f"stage {self._stage - 1}", "it closed its connection to the next stage")


class DistributedTransport:
    """torch.distributed's point-to-point (gloo or NCCL); the process group is the caller's, rank = stage.

    The receiver knows the shape from the plan, so that only the length of an error text goes ahead of the tensor.
    ``most_tokens`` is the largest microbatch.
    """

    def __init__(
        self, *, stage: int, hidden_size: int, most_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stage = stage
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        # What was sent must be taken off the wire even when there is no memory for it, or the next one is misread.
        self._drain = torch.empty((most_tokens if stage else 0, hidden_size), dtype=dtype, device=device)

    def send(self, microbatch: Microbatch, output: torch.Tensor | HiddenFailed) -> None:
        """See ``HiddenTransport``."""
        try:
            whole = output if isinstance(output, HiddenFailed) else output.contiguous()
        except OUT_OF_MEMORY as exc:
            whole = without_memory(self._stage, microbatch, "hand on", exc)
        if isinstance(whole, HiddenFailed):
            text = whole.error.encode()[:_ERROR_BYTES]
            body = torch.frombuffer(bytearray(text or b"?"), dtype=torch.uint8).to(self._device)
            self._send_pair(microbatch, len(body), body)
        else:
            self._send_pair(microbatch, 0, whole)

    def receive(self, microbatch: Microbatch) -> torch.Tensor | HiddenFailed:
        """See ``HiddenTransport``."""
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
        return hidden

    def close(self) -> None:
        """See ``HiddenTransport``; the process group stays with whoever made it."""

    def _send_pair(self, microbatch: Microbatch, error_bytes: int, body: torch.Tensor) -> None:
        head = torch.tensor([microbatch.id, error_bytes], dtype=torch.int64, device=self._device)
        torch.distributed.send(head, self._stage + 1)
        torch.distributed.send(body, self._stage + 1)

    def _recv(self, tensor: torch.Tensor) -> None:
        try:
            torch.distributed.recv(tensor, self._stage - 1)
        except RuntimeError as exc:
            raise ProcessDiedError(f"stage {self._stage - 1}", f"its connection broke: {exc}") from exc


def without_memory(stage: int, microbatch: Microbatch, verb: str, exc: BaseException) -> HiddenFailed:
    """What a stage makes of hidden states that there is no memory for: their microbatch fails, not the process."""
    what = f"stage {stage} could not {verb} the hidden states of microbatch {microbatch.id}"
    return HiddenFailed(microbatch.id, f"{what}: {type(exc).__name__}: {exc}")


def _connection(context: zmq.Context[zmq.Socket[bytes]], kind: int, owner: ExitStack) -> zmq.Socket[bytes]:
    """A socket with the pipeline's options, closed by ``owner``."""
    socket = context.socket(kind)
    owner.callback(socket.close, LINGER_MS)
    socket.set_hwm(UNBOUNDED)
    # The peer may bind later than we connect; the default of 100 ms between attempts would dominate a start.
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    return socket


def _watch_disconnects(socket: zmq.Socket[bytes], owner: ExitStack) -> zmq.Socket[bytes]:
    """A socket that becomes readable when a peer of ``socket`` goes away: how a death shows without a time limit."""
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    # Closed by hand: whoever polls the monitor holds a reference to it, and an open socket would keep its context from
    # ending for ever.
    owner.callback(monitor.close, 0)
    owner.callback(socket.disable_monitor)
    return monitor


def _disconnected(monitor: zmq.Socket[bytes]) -> bool:
    """Take one event from a monitor; True if a peer went away."""
    return recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED


def _tensor(header: HiddenStates, payload: memoryview) -> torch.Tensor:
    tensor = torch.empty((header.tokens, header.hidden_size), dtype=getattr(torch, header.dtype.value))
    raw = tensor.view(torch.uint8).numpy().reshape(-1)
    if payload.nbytes != raw.nbytes:
        raise StepFailedError(f"hidden states of {header} must have {raw.nbytes} bytes, got {payload.nbytes}")
    raw[:] = np.frombuffer(payload, np.uint8)
    return tensor
