"""The messages of a scheduler of the usual shape: events in, the plan of a batch out, replies out.

Plain serializable values. Token ids are ints, positions count from 0, a block holds ``block_size`` tokens.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from scripted.core.machine import Machine
from scripted.core.tokens import tokens_alone
from scripted.sdk.images import Image

# The part of a device's memory that holds all KV.
KV_PART: Final = "kv_cache"

# -- events: a step's input, in order --


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A request arrives. ``arrival`` counts the run's requests; a higher ``priority`` goes first, where declared.

    It ends with ``length`` after ``max_new_tokens`` tokens, or with ``stop`` after one of ``stop_token_ids``. ``lora``
    is the number of the LoRA that computes it, 0 for none. With ``grammar`` 1 its tokens are masked; a grammar of -1
    fails to compile, and the request ends with an error. ``session`` is the number of new tokens at the end of a
    session's prompt: the tokens before them are the prompt and output of the session's previous request, without its
    last output token, and their KV is kept in between. The request may arrive while the previous one is alive; it then
    begins with the output that the previous one will have. ``images`` are in order; the tokens of ``prompt_ids`` at
    their positions are their content.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival: int = 0
    lora: int = 0
    grammar: int = 0
    session: int = 0
    images: tuple[Image, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether it is further input for a session that has begun."""
        return 0 < self.session < len(self.prompt_ids)

    def alone(self, most: int) -> tuple[int, ...]:
        """Return the first ``most`` tokens of its output when it runs undisturbed."""
        return tokens_alone(self.prompt_ids, most, self.stop_token_ids, self.lora, masked=self.grammar > 0)


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """A client aborts a request. Aborting an unknown or ended one changes nothing."""

    rid: str


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Empty the prefix cache; the answer says whether it was emptied.

    With ``force``, if the adapter declares it, running requests are preempted first.
    """

    call_id: str
    force: bool = False


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Generation stops until ``Resume``. ``mode`` is the name of a mode that the adapter declares."""

    call_id: str
    mode: str


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Generation continues."""

    call_id: str


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """The device releases its memory, or one ``part`` of it; the answer says whether it did. ``Wake`` ends it.

    All KV is lost with the whole memory and with the part ``kv_cache``. Requests stop as in a pause of this ``mode``,
    one of the sleep modes that the adapter declares; "" pauses nothing. A sleep of ``level`` 0 is the pause alone and
    releases nothing; levels above 1 release the same memory as 1 and keep less of it elsewhere.
    """

    call_id: str
    mode: str = ""
    level: int = 1
    part: str = ""

    @property
    def drops_kv(self) -> bool:
        """Whether no KV outlives it."""
        return self.level > 0 and self.part in ("", KV_PART)


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """The device takes back all of its memory, or this ``part``. The answer is ok if all of that is there."""

    call_id: str
    part: str = ""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The result of a batch: the sampled tokens of each of its shares, in order.

    A share that does not reach the end of its request has none. ``draft_ids`` are guesses at the next tokens, if the
    adapter declares ``speculative_tokens``.
    """

    batch_id: int
    token_ids: tuple[tuple[int, ...], ...]
    draft_ids: tuple[tuple[int, ...], ...] = ()


class BatchFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A batch was not computed, and its blocks were not written."""

    batch_id: int
    error: str


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """An event that only one kind of machine has, such as a transfer that will fail. It promises nothing to clients."""

    name: str
    value: int = 0
    rid: str = ""


Completion: TypeAlias = BatchResult | BatchFailed
Event = Add | Abort | FlushCache | Pause | Resume | Sleep | Wake | Completion | Signal


# -- the plan: a step's launch --


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The block table of layers that attend only to the last ``tokens`` positions, their own included.

    With ``is_chunk`` they attend to the positions in the same chunk of ``tokens`` positions; in either case never to
    positions before ``first``. The contents of blocks wholly before the window do not matter.
    """

    block_ids: tuple[int, ...]
    tokens: int
    is_chunk: bool = False
    first: int = 0

    def begins(self, position: int) -> int:
        """Return the first position that this position attends to."""
        start = position // self.tokens * self.tokens if self.is_chunk else position + 1 - self.tokens
        return max(self.first, start)


