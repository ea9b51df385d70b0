"""What crosses the border of a scheduler of the usual shape: events in, the plan of a batch out, replies out.

Plain values that can be written down. Token ids are ints, positions count from 0, a block holds ``block_size`` tokens.
"""

from __future__ import annotations

import msgspec

from scripted.core.tokens import tokens_alone
from scripted.sdk.images import Image

# -- events: what a step is given, in order --


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A request arrives. ``arrival`` counts the requests of a run; a higher ``priority`` goes first, where declared.

    It ends with ``length`` after ``max_new_tokens`` tokens, or with ``stop`` after one of ``stop_token_ids``. ``lora``
    computes it, where there are any; 0 is none. With ``grammar`` 1 its tokens are masked; one of -1 does not compile,
    and the request ends with an error. Of a ``session`` so many of the prompt's last tokens are new: its other tokens
    are what the request before it in the session had, without the last that it said, and its KV is kept in between. It
    may come while that one is alive, and begins with what that one will have said. ``images`` are in order; the tokens
    of ``prompt_ids`` at their positions are their content.
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
        """It is more input of a session that has begun."""
        return 0 < self.session < len(self.prompt_ids)

    def alone(self, most: int) -> tuple[int, ...]:
        """The first ``most`` tokens that it says where nothing disturbs it."""
        return tokens_alone(self.prompt_ids, most, self.stop_token_ids, self.lora, masked=self.grammar > 0)


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """A client aborts a request. An unknown or ended one changes nothing."""

    rid: str


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Empty the prefix cache; the answer says whether it was.

    With ``force``, where the adapter declares it, running requests are preempted for it.
    """

    call_id: str
    force: bool = False


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Generation stops until ``Resume``. ``mode`` is the name of one of those that the adapter declares."""

    call_id: str
    mode: str


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """A pause ends."""

    call_id: str


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The result of a batch: for each of its shares, in their order, the tokens that were sampled.

    A share that does not reach the end of its request has none. ``draft_ids`` are guesses at what comes next, where the
    adapter declares ``speculative_tokens``.
    """

    batch_id: int
    token_ids: tuple[tuple[int, ...], ...]
    draft_ids: tuple[tuple[int, ...], ...] = ()


class BatchFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A batch was not computed; what it would have written into blocks is not there."""

    batch_id: int
    error: str


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Something that only this machine knows, such as a transfer that will fail. It promises nothing to clients."""

    name: str
    value: int = 0
    rid: str = ""


Event = Add | Abort | FlushCache | Pause | Resume | BatchResult | BatchFailed | Signal


# -- the plan: what a step launches --


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The block table of layers that attend to the last ``tokens`` positions alone, their own among them.

    With ``is_chunk`` they attend to those that are in the same chunk of so many, and never to what is before ``first``.
    Blocks that are wholly before the window may be anything.
    """

    block_ids: tuple[int, ...]
    tokens: int
    is_chunk: bool = False
    first: int = 0

    def begins(self, position: int) -> int:
        """The first position that this one attends to."""
        start = position // self.tokens * self.tokens if self.is_chunk else position + 1 - self.tokens
        return max(self.first, start)


