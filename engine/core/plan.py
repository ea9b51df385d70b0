"""The microbatch plan: the scheduler sends it directly to every pipeline stage, in launch order.

A plan lists the tokens of each request to compute and the pages for their KV. It carries increments: a stage keeps a
page table and a sampling spec for each row, and each segment adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Final, TypedDict

import msgspec

from engine.core.messages import Grammar


class ForwardMode(StrEnum):
    """The kind of a microbatch: parts of prompts, one token for each of its requests, or both.

    The other kinds compute no token: the stages update their weights, start or stop a profile, load and drop LoRAs, or
    go to sleep and wake.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    UPDATE = "update"
    PROFILE = "profile"
    LORA = "lora"
    SLEEP = "sleep"


# Constants, because looking up a member on its class takes four to ten times as long, and every step looks some up.
PREFILL, DECODE, MIXED, UPDATE, PROFILE, LORA, SLEEP = ForwardMode


# Stands for the token that the previous microbatch chooses for this row.
UNKNOWN_TOKEN: Final = -1
_UNKNOWN_TOKENS: Final = (UNKNOWN_TOKEN,)


class SamplingSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sampling parameters of a request as the last stage needs them; fixed for the request's whole life.

    The random number for the token at absolute position ``p`` (0-based, prompt included) depends on ``(seed, p)``
    alone, so batching, chunking and retraction never change a request's output. ``temperature=0`` is greedy.
    ``suppressed_ids`` may not be sampled before the token at absolute position ``suppressed_until`` (min_new_tokens).
    Frequency and presence penalties count the tokens from position ``prompt_tokens`` on. ``logit_bias`` has pairs of a
    token id and the number added to its logit. ``prompt_top_logprobs_num`` is for the tokens of the prompt. A
    ``grammar_id`` restricts the choice to tokens that its grammar, compiled by an earlier ``GrammarOrder``, allows
    after the output so far; 0 is none.
    """

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    suppressed_ids: tuple[int, ...] = ()
    suppressed_until: int = 0
    return_logprob: bool = False
    top_logprobs_num: int = 0
    prompt_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_top_logprobs_num: int = 0
    grammar_id: int = 0

    @property
    def for_guesses(self) -> SamplingSpec:
        """Return the spec for its draft model: greedy, with the same biases and ``suppressed_ids``."""
        return SamplingSpec(
            seed=0,
            logit_bias=self.logit_bias,
            suppressed_ids=self.suppressed_ids,
            suppressed_until=self.suppressed_until,
        )

    @property
    def has_penalty(self) -> bool:
        """Whether sampling a token depends on earlier tokens."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class GrammarOrder(msgspec.Struct, frozen=True, array_like=True):
    """The order to the last stage to compile a grammar, or with None to forget it.

    Ids are never reused. One ``GrammarReady`` answers each order to compile. The scheduler forgets a grammar only when
    no live or in-flight request uses it.
    """

    id: int
    grammar: Grammar | None


class LoraOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The order to every stage to read its share of the LoRA in ``path``, or with None to drop a share that was read.

    The stages read beside the computation. One ``LoraRead`` answers each order to read; the ``LoraUpdate`` of the same
    version then takes the shares.
    """

    version: int
    name: str
    path: str | None = None


class ReceivePages(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The order to every stage to write the KV of ``transfer`` into these pages, in order; nothing else uses them.

    One ``PagesReceived`` answers it, when all pages have come or after a ``StopTransfer``.
    """

    transfer: int
    pages: tuple[int, ...]


