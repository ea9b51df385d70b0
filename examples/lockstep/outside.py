"""This project's own scheduler as an outsider would adapt it: searched with the checks that hold for every scheduler.

It shows what those checks see of the gallery's bugs without knowing anything of this engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from scripted_lockstep.mutants import MUTANTS
from scripted_lockstep.run_forks import COPIER

from engine.core import messages as own
from engine.core.config import EngineConfig
from engine.core.instruments import SilentDigests
from engine.core.limits import EMBEDDED_FACTS
from engine.core.limits import Limits as EngineLimits
from engine.core.plan import Segment
from engine.core.scheduler import Scheduler
from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    Capabilities,
    FlushCache,
    Limits,
    Pause,
    PauseMode,
    Refused,
    Resume,
    SchedulerAdapter,
    Share,
    Stepped,
    Tokens,
)
from scripted.sdk.messages import Event, Reply


class Config(msgspec.Struct, frozen=True):
    """The settings of the engine that change how it schedules. Sizes are in tokens and requests."""

    pp_size: int = 2
    pp_async_depth: int = 1
    page_size: int = 4
    max_total_tokens: int = 48
    chunked_prefill_size: int = 16
    max_running_requests: int = 4
    schedule_policy: str = "priority"
    priority_preemption: bool = True
    mixed_chunk: bool = False


def _limits_of(config: Config) -> EngineLimits:
    return EngineLimits.of(EngineConfig(**msgspec.structs.asdict(config)), EMBEDDED_FACTS)


class OutsideMachine:
    """The scheduler, and the page table of each of its rows, which its plans only add to."""

    def __init__(self, config: Config) -> None:
        limits = _limits_of(config)
        self.depth = limits.depth
        self._scheduler = Scheduler(limits)
        self._scheduler.digests = SilentDigests()
        self._tables: dict[int, tuple[int, ...]] = {}
        self._batches: dict[int, tuple[Segment, ...]] = {}

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        stepped = self._scheduler.step([message for event in events for message in self._messages(event)], now)
        batch = stepped.microbatch
        # Those that wait have no pages; and one may have lost them and got others within this step.
        preempted = [request.rid for request in self._scheduler.books.waiting]
        preempted += [segment.rid for segment in batch.segments if segment.sampling] if batch else []
        return Stepped(
            microbatch=None if batch is None else self._batch(batch.id, batch.segments),
            replies=tuple([reply for one in stepped.replies for reply in _replies(one)]),
            preempted=tuple(preempted),
            again=stepped.again,
            deadline=stepped.deadline,
        )

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_fully_idle

    def counts(self) -> dict[str, int]:
        books, memory = self._scheduler.books, self._scheduler.memory
        return {
            "waiting": len(books.waiting),
            "running": len(books.running),
            "in_flight": len(books.in_flight),
            "blocks_free": memory.pages.free + memory.pages.cached,
            "rows_free": memory.rows.free,
        }

    def _messages(self, event: Event) -> Iterator[own.Event]:
        match event:
            case Add():
                sampling = own.SamplingParams(
                    max_new_tokens=event.max_new_tokens, stop_token_ids=event.stop_token_ids, ignore_eos=True
                )
                yield own.Generate(
                    rid=event.rid, prompt_ids=event.prompt_ids, sampling=sampling, priority=event.priority
                )
            case Abort():
                yield own.Abort(rid=event.rid)
            case FlushCache():
                yield own.FlushCache(call_id=event.call_id)
            case Pause():
                yield own.PauseGeneration(call_id=event.call_id, mode=own.PauseMode(event.mode))
            case Resume():
                yield own.ContinueGeneration(call_id=event.call_id)
            case BatchResult():
                segments = self._batches.pop(event.batch_id)
                ids = [ids[0] for segment, ids in zip(segments, event.token_ids, strict=True) if segment.emits]
                yield own.Completion(microbatch_id=event.batch_id, token_ids=tuple(ids))
            case BatchFailed():
                del self._batches[event.batch_id]
                yield own.Completion(microbatch_id=event.batch_id, error=event.error)

    def _batch(self, batch_id: int, segments: Sequence[Segment]) -> Batch:
        self._batches[batch_id] = tuple(segments)
        return Batch(id=batch_id, shares=tuple([self._share(segment) for segment in segments]))

    def _share(self, segment: Segment) -> Share:
        if segment.sampling is not None:
            self._tables[segment.row] = ()
        table = self._tables.get(segment.row, ())[: segment.page_start] if segment.pages else self._tables[segment.row]
        self._tables[segment.row] = table = (*table, *segment.pages)
        return Share(
            rid=segment.rid,
            start=segment.start,
            count=len(segment.token_ids),
            block_ids=table,
            token_ids=segment.token_ids,
        )


def _replies(reply: own.Reply) -> Iterator[Reply]:
    match reply:
        case own.TokenOutput():
            reason = None if reply.finish_reason is None else reply.finish_reason.value
            yield Tokens(rid=reply.rid, token_ids=reply.token_ids, finish_reason=reason)
        case own.Refusal():
            yield Refused(rid=reply.rid, reason=reply.message)
        case own.CallAnswer():
            yield Answer(call_id=reply.call_id, ok=reply.ok, text=reply.message)


def _portable_limits(config: Config) -> Limits:
    limits = _limits_of(config)
    return Limits(
        block_size=limits.page_size,
        blocks=limits.total_pages,
        batch_tokens=limits.prefill_budget_tokens + (limits.rows if limits.mixed_chunk else 0),
        batch_requests=limits.rows,
        context_tokens=limits.context_length,
        depth=limits.depth,
    )


ADAPTER: Final = SchedulerAdapter(
    "outside",
    config=Config,
    machine=OutsideMachine,
    limits=_portable_limits,
    can=lambda config: Capabilities(
        pause_modes=(PauseMode(name="retract"), PauseMode(name="in_place"), PauseMode(name="abort", aborts=True)),
        fail=True,
        priority=config.priority_preemption,
        whole_leases=True,
    ),
    settings={"schedule_policy": ("fcfs", "lpm", "dfs-weight")},
    mutants=MUTANTS,
    copier=COPIER,
    # The tables of rows are the runner's, and a row keeps its last one; digests and heaps are thinned now and then.
    may_grow=("_tables", "_pending", "_replies"),
)
