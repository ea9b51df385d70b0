"""Promises about vLLM's plans: no request is left out despite room for it, and no lookup uses wrong hashes.

Since 0.33 the scans of running and waiting requests continue past a request that cannot be computed. Before, they ended
there: 0.32.0 preempts for nobody (pull request 26765), and lets requests wait behind an image without room.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import request_hasher
from scripted_vllm.ids import rid_of

# A method that came with these changes.
GOES_ON: Final = hasattr(Scheduler, "has_request")
_READY: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def why_left_out(plan: Any, scheduler: Any, settings: VllmSettings, *, is_alone: bool) -> str:
    """Return the request that a plan leaves out despite room for it, with the reason; empty if there is none.
    ``is_alone``: nothing is in flight.

    HiSparse, the user's own connector, and a connector that loads beside a batch in flight keep freed blocks: with them
    vLLM decides differently.
    """
    keeps_blocks = settings.connector_cls or settings.hisparse_host_blocks or scheduler.defer_block_free
    tokens = _tokens_left(plan, scheduler)
    if keeps_blocks or tokens <= 0:
        return ""
    room = f"the plan has {tokens} tokens and {_free(scheduler)} blocks left"
    running = [rid_of(one.request_id) for one in running_left_out(plan, scheduler, settings, is_alone=is_alone)]
    if running:
        preempted = ", ".join(sorted(map(rid_of, plan.preempted_req_ids or ())))
        lost = f", which preempts {preempted}" if preempted else ""
        return f"{', '.join(running)} runs and has a token to compute, but is not in the plan{lost}: {room}"
    waiting = next(waiting_left_out(plan, scheduler, settings, tokens), None)
    return "" if waiting is None else f"{rid_of(waiting.request_id)} waits, but {room}, enough for each before it too"


def _tokens_left(plan: Any, scheduler: Any) -> int:
    """Return the tokens that one more request may have, besides its slots for guesses."""
    guesses = scheduler.vllm_config.speculative_config
    slots = 0 if guesses is None else guesses.max_num_new_slots_for_drafting
    planned = plan.total_num_scheduled_tokens + slots * (len(plan.num_scheduled_tokens) + 1)
    return int(scheduler.max_num_scheduled_tokens - planned)


def _free(scheduler: Any) -> int:
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def _groups(scheduler: Any) -> int:
    return len(scheduler.kv_cache_manager.coordinator.single_type_managers)


def running_left_out(plan: Any, scheduler: Any, settings: VllmSettings, *, is_alone: bool) -> Iterator[Any]:
    """Yield the running requests that have a token to compute and none in the plan.

    A chunk of a prompt may be empty by the rules of images, states, drafters and prefill intervals. The scan ends at a
    request without a block if the blocks of the least urgent one are still written by a batch in flight. An image from
    outside may be in transit.
    """
    if scheduler.pause_state == PauseState.PAUSED_ALL:
        return
    may_be_empty = settings.encoder_cache_size or settings.has_mamba or settings.prefill_schedule_interval > 1
    may_be_empty = may_be_empty or not is_alone or scheduler.num_prefill_lookahead > 1
    needed = _groups(scheduler) * (2 + 2 * settings.num_speculative_tokens // settings.block_size)
    if not is_alone and _free(scheduler) < needed:
        return
    for request in scheduler.running:
        if request.request_id in plan.num_scheduled_tokens or (request.is_prefill_chunk and may_be_empty):
            continue
        # Its last token is still in flight, or its workers compute another batch.
        if request.num_output_placeholders or scheduler.current_step < request.next_decode_eligible_step:
            continue
        if settings.ec_connector and request.mm_features:
            continue
        at = request.num_computed_tokens
        if at < request.num_tokens and at + 1 < settings.max_model_len:
            yield request


def waiting_left_out(plan: Any, scheduler: Any, settings: VllmSettings, tokens: int) -> Iterator[Any]:
    """Yield the waiting requests for which the plan has seats, ``tokens`` and blocks, if it also has them for each
    request before.

    A request that is skipped takes nothing, so the admission may have ended only at a request that does not fit by
    itself. Chunks of states, of MTP's modules and prompts that are not cut may end it too.
    """
    ends_early = settings.has_mamba or scheduler.num_prefill_lookahead > 1 or not settings.enable_chunked_prefill
    ends_early = ends_early or settings.prefill_schedule_interval > 1 or tokens <= settings.num_speculative_tokens
    if ends_early or plan.preempted_req_ids or scheduler.pause_state != PauseState.UNPAUSED:
        return
    # A load takes its blocks at once, or its size is not known yet.
    if settings.kv_connector == "async" or (settings.has_connector and scheduler.connector.offered is None):
        return
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs:
        return
    free = _free(scheduler) - scheduler.kv_cache_manager.watermark_blocks
    for request in itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting):
        if request.status not in _READY or request.num_stale_output_tokens:
            continue
        most = request.num_tokens + 1 + 2 * settings.num_speculative_tokens
        if _groups(scheduler) * -(-most // settings.kv_block_size) > free:
            return
        if not _may_be_skipped(request, scheduler.kv_cache_manager, settings):
            yield request


def _may_be_skipped(request: Any, manager: Any, settings: VllmSettings) -> bool:
    """Return whether a request may wait for its LoRA, for an image from outside, or for the encoder's room."""
    if request.lora_request is not None:
        return True
    if not request.mm_features:
        return False
    # A lookup would announce its hits, and what a connector offers may end within an image.
    if settings.ec_connector or settings.enable_kv_cache_events or settings.has_connector:
        return True
    at = request.num_computed_tokens or manager.get_computed_blocks(request)[1]
    places = [one.mm_position for one in request.mm_features]
    return any(place.offset <= at < place.offset + place.length for place in places)


def looking_up(scheduler: Any) -> list[Any]:
    """Return the waiting sessions that look up the prefix cache on admission and may have dropped tokens."""
    if not getattr(scheduler, "num_hash_lookahead_tokens", 0):
        return []
    waiting = itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting)
    return [one for one in waiting if one.resumable and not one.num_computed_tokens]


def why_looked_up_wrongly(plan: Any, sessions: Collection[Any], settings: VllmSettings) -> str:
    """Return the session that was admitted with hashes of tokens that it does not have; empty if none was."""
    for request in sessions:
        hasher = request_hasher(settings)
        if request.request_id not in plan.num_scheduled_tokens or hasher is None:
            continue
        fresh = copy.copy(request)
        fresh.block_hashes = []
        known = hasher(fresh)
        wrong = [at for at, one in enumerate(request.block_hashes) if at >= len(known) or one != known[at]]
        if wrong:
            return (
                f"{rid_of(request.request_id)} looks up the prefix cache by hashes of other tokens than its own: "
                f"{len(wrong)} of {len(request.block_hashes)}, from hash {wrong[0]} on"
            )
    return ""
