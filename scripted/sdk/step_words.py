"""Turns a scheduler's records into the steps that reports show: one short phrase for each event, launch and reply.

``StepWords`` is the base for every adapter; ``log_of`` reads the records of an SDK machine. Text from clients is made
printable here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from scripted.core.action import Action, name_in_answers, words_of
from scripted.core.phrases import plural, printable, short_rid
from scripted.report.step_log import Said, ShownBatch, ShownShare, ShownStep, StepLog, content_of
from scripted.sdk.actions import ACTIONS
from scripted.sdk.capabilities import Limits
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    Completion,
    Event,
    FlushCache,
    Record,
    Refused,
    Reply,
    Share,
    Signal,
    Tokens,
)

# How many of a request's blocks and tokens are shown; the others are counted.
_SHOWN: Final = 12


class StepWords:
    """Describes events and replies in short phrases; ``actions`` name their events.

    ``calls`` has the names of administrative calls by id, so that an answer can say which call it answers.
    """

    # Events that a report highlights.
    strong: ClassVar[tuple[type, ...]] = ()
    # Events about one request.
    of_request: ClassVar[tuple[type, ...]] = ()
    failed_ends: ClassVar[Collection[str]] = ("error",)

    def __init__(self, actions: Iterable[type[Action]], calls: Mapping[str, str] | None = None) -> None:
        self._actions = tuple(actions)
        self.calls = dict(calls or {})

    # -- events --

    def note_call(self, event: Any) -> None:
        """Remember the name of a call for the description of its answer."""
        call_id = getattr(event, "call_id", None)
        if call_id is not None:
            self.calls[call_id] = name_in_answers(event, self._actions) or self.other_words(event)

    def event_text(self, event: Any) -> str:
        return words_of(event, self._actions) or self.other_words(event)

    def other_words(self, event: Any) -> str:
        """Describe an event that no action makes."""
        return type(event).__name__

    def arrived(
        self, event: Any, text: str, *, batch: int | None = None, is_result: bool = False, is_failure: bool = False
    ) -> Said:
        """Show an event of a step; ``batch`` is the batch whose result it carries, if any."""
        if is_failure:
            kind = "bad"
        elif is_result:
            kind = "taken"
        else:
            kind = "strong" if isinstance(event, self.strong) else "event"
        rid = event.rid if type(event) in self.of_request else None
        return Said(text=text, kind=kind, rid=rid, batch=batch, of_pipeline=is_result, content=content_of(event))

    # -- replies --

    def tokens(self, reply: Any, token_ids: str, error: str | None = None) -> Said:
        """Show a request's tokens or its end, from a reply with ``rid`` and ``finish_reason``."""
        kind = "bad" if reply.finish_reason in self.failed_ends else "token"
        text = f"{short_rid(reply.rid)} -> {self.output_text(token_ids, reply.finish_reason, error)}"
        return Said(text=text, kind=kind, rid=reply.rid, content=content_of(reply))

    def output_text(self, token_ids: str, finish_reason: str | None, error: str | None = None) -> str:
        parts = [f"token {token_ids}"] if token_ids else []
        parts += [] if finish_reason is None else [f"ends: {finish_reason}"]
        parts += [] if error is None else [printable(error)]
        return ", ".join(parts) or "nothing new"

    def refused(self, reply: Any, why: str) -> Said:
        """Show that a request does not begin."""
        return Said(text=f"{short_rid(reply.rid)} -> {why}", kind="refused", rid=reply.rid, content=content_of(reply))

    def answered(self, reply: Any, answer: str, *, ok: bool, full: str = "") -> Said:
        """Show the answer to an administrative call."""
        text = f"{self.calls.get(reply.call_id, 'call')} -> {answer}"
        return Said(text=text, kind="answer" if ok else "refused", full=full, content=content_of(reply))


# -- machines of the SDK --


def log_of(records: Sequence[Record], limits: Limits, actions: Iterable[type[Action]] = ACTIONS) -> StepLog:
    """Show every step, on one stage. Batches are numbered from 0; queues are inferred from the replies."""
    reader = _Reader(actions)
    return StepLog(1, limits.depth, tuple([reader.read(step, record) for step, record in enumerate(records, 1)]))


