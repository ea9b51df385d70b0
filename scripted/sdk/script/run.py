"""The run of scripts on an SDK adapter: a machine as good as new, the script, and the end of every schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar, Final, NoReturn, get_args

import msgspec

from scripted.core.action import Action, verbs_of
from scripted.core.errors import BadCall
from scripted.core.phrases import plural
from scripted.core.refusals import HarnessError
from scripted.core.run import STEPS_LIMIT
from scripted.script.clients import Call, Chunk, ClientView
from scripted.script.context import BaseContext, with_verbs
from scripted.script.execution import ScriptExecution, ScriptSource
from scripted.script.run import ScriptedRun
from scripted.script.state import Arrival, KVState, MicrobatchInFlight, RowState, State, mode_of
from scripted.script.values import Listed, Word
from scripted.script.wait import Steps
from scripted.sdk.action_bases import AdministrativeCall
from scripted.sdk.actions import ACTIONS, actions_of
from scripted.sdk.messages import (
    Add,
    Answer,
    Batch,
    BatchFailed,
    Completion,
    Event,
    Record,
    Refused,
    Share,
    Stepped,
    Tokens,
)
from scripted.sdk.script.handle import SdkRequest

_VERBS: Final = tuple(name for action in ACTIONS for name in verbs_of(action))


class SdkContext(BaseContext):
    """``t`` on an SDK adapter."""

    @property
    def last_batch(self) -> MicrobatchInFlight | None:
        """The microbatch that the last step launched; None if it launched nothing."""
        last: MicrobatchInFlight | None = self.run.batch_of_step(self.run.step)
        return last

    def _refuse(self, name: str) -> NoReturn:
        if name in _VERBS:
            there = dir(type(self))
            declared = [verb for verb in _VERBS if verb in there]
            raise BadCall(
                f"t.{name}() is no verb of {self.run.adapter.name} in this configuration, which declares "
                f"{', '.join(declared)}; its adapter declares its abilities in Capabilities"
            )
        super()._refuse(name)


_REFUSED_STATUS = 400


@functools.cache
def _context_of(actions: tuple[type[Action], ...]) -> type[SdkContext]:
    """Make the class of ``t`` for the declared actions."""
    return with_verbs(actions)(type(SdkContext.__name__, (SdkContext,), {}))


class SdkRun(ScriptedRun):
    """Runs one script on a new machine, and winds it up like a schedule.

    ``plans`` are the batches as the device understood them, by the step that launched them.
    """

    fatal: ClassVar[tuple[type[Exception], ...]] = (HarnessError,)
    records: list[Record]

    def __init__(
        self, config: object, of: str, source: ScriptSource, *, parts: tuple[Any, Any, Any] | None = None
    ) -> None:
        super().__init__(config, of, source, parts=parts)
        self._limits, self._can = self.adapter.limits_of(config)
        self.context_type = self.context_with()
        self.plans: dict[int, Batch] = {}
        self.launched_at: dict[int, int] = {}
        self._is_over = False

    def context_with(self, *more: type[Action]) -> type[SdkContext]:
        """Make the class of ``t`` for the configuration's declared actions and these."""
        own = [action for action in self.adapter.actions if action not in ACTIONS]
        return _context_of((*actions_of(self._can), *own, *more))

    # -- observations --

    def take_state(self) -> State:
        live = self.oracle.account.live
        handles = self.handles.live()
        running = [rid for rid in live if rid in handles and handles[rid].is_running]
        counts, limits, paused = dict(self.machine.counts()), self._limits, self.oracle.paused
        free = counts.get("blocks_free", limits.blocks)
        in_flight = Listed(self._shown(batch) for batch in self.oracle.in_flight)
        chunked = next((rid for rid in running if handles[rid].is_chunking), None)
        return State(
            step=self.step,
            now=self.clock.now(),
            arrived=Listed(_arrival_of(message) for message in self.arrived),
            waiting=Listed(
                [*(rid for rid in live if rid not in running), *(m.rid for m in self.arrived if isinstance(m, Add))]
            ),
            chunked=chunked,
            running=Listed(rid for rid in running if handles[rid].output_ids),
            in_flight=in_flight,
            paused=None if paused is None else Word(paused.name, "a pause's mode", self._pauses),
            is_quiescent=not in_flight and not running and not self.arrived,
            is_fully_idle=self.is_fully_idle,
            kv=KVState(
                total=limits.blocks, free=free, cached=0, held=limits.blocks - free, page_size=limits.block_size
            ),
            rows=RowState(total=limits.batch_requests, free=max(0, limits.batch_requests - len(running))),
            counts=counts,
        )

    @property
    def _pauses(self) -> frozenset[str]:
        return frozenset(mode.name for mode in self._can.pause_modes)

    def _shown(self, batch: Batch) -> MicrobatchInFlight:
        # A result that is due in the coming step is still listed.
        launched = self.launched_at[batch.id]
        return MicrobatchInFlight(
            id=batch.id,
            mode=mode_of(self._mode_of(batch)),
            rids=Listed(share.rid for share in batch.shares),
            positions={share.rid: Listed(range(share.start, share.start + share.count)) for share in batch.shares},
            pages={share.rid: Listed(share.block_ids) for share in batch.shares},
            tokens=sum(share.count for share in batch.shares),
            drafts=sum(len(share.draft_ids) for share in batch.shares),
            launched_at_step=launched,
            due_at_step=self.results.due_steps().get(batch.id, launched + self.machine.depth),
        )

    def batch_of_step(self, step: int) -> MicrobatchInFlight | None:
        """Return the microbatch that this step launched."""
        batch = self.plans.get(step)
        return None if batch is None else self._shown(batch)

    def last_batch(self) -> MicrobatchInFlight | None:
        if not self.plans:
            return None
        batch = self.plans[max(self.plans)]
        landed = any(
            isinstance(event, Completion) and event.batch_id == batch.id for event in self.records[-1].step.events
        )
        return self._shown(batch) if landed or batch in self.oracle.in_flight else None

    def decoding_in(self, batch: MicrobatchInFlight) -> set[str]:
        return {rid for rid in batch.rids if batch.positions[rid][0] >= len(self._computing(rid).prompt_ids)}

    def _mode_of(self, batch: Batch) -> str:
        kinds = {self._is_decode(share) for share in batch.shares}
        return "mixed" if len(kinds) > 1 else "decode" if kinds == {True} else "prefill"

    def _is_decode(self, share: Share) -> bool:
        handle = self._computing(share.rid)
        return handle is not None and share.start >= len(handle.prompt_ids)

    def _computing(self, rid: str) -> Any:
        """Return the handle of the request computed under this rid; others of its session may wait behind it."""
        return self.handles.live().get(rid, self.handles.latest(rid))

    def did_something(self, record: Record) -> bool:
        stepped = record.stepped
        return bool(record.step.events) or (stepped is not None and bool(stepped.replies or stepped.microbatch))

    def can_fail(self, record: Record) -> bool:
        failed = any(isinstance(event, BatchFailed) for event in record.step.events)
        return failed or (record.stepped is not None and record.stepped.microbatch is not None)

    def causes(self) -> Iterator[str]:
        if self.is_holding:
            held = plural(len(self.results), "batch")
            yield f"results are held, {held} in flight may wait for t.release_results()"
        if self.oracle.paused is not None:
            yield f"generation is paused ({self.oracle.paused.name}), until t.continue_generation()"
        last = self.records[-1].stepped if self.records else None
        if last is not None and last.deadline is not None:
            yield (
                f"a step is due at {last.deadline:g} s, it is {self.clock.now():g} s now, and only "
                "t.clock.advance(seconds) moves that"
            )
        if self.is_fully_idle:
            yield self.idle_words

    # -- for the verbs --

    def start(self, message: Add) -> SdkRequest:
        """Let a request arrive."""
        handle = SdkRequest(message, ClientView(message.rid), self.oracle.account, len(self.handles.all))
        self.device.begin(message, is_queued=message.rid in self.oracle.account.live)
        self.give(message)
        self.handles.start(handle)
        return handle

    def call(self, action: AdministrativeCall) -> Call:
        """Let an administrative call arrive."""
        call = Call(action.path)
        call.call_id, call.arrived = f"call-{self._calls + 1}", True
        self.act(action)
        self.handles.calls.append(call)
        return call

    # -- one script --

    def after_script(self, script: ScriptExecution) -> Steps:
        """Settle everything open and wind the run up, as at the end of any schedule."""
        assert script.context is not None
        context = script.context
        self._last_step, self._steps_limit = self.step, self.step + STEPS_LIMIT
        context.end()
        while not self._is_over:
            yield
        try:
            context.check_reached()
        except AssertionError as exc:
            self.script_error = exc
            raise

    def compose(self, previous: Stepped | None) -> Any:
        step = super().compose(previous)
        self._is_over = step is None
        return step

    def take_step(self, stepped: Stepped) -> None:
        if stepped.microbatch is not None:
            batch = self.plans[self.step] = self.device.understood or stepped.microbatch
            self.launched_at[batch.id] = self.step
            self.launches += 1
        self._judge(stepped)
        handles = self._listening()
        for rid in stepped.preempted:
            if rid in handles:
                handles[rid].note_retraction()
        calls = self.handles.open_calls()
        for reply in stepped.replies:
            match reply:
                case Tokens() | Refused():
                    _tell(self._listening()[reply.rid].client, reply)
                case Answer() if reply.call_id in calls:
                    calls[reply.call_id].answer(200 if reply.ok else _REFUSED_STATUS, reply.text)
        for handle in self.handles.all:
            # Where aborts are not answered, the client has hung up; queued requests end with the one before.
            handle.client.closed = handle.client.closed or handle.finished
        if stepped.microbatch is not None:
            handles = self._listening()
            for share in self.plans[self.step].shares:
                handles[share.rid].note_share(share)

    def _listening(self) -> dict[str, SdkRequest]:
        """Return the handles that get the next replies, by rid: the oldest whose client has not learned of its end."""
        return {handle.rid: handle for handle in reversed(self.handles.all) if not handle.client.closed}


def _tell(view: ClientView, reply: Tokens | Refused) -> None:
    """Give a reply to a client."""
    if isinstance(reply, Refused):
        view.fail(reply.reason, _REFUSED_STATUS)
        return
    view.status = 200
    text = bytes(token for token in reply.token_ids if token < 256).decode("utf-8", "replace")
    view.receive(Chunk(text=text, token_ids=reply.token_ids, finish_reason=reply.finish_reason))
    view.closed = reply.finish_reason is not None


def _arrival_of(message: Any) -> Arrival:
    kind = _kind_of(type(message))
    return Arrival(kind=Word(kind, "a message's kind", _KINDS | {kind}), rid=getattr(message, "rid", None))


def _kind_of(message: type[msgspec.Struct]) -> str:
    tag = str(message.__struct_config__.tag)
    return {"add": "start", "resume": "continue"}.get(tag, tag)


_KINDS: Final = frozenset(map(_kind_of, get_args(Event)))
