"""The steps of a run in words, a line each: what came in, what was launched in which blocks, what clients were told."""

from __future__ import annotations

from typing import Final

from scripted.core.phrases import plural
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
    Refused,
    Reply,
    Resume,
    Share,
    Tokens,
)
from scripted.sdk.records import Record

__all__ = ["step_line"]

# Blocks and tokens shown of a request; the others are counted.
_SHOWN: Final = 12


def step_line(number: int, record: Record, batch: Batch | None) -> str:
    """``step 7: result of batch 2 (112) -> told a 112 (length); batch 4: b[32:35] in blocks 0 1 2``.

    ``batch`` is what the step launched, as the pipeline understood it.
    """
    came = ", ".join(map(_event, record.step.events)) or "nothing"
    stepped, done = record.stepped, []
    if stepped is not None:
        done += [f"preempted {' '.join(stepped.preempted)}"] if stepped.preempted else []
        done += [", ".join(map(_reply, stepped.replies))] if stepped.replies else []
    if batch is not None:
        copies = [f"copies block {source} to {target}" for source, target in batch.copies]
        done.append(f"batch {batch.id}: {', '.join([*copies, *map(_share, batch.shares)])}")
    if record.error is not None:
        done.append(f"died of {record.error}")
    return f"step {number}: {came} -> {'; '.join(done) or 'nothing'}"


def _event(event: Event) -> str:
    match event:
        case Add():
            more = f", priority {event.priority}" if event.priority else ""
            return f"start {event.rid} ({len(event.prompt_ids)} + {event.max_new_tokens} tokens{more})"
        case Abort():
            return f"abort {event.rid}"
        case FlushCache():
            return "forced flush" if event.force else "flush"
        case Pause():
            return f"pause ({event.mode})"
        case Resume():
            return "continue"
        case BatchResult():
            return f"result of batch {event.batch_id} ({', '.join(_some(ids) or '-' for ids in event.token_ids)})"
        case BatchFailed():
            return f"batch {event.batch_id} failed"


def _reply(reply: Reply) -> str:
    match reply:
        case Tokens():
            words = [_some(reply.token_ids), f"({reply.finish_reason})" if reply.finish_reason else ""]
            return " ".join(["told", reply.rid, *filter(None, words)])
        case Refused():
            return f"refused {reply.rid}: {reply.reason}"
        case Answer():
            return (
                f"answered {reply.call_id}: {'ok' if reply.ok else 'not ok'}{f' ({reply.text})' if reply.text else ''}"
            )


def _share(share: Share) -> str:
    guesses = f" with {plural(len(share.draft_ids), 'guess')}" if share.draft_ids else ""
    # The pipeline could not say where one begins whose request never arrived.
    where = f"{share.start}:{share.start + share.count}" if share.start >= 0 else f"{share.count} more"
    return f"{share.rid}[{where}]{guesses} in blocks {_some(share.block_ids)}"


def _some(numbers: tuple[int, ...]) -> str:
    more = len(numbers) - _SHOWN
    shown = " ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
