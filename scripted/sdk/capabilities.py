"""A scheduler's declarations: its limits, and the features that not every scheduler has."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that every plan must obey; base workloads are made from them.

    ``blocks`` is the number of blocks that all requests together can own. ``batch_tokens`` and ``batch_requests`` bound
    a batch, ``context_tokens`` bounds a request's prompt and output. ``depth`` batches may be in flight. A prompt that
    does not get a whole batch has at most ``prompt_tokens`` in each, and more steps to end in; None: ``batch_tokens``.

    With several memory pools, such as a second one for the layers with a window, ``pools`` are their sizes. They add up
    to ``blocks``, which are numbered from 0 on through all pools. A request's ``block_ids`` are in the first pool; each
    other table has its pool, the same for all requests.

    ``time_limits`` are the seconds after which the scheduler acts by itself, such as the longest wait of a request: the
    search lets each of them, or half of it, pass at any step.
    """

    block_size: int
    blocks: int
    batch_tokens: int
    batch_requests: int
    context_tokens: int
    depth: int = 1
    pools: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    time_limits: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = msgspec.structs.asdict(self)
        sizes, seconds = numbers.pop("pools"), numbers.pop("time_limits")
        if self.prompt_tokens is None:
            del numbers["prompt_tokens"]
        for name, value in [*numbers.items(), *(("pools", size) for size in sizes)]:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"the limit {name} is at least 1, a whole number, got {value!r}")
        if not all(isinstance(limit, int | float) and limit > 0 for limit in seconds):
            raise ValueError(f"the limit time_limits has numbers of seconds above 0, got {seconds!r}")
        if sizes and sum(sizes) != self.blocks:
            raise ValueError(f"the limit pools adds up to the limit blocks, {self.blocks}, got {sizes!r}")

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """The blocks of each pool."""
        return self.pools or (self.blocks,)

    @property
    def pool_tokens(self) -> int:
        """The tokens that fit into the first pool."""
        return self.block_size * self.pool_sizes[0]

    def pool_of(self, block: int) -> int:
        """Return the pool of a block; -1 if no pool has it."""
        ends = itertools.accumulate(self.pool_sizes)
        return next((pool for pool, end in enumerate(ends) if 0 <= block < end), -1)


class PauseMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way to pause. ``stops_running``: nothing is launched; otherwise no request begins. ``aborts``: live ones end.

    ``flushes``: all computed KV is dropped before the answer, as by a flush.
    """

    name: str
    stops_running: bool = True
    aborts: bool = False
    flushes: bool = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The optional features: one that is off is neither searched nor required.

    ``flush``: the prefix cache can be emptied, with ``forced_flush`` also while requests run. ``pause_modes``: the ways
    to pause generation. ``fail``: a batch may fail and the engine goes on. ``chunked``: a prompt may take several
    batches. ``continuous``: a request may begin while others run (continuous batching); without it (static batching)
    all requests of a batch end before others begin. ``preemption``: a request may lose its blocks and compute again.
    ``priority``: a request with a higher priority goes first. ``speculative_tokens``: how many guesses one share
    verifies. ``answers_aborts``: a last reply with ``abort`` answers the abort of a live request; without it the
    request has ended for its client at the abort. ``grammars``: the tokens of a request may be masked. ``loras``: the
    number of known LoRAs, of which one batch has at most ``loras_together``. ``sessions``: a request may keep its KV
    for the next. ``images``: prompts may have images, and the device keeps this many tokens of encoder output.
    ``images_beside``: the model attends to a prompt's first image separately, padded to the largest image's tokens.
    ``pauses_in_turn``: a pause, or its end, waits for an unanswered pause that aborts, and takes effect with its own
    answer; requests that arrive during a pause are held back, and no pause aborts them. ``late_launches``: how often an
    aborted request may still be launched before its next result ends it. ``equal_writes``: one batch may write a block
    for two requests if both leave the same in it. ``whole_leases``: a request begins only with room for all of its
    tokens so far; without it, a request that cannot grow may give up its blocks and begin again at once.
    ``spare_blocks``: a request may wait until this many blocks more than it needs are free.
    ``ended_take_seats``: requests launched after their abort count among the requests of a batch. ``kept_logits``: the
    first token of a fully cached prompt may come from logits that an equal prompt left, without a launch.
    ``sleep_modes``: the device can release its memory; each entry names the pause in which requests stop meanwhile, or
    is "" for none. ``sleep_levels``: how deep it may sleep; 0 pauses alone. ``sleep_parts``: the parts of its memory
    that it may release alone, without a pause; ``kv_cache`` holds all KV. ``wake_parts``: the parts that the device may
    take back alone. ``wakes_resume``: a device that is fully awake ends a pause.
    """

    flush: bool = True
    forced_flush: bool = False
    pause_modes: tuple[PauseMode, ...] = ()
    fail: bool = False
    chunked: bool = True
    continuous: bool = True
    preemption: bool = True
    priority: bool = False
    speculative_tokens: int = 0
    grammars: bool = False
    loras: int = 0
    loras_together: int = 0
    sessions: bool = False
    images: int = 0
    images_beside: bool = False
    answers_aborts: bool = True
    pauses_in_turn: bool = False
    late_launches: int = 0
    equal_writes: bool = False
    whole_leases: bool = False
    spare_blocks: int = 0
    ended_take_seats: bool = True
    kept_logits: bool = False
    sleep_modes: tuple[str, ...] = ()
    sleep_levels: tuple[int, ...] = (1,)
    sleep_parts: tuple[str, ...] = ()
    wake_parts: tuple[str, ...] = ()
    wakes_resume: bool = False


class Declaration(NamedTuple):
    """The facts that a configuration declares."""

    limits: Limits
    can: Capabilities

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The seconds after which the scheduler acts by itself."""
        return self.limits.time_limits
