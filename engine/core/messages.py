"""The scheduler's inputs and outputs: client messages, pipeline events, operator events, and replies.

Every struct is frozen and typed, travels as msgpack and is decoded by type; nothing is ever pickled. The front end
makes a client's message, the gate holds it, and one scheduler step takes it as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, ClassVar, Final

import msgspec

from engine.core.errors import death_words
from engine.core.frames import decoder_of
from engine.core.stats import EngineStats

# The range of numbers in a frame. Decoding refuses others, before arithmetic overflows. Recordings with redacted text
# have 63-bit fingerprints as tokens.
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**63 - 1)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_TimeLimit = Annotated[float, msgspec.Meta(gt=0)]


class FinishReason(StrEnum):
    """Why a request ended.

    Clients see ``error``, ``invalid`` and ``unavailable`` as errors: ``error`` is the engine's failure, ``invalid`` the
    request's fault, found while it was computed, and ``unavailable`` a file that the server can no longer read.
    """

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"


# Constants: every step looks some up, and a lookup on the class takes four to ten times as long.
LENGTH, STOP, ABORT, ERROR, TIMEOUT, INVALID, UNAVAILABLE = FinishReason
# Finish reasons that a client sees as errors, even after tokens.
FAILURES: Final = frozenset({ERROR, INVALID, UNAVAILABLE})


class PauseMode(StrEnum):
    """The effect of ``/pause_generation`` on live requests: retracted, frozen in place, or ended."""

    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


class RefusalKind(StrEnum):
    """Why a request was not admitted; the front end maps each kind to one HTTP status."""

    INVALID = "invalid"
    DUPLICATE = "duplicate"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    NOT_FOUND = "not_found"


class GrammarKind(StrEnum):
    """The language of a grammar. A choice is a JSON array of the allowed outputs."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The language of a request's whole output, written as ``text`` in the syntax of its kind."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which tokens are sampled and a request ends, under the usual names.

    ``top_k=-1`` means no limit, ``temperature=0`` means greedy; ``logit_bias`` is added to the logits of its token ids.
    The front end, or a script's ``start_req``, validates it; the scheduler relies on the bounds of the types here.
    """

    max_new_tokens: _Count = 128
    min_new_tokens: _Count = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: _Seed | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[_TokenId, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[_TokenId, float], ...] = ()
    grammar: Grammar | None = None


# ---- client messages: from the front end to the scheduler ----


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefill engine sends the KV of a prompt: full pages, from ``first_page`` of the prompt on.

    ``to`` has the address of each stage of the decode engine, which identifies the pages by ``transfer``. The prefill
    engine must compute with ``weights``, see ``Books.weights``.
    """

    to: tuple[str, ...]
    transfer: _Count
    first_page: _Count = 0
    weights: str = ""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a request. ``rid`` is unique among live requests; ``prompt_ids`` is the tokenized prompt, length >= 1.

    Prompt tokens after position ``prompt_logprobs_from`` get a logprob, given the tokens before them; -1 requests none.
    With ``max_new_tokens=0`` the prompt is only computed and cached. The request ends ``timeout_s`` seconds after it
    entered the queue, or ``waiting_timeout_s`` seconds after if it has not started by then.
    """

    rid: str
    prompt_ids: tuple[_TokenId, ...]
    sampling: SamplingParams
    priority: _Priority = 0
    return_logprob: bool = False
    top_logprobs_num: _Count = 0
    prompt_logprobs_from: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    prompt_top_logprobs_num: _Count = 0
    timeout_s: _TimeLimit | None = None
    waiting_timeout_s: _TimeLimit | None = None
    # The name of the LoRA; None for the model itself.
    lora: str | None = None
    # Requests share a prefix only under the same salt; None is a salt too.
    cache_salt: str | None = None
    # The prefill engine that computes the prompt; None for this engine.
    prefill_at: str | None = None
    # Where to send the KV of a prompt of full pages; such a request generates no token.
    deliver: Delivery | None = None
    # The number of choices of one answer, which enter the queue together or not at all, and the rid of the first.
    choices: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    first_choice: str | None = None


def salt_key(salt: str | None) -> int:
    """Return the key of a cache salt's prefixes, from 1 to 2**64 - 1; 0 without a salt."""
    return 0 if salt is None else int.from_bytes(blake2b(salt.encode(), digest_size=8).digest()) or 1


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End one request by its exact rid. Unknown and finished rids are a no-op. ``call_id`` is answered if given."""

    rid: str
    call_id: str | None = None
    finish_reason: FinishReason = FinishReason.ABORT


class AbortAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: str | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An administrative call, which a ``CallAnswer`` answers under the name ``words``."""

    words: ClassVar[str]

    call_id: str


class FlushCache(Call, frozen=True, kw_only=True, tag=True):
    """Reset prefix tree, rows and pages of a quiescent engine; ``timeout_s`` bounds the wait for it."""

    words: ClassVar[str] = "flush"

    timeout_s: float | None = None