class StateTable(msgspec.Struct, frozen=True, kw_only=True):
    """The block table of layers that keep one state of all tokens before: it begins as that after the last of them.

    The state after position ``p`` is in ``block_ids[p // tokens]``. A share leaves that after its last position there,
    and none of those between. One with guesses leaves a state behind each, in the blocks that follow that place; when
    it is known how many hold, the device copies a state that ends a block to that block's own place. Of ``kept``, the
    state after so many tokens of the share is left in that place too; with no tokens none is.
    """

    block_ids: tuple[int, ...]
    tokens: int
    kept: tuple[int, int] = (0, 0)


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """The block of layers that need what came before in the same group of so many ``tokens``, and nothing else.

    Position ``p`` is in the slot ``p % block_size``.
    """

    block_id: int
    tokens: int

    def begins(self, position: int) -> int:
        """The first position of the group of this one."""
        return position // self.tokens * self.tokens


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one request computes in a batch: the positions ``start`` to ``start + count - 1``.

    ``block_ids`` is its block table: position ``p`` is in ``block_ids[p // block_size]``. The last ``len(draft_ids)``
    positions are guesses that are verified; -1 is the guess that the request's last result brought or will bring.
    ``start`` is -1 where a scheduler with ``speculative_tokens`` cannot know it, because results that decide on guesses
    are in flight: then the share begins where the one before it came to. ``known_tokens`` is how many tokens the
    request has, those in flight included, where the scheduler knows better than the results that it was given: after it
    dropped some of them. ``token_ids`` are the tokens of these positions where the plan states them, -1 for one that it
    does not know yet.
    Where layers differ in what they attend to, ``windows`` and ``states`` are the tables of the other groups, in blocks
    of the same pool and size. Layers of a decoder read what an encoder made of the request's first image from the
    blocks ``crossed``, which its first share writes; None where there are no such layers. No layer of the first group
    reads the positions from the first of ``gap`` to before the second, whose blocks may be anything. Positions before
    ``rebuilt`` are computed for the windows alone: what the first group has of them is there, and stays.
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
        """The blocks of ``block_ids``, of this size, that are not wholly in the gap."""
        first, end = -(-self.gap[0] // size), self.gap[1] // size
        return self.block_ids if end <= first else (*self.block_ids[:first], *self.block_ids[end:])

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """All of its block tables."""
        return (self.block_ids, *(window.block_ids for window in self.windows)) if self.windows else (self.block_ids,)

    @property
    def written(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Each table, with the first position that is written there."""
        own = (self.block_ids, max(self.start, self.rebuilt))
        return (own, *[(window.block_ids, self.start) for window in self.windows]) if self.windows else (own,)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """So many slots of a block from the ``first`` on, which are copied to the same slots of another."""

    source: int
    target: int
    first: int
    count: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch. All its shares are written before any of them reads.

    Before that, ``copies`` are made in their order, each from the first block to the second: of requests that are
    swapped out and in, of prefixes that two requests go on from. Host memory has block numbers of its own. Of the rows
    ``mirrored`` those that the batch wrote are copied after it.

    The device keeps what its encoder made of images, by their numbers, until it is told to drop it: first those in
    ``dropped``, then those in ``encoded`` are computed, each a request and the place of the image among its own.
    """

    id: int
    shares: tuple[Share, ...]
    copies: tuple[tuple[int, int], ...] = ()
    mirrored: tuple[Rows, ...] = ()
    encoded: tuple[tuple[str, int], ...] = ()
    dropped: tuple[int, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """KV that comes from outside, before the batch of the same step is computed.

    It is that of the positions from ``start`` to the end of ``token_ids``, which are the tokens of the request ``rid``
    from its first one on; ``block_ids`` is its block table. In the blocks ``missing`` nothing arrived: what is computed
    from them is worthless, the scheduler will be told so, and must not tell it to anybody. The ``windows``, ``states``
    and ``rings`` of other groups get what the next position needs, if nothing is missing. ``said`` was sampled where
    the KV comes from: the request goes on with it. A load that is ``late`` is of a request that has ended: it is
    written, and begins nothing of one that has got its name since.
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


# -- replies: what clients are told --


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Further tokens of a request; the last with ``finish_reason``: ``length``, ``stop``, ``abort`` or ``error``."""

    rid: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request does not begin."""

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

    ``preempted`` are requests that lost their blocks and will compute again from the beginning. ``loads`` came from
    outside. ``copies`` were made before the batch is computed, as those of a batch; blocks with numbers below 0 are
    outside, so that a flush does not empty them. ``verified``: of the guesses that a request has in the last batch, so
    many may hold, which was not known when it was launched. ``again``: a step without any event may do more.
    ``deadline``: the time at which a step is due although nothing happens.
    """

    microbatch: Batch | None = None
    replies: tuple[Reply, ...] = ()
    preempted: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    verified: tuple[tuple[str, int], ...] = ()
    again: bool = False
    deadline: float | None = None


# -- a step written down --


class Step(msgspec.Struct, frozen=True):
    """The input of one step."""

    events: tuple[Event, ...]
    now: float


class Record(msgspec.Struct, frozen=True):
    """One step written down; without ``stepped`` the machine died in it, of ``error``."""

    step: Step
    stepped: Stepped | None
    counts: dict[str, int]
    error: str | None = None
