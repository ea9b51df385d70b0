"""What a scheduler declares of itself: its limits, and the parts that not every scheduler has."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that every plan must obey; base workloads are made from them.

    ``blocks`` is how many blocks requests can own together. ``batch_tokens`` and ``batch_requests`` bound one batch,
    ``context_tokens`` prompt and output of a request. ``depth`` batches may be in flight.
    """

    block_size: int
    blocks: int
    batch_tokens: int
    batch_requests: int
    context_tokens: int
    depth: int = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"the limit {name} is at least 1, a whole number, got {value!r}")

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into all blocks."""
        return self.block_size * self.blocks


class PauseMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way to pause. ``stops_running``: nothing is launched; else no request begins. ``aborts``: live ones end.

    ``flushes``: before it is answered, all that was computed is given up, as a flush does it.
    """

    name: str
    stops_running: bool = True
    aborts: bool = False
    flushes: bool = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The optional parts: what is not declared is not searched, and not demanded.

    ``flush``: the prefix cache can be emptied, with ``forced_flush`` also while requests run. ``pause_modes``: how
    generation can be paused. ``fail``: a batch may fail and the engine goes on. ``chunked``: a prompt may take several
    batches. ``continuous``: a request may begin while others run (continuous batching); without it, in static
    batching, all of a batch end before others begin. ``preemption``: a request may lose its blocks and compute again.
    ``priority``: a higher one goes first. ``speculative_tokens``: guesses that are verified in one share.
    ``answers_aborts``: an abort of a live request is answered by a last reply with ``abort``; without it the request
    has ended for its client when it was aborted.
    ``grammars``: the tokens of a request may be masked. ``loras``: so many LoRAs are known, of which requests that are
    computed together have ``loras_together`` at most. ``sessions``: a request may keep its KV for the next.
    ``images``: prompts may have images, and so many tokens of what the encoder made of them are kept.
    ``pauses_in_turn``: a pause, or its end, that comes while one that aborts is not answered waits for that, and takes
    effect with its own answer; requests that come during a pause are held back, and no pause aborts them.
    ``late_launches``: how often a request may still be launched after its abort, before its next result ends it.
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
    answers_aborts: bool = True
    pauses_in_turn: bool = False
    late_launches: int = 0