class UpdateWeights(Call, frozen=True, kw_only=True, tag=True):
    """Load other weights into a quiescent engine and drop its cache; waits as a flush does.

    ``model_path`` is a folder of the same model, or 'embedded:SEED'; None is the configured model.
    """

    words: ClassVar[str] = "weight update"

    model_path: str | None = None
    timeout_s: float | None = None


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop planning microbatches, in one of three modes, until ``ContinueGeneration``."""

    call_id: str
    mode: PauseMode = PauseMode.RETRACT


class ContinueGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Resume planning after a pause; a no-op when not paused."""

    call_id: str


class Sleep(Call, frozen=True, kw_only=True, tag=True):
    """Free weights and KV on every stage, as soon as nothing is in flight.

    Live requests are retracted or ended, as at a pause; none keeps its KV, so ``in_place`` is not supported. At
    ``level`` 1 the stages wake with their old weights, at 2 with the weights of an update during the sleep.
    """

    words: ClassVar[str] = "sleep"

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    mode: PauseMode = PauseMode.RETRACT


class Wake(Call, frozen=True, kw_only=True, tag=True):
    """Allocate weights and KV on every stage again and resume planning; a no-op when awake."""

    words: ClassVar[str] = "wake"


class StartProfile(Call, frozen=True, kw_only=True, tag=True):
    """Profile every stage; each writes its trace into ``folder``."""

    words: ClassVar[str] = "profile"

    folder: str


class StopProfile(Call, frozen=True, kw_only=True, tag=True):
    words: ClassVar[str] = "profile"


class LoadLora(Call, frozen=True, kw_only=True, tag=True):
    """Load a LoRA adapter on every stage; requests select it by ``name``.

    ``path`` is a folder that peft saved, or 'embedded-lora:SEED' for a LoRA of the embedded model.
    """

    words: ClassVar[str] = "LoRA load"

    name: str
    path: str


class UnloadLora(Call, frozen=True, kw_only=True, tag=True):
    """Drop a LoRA on every stage, if no request uses it.

    With ``timeout_s`` the LoRA accepts no new request, and the call waits that long for the running ones.
    """

    words: ClassVar[str] = "LoRA unload"

    name: str
    timeout_s: float | None = None


class PrefillFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that a prefill engine ended the transfer of a ``PrefillWanted`` early: this engine computes the rest."""

    transfer: _Count
    error: str


class GetStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: str


ClientMessage = (
    Generate
    | Abort
    | AbortAll
    | FlushCache
    | UpdateWeights
    | PauseGeneration
    | ContinueGeneration
    | Sleep
    | Wake
    | StartProfile
    | StopProfile
    | GetStats
    | LoadLora
    | UnloadLora
    | PrefillFailed
)

# ---- pipeline events: from the pipeline to the scheduler ----


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The natural-log probability of one sampled token, and of the most likely ones as (token id, logprob).

    An embedding model samples nothing: ``vector`` is the prompt's embedding, fp32 in the machine's byte order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    vector: bytes = b""


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The natural-log probability of one token of a prompt, its rank among all tokens, and the most likely ones.

    The most likely token has rank 1; ``top`` has pairs of a token id and its logprob.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The failure of one request of a microbatch: its text and its finish reason."""

    rid: str
    error: str
    reason: FinishReason = FinishReason.ERROR