class _Reader(StepWords):
    """Knows the requests and batches up to a step."""

    strong = (Abort, FlushCache)
    of_request = (Add, Abort)

    def __init__(self, actions: Iterable[type[Action]]) -> None:
        super().__init__(actions)
        self._tokens: dict[str, list[int]] = {}
        # How many positions a request computes before it decodes: its prompt, and after a preemption its output too.
        self._prompts: dict[str, int] = {}
        # The first position of a request that no launch has computed.
        self._computed: dict[str, int] = {}
        self._begun: dict[str, bool] = {}
        self._numbers: dict[int, int] = {}
        self._in_flight: list[int] = []
        self._shares: dict[int, tuple[Share, ...]] = {}
        self._digest = b""

    def read(self, step: int, record: Record) -> ShownStep:
        arrived = [self._event(event) for event in record.step.events]
        answered, launched, stepped = [], None, record.stepped
        if stepped is not None:
            for rid in stepped.preempted:
                answered.append(Said(text=f"preempted {short_rid(rid)}", kind="bad", rid=rid))
                if rid in self._begun:
                    self._begun[rid] = False
                    self._prompts[rid], self._computed[rid] = len(self._tokens[rid]), 0
            answered += [self._reply(reply) for reply in stepped.replies]
            launched = None if stepped.microbatch is None else self._launch(stepped.microbatch)
        chunked = next((rid for rid in self._begun if self._is_chunked(rid)), None)
        self._digest = hashlib.blake2b(self._digest + msgspec.msgpack.encode(record), digest_size=8).digest()
        return ShownStep(
            step=step,
            now=record.step.now,
            arrived=tuple(arrived),
            launched=launched,
            answered=tuple(answered),
            waiting=tuple(rid for rid, begun in self._begun.items() if not begun),
            chunked=chunked,
            running=tuple(rid for rid, begun in self._begun.items() if begun and rid != chunked),
            in_flight=tuple(self._in_flight),
            memory=record.counts,
            digest=self._digest.hex(),
            error=record.error,
        )

    def _is_chunked(self, rid: str) -> bool:
        """Whether a request has begun and part of its prompt has not been launched."""
        return self._begun[rid] and self._computed[rid] < self._prompts[rid]

    def _event(self, event: Event) -> Said:
        self.note_call(event)
        if isinstance(event, Completion):
            return self._result(event)
        if isinstance(event, Add):
            self._tokens[event.rid] = list(event.prompt_ids)
            self._prompts[event.rid], self._computed[event.rid] = len(event.prompt_ids), 0
            self._begun[event.rid] = False
        return self.arrived(event, self.event_text(event))

    def other_words(self, event: Event) -> str:
        return f"{event.name} {event.rid or event.value}" if isinstance(event, Signal) else super().other_words(event)

    def _result(self, event: Completion) -> Said:
        batch, name = self._returned(event.batch_id)
        if isinstance(event, BatchFailed):
            text = f"result {name} FAILED: {printable(event.error)}"
            return self.arrived(event, text, batch=batch, is_result=True, is_failure=True)
        for share, ids in zip(self._shares.get(event.batch_id, ()), event.token_ids, strict=False):
            self._tokens[share.rid].extend(ids)
        text = f"result {name} ({', '.join(_some(ids) or '-' for ids in event.token_ids)})"
        return self.arrived(event, text, batch=batch, is_result=True)

    def _returned(self, batch_id: int) -> tuple[int | None, str]:
        """Return the displayed number of the batch and its name; a machine may get a result without a launch."""
        number = self._numbers.get(batch_id)
        if number is None or number not in self._in_flight:
            return None, f"of no launch ({batch_id})"
        self._in_flight.remove(number)
        return number, f"#{number}"

    def _reply(self, reply: Reply) -> Said:
        match reply:
            case Tokens():
                if reply.finish_reason is not None:
                    self._begun.pop(reply.rid, None)
                return self.tokens(reply, _some(reply.token_ids))
            case Refused():
                self._begun.pop(reply.rid, None)
                return self.refused(reply, f"refused: {printable(reply.reason)}")
            case Answer():
                said = f"{'ok' if reply.ok else 'not ok'}{f' ({printable(reply.text)})' if reply.text else ''}"
                return self.answered(reply, said, ok=reply.ok)

    def _launch(self, batch: Batch) -> ShownBatch:
        number = self._numbers[batch.id] = len(self._numbers)
        self._in_flight.append(number)
        self._shares[batch.id] = batch.shares
        kinds, shares = set(), []
        for share in batch.shares:
            is_decode, shown = self._share(share)
            kinds.add("decode" if is_decode else "prefill")
            shares.append(shown)
        kind = "mixed" if len(kinds) > 1 else next(iter(kinds), "empty")
        copies = [f"copies block {source} to {target}" for source, target in batch.copies]
        copies += [f"encodes image {place} of {short_rid(rid)}" for rid, place in batch.encoded]
        return ShownBatch(
            id=number,
            kind=", ".join([kind, *copies]),
            shares=tuple(shares),
            tokens=sum(share.count for share in batch.shares),
            order="" if shares else "no request",
            content=content_of(msgspec.structs.replace(batch, id=0)),
        )

    def _share(self, share: Share) -> tuple[bool, ShownShare]:
        """Return whether the share only decodes, and its positions, as far as its tokens are known at launch."""
        if share.rid in self._begun:
            self._begun[share.rid] = True
        tokens = self._tokens.setdefault(share.rid, [])
        start = share.start if share.start >= 0 else max(0, len(tokens) - 1)
        positions = f"[{start}:{start + share.count}]"
        guesses = f" with {plural(len(share.draft_ids), 'guess')}" if share.draft_ids else ""
        note = f"{guesses} in blocks {_some(share.block_ids)}"
        self._computed[share.rid] = start + share.count
        # The prompt of a request that began before the records is unknown.
        is_decode = start >= self._prompts.get(share.rid, len(tokens) - 1) > 0
        return is_decode, ShownShare(share.rid, positions, note, f"{printable(share.rid)}{positions}{note}")


def _some(numbers: Sequence[int]) -> str:
    more = len(numbers) - _SHOWN
    shown = " ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
