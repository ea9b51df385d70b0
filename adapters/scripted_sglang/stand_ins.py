"""Stand-ins for the connections of SGLang's scheduler: its sockets, its table of messages, and the worker.

Only the worker's forward pass is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.utils import GenerationBatchResult

from scripted.sdk import Share, Violation
from scripted_sglang.scheduler_view import shares_of

# Handles of tokens that a batch will sample: greater than any token id, and any substitute in a redacted flight.
_FIRST_HANDLE: Final = 1 << 48
_MOST_ROWS: Final = 64
_NOTHING: Final = 0


class Receiver:
    """Stands in for the receiving sockets; messages are put into the scheduler's own list."""

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        return list(local_reqs)


class Sender:
    """Stands in for the sockets to the front end; ``flushed`` is the last answer to a flush."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.flushed = False

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        del recv_obj
        self.sent.append(output)


def keep_nothing(batch: Any) -> None:
    """Stand in for the function that keeps tensors alive for a GPU."""


class Dispatcher:
    """Stands in for the table of messages and handlers, for the messages that this machine sends."""

    def __init__(self, scheduler: Any, table: Mapping[type, Any]) -> None:
        self._scheduler = scheduler
        self._handlers = {}
        for kind in (AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput, TokenizedGenerateReqInput):
            assert table[kind].__self__ is scheduler, f"{kind.__name__} is handled by the scheduler"
            self._handlers[kind] = table[kind].__name__

    def __call__(self, message: Any) -> Any:
        if isinstance(message, FlushCacheReqInput):
            return self._scheduler.flush_wrapper.handle(message)
        if isinstance(message, ReleaseMemoryOccupationReqInput):
            return self._scheduler.weight_updater.release_memory_occupation(message)
        if isinstance(message, ResumeMemoryOccupationReqInput):
            return self._scheduler.weight_updater.resume_memory_occupation(message)
        return getattr(self._scheduler, self._handlers[type(message)])(message)


class SimulatedWorker:
    """Stands in for the worker: a forward pass returns handles, which become tokens with the result."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.launched = 0
        self.shares: tuple[Share, ...] = ()
        # The handle of each request's newest token, and the token once its result is there.
        self.chosen: dict[str, tuple[int, int | None]] = {}

    def forward_batch_generation(self, batch: Any, **_: Any) -> GenerationBatchResult:
        self.launched += 1
        self.shares = tuple(shares_of(batch, self._page_size, self._token))
        first = _FIRST_HANDLE + _MOST_ROWS * self.launched
        handles = range(first, first + len(batch.reqs))
        for req, handle in zip(batch.reqs, handles, strict=True):
            self.chosen[req.rid] = handle, None
        return GenerationBatchResult(
            logits_output=None, next_token_ids=torch.tensor(handles, dtype=torch.int64), can_run_cuda_graph=False
        )

    def know(self, handles: torch.Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Take the tokens of a batch's handles; a row before the end of its prompt samples an unused token."""
        known = dict(zip(handles.tolist(), [ids[0] if ids else _NOTHING for ids in tokens], strict=True))
        handles.copy_(torch.tensor(list(known.values())))
        for rid, (handle, _) in self.chosen.items():
            if handle in known:
                self.chosen[rid] = handle, known[handle]

    def _token(self, req: Any, token: int) -> int:
        """Return the token of an input, which may be a handle; -1 while it is unknown."""
        if token < _FIRST_HANDLE:
            return token
        handle, known = self.chosen.get(req.rid, (None, None))
        if token != handle:
            other = next((rid for rid, (one, _) in self.chosen.items() if one == token), "an earlier batch")
            raise Violation(f"{req.rid} gets the token that was sampled for {other}")
        return -1 if known is None else known
