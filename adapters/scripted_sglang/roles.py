"""Roles of SGLang's schedulers: the work of a prefill or decode server in a turn of its loop."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final

from sglang.srt.disaggregation.utils import DisaggregationMode

from scripted.sdk import Load
from scripted_sglang.scheduler_view import rid_of
from scripted_sglang.transfers import PORT, LinkedManager

_TURN: Final = frozenset({
    "ingest_requests", "_record_scheduler_state_for_paused_engine", "run_batch", "process_batch_result", "on_idle",
})  # fmt: skip
_PREFILL: Final = _TURN | {
    "get_next_disagg_prefill_batch_to_run", "process_disagg_prefill_inflight_queue", "maybe_prefetch_staging_for_batch",
}  # fmt: skip
_DECODE: Final = _TURN | {"process_decode_queue", "get_next_disagg_decode_batch_to_run"}
_OVERLAP: Final = frozenset({"_apply_war_barrier", "launch_batch_sample_if_needed"})
# The calls of the loops with a role; ``machine.py`` has those of the other loops.
LOOPS: Final = {
    "event_loop_normal_disagg_prefill": _PREFILL,
    "event_loop_overlap_disagg_prefill": _PREFILL
    | _OVERLAP
    | {
        "_is_continuous_input_polling_enabled", "_yield_gil_if_needed", "_war_barrier_is_coarse",
        "is_disagg_prefill_batch_result_ready",
    },
    "event_loop_normal_disagg_decode": _DECODE,
    "event_loop_overlap_disagg_decode": _DECODE | _OVERLAP | {"is_disable_overlap_for_batch"},
}  # fmt: skip


class Role:
    """The role of a scheduler that prefills and decodes. With another role, ``transfers`` is its KV manager."""

    may_wait_before_launch = True
    transfers: LinkedManager | None = None

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.loads: list[Load] = []

    def plan(self) -> Any:
        """Return the next batch, after the loop's calls that precede it."""
        scheduler = self._scheduler
        return scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)

    def end_turn(self) -> None:
        """Do the work at the end of a turn."""

    def queues(self) -> Mapping[str, int]:
        """Return the number of requests in each queue."""
        return {}

    def reqs(self) -> Iterable[Any]:
        """Return the requests in the queues of the role."""
        return ()

    def routed(self, rid: str) -> Mapping[str, Any]:
        """Return the fields that a router adds to a request."""
        del rid
        return {}


class _WithTransfers(Role):
    """A role with KV transfers. ``rooms`` has each request's prefill engine and room number, by rid."""

    transfers: LinkedManager

    def __init__(self, scheduler: Any, queue: Any) -> None:
        super().__init__(scheduler)
        self.rooms: dict[str, tuple[str, int]] = {}
        self.transfers = queue.kv_manager
        self.transfers.scheduler = scheduler

    def routed(self, rid: str) -> Mapping[str, Any]:
        host, room = self.rooms[rid]
        return {"bootstrap_host": host, "bootstrap_port": PORT, "bootstrap_room": room}

    def forget(self, live: Container[str]) -> None:
        """Forget the rooms of requests that are not alive."""
        self.rooms = {rid: given for rid, given in self.rooms.items() if rid in live}

    def rid_in(self, room: int) -> str | None:
        """Return the live request in a room."""
        return next((rid for rid, (_, number) in self.rooms.items() if number == room), None)


class Prefill(_WithTransfers):
    """The role of ``event_loop_normal_disagg_prefill`` and ``event_loop_overlap_disagg_prefill``."""

    may_wait_before_launch = False

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler, scheduler.disagg_prefill_bootstrap_queue)

    def plan(self) -> Any:
        scheduler = self._scheduler
        scheduler.waiting_queue.extend(scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        return scheduler.get_next_disagg_prefill_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )

    def end_turn(self) -> None:
        self._scheduler.process_disagg_prefill_inflight_queue()

    def queues(self) -> Mapping[str, int]:
        scheduler = self._scheduler
        return {
            "bootstrap": len(scheduler.disagg_prefill_bootstrap_queue.queue),
            "inflight": len(scheduler.disagg_prefill_inflight_queue),
            "rows_of_metadata": scheduler.req_to_metadata_buffer_idx_allocator.available_size(),
        }

    def reqs(self) -> Iterable[Any]:
        scheduler = self._scheduler
        return [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.disagg_prefill_inflight_queue]


