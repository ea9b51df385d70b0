"""Checks that plans tell vLLM's model runner everything that it computes. Standalone tests contain this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripted_vllm.readers import positions_of


def gaps_in(plans: Sequence[Any], runner: int) -> list[str]:
    """Return what the plans of a scheduler, in order, leave out for the model runner of this version."""
    # How many tokens of each request the runner can have: those that it is told, and those that it samples.
    known: dict[str, int] = {}
    gaps = []
    for plan in plans:
        # Version 1 keeps preempted requests.
        for name in {*plan.finished_req_ids, *((plan.preempted_req_ids or ()) if runner == 2 else ())}:
            known.pop(name, None)
        told = _told_by(plan, runner)
        cached = plan.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name not in known:
                gaps.append(f"{name} continues, but the runner does not have it")
            if name in cached.resumed_req_ids and (blocks is None or name not in told):
                gaps.append(f"{name} resumes without its blocks or its tokens")
        known |= told
        gaps += _gaps_of(plan, {*cached.req_ids, *told}, known)
    return gaps


def _told_by(plan: Any, runner: int) -> dict[str, int]:
    """Return how many tokens the plan names of each request that begins or resumes."""
    told = {
        new.req_id: len(new.prefill_token_ids if runner == 2 else new.prompt_token_ids)
        for new in plan.scheduled_new_reqs
    }
    resumed = plan.scheduled_cached_reqs.resumed_req_ids
    return told | {name: len(ids) for name, ids in plan.scheduled_cached_reqs.all_token_ids.items() if name in resumed}


def _gaps_of(plan: Any, placed: set[str], known: dict[str, int]) -> list[str]:
    """Return the gaps of a plan; add to ``known`` what it samples."""
    gaps = [f"{name} has neither blocks nor a position" for name in plan.num_scheduled_tokens if name not in placed]
    for name in plan.num_scheduled_tokens:
        if name not in placed or name not in known:
            continue
        guesses = len(plan.scheduled_spec_decode_tokens.get(name, ()))
        last = positions_of(plan, name)[-1] - guesses
        if last >= known[name]:
            gaps.append(f"{name} computes position {last}, but the runner has only {known[name]} of its tokens")
        # All guesses may be right; after the last known token another one is sampled.
        known[name] = max(known[name], last + guesses + 2)
    idle = plan.scheduled_spec_decode_tokens.keys() - plan.num_scheduled_tokens.keys()
    return [*gaps, *(f"{name} has guesses, but computes nothing" for name in sorted(idle))]
