"""Transformers' continuous batching as a machine for the search: its own batch processor, with a simulated forward.

``prepare_next_batch`` and ``update_batch``, the scheduler, the cache and the offloading manager are as installed.
``BatchIO`` changes the requests as a batch's tensors would, because real tensors need a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from transformers.generation.continuous_batching.requests import (
    TMP_TOKEN_ID,
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from scripted.core.promises import CachedPrefix
from scripted.sdk import Abort, Add, Batch, BatchResult, Refused, Share, Stepped, Tokens, Violation
from scripted.sdk.messages import Event, Reply
from scripted_transformers.processor import Processor


class TransformersSettings(msgspec.Struct, frozen=True):
    """The fields of ``ContinuousBatchingConfig`` that affect scheduling. Sizes are in tokens."""

    page_size: int = 4
    num_blocks: int = 12
    max_batch_tokens: int = 16
    max_requests_per_batch: int = 4
    allow_block_sharing: bool = True
    use_async_batching: bool = False
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    # Every request has its own id, as the manager gives to requests without one; otherwise the client's name.
    unique_ids: bool = True

    def __post_init__(self) -> None:
        if self.scheduler_type not in SCHEDULER_MAPPING:
            known = ", ".join(SCHEDULER_MAPPING)
            raise ValueError(f"scheduler_type is one of {known}, got {self.scheduler_type!r}")

    @property
    def depth(self) -> int:
        """How many batches are in flight: with asynchronous batching one is prepared while another is computed."""
        return 2 if self.use_async_batching else 1


def _rid_of(request_id: str) -> str:
    return request_id.partition("#")[0]


class KnownHashes:
    """The tokens behind each hash of the prefix cache. A hash never changes its tokens, so copies share them."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self.tokens: dict[int, tuple[int, ...]] = {}

    def note(self, token_ids: Sequence[int]) -> None:
        """Note the hashes of a request's full blocks."""
        parent = None
        for end in range(self._size, len(token_ids) + 1, self._size):
            parent = compute_block_hash(parent, [*token_ids[end - self._size : end]])
            self.tokens.setdefault(parent, tuple(token_ids[:end]))