class Decode(_WithTransfers):
    """The role of ``event_loop_normal_disagg_decode`` and ``event_loop_overlap_disagg_decode``.

    ``loads`` has the KV from ended transfers, and from ended returns from the host.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler, scheduler.disagg_decode_prealloc_queue)
        # No time passes between attempts to reach a server, so one is enough.
        scheduler.disagg_decode_prealloc_queue._max_ensure_retries = 1  # noqa: SLF001 - not public
        # Rooms of lost prefill engines.
        self.orphans: set[int] = set()

    def plan(self) -> Any:
        scheduler = self._scheduler
        retracted = {req.rid for req in scheduler.disagg_decode_prealloc_queue.retracted_queue}
        before = {req.rid for req in scheduler.waiting_queue}
        self._end_deferred()
        scheduler.process_decode_queue()
        for req in scheduler.waiting_queue:
            if req.rid not in before:
                self.loads.append(self._load_of(req, is_restored=req.rid in retracted))
        return scheduler.get_next_disagg_decode_batch_to_run(running_batch=scheduler.running_batch)

    def _load_of(self, req: Any, *, is_restored: bool) -> Load:
        """Return the KV of a request without its last token, which is known."""
        tokens = (*req.origin_input_ids, *req.output_ids)
        return Load(
            rid=rid_of(req.rid),
            start=0 if is_restored else len(tokens) - 1,
            token_ids=tokens[:-1],
            block_ids=self.pages_of(req, len(tokens) - 1),
            said=tokens[-1:],
        )

    def pages_of(self, req: Any, count: int) -> tuple[int, ...]:
        """Return the pages of a request's first ``count`` tokens."""
        size = self._scheduler.page_size
        slots = self._scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :count:size].tolist()
        return tuple([slot // size for slot in slots])

    def receivers(self) -> Iterator[Any]:
        """Yield the requests whose pages another engine may write."""
        queue = self._scheduler.disagg_decode_transfer_queue
        yield from queue.queue
        for one, *_ in queue._deferred_releases:  # noqa: SLF001 - not public
            yield one

    def lose(self, name: str) -> None:
        """Lose a prefill engine with its writes."""
        self.orphans |= {one.req.bootstrap_room for one in self.receivers() if one.req.bootstrap_host == name}
        self.transfers.lose_prefill(name)

    def _end_deferred(self) -> None:
        """Release the pages kept for a lost engine's writes."""
        if not self.orphans:
            return
        self.orphans &= {one.req.bootstrap_room for one in self.receivers()}
        for one, *_, acks in self._scheduler.disagg_decode_transfer_queue._deferred_releases:  # noqa: SLF001 - as above
            state = self.transfers._deferred_abort_ack_tracker.get(one.req.bootstrap_room)  # noqa: SLF001 - as above
            if one.req.bootstrap_room in self.orphans and state is not None:
                state.prefill_ranks.update(range(acks))

    def awaiting(self) -> Iterable[str]:
        """Yield the requests that wait for KV."""
        return [rid_of(req.rid) for req in self._awaiting()]

    def _awaiting(self) -> list[Any]:
        queue = self._scheduler.disagg_decode_prealloc_queue
        reqs = [one.req for one in (*queue.queue, *self._scheduler.disagg_decode_transfer_queue.queue)]
        return [*reqs, *queue.held_rebootstrap_reqs]

    def reqs(self) -> Iterable[Any]:
        return [*self._awaiting(), *self._scheduler.disagg_decode_prealloc_queue.retracted_queue]

    def queues(self) -> Mapping[str, int]:
        scheduler = self._scheduler
        queue = scheduler.disagg_decode_prealloc_queue
        return {
            "prealloc": len(queue.queue) + len(queue.held_rebootstrap_reqs),
            "retracted": len(queue.retracted_queue),
            "transfer": len(scheduler.disagg_decode_transfer_queue.queue),
            "rows_of_metadata": scheduler.req_to_metadata_buffer_idx_allocator.available_size(),
        }


def role_of(scheduler: Any) -> Role:
    """Return the role of this scheduler."""
    mode = scheduler.disaggregation_mode
    if mode == DisaggregationMode.PREFILL:
        return Prefill(scheduler)
    return Decode(scheduler) if mode == DisaggregationMode.DECODE else Role(scheduler)
