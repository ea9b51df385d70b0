"""What each client was told, and what it must be told: the account of requests, replies and microbatches.

It sees only what crosses the gate (events, plans, replies) and does not rely on what the engine says of itself. This
module follows the steps and applies their events; what they lead to is in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from engine.limits import Limits
from engine.messages import (
    ABORT,
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    GrammarReady,
    LoadLora,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    Refusal,
    RefusalKind,
    Reply,
    StartProfile,
    StopProfile,
    TokenOutput,
    UnloadLora,
    UpdateWeights,
)
from engine.plan import ProfileSwitch
from engine.scheduler import StepResult
from scripted.adapters.lockstep.oracle.due_replies import DueReplies, Said
from scripted.adapters.lockstep.oracle.launches import follow_launch
from scripted.adapters.lockstep.oracle.ledger import Ledger
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.oracle.refusals import check_refusal, refusal_of
from scripted.adapters.lockstep.oracle.results import follow_death, follow_result
from scripted.core.violation import Violation

__all__ = ["ClientAccount"]


class ClientAccount:
    """The account of one engine, from its first step on. ``follow`` takes each step and raises Violation.

    ``ledger`` is what it knows.
    """

    def __init__(self, limits: Limits) -> None:
        self.ledger = Ledger(limits)
        self._step: int | None = None
        self._now = 0.0
        # Whether any request has a time limit.
        self._timed = limits.waiting_timeout_s is not None
        self._may_wait = False
        # When a gate that waits makes a step all the same.
        self._wakes_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return not self.ledger.live and not self.ledger.calls.open

    def follow(self, events: Sequence[Event], result: StepResult, now: float) -> None:
        """Account for one step. Raises Violation for a reply or a plan that events and time do not account for."""
        ledger = self.ledger
        self._check_step(events, result, now)
        ledger.calls.begin_step()
        self._now = now
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(self, event)
        if self._timed:
            self._end_overdue()
        if result.grammars:
            ledger.grammars.note(result.grammars, [life.message for life in ledger.live.values()])
        # A step that only launches may launch the update that waits: a retraction has left the engine quiescent.
        if result.replies or events or result.microbatch is not None or ledger.due.told:
            if ledger.calls.open:
                ledger.calls.begin_waiting_update(quiescent=ledger.is_quiescent)
            self._hear(result.replies)
            ledger.calls.end_step()
            ledger.loras.end_step()
        microbatch = result.microbatch
        if microbatch is not None:
            if isinstance(microbatch, ProfileSwitch):
                ledger.profiles.launch(microbatch)
            # After a flush that should have been refused, the account of memory is of no use.
            if not ledger.calls.suspicion:
                follow_launch(ledger, microbatch)
        slot = ledger.dead is None and ledger.calls.update is None and len(ledger.flights) < ledger.limits.depth
        ledger.profiles.end_step(has_slot=slot)

    def check_end(self) -> None:
        """The engine is idle. Every client must have been told how its request ended. Raises Violation."""
        if self.ledger.live:
            raise Violation(f"{', '.join(self.ledger.live)} never got a terminal reply")
        self.ledger.calls.check_end()

    def check_refusal(self, message: Generate, refusal: Refusal, ahead: Iterable[Event]) -> None:
        """A request is refused before a step has seen it, with ``ahead`` on its way before it. Raises Violation."""
        check_refusal(message, refusal, ahead, self.ledger)

    def _check_step(self, events: Sequence[Event], result: StepResult, now: float) -> None:
        woken, self._wakes_at = self._wakes_at is not None and now >= self._wakes_at, result.deadline
        quiet, self._may_wait = not events and not woken and self._may_wait, not result.again
        if quiet and result.microbatch is not None:
            raise Violation(f"a gate that waits for an event would have missed microbatch {result.microbatch.id}")
        if self._step is not None and result.step != self._step + 1:
            raise Violation(f"step {result.step} follows step {self._step}")
        self._step = result.step

    # -- events --

    def _on_generate(self, message: Generate) -> None:
        ledger, life = self.ledger, Life(message, self.ledger.limits, self._now)
        self._timed = self._timed or message.timeout_s is not None or message.waiting_timeout_s is not None
        ledger.lives.append(life)
        refusal = refusal_of(life, ledger)
        if refusal is not None:
            life.refused = True
            ledger.due.refused.append((message.rid, refusal))
            ledger.totals.requests_refused += 1
            return
        life.lora_path = None if message.lora is None else ledger.loras.paths[message.lora]
        ledger.live[message.rid] = life
        ledger.totals.requests_started += 1
        ledger.totals.prompt_tokens += life.prompt_tokens

    def _on_abort(self, abort: Abort) -> None:
        if abort.call_id is not None:
            self.ledger.calls.ask(abort.call_id, abort, quiescent=False)
        life = self.ledger.live.get(abort.rid)
        if life is not None:
            self.ledger.end(life, abort.finish_reason)

    def _on_abort_all(self, abort: AbortAll) -> None:
        if abort.call_id is not None:
            self.ledger.calls.ask(abort.call_id, abort, quiescent=False)
        self.ledger.end_all(ABORT)

    def _on_pause(self, pause: PauseGeneration) -> None:
        self.ledger.calls.ask(pause.call_id, pause, quiescent=False)
        self.ledger.paused = pause.mode
        if pause.mode is PauseMode.ABORT:
            self.ledger.end_all(ABORT)
        elif pause.mode is PauseMode.RETRACT:
            self.ledger.retract_all()

    def _on_continue(self, message: ContinueGeneration) -> None:
        self.ledger.calls.ask(message.call_id, message, quiescent=False)
        self.ledger.paused = None

    def _on_profile(self, call: StartProfile | StopProfile) -> None:
        self.ledger.calls.ask(call.call_id, call, quiescent=False)
        self.ledger.profiles.ask(call)
        if self.ledger.dead is not None:
            self.ledger.profiles.give_up()

    def _on_lora_call(self, call: LoadLora | UnloadLora) -> None:
        self.ledger.calls.ask(call.call_id, call, quiescent=False)
        self.ledger.loras.ask(call, is_used=self.ledger.is_used(call.name))

    def _on_call(self, call: FlushCache | UpdateWeights) -> None:
        if self.ledger.calls.ask(call.call_id, call, quiescent=self.ledger.is_quiescent):
            self.ledger.pages.flush()

    def _on_get_stats(self, message: GetStats) -> None:
        self.ledger.calls.ask(message.call_id, message, quiescent=False)
        self.ledger.stats.ask(message.call_id, self.ledger.counts())

    def _on_pipeline_failed(self, failed: PipelineFailed) -> None:
        follow_death(self.ledger, failed)

    def _on_completion(self, completion: Completion) -> None:
        follow_result(self.ledger, completion)

    def _on_grammar_ready(self, ready: GrammarReady) -> None:
        failed = self.ledger.grammars.answer(ready)
        if failed is None:
            return
        for life in [one for one in self.ledger.live.values() if one.message.sampling.grammar == failed]:
            self.ledger.end(life, ready.reason, error=ready.error)

    def _end_overdue(self) -> None:
        for life in list(self.ledger.live.values()):
            limit = life.out_of_time(self._now)
            if limit is not None:
                self.ledger.end(life, FinishReason.TIMEOUT, error=limit)

    # -- replies --

    def _hear(self, replies: Sequence[Reply]) -> None:
        told: list[Said] = []
        refused: list[tuple[str, RefusalKind]] = []
        for reply in replies:
            if isinstance(reply, TokenOutput):
                told.append(DueReplies.said_by(reply))
            elif isinstance(reply, Refusal):
                refused.append((reply.rid, reply.kind))
            elif isinstance(reply, CallAnswer):
                self._hear_answer(reply)
            else:
                self.ledger.calls.open.pop(reply.call_id, None)
                self.ledger.stats.answered(reply.call_id, reply.stats)
        self.ledger.due.compare(told, refused)

    def _hear_answer(self, answer: CallAnswer) -> None:
        ledger = self.ledger
        if isinstance(ledger.calls.open.get(answer.call_id), StartProfile | StopProfile):
            ledger.profiles.answered(answer)
        ledger.loras.answered(answer)
        if ledger.calls.answered(answer, quiescent=ledger.is_quiescent, dead=ledger.dead is not None):
            ledger.pages.flush()

    _handlers: ClassVar[dict[type, Callable[[ClientAccount, Any], None]]] = {
        Completion: _on_completion,
        PipelineFailed: _on_pipeline_failed,
        GrammarReady: _on_grammar_ready,
        Generate: _on_generate,
        Abort: _on_abort,
        AbortAll: _on_abort_all,
        PauseGeneration: _on_pause,
        ContinueGeneration: _on_continue,
        FlushCache: _on_call,
        UpdateWeights: _on_call,
        LoadLora: _on_lora_call,
        UnloadLora: _on_lora_call,
        StartProfile: _on_profile,
        StopProfile: _on_profile,
        GetStats: _on_get_stats,
    }
