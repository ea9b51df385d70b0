"""Orders: the requests of a body, checked against the served model and tokenized.

Applies the scheduler's own rule for requests that never fit, so that both refuse alike and no such request is queued.
Owns the packed form of an order between processes, which is small because prompts fit into the context.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.core.limits import Limits
from engine.core.messages import Generate, Grammar, SamplingParams
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.schema.native import GenerateBody, parse_body
from engine.frontend.text.dialect import PLAIN, Dialect, Parsing
from engine.frontend.text.tokenizer import ChatTemplate, load_tokenizer
from engine.process.settings import ServerSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A whole reply is kept until its end: this is 200 MB of logprobs.
MAX_PROMPT_LOGPROBS = 1 << 20


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one reply, all choices of the first prompt before those of the next.

    ``n`` is the number of choices for each prompt. The reply shows ``logprobs``, the usage (``include_usage``, in each
    event with ``continuous_usage``), the cached tokens by tier (``cached_tokens_details``), ``token_ids``, the text of
    special tokens (``shows_special``) and of stop strings (``shows_stop``) if these are set. Its choices begin with
    ``echo``, the prompts' texts. ``top_logprobs`` and ``prompt_logprobs`` are the numbers of most likely tokens in a
    completion's logprobs and in the logprobs of its prompt. ``grammar_field`` is the field with the grammar of the
    output, if any, which is in the sampling of all requests. ``parsing`` selects the parts to parse. ``grammar_parts``
    are parts of the grammar that the client wrote, with their places in the body, for errors. ``lora`` is the LoRA that
    was selected as the model, ``lora_field`` the field that selects it. ``shown_request`` are the fields of the request
    that its reply repeats, as JSON.
    """

    rid: str
    messages: tuple[Generate, ...]
    stream: bool
    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cached_tokens_details: bool = False
    token_ids: bool = False
    shows_special: bool = False
    shows_stop: bool = False
    echo: tuple[str, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar_field: str | None = None
    parsing: Parsing | None = None
    grammar_parts: tuple[tuple[str, Grammar], ...] = ()
    lora: str | None = None
    lora_field: str = "model"
    shown_request: bytes = b"{}"


@dataclass(frozen=True)
class ServedModel:
    """The served model, against which bodies are checked: its tokenizer, template, limits and name.

    ``dialect`` is its syntax for reasoning and calls. ``sampling_defaults`` are the checkpoint's defaults for sampling
    fields. ``longest_token_chars`` gives a lower bound on a text's tokens; byte-level vocabularies count bytes.
    ``special_ids`` are the special tokens of the vocabulary.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    limits: Limits
    model_name: str
    dialect: Dialect = PLAIN
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    longest_token_chars: int = field(init=False)
    special_ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        added = self.tokenizer.get_added_tokens_decoder().items()
        special = {token.content: token_id for token_id, token in added if token.special}
        object.__setattr__(self, "special_ids", special)
        object.__setattr__(self, "longest_token_chars", max(map(len, self.tokenizer.get_vocab())))

    @property
    def longest_text_chars(self) -> int:
        """Return an upper bound on the length of a text that fits into the context."""
        return self.longest_token_chars * self.limits.context_length


def served_model(settings: ServerSettings, limits: Limits, sampling_defaults: Mapping[str, float]) -> ServedModel:
    """Load the model's tokenizer and facts. Raises CheckpointError if there is no working tokenizer."""
    tokenizer, template = load_tokenizer(settings)
    dialect = Dialect.of(settings, template.text)
    return ServedModel(tokenizer, template, limits, settings.model_name, dialect, sampling_defaults)


def native_order(data: bytes, served: ServedModel) -> Order:
    """Make the order of a body of ``/generate``. Raises ApiError."""
    body = parse_body(GenerateBody, data)
    message, n = request_of(body, served), body.sampling_params.n
    messages = tuple(
        msgspec.structs.replace(message, rid=rid, sampling=sampling_of(message.sampling, choice))
        for choice, rid in enumerate(rids_of(message.rid, n))
    )
    check_prompt_logprobs(messages, "logprob_start_len")
    grammar = body.sampling_params.grammar
    field = None if grammar is None else f"sampling_params.{grammar[0]}"
    return Order(
        rid=message.rid,
        messages=messages,
        stream=body.stream,
        n=n,
        shows_special=not body.sampling_params.skip_special_tokens,
        shows_stop=body.sampling_params.no_stop_trim,
        grammar_field=field,
        lora_field="lora_path",
    )


def rids_of(rid: str, count: int) -> list[str]:
    """Return the rids of an order's requests: its own rid for a single one, else numbered."""
    return [rid] if count == 1 else [f"{rid}-{number}" for number in range(count)]


def sampling_of(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the sampling of one choice, whose seed differs: a shared seed would give n equal choices."""
    if sampling.seed is None or not choice:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % 2**63)


def request_of(body: GenerateBody, served: ServedModel) -> Generate:
    """Return the request of a native body. Raises ApiError (400) with the numbers if it can never run here."""
    limits = served.limits
    prompt_ids = tuple(body.input_ids or ()) if body.text is None else tokenize(served, body.text, param="text")
    check_vocabulary(prompt_ids, limits.vocab_size, "input_ids")
    check_vocabulary(body.sampling_params.stop_token_ids, limits.vocab_size, "sampling_params.stop_token_ids")
    check_vocabulary(tuple(body.sampling_params.logit_bias), limits.vocab_size, "sampling_params.logit_bias")
    param = "text" if body.text is not None else "input_ids"
    check_fits(len(prompt_ids), body.sampling_params.max_new_tokens, limits, param)
    start = body.logprob_start_len
    if start >= len(prompt_ids):
        raise ApiError.at(
            "logprob_start_len",
            f"must be < {len(prompt_ids)}, the tokens of the prompt, got {start}; lower it, or send -1 for none of "
            "them",
        )
    return Generate(
        rid=body.rid or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=body.sampling_params.params(served.sampling_defaults),
        priority=body.priority,
        return_logprob=body.return_logprob,
        top_logprobs_num=body.top_logprobs_num,
        prompt_logprobs_from=start,
        prompt_top_logprobs_num=body.top_logprobs_num if start >= 0 else 0,
        timeout_s=body.timeout_s,
        waiting_timeout_s=body.waiting_timeout_s,
        cache_salt=body.cache_salt,
        lora=_lora_of(body.lora_path, limits),
    )


def _lora_of(name: str | None, limits: Limits) -> str | None:
    """Return the requested LoRA. Raises ApiError (404) on a server without LoRAs.

    The scheduler refuses unknown names, because it knows the order of loads and requests.
    """
    if name is not None and not limits.max_loras:
        raise ApiError(
            ErrorType.NOT_FOUND,
            f"a LoRA must be loaded before a request selects it, got {name!r}, but this server holds no LoRAs; "
            "start it with --max-loras N or --lora NAME=PATH",
            param="lora_path",
        )
    return name


def check_lora_name(name: str, model_name: str) -> None:
    """Raise ApiError (400) for a LoRA with the served model's name, which no request could select."""
    if name == model_name:
        raise ApiError.at("lora_name", f"must differ from the served model's name, got {name!r}; choose another")


def tokenize(served: ServedModel, text: str, *, param: str, special: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text, with the tokenizer's special tokens around it if ``special``.

    Raises ApiError (400) for invalid text, and at once for a text that is too long for any tokenization to fit.
    """
    if len(text) > served.longest_text_chars:
        raise ApiError.too_long(
            f"the prompt has {len(text)} characters, but at most {served.longest_text_chars} can fit: this model's "
            f"maximum context length is {served.limits.context_length} tokens, and the longest token of the vocabulary "
            f"has {served.longest_token_chars} characters; shorten the prompt",
            param=param,
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:  # JSON can spell half of a surrogate pair, which is not text.
        raise ApiError.invalid(
            f"the prompt must be Unicode text, but has {exc.reason} at character {exc.start}; escape characters as "
            "pairs",
            param=param,
        ) from exc
    # Without offsets of tokens, which nothing needs and which would take five times the time and memory.
    (encoding,) = served.tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return tuple(encoding.ids)


def check_fits(prompt_tokens: int, max_new_tokens: int, limits: Limits, param: str) -> None:
    """Raise ApiError (400), with the numbers, if a request can never run here."""
    reason = limits.why_never_fits(prompt_tokens, max_new_tokens)
    if reason is not None:
        raise (ApiError.too_long if prompt_tokens else ApiError.invalid)(reason, param=param)


def check_prompt_logprobs(messages: Sequence[Generate], param: str, *, values_each: int | None = None) -> None:
    """Raise ApiError (400) if the prompts' logprobs would make a reply too large to keep.

    ``values_each`` is the number of values that the reply shows for each token, if not the requested number.
    """
    values = sum(
        (len(message.prompt_ids) - message.prompt_logprobs_from) * (values_each or 1 + message.prompt_top_logprobs_num)
        for message in messages
        if message.prompt_logprobs_from >= 0
    )
    if values > MAX_PROMPT_LOGPROBS:
        raise ApiError.at(
            param,
            f"must request at most {MAX_PROMPT_LOGPROBS} logprobs of the prompts, including the most likely tokens "
            f"and counted for each choice that shows them, got {values}; request fewer most likely tokens or "
            "choices, or send several requests",
        )


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError (400) for the first id outside the vocabulary."""
    outside = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise ApiError.at(
            param, f"must be token ids from 0 to {vocab_size - 1}, got {outside}; use the model's own tokenizer"
        )


class _Packed(msgspec.Struct, frozen=True):
    """An order without its prompts, with each prompt once."""

    order: Order
    prompts: tuple[msgspec.Raw, ...]


_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_prompt_decoder = msgspec.msgpack.Decoder(tuple[int, ...])
_encode = msgspec.msgpack.Encoder().encode


def packed(data: bytes, take: Callable[[bytes], Order]) -> bytes:
    """Pack the order that ``take`` makes of a body."""
    order = take(data)
    prompts = tuple(msgspec.Raw(_encode(message.prompt_ids)) for message in order.messages[:: order.n])
    bare = tuple(msgspec.structs.replace(message, prompt_ids=()) for message in order.messages)
    return _encode(_Packed(msgspec.structs.replace(order, messages=bare), prompts))


async def unpacked(answer: bytes | memoryview) -> Order:
    """Unpack an order, with turns of the event loop in between."""
    found = _packed_decoder.decode(answer)
    messages: list[Generate] = []
    for index, prompt in enumerate(found.prompts):
        ids = _prompt_decoder.decode(prompt)
        choices = found.order.messages[index * found.order.n : (index + 1) * found.order.n]
        messages += [msgspec.structs.replace(message, prompt_ids=ids) for message in choices]
        await asyncio.sleep(0)
    return msgspec.structs.replace(found.order, messages=tuple(messages))
