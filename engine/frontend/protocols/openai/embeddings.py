"""``/v1/embeddings``: its body, its order, and its reply with the vectors.

Each input is a request, for which the last stage returns a vector instead of a token.
"""

from __future__ import annotations

import base64
import sys
import uuid
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
from pydantic import Field

from engine.core.messages import Generate, SamplingParams
from engine.frontend.protocols.openai.bodies import MAX_USER_CHARS, Prompts, each_prompt
from engine.frontend.protocols.openai.requests import requested_lora
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.foreign_fields import FOREIGN_FIELDS
from engine.frontend.schema.native import (
    GenerateAnswer,
    NullableBody,
    OnlyFalse,
    RequestFields,
    RuledBody,
    TokenIds,
    parse_body,
)
from engine.frontend.sessions.requests import Order, ServedModel, check_fits, check_vocabulary, rids_of, tokenize
from engine.frontend.sessions.sessions import Shape, Shaping

# The protocol's own limit.
MAX_INPUTS: Final = 2048
# The maximum numbers in a reply, which stays in memory until it is sent: 40 MB as text.
MAX_VALUES: Final = 1 << 22


class EmbeddingBody(RequestFields, RuledBody, NullableBody):
    """The body of ``POST /v1/embeddings``. ``input`` is one text or many, or token ids of one text or many."""

    foreign = FOREIGN_FIELDS
    model: str | None = Field(None, description="the served model's name; left out: the served model")
    input: str | TokenIds | Annotated[Prompts, Field(max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian fp32")
    dimensions: int | None = Field(None, description="only the size of the model's vectors")
    stream: OnlyFalse = Field(default=False, description="vectors are not streamed: only false")
    user: str | None = Field(None, max_length=MAX_USER_CHARS, description="changes nothing")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if not self.inputs or not all(self.inputs):
            yield "input", f"must be texts or token ids, none of them empty, got {self.input!r:.80}"

    @property
    def inputs(self) -> list[str | list[int]]:
        return each_prompt(self.input)


def embedding_order(data: bytes, served: ServedModel) -> Order:
    """Return the order of a body: one request for each input. Raises ApiError."""
    body = parse_body(EmbeddingBody, data)
    limits, size = served.limits, served.limits.embedding_size
    lora = requested_lora(body.model, served)
    if body.dimensions not in (None, size):
        raise ApiError.at(
            "dimensions", f"must be {size}, the size of this model's vectors, got {body.dimensions}; leave it out"
        )
    most = min(MAX_INPUTS, MAX_VALUES // size, limits.max_queued_requests)
    if len(body.inputs) > most:
        raise ApiError.at(
            "input",
            f"must be at most {most} texts here (max_queued_requests={limits.max_queued_requests}, vectors of {size} "
            f"numbers), got {len(body.inputs)}; send several requests",
        )
    rid = body.rid or f"embd-{uuid.uuid4().hex}"
    messages = []
    for own_rid, given in zip(rids_of(rid, len(body.inputs)), body.inputs, strict=True):
        ids = tokenize(served, given, param="input") if isinstance(given, str) else tuple(given)
        check_vocabulary(ids, limits.vocab_size, "input")
        check_fits(len(ids), 1, limits, "input")
        messages.append(
            Generate(
                rid=own_rid,
                prompt_ids=ids,
                sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
                priority=body.priority,
                return_logprob=True,
                timeout_s=body.timeout_s,
                waiting_timeout_s=body.waiting_timeout_s,
                lora=lora,
                cache_salt=body.cache_salt,
            )
        )
    shown = msgspec.json.encode({"encoding_format": body.encoding_format})
    return Order(rid=rid, messages=tuple(messages), stream=False, lora=lora, shown_request=shown)


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or little-endian fp32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingShape(Shape):
    """Shapes an answer: the vectors in the order of their inputs."""

    def __init__(self, order: Order, served: ServedModel) -> None:
        self._model = order.lora or served.model_name
        self._as_text = msgspec.json.decode(order.shown_request)["encoding_format"] == "base64"

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        data = []
        for index, answer in enumerate(answers):
            if index:
                yield
            assert isinstance(answer.vector, bytes), "the last stage of an embedding model returns vectors"
            data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=index, embedding=self._shown(answer.vector)))))
        tokens = sum(answer.meta_info.prompt_tokens for answer in answers)
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingAnswer(data=data, model=self._model, usage=usage)  # type: ignore[arg-type]  # encoded already

    def _shown(self, vector: bytes) -> list[float] | str:
        values = array("f", vector)
        if not self._as_text:
            return values.tolist()
        if sys.byteorder == "big":
            values.byteswap()
        return base64.b64encode(values.tobytes()).decode()
