"""The history of a script: records of steps, the handles of its requests, and the replies to their clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from engine.core.messages import FinishReason, Refusal, Reply, TokenOutput
from engine.core.scheduler import Scheduler, Step, StepRecord, StepResult
from scripted.core.violation import Violation
from scripted.script.handles import Handles
from scripted_lockstep.script.handle import RequestHandle


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
        transfers=result.transfers,
        transferring=tuple(books.transferring),
    )


_COMPLETE: Final = (FinishReason.LENGTH.value, FinishReason.STOP.value)


def check_answers(handles: Iterable[RequestHandle]) -> None:
    """Check that each reply of the scheduler has reached its client once. Raises Violation."""
    for handle in handles:
        client = handle.client
        if client.terminal_answers != 1 and client.status is not None and not client.dropped:
            raise Violation(f"the client of {handle.rid} got {client.terminal_answers} terminal answers: {client}")
        due = (None, *[value.logprob for value in handle.prompt_logprobs])
        is_whole = handle.message.prompt_logprobs_from >= 0 and client.finish_reason in _COMPLETE
        if is_whole and client.input_logprobs != due:
            raise Violation(f"the client of {handle.rid} got the logprobs {client.input_logprobs}, but told were {due}")


class EngineHandles(Handles):
    def __init__(self) -> None:
        super().__init__()
        self._ended: list[RequestHandle] = []

    def update(self, replies: Iterable[Reply], scheduler: Scheduler, launched: Collection[str] = ()) -> None:
        """Update the handles after a step, which launched chunks of these rids."""
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
                lora = scheduler.features.loras.of(request)
                lives[0].bind(request, None if lora is None else lora.path)
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
        super().start_over()
        self._ended.clear()
