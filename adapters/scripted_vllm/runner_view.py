"""Requests as vLLM's model runner knows them from plans alone: computed tokens and block tables.

Plans contain changes only. A change that a plan omits is missing here, as on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from scripted.sdk import Ring, Share, StateTable, Violation, Window
from scripted_vllm.config import VllmSettings
from scripted_vllm.hisparse import SparseHost
from scripted_vllm.ids import rid_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _Request:
    __slots__ = ("blocks", "known", "next", "prompt", "replays_from")

    def __init__(self, blocks: Sequence[Sequence[int]], known: int, prompt: int, replays_from: int) -> None:
        # One table per group of layers.
        self.blocks = [[*table] for table in blocks]
        # How many tokens the request had in the plan that began or resumed it; None after that plan.
        self.known: int | None = known
        # The tokens of its prompt.
        self.prompt = prompt
        # Where the window before its prefix hit begins; 0 if none of it is recomputed.
        self.replays_from = replays_from
        # The position after its last share as version 2 counts it itself: -1 if guesses decide on it, None before.
        self.next: int | None = None


def tables_of_groups(
    blocks: Sequence[Sequence[int]], settings: VllmSettings, kept: tuple[int, int] = (0, 0), first: int = 0
) -> dict[str, Any]:
    """Return the tables of the groups after the first, in order: windows, states, rings, cross attention."""
    others = iter([tuple(table) for table in blocks[1:]])
    if settings.hisparse_host_blocks:
        # The indexer attends to everything; the region for host rows is overwritten and keeps nothing.
        return {
            "windows": (Window(block_ids=next(others), tokens=settings.max_model_len),),
            "rings": tuple([Ring(block_id=block, tokens=1) for block in blocks[-1]]),
        }
    return {
        "windows": tuple(
            [
                Window(block_ids=next(others), tokens=size, is_chunk=is_chunk, first=first)
                for size, is_chunk in settings.windows
            ]
        ),
        "states": tuple([_states(next(others), size, kept) for size in settings.states]),
        "rings": tuple([Ring(block_id=next(others)[0], tokens=size) for size in settings.rings]),
    }


def _states(blocks: tuple[int, ...], size: int, kept: tuple[int, int]) -> StateTable:
    # A place with the null block keeps nothing.
    return StateTable(block_ids=blocks, tokens=size, kept=kept if kept[0] and blocks[kept[1]] else (0, 0))


class RunnerView:
    """Follows the plans of one scheduler. ``host`` knows where pages are, if some are in host memory."""

    def __init__(self, settings: VllmSettings, scheduler: Any, host: SparseHost | None = None) -> None:
        self._settings = settings
        # The state that a prompt's share keeps besides its last one.
        self._checkpoint_of = _checkpoint_reader(settings, scheduler)
        self._host = host
        self._version = settings.model_runner
        self._requests: dict[str, _Request] = {}
        # Requests that begin again with their tokens so far.
        self.sessions: set[str] = set()

    def know(self, request_id: str, blocks: Sequence[Sequence[int]], prompt: int) -> None:
        """Note a running request that no recorded plan began."""
        self._requests[request_id] = request = _Request(blocks, 0, prompt, 0)
        request.known = None

    def shares_of(self, plan: SchedulerOutput, guessing: Collection[str]) -> tuple[Share, ...]:
        """Take a plan; return the share of each request in the plan's order. Raises Violation for a plan with gaps.

        ``guessing`` are requests with guesses in flight, whose positions the scheduler cannot know.
        """
        starts = self._update(plan)
        shares = []
        for rid, count in plan.num_scheduled_tokens.items():
            if rid not in starts:
                raise Violation(
                    f"the plan computes {count} tokens of {rid_of(rid)}, but names neither its blocks nor its position"
                )
            request = self._requests[rid]
            drafts = plan.scheduled_spec_decode_tokens.get(rid, ())
            start = starts[rid]
            if request.known is None and rid in guessing:
                start = -1
            elif request.known is None and request.next is not None:
                start = request.next
            if self._version == 2:
                # It takes the plan's position only where a request begins or resumes.
                request.next = -1 if start < 0 or drafts else start + count
            blocks = tuple(request.blocks[0])
            if self._host is not None:
                blocks = self._host.read_from(rid, request.blocks, starts[rid], starts[rid] + count)
            kept = (0, 0)
            if self._checkpoint_of is not None and not drafts:
                kept = self._checkpoint_of(starts[rid], starts[rid] + count)
            shares.append(
                Share(
                    rid=rid_of(rid),
                    start=start,
                    count=count,
                    block_ids=blocks,
                    crossed=tuple(request.blocks[-1]) if self._settings.is_encoder_decoder else None,
                    gap=self._gap_of(request, starts[rid]),
                    draft_ids=tuple(drafts),
                    known_tokens=request.known,
                    rebuilt=request.replays_from and request.replays_from + self._settings.sliding_window,
                    **tables_of_groups(request.blocks, self._settings, kept, request.replays_from),
                )
            )
            request.known = None
        for rid in plan.scheduled_spec_decode_tokens:
            if rid not in plan.num_scheduled_tokens:
                raise Violation(f"the plan has guesses for {rid_of(rid)}, but computes none of its tokens")
        return tuple(shares)

    def _gap_of(self, request: _Request, start: int) -> tuple[int, int]:
        """Return the range of a request's output that its layers do not read."""
        if not self._settings.rswa_window:
            return (0, 0)
        return request.prompt, max(request.prompt, start + 1 - self._settings.rswa_window)

    def _update(self, plan: SchedulerOutput) -> dict[str, int]:
        gone = set(plan.finished_req_ids)
        if self._version == 2:
            # Version 1 keeps preempted requests, and expects all of their blocks to be replaced.
            gone |= plan.preempted_req_ids or set()
        for rid in gone:
            self._requests.pop(rid, None)
        self.sessions -= set(plan.finished_req_ids)
        starts = {}
        for new in plan.scheduled_new_reqs:
            if self._version == 1 and new.req_id in self._requests and new.req_id not in self.sessions:
                raise Violation(f"the plan begins {rid_of(new.req_id)}, which the runner was not told to drop")
            known = len(new.prefill_token_ids if self._version == 2 else new.prompt_token_ids)
            replays_from = getattr(new, "replay_start", 0)
            self._requests[new.req_id] = _Request(new.block_ids, known, len(new.prompt_token_ids), replays_from)
            starts[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for rid, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self._requests.get(rid)
            if request is None:
                raise Violation(f"the plan continues {rid_of(rid)}, which the runner never received or has dropped")
            if rid in cached.resumed_req_ids:
                if blocks is None or rid not in cached.all_token_ids:
                    raise Violation(f"the plan resumes {rid_of(rid)} without its blocks or its tokens")
                request.blocks = [[*table] for table in blocks]
                request.known = len(cached.all_token_ids[rid])
            elif blocks is not None:
                for table, more in zip(request.blocks, blocks, strict=True):
                    table += more
            starts[rid] = start
        return starts


def _checkpoint_reader(settings: VllmSettings, scheduler: Any) -> Callable[[int, int], tuple[int, int]] | None:
    """Return the function that tells Mamba's kernels where in a share to keep another state, and in which block.

    None if they keep none.
    """
    if not settings.mamba_checkpoint_alignment:
        return None
    # Its module imports kernels.
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    group = scheduler.kv_cache_manager.coordinator.single_type_managers[-1 - len(settings.rings)]

    more: dict[str, Any] = {
        "hash_block_size": settings.hash_block_size,
        "mamba_block_size": settings.states[0],
        "checkpoint_alignment": settings.mamba_checkpoint_alignment,
        "drop_eagle_block": scheduler.use_eagle_block_drop,
        # Since 0.32; and since 0.33 a hash may cover tokens after its block.
        "cache_hit_alignment_tokens": getattr(group, "cache_hit_alignment_tokens", None),
        "num_hash_lookahead_tokens": getattr(scheduler, "num_hash_lookahead_tokens", None),
    }
    known = inspect.signature(compute_mamba_prefill_checkpoints).parameters
    more = {name: value for name, value in more.items() if name in known}

    def checkpoint_of(start: int, end: int) -> tuple[int, int]:
        (count,), (place,) = compute_mamba_prefill_checkpoints([end], [end - start], **more)
        return count, place

    return checkpoint_of
