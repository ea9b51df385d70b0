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

# The numbers that a frame may hold: others are refused where the frame is decoded, before arithmetic can overflow on
# them.
# Recordings with redacted text have 63-bit fingerprints for tokens.
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**63 - 1)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_TimeLimit = Annotated[float, msgspec.Meta(gt=0)]


class FinishReason(StrEnum):
    """Why a request ended. ``timeout`` is the end of its time.

    ``error``, ``invalid`` and ``unavailable`` are never shown as a normal end: ``error`` is the engine's failure,
    ``invalid`` the request's own, which shows only while it is computed, and ``unavailable`` that of files which the
    request needs and the server cannot read any more.
    """

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"


# Constants, because a member takes four to ten times as long to look up on its class, and every step asks for some.
LENGTH, STOP, ABORT, ERROR, TIMEOUT, INVALID, UNAVAILABLE = FinishReason
# Ends that a client sees as errors, also after it has got tokens.
FAILURES: Final = frozenset({ERROR, INVALID, UNAVAILABLE})


class PauseMode(StrEnum):
    """The effect of ``/pause_generation`` on live requests: back to the queue, frozen where they are, or ended."""

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
    """The language that a request's whole output must belong to, written as ``text`` in the syntax of its kind."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are chosen and when it ends. Names and meanings are the usual ones of inference engines.

    ``top_k=-1`` means no limit, ``temperature=0`` means greedy; ``logit_bias`` is added to the logits of its token ids.
    Validated where a request enters (the front end or a script's ``start_req``); the scheduler trusts it, within the
    bounds of the types here.
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

    ``to`` is the address of each stage of the decode engine, which knows them by the number ``transfer``. ``weights``
    is what the KV must be computed with, see ``Books.weights``.
    """

    to: tuple[str, ...]
    transfer: _Count
    first_page: _Count = 0
    weights: str = ""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a request. ``rid`` is unique among live requests; ``prompt_ids`` is the tokenized prompt, length >= 1.

    From position ``prompt_logprobs_from`` on each token of the prompt is given its logprob after the tokens before it,
    that position itself excepted; -1 asks for none. With ``max_new_tokens=0`` the prompt is computed and cached only.
    It ends by itself ``timeout_s`` seconds after it entered the queue, and ``waiting_timeout_s`` after that if it was
    not started by then.
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
    # The name of the LoRA to compute with; None: the model itself.
    lora: str | None = None
    # A prefix is shared only with requests of the same salt; None is one of its own.
    cache_salt: str | None = None
    # The prefill engine that is to compute the prompt; None: this one does.
    prefill_at: str | None = None
    # For a prompt of full pages, and no new token.
    deliver: Delivery | None = None
    # The number of choices of one answer, which enter the queue together or not at all, and the first one's rid.
    choices: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    first_choice: str | None = None


def salt_key(salt: str | None) -> int:
    """The number by which prefixes of a cache salt are known, from 1 to 2**64 - 1; 0 without one."""
    return 0 if salt is None else int.from_bytes(blake2b(salt.encode(), digest_size=8).digest()) or 1


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End one request by its exact rid. Unknown and finished rids are a no-op. ``call_id`` is answered if given."""

    rid: str
    call_id: str | None = None
    finish_reason: FinishReason = FinishReason.ABORT


class AbortAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: str | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An administrative call, which a ``CallAnswer`` answers. ``words`` name it there."""

    words: ClassVar[str]

    call_id: str


class FlushCache(Call, frozen=True, kw_only=True, tag=True):
    """Reset prefix tree, rows and pages if the engine is quiescent; with ``timeout_s``, wait that long until it is."""

    words: ClassVar[str] = "flush"

    timeout_s: float | None = None


class UpdateWeights(Call, frozen=True, kw_only=True, tag=True):
    """Load other weights into the running engine and drop the cache, if the engine is quiescent; else like a flush.

    ``model_path`` is a folder of the same model, or 'embedded:SEED'; None stands for the configured model itself.
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
    """Have every stage give back its weights and its KV, as soon as nothing is in flight.

    Live requests go back to the queue or end, as at a pause; none keeps its KV, so ``in_place`` is not served. At
    ``level`` 1 the stages wake with the weights that they had, at 2 with the weights of an update during the sleep.
    """

    words: ClassVar[str] = "sleep"

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    mode: PauseMode = PauseMode.RETRACT


class Wake(Call, frozen=True, kw_only=True, tag=True):
    """Have every stage take weights and KV memory again, and go on; a no-op when awake."""

    words: ClassVar[str] = "wake"


class StartProfile(Call, frozen=True, kw_only=True, tag=True):
    """Have every stage profile itself and write its trace into ``folder``."""

    words: ClassVar[str] = "profile"

    folder: str


class StopProfile(Call, frozen=True, kw_only=True, tag=True):
    words: ClassVar[str] = "profile"


class LoadLora(Call, frozen=True, kw_only=True, tag=True):
    """Have every stage read its part of a LoRA adapter, which requests then ask for by ``name``.

    ``path`` is a folder as peft saves it, or 'embedded-lora:SEED' for one of the embedded model's.
    """

    words: ClassVar[str] = "LoRA load"

    name: str
    path: str


class UnloadLora(Call, frozen=True, kw_only=True, tag=True):
    """Forget a LoRA and have every stage drop it, if no request uses it.

    With ``timeout_s`` no further request may use it, and the call waits that long for those that do.
    """

    words: ClassVar[str] = "LoRA unload"

    name: str
    timeout_s: float | None = None


class PrefillFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prefill engine will send no more of what was asked for by ``PrefillWanted``: the rest is computed here."""

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

    A model that embeds samples nothing: ``vector`` is that of the prompt, fp32 in the machine's byte order.
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
    """A request that cannot go on while the others of its microbatch do: why, and what its end is called."""

    rid: str
    error: str
    reason: FinishReason = FinishReason.ERROR


