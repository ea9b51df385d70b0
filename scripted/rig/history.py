"""What happened in a script: every step as a record, and every request's handle.

Written by the gate after each step, from the step's own input and output; read by scripts, reports and traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from engine.messages import Refusal, Reply, TokenOutput
from engine.scheduler import Scheduler, Step, StepRecord, StepResult
from scripted.rig.clients import Call
from scripted.rig.handle import RequestHandle

__all__ = ["Handles", "History", "record_step"]


def record_step(step: Step, result: StepResult, scheduler: Scheduler, *, error: str | None = None) -> StepRecord:
    """Record one step, right after it ran or, with ``error``, after it died."""
    books, pages = scheduler.books, scheduler.memory.pages
    return StepRecord(
        step=result.step,
        now=step.now,
        events=step.events,
        microbatch=result.microbatch,
        replies=result.replies,
        waiting=len(books.waiting),
        chunked=books.chunked.rid if books.chunked is not None else None,
        running=len(books.running),
        in_flight=books.in_flight_ids(),
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_held=pages.held + pages.reserved,
        digest=scheduler.digests.digest,
        waiting_rids=tuple([request.rid for request in books.waiting]),
        running_rids=tuple(books.running),
        error=error,
    )


class History:
    """The steps of the present script."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.recording = True

    def add(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        """Record a step, unless the harness is doing its own work between scripts."""
        if self.recording:
            self.records.append(record_step(step, result, scheduler))

    def add_death(self, step: Step, scheduler: Scheduler, error: str) -> None:
        """Record the step that the scheduler died in: what it was given, and what its books say now."""
        if self.recording:
            result = StepResult(scheduler.step_number, None, (), again=False, deadline=None)
            self.records.append(record_step(step, result, scheduler, error=error))

    def start_over(self) -> None:
        self.records.clear()


class Handles:
    """The handles of the present script. Lives of one rid queue up: the oldest that has not ended is the live one."""

    def __init__(self) -> None:
        self._live: dict[str, deque[RequestHandle]] = {}
        self._ended: list[RequestHandle] = []
        self.all: list[RequestHandle] = []
        self.calls: list[Call] = []

    def start(self, handle: RequestHandle) -> None:
        """A new life of a rid began."""
        self._live.setdefault(handle.rid, deque()).append(handle)
        self.all.append(handle)

    def known_rids(self) -> set[str]:
        """Every rid that the script has started."""
        return {handle.rid for handle in self.all}

    def latest(self, rid: str) -> RequestHandle | None:
        """The last life of this rid, or None."""
        return next((handle for handle in reversed(self.all) if handle.rid == rid), None)

    def live(self) -> dict[str, RequestHandle]:
        """The handles of requests that have not ended, by rid."""
        return {rid: lives[0] for rid, lives in self._live.items() if lives}

    def open_calls(self) -> dict[str, Call]:
        """The administrative calls that are not answered, by call id."""
        return {call.call_id: call for call in self.calls if call.call_id is not None and not call.done}

    def update(self, replies: Iterable[Reply], scheduler: Scheduler, launched: Collection[str] = ()) -> None:
        """Bring the handles up to date after a step, which launched something of these rids."""
        for handle in self._ended:
            handle.step_on()
        self._ended.clear()
        for reply in replies:
            if isinstance(reply, TokenOutput):
                self._see(reply, scheduler.counters.weights_version)
            elif isinstance(reply, Refusal):
                self._refuse(reply)
        for rid, lives in self._live.items():
            if lives and not lives[0].is_bound and (request := scheduler.find_request(rid)) is not None:
                lives[0].bind(request)
        chunked = scheduler.books.chunked
        if chunked is not None and self._live.get(chunked.rid):
            self._live[chunked.rid][0].see_chunked(is_parked=chunked.rid not in launched)

    def _see(self, output: TokenOutput, weights_version: int) -> None:
        lives = self._live.get(output.rid)
        if not lives:
            return
        lives[0].see(output, weights_version)
        if output.finish_reason is not None:
            self._ended.append(lives.popleft())

    def _refuse(self, refusal: Refusal) -> None:
        lives = self._live.get(refusal.rid)
        if lives:
            lives.pop().see_refusal(refusal)

    def start_over(self) -> None:
        self._live.clear()
        self._ended.clear()
        self.all.clear()
        self.calls.clear()