class Completion(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The result of one microbatch: one token for each sampling segment, in the order of the segments.

    ``logprobs`` is empty or has an entry for each token, None unless its request asked for it. With ``error`` set the
    microbatch failed: no token is valid and its requests end with that error. ``accepted`` has the number of accepted
    drafts of each segment with drafts, in the order of the segments; such a segment has one token more. ``guesses`` is
    empty, or has the draft model's next tokens for each emitting segment. ``prompt_logprobs`` has an entry for each
    segment with targets, with a value for each target. ``errors`` has the requests that failed alone; their tokens are
    not valid.
    """

    microbatch_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str | None = None
    accepted: tuple[_Count, ...] = ()
    guesses: tuple[tuple[_TokenId, ...], ...] = ()
    prompt_logprobs: tuple[tuple[PromptLogprob, ...], ...] = ()
    errors: tuple[RequestError, ...] = ()


class PipelineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Loss of the pipeline: a stage died, and nothing in flight will complete.

    ``node`` is the machine of the process, empty for the scheduler's.
    """

    process: str
    cause: str
    node: str = ""

    def __str__(self) -> str:
        return death_words(self.process, self.cause, self.node)


class GrammarReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a grammar's compilation on the last stage; with ``error`` it failed.

    ``reason`` is then the finish reason of the requests that wait for it.
    """

    grammar_id: int
    error: str | None = None
    reason: FinishReason = FinishReason.ERROR


class PagesReceived(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The end of a ``ReceivePages``: its first ``pages`` have arrived on every stage, and no other page will be
    written.
    """

    transfer: _Count
    pages: _Count


class PagesSent(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The end of a ``SendPages``: no stage reads its pages any longer. With ``error`` not all of them were sent."""

    transfer: _Count
    error: str | None = None


class LoraRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The end of a ``LoraOrder``: every stage has read its share, or with ``error`` some stage could not."""

    version: _Count
    error: str | None = None


TransferEvent = PagesReceived | PagesSent
# The stages' answer to an order that they carry out beside the computation.
OrderAnswer = GrammarReady | LoraRead | TransferEvent
PipelineEvent = Completion | PipelineFailed | OrderAnswer

# ---- operator events: from the code that holds the gate, never from a socket ----


class SetPressure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Withhold pages, rows or tree nodes until this many are free or unlocked; None changes nothing.

    Window pages exist only for models with window layers.
    """

    leave_pages: int | None = None
    leave_rows: int | None = None
    leave_unlocked: int | None = None
    leave_window_pages: int | None = None


class ReleasePressure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Release everything that ``SetPressure`` withholds."""


class EvictCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Evict this many unlocked pages of the cache, least recently used first; None evicts all."""

    pages: int | None = None


OperatorEvent = SetPressure | ReleasePressure | EvictCache
Event = ClientMessage | PipelineEvent | OperatorEvent


def ended_by(message: Event, live: Collection[str]) -> tuple[str, ...]:
    """Return the live rids that a message ends; later requests may use them."""
    match message:
        case Abort():
            return (message.rid,) if message.rid in live else ()
        case AbortAll() | PauseGeneration(mode=PauseMode.ABORT) | Sleep(mode=PauseMode.ABORT):
            return tuple(live)
    return ()


# ---- replies: from the scheduler to the front end ----


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """New tokens of one request. With ``finish_reason`` it is the request's only terminal reply.

    ``stop_token_id`` is the token that stopped it, also part of ``token_ids``. ``prompt_tokens``, ``cached_tokens`` and
    ``completion_tokens`` are totals so far; ``cached_tokens_host`` of ``cached_tokens`` came from host memory.
    ``prompt_logprobs`` cover a part of the prompt; successive parts have no gap and no overlap.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_host: int = 0
    completion_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The terminal reply to a request that was not admitted, with the reason; the scheduler keeps no state of it.

    ``behind`` counts the earlier requests of the same rid that have no terminal reply yet: they go on.
    """

    rid: str
    kind: RefusalKind
    message: str
    behind: _Count = 0


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an administrative call; ``ok=False`` means refused, for the reason in ``message``.

    ``not_found``: the call names a missing target. ``fault`` is the field of the call that caused the refusal, if any.
    """

    call_id: str
    ok: bool
    message: str
    not_found: bool = False
    fault: str | None = None


class PrefillWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order for the prefill engine ``at`` to compute ``ids``, full pages, and send their KV from ``first_page`` on.

    The decode engine reserves pages until all have arrived, or until ``PrefillDropped``.
    """

    rid: str
    transfer: int
    at: str
    ids: tuple[int, ...]
    first_page: int
    weights: str
    priority: int = 0
    cache_salt: str | None = None


class PrefillDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Withdraws a ``PrefillWanted``; with ``is_late``, because it took too long."""

    transfer: int
    is_late: bool = False


class StatsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: str
    stats: EngineStats


class PagesStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Successive pages that entered the prefix cache below ``parent``, or at the beginning of a prompt.

    A key is a digest of all tokens up to the page's end and of ``kv_key``: the LoRA's version and the key of the cache
    salt. A copy on the host has no tokens and the key of its original.
    """

    parent: bytes | None
    keys: tuple[bytes, ...]
    tokens: tuple[int, ...] = ()
    kv_key: tuple[int, int] = (0, 0)
    lora_name: str = ""
    on_host: bool = False


class PagesRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Pages that left the prefix cache."""

    keys: tuple[bytes, ...]
    on_host: bool = False


class CacheCleared(msgspec.Struct, frozen=True, tag=True):
    """The whole prefix cache was dropped, host copies included."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared

Reply = TokenOutput | Refusal | CallAnswer | StatsAnswer | PrefillWanted | PrefillDropped


class RequestTrace(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """The timing of a finished request, sent by a tracing scheduler process outside the steps.

    Times are step times, in seconds of the machine's monotonic clock. ``first_microbatch`` is the request's first
    microbatch, ``prompt_microbatch`` the one that gave its first token, -1 for none; ``microbatches`` counts all of
    them. ``stages`` has the known begin and end of ``prompt_microbatch`` on each stage.
    """

    rid: str
    # As in a ``Refusal``.
    behind: int = 0
    arrived_s: float
    arrival_step: int
    launched_s: float | None = None
    launch_step: int = 0
    first_token_s: float | None = None
    ended_s: float = 0.0
    end_step: int = 0
    first_microbatch: int = -1
    prompt_microbatch: int = -1
    last_microbatch: int = -1
    microbatches: int = 0
    stages: tuple[tuple[float, float], ...] = ()
    finish_reason: FinishReason | None = None
    refusal: RefusalKind | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


encode = msgspec.msgpack.Encoder().encode
# Decoders raise BadFrameError for other input. A frame of replies holds the replies of one step.
decode_client_message: Callable[[bytes], ClientMessage] = decoder_of(ClientMessage)
# Sent by a scheduler process in addition to replies.
Aside = RequestTrace | CacheEvent
decode_replies: Callable[[bytes], tuple[Reply | Aside, ...]] = decoder_of(tuple[Reply | Aside, ...])