class SendPages(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The order to every stage to send the KV of these pages to its address in ``to``, where they are the pages of
    ``to_transfer`` from number ``first`` on.

    Nothing writes to the pages meanwhile. One ``PagesSent`` answers it.
    """

    transfer: int
    pages: tuple[int, ...]
    to: tuple[str, ...]
    to_transfer: int
    first: int


class StopTransfer(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The order to stop reading and writing the pages of a transfer. The transfer's own answer follows."""

    transfer: int


TransferOrder = ReceivePages | SendPages | StopTransfer


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's share of a microbatch: ``token_ids`` at absolute positions ``start .. start + len(token_ids) - 1``.

    Before computing it, a stage writes ``pages`` into its page table at ``table[row, page_start : page_start +
    len(pages)]``; afterwards the KV of position ``p`` lives in page ``table[row, p // page_size]`` at offset ``p %
    page_size``. Attention of a token at position ``p`` covers positions ``0 .. p`` of its row. ``sampling`` is given
    when the row gets a new request, and holds until the next one. With ``emits`` the logits of the last token choose
    one new token, for position ``start + len(token_ids)``.

    A model with window layers keeps their KV in a separate pool. ``window_pages`` are the pages of that pool for
    ``pages``, written into a second table at the same places; -1 for a page that the request neither has nor reads.

    The last ``drafts`` of the tokens are guesses. The logits of the token before them and of each guess choose a token
    for the position after it. The correct guesses and the token after them are emitted, at least one.

    With ``logprobs_from`` >= 0 the logits of the tokens from that position on give prompt logprobs, each of the next
    token. ``next_id`` is the token after the segment's last one; -1 at the end of a prompt.

    ``lora`` is the version of the LoRA that computes it; 0 is the model itself.

    A segment that is planned ahead is a decode whose one token is ``UNKNOWN_TOKEN``: it continues from the token that
    the last microbatch with this row chooses, which was launched before and is in flight.
    """

    rid: str
    row: int
    start: int
    token_ids: tuple[int, ...]
    page_start: int
    pages: tuple[int, ...]
    emits: bool
    sampling: SamplingSpec | None = None
    window_pages: tuple[int, ...] = ()
    drafts: int = 0
    logprobs_from: int = -1
    next_id: int = -1
    lora: int = 0

    @property
    def is_ahead(self) -> bool:
        """True if its token is not known yet."""
        return self.token_ids == _UNKNOWN_TOKENS

    @property
    def choosers(self) -> int:
        """The number of trailing tokens whose logits choose a token."""
        return self.drafts + self.emits

    def accepted(self, chosen: Sequence[int]) -> int:
        """Return how many of its drafts hold if its last tokens choose these: the drafts before the first wrong one."""
        guesses = self.token_ids[len(self.token_ids) - self.drafts :]
        return next((place for place, guess in enumerate(guesses) if chosen[place] != guess), self.drafts)

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens whose prompt logprobs are requested, each given by the logits of the position before it."""
        if self.logprobs_from < 0:
            return ()
        following = self.token_ids[self.logprobs_from - self.start + 1 :]
        return following if self.next_id < 0 else (*following, self.next_id)


class SegmentShare(TypedDict, total=False):
    """The fields of a segment that belong to features of the scheduler."""

    window_pages: tuple[int, ...]
    logprobs_from: int
    next_id: int
    lora: int


class LoraChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change of LoRAs on every stage: take the one read from ``path`` as ``version``, then drop version ``drop``.

    Versions count from 1 and are never reused; 0 is none. ``name`` is only for readers of the plan. With ``drop`` equal
    to ``version`` the stages have only read and checked the LoRA.
    """

    name: str
    version: int = 0
    path: str | None = None
    drop: int = 0


class Copies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The copies between pages and host pages that every stage makes before it computes.

    First ``out``, pairs of a page and its target host page; then ``into``, pairs of a host page and its target page.
    """

    out: tuple[tuple[int, int], ...]
    into: tuple[tuple[int, int], ...]


class _Microbatch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """One unit of work for all stages: a forward pass, or a change without tokens.

    ``id`` grows by one with each launch and comes back in the ``Completion``. Each kind is a subclass.
    """

    id: int

    is_control: ClassVar[bool] = True

    @property
    def mode(self) -> ForwardMode:
        return _MODES[type(self)]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The shares of requests; empty if nothing is computed."""
        return ()

    @property
    def copies(self) -> Copies | None:
        """The copies to make before the forward pass."""
        return None

    @property
    def tokens(self) -> int:
        return sum([len(segment.token_ids) for segment in self.segments])

    @property
    def drafts(self) -> tuple[int, ...]:
        """The number of drafts of each segment with drafts."""
        return tuple([segment.drafts for segment in self.segments if segment.drafts])

    @property
    def rids(self) -> tuple[str, ...]:
        return tuple([segment.rid for segment in self.segments])


class Forward(_Microbatch, frozen=True):
    """One forward pass through all stages. In a mixed one prefill segments come before decode segments.

    ``copies`` are between the pages of a stage and its host memory; those of a failed microbatch are void.
    """

    mode: ForwardMode
    segments: tuple[Segment, ...]
    copies: Copies | None = None

    is_control: ClassVar[bool] = False


class WeightUpdate(_Microbatch, frozen=True):
    """New weights, from ``path``; None for those of the configured model.

    Launched when nothing is in flight: everything before it uses the old weights, everything after it the new ones.
    """

    path: str | None


class ProfileSwitch(_Microbatch, frozen=True):
    """Begin a profile whose traces go into ``folder``; None ends it."""

    folder: str | None


class SleepSwitch(_Microbatch, frozen=True):
    """Free weights and KV, or at ``level`` 0 allocate them again. Launched, like an update, when nothing is in flight.

    The levels above 0 differ in the weights with which the stages wake.
    """

    level: int


class LoraUpdate(_Microbatch, frozen=True):
    """A change of LoRAs. It may be launched while others are in flight: none of them uses the LoRA that it drops."""

    change: LoraChange


Control = WeightUpdate | ProfileSwitch | LoraUpdate | SleepSwitch
Microbatch = Forward | Control
_MODES: Final = {
    WeightUpdate: ForwardMode.UPDATE,
    ProfileSwitch: ForwardMode.PROFILE,
    LoraUpdate: ForwardMode.LORA,
    SleepSwitch: ForwardMode.SLEEP,
}