class Completion(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The result of one microbatch: one token for each of its segments that samples, in the order of the segments.

    ``logprobs`` is empty or has one entry a token, None for tokens whose request asked for none. With ``error`` set the
    microbatch failed: no token is valid and its requests end with that error. ``accepted`` has the number of guesses
    that hold for each segment that has drafts, in the order of the segments; such a segment has one token more.
    ``guesses`` is empty, or has what a draft model guesses next for each segment that emits. ``prompt_logprobs`` has
    one entry for each segment with targets, with a value for each of them. ``errors`` has the requests that end by
    themselves; their tokens are not valid.
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
    """The pipeline is gone for good (a stage died): nothing in flight will ever complete.

    ``node`` is the machine of the process, empty where that is the scheduler's.
    """

    process: str
    cause: str
    node: str = ""

    def __str__(self) -> str:
        return death_words(self.process, self.cause, self.node)


class GrammarReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last stage can mask with a grammar; with ``error`` it never will, and the error says why.

    ``reason`` is then the end of the requests that wait for it.
    """

    grammar_id: int
    error: str | None = None
    reason: FinishReason = FinishReason.ERROR


class PagesReceived(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The end of a ``ReceivePages``: the first ``pages`` of it came whole on every stage, and no more is written."""

    transfer: _Count
    pages: _Count


class PagesSent(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The end of a ``SendPages``: no stage reads its pages any more. With ``error`` not all of them were sent."""

    transfer: _Count
    error: str | None = None


TransferEvent = PagesReceived | PagesSent
PipelineEvent = Completion | PipelineFailed | GrammarReady | TransferEvent

# ---- operator events: from the holder of the gate, never from a socket ----


class SetPressure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep pages, rows or tree nodes from requests until this many are left free or unlocked; None: as it is.

    Window pages are there only in an engine whose model has window layers.
    """

    leave_pages: int | None = None
    leave_rows: int | None = None
    leave_unlocked: int | None = None
    leave_window_pages: int | None = None


class ReleasePressure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give back everything that ``SetPressure`` keeps."""


class EvictCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Evict this many pages of cache that no request protects, least recently used first; None: all such pages."""

    pages: int | None = None


OperatorEvent = SetPressure | ReleasePressure | EvictCache
Event = ClientMessage | PipelineEvent | OperatorEvent


def ended_by(message: Event, live: Collection[str]) -> tuple[str, ...]:
    """The live rids whose requests a message ends; they are free for requests that are sent after it."""
    match message:
        case Abort():
            return (message.rid,) if message.rid in live else ()
        case AbortAll() | PauseGeneration(mode=PauseMode.ABORT) | Sleep(mode=PauseMode.ABORT):
            return tuple(live)
    return ()


# ---- replies: from the scheduler to the front end ----


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """New tokens of one request. With ``finish_reason`` set it is the request's one and only terminal reply.

    ``stop_token_id`` is the token that stopped it, if one did (the token itself is part of ``token_ids``).
    ``prompt_tokens``, ``cached_tokens`` and ``completion_tokens`` are totals so far, in tokens. Of the cached tokens
    ``cached_tokens_host`` were loaded from host memory. ``prompt_logprobs`` cover a part of the prompt; the parts
    follow each other without a gap, and none comes twice.
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


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request was not admitted. It is terminal, leaves no state and says why, with the numbers."""

    rid: str
    kind: RefusalKind
    message: str


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an administrative call; ``ok=False`` means refused, and ``message`` says what refused it.

    ``not_found`` says that what it names is not there, ``fault`` which field of the call is at fault, if one is.
    """

    call_id: str
    ok: bool
    message: str
    not_found: bool = False
    fault: str | None = None


class PrefillWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prefill engine ``at`` is to compute ``ids``, full pages, and to send their KV from ``first_page`` on.

    The decode engine keeps pages for it until ``PrefillDropped``, or until all of it has come.
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
    """The prompt of a ``PrefillWanted`` is not needed any more; with ``is_late`` because it took too long."""

    transfer: int
    is_late: bool = False


class StatsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: str
    stats: EngineStats


class PagesStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Pages that entered the prefix cache: one after the other below ``parent``, or as the beginning of a prompt.

    A key is a digest of all tokens up to the page's end and of ``kv_key``: the version of the LoRA that computed it and
    the key of the cache salt. A copy on the host has no tokens; its key is that of the page which it is a copy of.
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
    """The whole prefix cache was dropped, on the host too."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared

Reply = TokenOutput | Refusal | CallAnswer | StatsAnswer | PrefillWanted | PrefillDropped


class RequestTrace(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """The account of a request, sent after its end by a scheduler process that traces; no step makes or sees it.

    Times are step times, in seconds of the machine's monotonic clock. ``first_microbatch`` is the first microbatch with
    the request, ``prompt_microbatch`` gave its first token, ``microbatches`` counts them; -1 stands for none.
    ``stages`` is when each stage began and ended with ``prompt_microbatch``, where that is known.
    """

    rid: str
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
# Each raises BadFrameError for anything else. A frame of replies holds one step's.
decode_client_message: Callable[[bytes], ClientMessage] = decoder_of(ClientMessage)
# Sent by a scheduler process beside replies.
Aside = RequestTrace | CacheEvent
decode_replies: Callable[[bytes], tuple[Reply | Aside, ...]] = decoder_of(tuple[Reply | Aside, ...])