class TransformersMachine:
    """Drives a new processor with these settings as the manager's generation loop does.

    Each iteration of the loop prepares a batch, launches it, and updates the requests with the result of the oldest
    batch: the same one, or with asynchronous batching the one before.
    """

    def __init__(self, settings: TransformersSettings) -> None:
        self.depth = settings.depth
        self._settings = settings
        self._processor = Processor(settings)
        self._in_flight: deque[tuple[Batch, list[FutureRequestState]]] = deque()
        self._results: dict[int, BatchResult] = {}
        self._launched = 0
        # The client's tokens and the stop tokens of each live request, by id.
        self._delivered: dict[str, int] = {}
        self._stops: dict[str, tuple[int, ...]] = {}
        self._ids: dict[str, str] = {}
        self._added = 0
        self._hashes = KnownHashes(settings.page_size)

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Take events, update the oldest batch if its turn has come, and prepare one more."""
        del now
        replies = [reply for event in events for reply in self._take(event)]
        if len(self._in_flight) == self.depth:
            replies += self._update()
        batch, preempted = self._prepare() if len(self._in_flight) < self.depth else (None, ())
        return Stepped(
            microbatch=batch, replies=tuple(replies), preempted=preempted, again=batch is not None or bool(preempted)
        )

    @property
    def processor(self) -> Processor:
        return self._processor

    @property
    def is_idle(self) -> bool:
        """Whether there is no request. With asynchronous batching the last batch waits for the next."""
        return not self._processor.scheduler.has_pending_requests() and all(
            batch.id in self._results for batch, _ in self._in_flight
        )

    def counts(self) -> Mapping[str, int]:
        """Return requests by queue, batches in flight, and free or evictable blocks."""
        scheduler, cache = self._processor.scheduler, self._processor.cache
        kept = sum(len(allocator.ledger.cached_blocks) for allocator in cache.cache_allocators.values())
        return {
            "waiting": len(scheduler.waiting_requests),
            "active": len(scheduler.active_requests),
            "in_flight": sum(batch.id not in self._results for batch, _ in self._in_flight),
            "blocks_free": round(cache.compute_free_capacity() * self._settings.num_blocks) + kept,
        }

    # -- for promises --

    def open_rids(self) -> Collection[str]:
        """Return the rids of all requests in the scheduler's queues."""
        scheduler = self._processor.scheduler
        return {_rid_of(name) for name in (*scheduler.active_requests, *scheduler.waiting_requests)}

    def queries(self) -> Mapping[str, Callable[[], object]]:
        """Return the queries about admission and the cache, and the blocks that none of them may move."""
        scheduler, cache = self._processor.scheduler, self._processor.cache
        (allocator,) = cache.cache_allocators.values()
        waiting = [(one, [*one.remaining_prefill_tokens]) for one in scheduler.waiting_requests.values()]
        return {
            "pending": scheduler.has_pending_requests,
            "capacity": cache.compute_free_capacity,
            "fits": lambda: [cache.can_store_request_tokens(one, len(left), dry_run=True) for one, left in waiting],
            "hits": lambda: [allocator.match_prefix_blocks(left) for _, left in waiting],
            "blocks": lambda: {name: tuple(table) for name, table in allocator.block_table.items()},
        }

    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        """Yield each block of the prefix cache with its tokens, if a request has ended with them."""
        (allocator,) = self._processor.cache.cache_allocators.values()
        for block, known in allocator.ledger.block_to_hash.items():
            tokens = self._hashes.tokens.get(known)
            if tokens is not None:
                yield CachedPrefix(tokens, (block,), first=len(tokens) // self._settings.page_size - 1)

    def _take(self, event: Event) -> Iterator[Reply]:
        match event:
            case Add():
                if len(event.prompt_ids) + event.max_new_tokens > self._settings.page_size * self._settings.num_blocks:
                    # Without a bound, a request that does not fit even alone ends the loop.
                    yield Refused(rid=event.rid, reason="it does not fit into the cache")
                    return
                self._added += 1
                request_id = f"{event.rid}#{self._added}" if self._settings.unique_ids else event.rid
                self._ids[event.rid] = request_id
                self._delivered[request_id], self._stops[request_id] = 0, event.stop_token_ids
                self._processor.scheduler.add_waiting_request(
                    RequestState(
                        request_id=request_id,
                        initial_tokens=list(event.prompt_ids),
                        max_new_tokens=event.max_new_tokens,
                        eos_token_id=list(event.stop_token_ids) or None,
                        streaming=True,
                        created_time=0.0,
                    )
                )
            case Abort():
                request_id = self._ids.get(event.rid, event.rid)
                self._forget(request_id)
                self._processor.scheduler.set_request_cancellation(request_id)
            case BatchResult():
                self._results[event.batch_id] = event
            case _:
                raise TypeError(f"transformers has nothing for {event}")

    def _note_cancelled(self) -> None:
        """Note the hashes of the requests that the next batch drops: their last output is not delivered."""
        scheduler = self._processor.scheduler
        for name in scheduler._requests_to_cancel:  # noqa: SLF001 - not public
            state = scheduler.active_requests.get(name) or scheduler.waiting_requests.get(name)
            if state is not None:
                self._hashes.note([*state.initial_tokens, *state.generated_tokens])

    def _prepare(self) -> tuple[Batch | None, tuple[str, ...]]:
        scheduler, io = self._processor.scheduler, self._processor.inputs_and_outputs
        active = set(scheduler.active_requests)
        self._note_cancelled()
        is_there = self._processor.prepare_next_batch()
        preempted = tuple(sorted(map(_rid_of, active & set(scheduler.waiting_requests))))
        if not is_there:
            return None, preempted
        before = {future.state.request_id: future for future in self._in_flight[-1][1]} if self._in_flight else {}
        shares = tuple(self._share_of(future, before.get(future.state.request_id)) for future in io.prepared)
        self._launched += 1
        batch = Batch(id=self._launched, shares=shares)
        self._in_flight.append((batch, io.launch()))
        return batch, preempted

    def _share_of(self, future: FutureRequestState, earlier: FutureRequestState | None) -> Share:
        """Return a request's share. ``earlier`` is the same request in the batch before, whose token is not back.

        The device carries that token over to the last position of the share (``infer_carry_over_ids``).
        """
        state, tokens = future.state, [*future.state.tokens_to_process]
        if earlier is not None and earlier.has_new_token and future.has_new_token:
            if earlier.state is not state:
                raise Violation(
                    f"the token that the batch before chooses for an earlier request {state.request_id} "
                    "takes the place of a token of this one"
                )
            tokens[-1] = TMP_TOKEN_ID
        # A retracted request starts again with its output as part of its prompt.
        known = None if state.generated_tokens else len(state.initial_tokens)
        (allocator,) = self._processor.cache.cache_allocators.values()
        return Share(
            rid=_rid_of(state.request_id),
            start=state.position_offset,
            count=future.query_length,
            block_ids=tuple(allocator.block_table[state.request_id]),
            known_tokens=None if TMP_TOKEN_ID in tokens else known,
            token_ids=tuple(tokens),
        )

    def _update(self) -> Iterator[Reply]:
        batch, requests = self._in_flight[0]
        result = self._results.pop(batch.id, None)
        if result is None:
            return
        self._in_flight.popleft()
        tokens = [
            ids[0] if ids else 0 for future, ids in zip(requests, result.token_ids, strict=True) if future.has_new_token
        ]
        self._processor.inputs_and_outputs.bring(requests, tokens)
        self._processor.update_batch()
        for output in self._processor.ended:
            yield from self._undelivered(output)
        self._processor.ended.clear()

    def _undelivered(self, output: Any) -> Iterator[Reply]:
        """Yield the part of an output that the request's streaming client has not seen."""
        seen = self._delivered.get(output.request_id)
        if seen is None:
            return
        new = tuple(output.generated_tokens[seen:])
        self._delivered[output.request_id] = seen + len(new)
        reason = None
        if output.status == RequestStatus.FINISHED:
            reason = "stop" if new and new[-1] in self._stops[output.request_id] else "length"
            self._hashes.note([*output.prompt_ids, *output.generated_tokens])
            self._forget(output.request_id)
        yield Tokens(rid=_rid_of(output.request_id), token_ids=new, finish_reason=reason)

    def _forget(self, request_id: str) -> None:
        self._delivered.pop(request_id, None)
        self._stops.pop(request_id, None)
        if self._ids.get(_rid_of(request_id)) == request_id:
            del self._ids[_rid_of(request_id)]
