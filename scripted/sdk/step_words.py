"""Records of a machine as steps that are shown: what came in, what was launched in which blocks, what clients heard."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, assert_never

import msgspec

from scripted.core.phrases import plural, printable, short_rid
from scripted.report.step_log import Said, ShownBatch, ShownShare, ShownStep, StepLog, content_of
from scripted.sdk.capabilities import Limits
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    Event,
    FlushCache,
    Pause,
    Record,
    Refused,
    Reply,
    Resume,
    Share,
    Signal,
    Tokens,
)

# Blocks and tokens shown of a request; the others are counted.
_SHOWN: Final = 12
_FAILED_ENDS: Final = ("error",)


def log_of(records: Sequence[Record], limits: Limits) -> StepLog:
    """Every step on one stage. Batches are numbered from 0 on, and requests are counted from what clients were told."""
    reader = _Reader(limits)
    return StepLog(1, limits.depth, tuple([reader.read(step, record) for step, record in enumerate(records, 1)]))


class _Reader:
    """What is known of requests and batches up to a step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tokens: dict[str, list[int]] = {}
        self._begun: dict[str, bool] = {}
        self._calls: dict[str, str] = {}
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
            answered += [self._reply(reply) for reply in stepped.replies]
            launched = None if stepped.microbatch is None else self._launch(stepped.microbatch)
        self._digest = hashlib.blake2b(self._digest + msgspec.msgpack.encode(record), digest_size=8).digest()
        return ShownStep(
            step=step,
            now=record.step.now,
            arrived=tuple(arrived),
            launched=launched,
            answered=tuple(answered),
            waiting=tuple(rid for rid, begun in self._begun.items() if not begun),
            running=tuple(rid for rid, begun in self._begun.items() if begun),
            in_flight=tuple(self._in_flight),
            memory=record.counts,
            digest=self._digest.hex(),
            error=record.error,
        )

    def _event(self, event: Event) -> Said:
        text, kind, rid, batch = "", "event", None, None
        match event:
            case Add():
                self._tokens[event.rid] = list(event.prompt_ids)
                self._begun[event.rid] = False
                said = {name: getattr(event, name) for name in ("priority", "lora", "grammar", "session")}
                said["images"] = len(event.images)
                more = "".join(f", {name} {value}" for name, value in said.items() if value)
                text = f"start {short_rid(event.rid)} ({len(event.prompt_ids)} + {event.max_new_tokens} tokens{more})"
                rid = event.rid
            case Abort():
                text, kind, rid = f"abort {short_rid(event.rid)}", "strong", event.rid
            case FlushCache():
                text, kind = "forced flush" if event.force else "flush", "strong"
            case Pause():
                text = f"pause ({event.mode})"
            case Resume():
                text = "continue"
            case BatchResult():
                batch, name = self._returned(event.batch_id)
                for share, ids in zip(self._shares.get(event.batch_id, ()), event.token_ids, strict=False):
                    self._tokens[share.rid].extend(ids)
                text, kind = f"result {name} ({', '.join(_some(ids) or '-' for ids in event.token_ids)})", "taken"
            case BatchFailed():
                batch, name = self._returned(event.batch_id)
                text, kind = f"result {name} FAILED: {printable(event.error)}", "bad"
            case Signal():
                text = f"{event.name} {event.rid or event.value}"
            case _:
                assert_never(event)
        if isinstance(event, FlushCache | Pause | Resume):
            self._calls[event.call_id] = text
        is_result = isinstance(event, BatchResult | BatchFailed)
        return Said(text=text, kind=kind, rid=rid, batch=batch, of_pipeline=is_result, content=content_of(event))

    def _returned(self, batch_id: int) -> tuple[int | None, str]:
        """The number that the batch is shown by, and its name; a machine may be given a result of no launch."""
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
                kind = "bad" if reply.finish_reason in _FAILED_ENDS else "token"
                words = [f"token {_some(reply.token_ids)}"] if reply.token_ids else []
                words += [f"ends: {reply.finish_reason}"] if reply.finish_reason else []
                text = f"{short_rid(reply.rid)} -> {', '.join(words) or 'nothing new'}"
                return Said(text=text, kind=kind, rid=reply.rid, content=content_of(reply))
            case Refused():
                self._begun.pop(reply.rid, None)
                text = f"{short_rid(reply.rid)} -> refused: {printable(reply.reason)}"
                return Said(text=text, kind="refused", rid=reply.rid, content=content_of(reply))
            case Answer():
                said = f"{'ok' if reply.ok else 'not ok'}{f' ({printable(reply.text)})' if reply.text else ''}"
                text = f"{self._calls.get(reply.call_id, 'call')} -> {said}"
                return Said(text=text, kind="answer" if reply.ok else "refused", content=content_of(reply))

    def _launch(self, batch: Batch) -> ShownBatch:
        number = self._numbers[batch.id] = len(self._numbers)
        self._in_flight.append(number)
        self._shares[batch.id] = batch.shares
        kinds, shares = set(), []
        for share in batch.shares:
            is_decode, shown = self._share(share)
            kinds.add("decode" if is_decode else "prefill")
            shares.append(shown)
        copies = [f"copies block {source} to {target}" for source, target in batch.copies]
        copies += [f"encodes image {place} of {short_rid(rid)}" for rid, place in batch.encoded]
        return ShownBatch(
            id=number,
            kind=", ".join(["mixed" if len(kinds) > 1 else kinds.pop() if kinds else "empty", *copies]),
            shares=tuple(shares),
            tokens=sum(share.count for share in batch.shares),
            order="" if shares else "no request",
            content=content_of(msgspec.structs.replace(batch, id=0)),
        )

    def _share(self, share: Share) -> tuple[bool, ShownShare]:
        """Whether it only decodes; and its positions, as far as its tokens are known when it is launched."""
        if share.rid in self._begun:
            self._begun[share.rid] = True
        tokens = self._tokens.setdefault(share.rid, [])
        start = share.start if share.start >= 0 else max(0, len(tokens) - 1)
        positions = f"[{start}:{start + share.count}]"
        guesses = f" with {plural(len(share.draft_ids), 'guess')}" if share.draft_ids else ""
        note = f"{guesses} in blocks {_some(share.block_ids)}"
        is_decode = share.count == 1 and start >= len(tokens) - 1 > 0
        return is_decode, ShownShare(share.rid, positions, note, f"{printable(share.rid)}{positions}{note}")


def _some(numbers: Sequence[int]) -> str:
    more = len(numbers) - _SHOWN
    shown = " ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