class StateTable(msgspec.Struct, frozen=True, kw_only=True):
    """The block table of layers that keep a single state for all preceding tokens, such as Mamba's.

    The state after position ``p`` is in ``block_ids[p // tokens]``. A share starts from the state before its first
    position and stores there the state after its last position, and none in between. A share with guesses stores a
    state after each guess, in the blocks after that place; once it is known how many guesses hold, the device copies a
    state at the end of a block to that block's own place. ``kept`` is a number of tokens of the share and a place for
    the state after these tokens; with 0 tokens there is none.
    """

    block_ids: tuple[int, ...]
    tokens: int
    kept: tuple[int, int] = (0, 0)


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """The block of layers that need only the earlier positions in the same group of ``tokens`` positions.

    Position ``p`` is in slot ``p % block_size``.
    """

    block_id: int
    tokens: int

    def begins(self, position: int) -> int:
        """Return the first position of this position's group."""
        return position // self.tokens * self.tokens


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part of a batch: the positions ``start`` to ``start + count - 1``.

    ``block_ids`` is its block table: position ``p`` is in ``block_ids[p // block_size]``. The last ``len(draft_ids)``
    positions are guesses to verify; -1 stands for the guess of the request's last result, even one in flight. ``start``
    is -1 if a scheduler with ``speculative_tokens`` cannot know it, because results in flight decide on guesses: the
    share then begins where the previous one ended. ``known_tokens`` is the number of the request's tokens, those in
    flight included, if the scheduler knows it better than its results, because it dropped some of them. ``token_ids``
    are the tokens at these positions if the plan states them, -1 for an unknown one.

    If groups of layers attend to different positions, ``windows`` and ``states`` are the tables of the other groups, in
    blocks of the same size, and of the same pool unless ``Limits.pools`` has several. Layers of a decoder read the
    encoder's output for the request's first image from the blocks ``crossed``, which its first share writes; None
    without such layers. No layer of the first group reads positions from ``gap[0]`` to before ``gap[1]``, so their
    blocks do not matter. Positions before ``rebuilt`` are computed only for the windows: the first group already has
    them.
    """

    rid: str
    start: int
    count: int
    block_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] = ()
    known_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    windows: tuple[Window, ...] = ()
    states: tuple[StateTable, ...] = ()
    crossed: tuple[int, ...] | None = None
    rings: tuple[Ring, ...] = ()
    gap: tuple[int, int] = (0, 0)
    rebuilt: int = 0

    def own_blocks(self, size: int) -> tuple[int, ...]:
        """Return the blocks in ``block_ids``, of this size, that are not wholly in the gap."""
        first, end = -(-self.gap[0] // size), self.gap[1] // size
        return self.block_ids if end <= first else (*self.block_ids[:first], *self.block_ids[end:])

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """All of its block tables."""
        return (self.block_ids, *(window.block_ids for window in self.windows)) if self.windows else (self.block_ids,)

    def used(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks, of this size, that it reads or writes in each table, its own table first."""
        end = -(-(self.start + self.count) // size)
        windows = [window.block_ids[max(0, window.begins(self.start)) // size : end] for window in self.windows]
        states = [
            state.block_ids[max(0, self.start - 1) // state.tokens : -(-(self.start + self.count) // state.tokens)]
            for state in self.states
        ]
        return (self.own_blocks(size)[:end], *windows, *states, *[(ring.block_id,) for ring in self.rings])

    @property
    def written(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Each table, with the first position that is written there."""
        own = (self.block_ids, max(self.start, self.rebuilt))
        return (own, *[(window.block_ids, self.start) for window in self.windows]) if self.windows else (own,)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` slots of a block, starting at ``first``, that are copied to the same slots of another block."""

    source: int
    target: int
    first: int
    count: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch. All its shares are written before any of them reads.

    Before that, ``copies`` are made in order, each from its first block to its second: for requests that are swapped
    out and in, and for prefixes that two requests continue. Host memory has its own block numbers. ``mirrored`` rows
    are copied after the batch has written them.

    The device keeps the encoder's output for images, by number, until it is told to drop it: it first drops the images
    in ``dropped``, then computes the images in ``encoded``, each given as a request and the image's index in it.
    """

    id: int
    shares: tuple[Share, ...]
    copies: tuple[tuple[int, int], ...] = ()
    mirrored: tuple[Rows, ...] = ()
    encoded: tuple[tuple[str, int], ...] = ()
    dropped: tuple[int, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """KV that arrives from outside, before the batch of the same step is computed.

    It covers the positions from ``start`` to the end of ``token_ids``, the tokens of the request ``rid`` from its first
    on; ``block_ids`` is its block table. Nothing arrived in the blocks ``missing``: results computed from them are
    worthless, and the scheduler, which will learn of it, must not pass them on. If nothing is missing, ``windows``,
    ``states`` and ``rings`` of other groups get what the next position needs. ``said`` was sampled at the source: the
    request continues from it. A ``late`` load belongs to a request that has ended: it is written, and begins no newer
    request with that rid.
    """

    rid: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    missing: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    states: tuple[StateTable, ...] = ()
    rings: tuple[Ring, ...] = ()
    said: tuple[int, ...] = ()
    late: bool = False


# -- replies to clients --


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Further tokens of a request; the last with ``finish_reason``: ``length``, ``stop``, ``abort`` or ``error``."""

    rid: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request is refused."""

    rid: str
    reason: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The one answer to a call."""

    call_id: str
    ok: bool
    text: str = ""


Reply = Tokens | Refused | Answer


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one step.

    ``preempted`` requests lost their blocks and will compute again from the beginning. ``loads`` came from outside.
    ``copies`` are made before the batch is computed, like a batch's own; blocks with negative numbers are outside, so a
    flush does not empty them. ``verified``: how many of a request's guesses in the last batch may hold, if that was
    unknown at its launch. ``again``: a step without any event may do more. ``deadline``: the time at which a step is
    due even without an event; with ``is_timer`` open requests wait for that time, as for the end of a batching delay or
    the next poll, and without it the deadline only ends requests.
    """

    microbatch: Batch | None = None
    replies: tuple[Reply, ...] = ()
    preempted: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    verified: tuple[tuple[str, int], ...] = ()
    again: bool = False
    deadline: float | None = None
    is_timer: bool = False


# -- a recorded step --


class Step(msgspec.Struct, frozen=True):
    """The input of one step."""

    events: tuple[Event, ...]
    now: float


class Record(msgspec.Struct, frozen=True):
    """One recorded step; without ``stepped`` the machine died in it, of ``error``."""

    step: Step
    stepped: Stepped | None
    counts: dict[str, int]
    error: str | None = None


# A machine with these messages.
SdkMachine: TypeAlias = Machine[Event, Stepped]
