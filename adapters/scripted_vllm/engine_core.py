"""vLLM's own engine core around a scheduler, for pauses, sleeps, wakes and flushes: no process, socket or worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor

from scripted.sdk import Answer, Violation


class SleepingDevice(Executor):
    """Stands in for the workers. vLLM's executor tracks the memory that they have released."""

    def __init__(self, drop_images: Callable[[], None]) -> None:
        # Skips the base class's constructor, which starts workers.
        self.sleeping_tags: set[str] = set()
        self._drop_images = drop_images

    def collective_rpc(self, method: Any, *_: Any, kwargs: Any = None, **__: Any) -> list[Any]:
        """Carry out an order to all workers; the oracle follows what they have released by the answers to its calls.

        Raises Violation for workers that release memory in a sleep that only pauses.
        """
        if method == "reset_encoder_cache":
            self._drop_images()
        if method == "sleep" and kwargs["level"] < 1:
            raise Violation("a sleep of level 0 releases the device's memory, but must only pause")
        return []

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...


class EngineCalls(EngineCoreProc):
    """Carries out operators' calls. ``in_flight`` are the plans without results.

    Until the machine takes them, ``ended`` has the requests that a call aborted, and ``preempted`` the names of
    requests that a call sent back to the queue.
    """

    def __init__(self, scheduler: Any, device: SleepingDevice, in_flight: deque[Any]) -> None:
        # Skips the base class's constructor, which starts threads and opens sockets.
        self.scheduler = scheduler
        self.model_executor = device
        self.batch_queue = in_flight
        self.engines_running = False
        self.mm_receiver_cache = None
        self._idle_state_callbacks: list[Any] = []
        self.ended: list[Any] = []
        self.preempted: set[str] = set()
        # By call: the answers that are due once the engine is idle.
        self._pending: dict[str, Future[Any]] = {}

    def call(self, call_id: str, ask: Callable[[], Any]) -> Sequence[Answer]:
        """Carry out a call; return its answer, if it already has one. vLLM answers an error and continues."""
        try:
            said = ask()
        except RuntimeError as exc:
            return (Answer(call_id=call_id, ok=False, text=str(exc)),)
        if isinstance(said, Future):
            self._pending[call_id] = said
            return ()
        return (Answer(call_id=call_id, ok=said is not False),)

    @property
    def needs_a_step(self) -> bool:
        """Whether a call waits for a plan that only forgets ended requests, after which the engine is idle."""
        return bool(self._pending) and bool(self.scheduler.finished_req_ids)

    def answers_when_idle(self) -> Sequence[Answer]:
        """Run the callbacks if the engine is idle; return the answers that they gave, the last call's first."""
        if not self._pending or self.has_work():
            return ()
        self._notify_idle_state_callbacks()
        over = {call_id: future for call_id, future in reversed(self._pending.items()) if future.done()}
        for call_id in over:
            del self._pending[call_id]
        errors: Mapping[str, BaseException | None] = {call_id: one.exception() for call_id, one in over.items()}
        return [Answer(call_id=name, ok=error is None, text=str(error or "")) for name, error in errors.items()]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, and note the running requests that this preempts."""
        running = {request.request_id for request in self.scheduler.running}
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            self.preempted |= running - {request.request_id for request in self.scheduler.running}

    def _send_abort_outputs(self, aborted_reqs: list[Any]) -> None:
        self.ended += aborted_reqs
