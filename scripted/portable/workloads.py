"""Base workloads for any scheduler of the usual shape, made of its limits: each has one situation that engines got wrong."""

from __future__ import annotations

from collections.abc import Mapping

from scripted.portable.capabilities import Capabilities, Limits

__all__ = ["workloads_of"]


def workloads_of(limits: Limits, can: Capabilities) -> Mapping[str, str]:
    """By name, as text without a configuration, which is the default one."""
    size, pool, budget = limits.block_size, limits.pool_tokens, limits.batch_tokens
    longest = min(pool, limits.context_tokens)
    long = min(longest - 2, 2 * budget + size // 2 + 1) if can.chunked else min(longest - 2, budget)
    # Prompts of a third of the pool: three of them and their outputs do not fit.
    third = max(1, min(pool // 3 - 1, long))
    grow = min(pool // 3, limits.context_tokens - third)
    made = {
        "alone": f"1 start a prompt={long} new=3",
        # Equal prompts of full blocks: a prompt that is fully cached must still compute one token.
        "twins": f"1 start a prompt={2 * size} new=2; 2 start b prompt={2 * size} new=2; 8 start c prompt={2 * size} new=3",
        "warm-prefix": f"1 start warm prompt={2 * size + 1} new=1; 12 start a prompt={3 * size + 1} new=2",
        "branches": (
            f"1 start a prompt={3 * size + 1} new=1; 6 start b prompt={3 * size + 1} shared={2 * size} tail=1 new=2; "
            f"8 start c prompt={3 * size + 1} shared={size + 1} tail=2 new=2; 10 start d prompt={3 * size + 1} new=2"
        ),
        "beside-decodes": f"1 start a prompt={size} new=8; 1 start b prompt={size} seed=1 new=8; 4 start c prompt={long} seed=2",
        # The one after the other leaves in the middle of what the others do.
        "many": "; ".join(
            f"{1 + i // 2} start r{i} prompt={size - 1 + i % 3} seed={i} new={1 + i % 4}" for i in range(6)
        ),
        "late-results": f"1 start a prompt={size + 1} new=3; 2 hold; 3 start b prompt={size + 1} new=2; 8 release count=1; 10 release",
        "stops": f"1 start a prompt={size + 2} new=5 stop=33; "
        + "; ".join(
            f"2 start s{i} prompt={size} seed={i + 1} new=6 stop={stop}" for i, stop in enumerate((40, 60, 80, 100))
        ),
        # What an aborted request left behind is met by others: blocks that are written anew, a prompt that comes again.
        "aborted": (
            f"1 start a prompt={long} new=3; 2 abort a; 3 start b prompt={long} seed=1 new=2; 4 start c prompt={long} new=2"
        ),
        "aborted-decodes": (
            f"1 start a prompt={size} new=6; 1 start b prompt={size} seed=1 new=6; 4 abort a; 5 start c prompt={long} new=2; "
            f"6 start d prompt={2 * size} new=2"
        ),
        "refilled": f"1 start a prompt={third} new=2; 10 start b prompt={third} seed=1 new=2; 20 start a prompt={third} new=2",
    }
    if can.preemption:
        made["full-blocks"] = "; ".join(f"{1 + i} start r{i} prompt={third} seed={i} new={grow}" for i in range(3))
        made["full-blocks-twins"] = "; ".join(
            f"{1 + i} start r{i} prompt={third} seed={i // 2} new={grow}" for i in range(4)
        )
        made["one-fills-all"] = (
            f"1 start small prompt={size} new={grow}; 2 start big prompt={max(1, pool - 2 * size)} seed=1 new=3"
        )
    if can.priority:
        made["priorities"] = "; ".join(
            f"{1 + i} start r{i} prompt={third} seed={i} new={grow} priority={i}" for i in range(3)
        )
    if can.pause_modes:
        made["paused"] = (
            f"1 start a prompt={long} new=3; 2 start b prompt={size} seed=1 new=4; 3 pause mode={can.pause_modes[0]}; 9 continue"
        )
    return {name: f"default; {text}" for name, text in made.items()}
