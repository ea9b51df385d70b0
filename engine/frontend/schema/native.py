"""The native protocol: typed bodies and replies of each route, and the fields that all protocols share.

Checks types and single fields. Rules that depend on the model, and grammars, are checked elsewhere. Unknown fields are
refused: a parameter is honoured or answered with 400.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticKnownError, from_json

from engine.core.config import MAX_LORA_NAME_CHARS
from engine.core.messages import FinishReason, Grammar, GrammarKind, SamplingParams
from engine.frontend.schema.errors import ApiError, FieldError
from engine.frontend.schema.foreign_fields import GENERATE_FIELDS, SAMPLING_FIELDS, ForeignField, without_neutral
from engine.frontend.schema.invalid_body import invalid_body
from engine.grammar.source import MAX_GRAMMAR_CHARS, schema_grammar

MAX_RID_CHARS = 256
MAX_SALT_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_TOKEN_ID_DIGITS = 10
MAX_PATH_CHARS = 4096
# The maximum wait of a call for an idle engine, in seconds.
MAX_CALL_TIMEOUT_S = 3600.0
# The maximum time limit of a request: a day.
MAX_TIME_LIMIT_S = 86_400.0
MAX_INT32 = 2**31 - 1

# The maximum choices for one prompt.
MAX_N = 128
MAX_CHOICES = 1024
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 4096
# Any object, for json_object.
_ANY_OBJECT = {"type": "object"}

_DEFAULTS = SamplingParams()

LoraName = Annotated[str, Field(min_length=1, max_length=MAX_LORA_NAME_CHARS)]

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


def _require_finite(value: JsonValue) -> JsonValue:
    """Raise PydanticKnownError for a number in a value that JSON cannot write, such as NaN."""
    parts: list[JsonValue] = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise PydanticKnownError("finite_number")
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
    return value


def _require_json(text: str) -> str:
    """Raise PydanticKnownError for text that is not JSON or is nested too deeply."""
    try:
        value = from_json(text)
    except ValueError as exc:
        raise PydanticKnownError("json_invalid", {"error": str(exc)}) from exc
    _require_finite(value)
    return text


def _refuse_zero(value: object) -> object:
    """Raise PydanticKnownError for 0, which Python takes for false."""
    if value == 0 and value is not False:
        raise PydanticKnownError("literal_error", {"expected": "False"})
    return value


# A switch that must stay off.
OnlyFalse = Annotated[Literal[False], BeforeValidator(_refuse_zero)]


# Any value in JSON. Its validator also takes NaN, the infinities, and numbers that are too large for a float.
FreeJson = Annotated[JsonValue, AfterValidator(_require_finite)]
# A schema, as an object or as JSON text.
Schema = dict[str, FreeJson] | bool | Annotated[GrammarText, AfterValidator(_require_json)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES), Field(fail_fast=True)
]


def _token_id_of(key: object) -> object:
    """Return the token id in an object's key, which in JSON is a string."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS:
        token_id = int(key)
        if str(token_id) == key:  # with leading zeros two keys could name one token
            return token_id
    raise ValueError(
        f"the keys of logit_bias must be token ids in decimal digits without leading zeros, got {key!r}; use /tokenize"
    )


LogitBias = Annotated[
    dict[Annotated[int, BeforeValidator(_token_id_of)], Annotated[float, Field(ge=-100, le=100)]],
    Field(
        max_length=MAX_BIASED_TOKENS,
        description="numbers to add to the logits of token ids",
        json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"}},
    ),
]
# Only the first wrong entry of a list is reported, which limits the cost of a long list.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TimeLimit = Annotated[float, Field(gt=0, le=MAX_TIME_LIMIT_S)]
Body = TypeVar("Body", bound=BaseModel)


class StrictBody(BaseModel):
    """A body that accepts only its own fields, with exact types: "1" is not a number and 1 is not a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RuledBody(StrictBody):
    """A body with rules between its fields."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, broken rule), the beginning and the rest of a sentence; the field is '' if none is at fault."""
        yield from ()

    @model_validator(mode="after")
    def _rules_between_fields(self) -> Self:
        for field, rule in self.broken_rules():
            raise FieldError(field, f"{field} {rule}") if field else ValueError(rule)
        return self


class NullableBody(StrictBody):
    """A body in which null means a field's default, as on other servers.

    ``foreign`` are fields of other servers.
    """

    foreign: ClassVar[Sequence[ForeignField]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if cls.foreign and not data.keys() <= known:
            data = without_neutral(data, known, cls.foreign)
        return {name: value for name, value in data.items() if value is not None or name not in known}


def choice_grammar(choices: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))


def grammar_among(grammars: Mapping[str, Grammar | None]) -> tuple[str, Grammar] | None:
    """Return the given grammar with its field, or None. Raises ValueError for more than one."""
    given = [(field, grammar) for field, grammar in grammars.items() if grammar is not None]
    if len(given) > 1:
        names = " and ".join(field for field, _ in given)
        raise ValueError(f"at most one field may restrict the output, got {names}; send one of them")
    return given[0] if given else None


class TextFormat(NullableBody):
    type: Literal["text"]

    @property
    def grammar(self) -> None:
        """Return None: any output is allowed."""


class JsonObjectFormat(NullableBody):
    type: Literal["json_object"]

    @property
    def grammar(self) -> Grammar:
        """Return the grammar of any object."""
        return schema_grammar(_ANY_OBJECT)


class NamedSchema(NullableBody):
    """The schema of a ``response_format``, followed even without ``strict``; name and description have no effect."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    json_schema: dict[str, FreeJson] | bool = Field(default=True, alias="schema")
    strict: bool = Field(default=True, description="every schema is followed strictly")


class JsonSchemaFormat(NullableBody):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def grammar(self) -> Grammar:
        """Return the grammar of the schema."""
        return schema_grammar(self.json_schema.json_schema)


class StructuredOutputs(RuledBody, NullableBody):
    """``structured_outputs``: exactly one of the first five fields."""

    json_: Schema | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="in GBNF or Lark")
    json_object: bool | None = None
    disable_any_whitespace: OnlyFalse = Field(default=False, description="not honoured: only false")
    disable_additional_properties: OnlyFalse = Field(default=False, description="not honoured: only false")
    whitespace_pattern: None = Field(None, description="not honoured: only null")
    structural_tag: None = Field(None, description="not honoured: only null")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if grammar_among(self.grammars) is None:
            words = f"must hold one of {', '.join(self.grammars)}, got none of them"
            yield "", f"structured_outputs {words}; name one or leave structured_outputs out"

    @cached_property
    def grammars(self) -> dict[str, Grammar | None]:
        """Return the grammar of each field."""
        return {
            "structured_outputs.json": None if self.json_ is None else schema_grammar(self.json_),
            "structured_outputs.regex": None if self.regex is None else Grammar(GrammarKind.REGEX, self.regex),
            "structured_outputs.choice": None if self.choice is None else choice_grammar(self.choice),
            "structured_outputs.grammar": None if self.grammar is None else Grammar(GrammarKind.EBNF, self.grammar),
            "structured_outputs.json_object": schema_grammar(_ANY_OBJECT) if self.json_object else None,
        }


class RequestFields(StrictBody):
    """The fields that all protocols share, except for prompt and sampling."""

    stream: bool = False
    rid: str | None = Field(None, min_length=1, max_length=MAX_RID_CHARS, description="the id of the reply")
    priority: int = Field(0, ge=-MAX_INT32, le=MAX_INT32)
    timeout_s: TimeLimit | None = Field(None, description="seconds after which the request ends with its tokens so far")
    waiting_timeout_s: TimeLimit | None = Field(
        None, description="seconds within which the request must start, else 504"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="prefixes are shared only with requests with the same salt",
    )


class SamplingFields(RuledBody):
    """The sampling fields that the protocols share, with the defaults of ``engine.core.messages.SamplingParams``."""

    temperature: float = Field(default=_DEFAULTS.temperature, ge=0)
    top_p: float = Field(default=_DEFAULTS.top_p, gt=0, le=1)
    top_k: int = Field(default=_DEFAULTS.top_k, ge=-1, le=MAX_INT32, description="-1 or 0: no limit")
    min_p: float = Field(default=_DEFAULTS.min_p, ge=0, le=1)
    frequency_penalty: float = Field(default=_DEFAULTS.frequency_penalty, ge=-2, le=2)
    presence_penalty: float = Field(default=_DEFAULTS.presence_penalty, ge=-2, le=2)
    repetition_penalty: float = Field(default=_DEFAULTS.repetition_penalty, gt=0, le=2)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True)] = Field(default=[], max_length=MAX_STOP_CHARS)
    stop_token_ids: TokenIds = Field(default=[], max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    logit_bias: LogitBias = Field(default={})

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if (count := len(self.stop_strings)) > MAX_STOP_STRINGS:
            yield "stop", f"must be at most {MAX_STOP_STRINGS} strings, got {count}; send fewer"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling_params(
        self, most: int, least: int, grammar: tuple[str, Grammar] | None, defaults: Mapping[str, float]
    ) -> SamplingParams:
        """Return the scheduler's parameters, with the maximum and the minimum of new tokens.

        ``defaults`` are the model's defaults for fields that the client left out.
        """
        converted = {"stop", "stop_token_ids", "logit_bias"}
        values = {name: getattr(self, name) for name in SamplingFields.model_fields.keys() - converted}
        values |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return SamplingParams(
            **values,
            max_new_tokens=most,
            min_new_tokens=least,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            grammar=None if grammar is None else grammar[1],
        )


class SamplingBody(SamplingFields, NullableBody):
    """``sampling_params`` of a request."""

    foreign = SAMPLING_FIELDS
    n: int = Field(
        default=1, ge=1, le=MAX_N, description="choices for the prompt; each uses the next seed after a given one"
    )
    max_new_tokens: int = Field(
        default=_DEFAULTS.max_new_tokens, ge=0, le=MAX_INT32, description="0: only compute and cache the prompt"
    )
    min_new_tokens: int = Field(default=_DEFAULTS.min_new_tokens, ge=0, le=MAX_INT32)
    json_schema: Schema | None = Field(default=None, description="the output is JSON of this schema")
    regex: GrammarText | None = Field(default=None, description="the whole output matches this")
    ebnf: GrammarText | None = Field(default=None, description="the output follows this grammar, in GBNF or Lark")
    skip_special_tokens: bool = Field(default=True, description="false: the text shows special tokens")
    no_stop_trim: bool = Field(default=False, description="a text ends with its stop string")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        if self.min_new_tokens > self.max_new_tokens:
            most, least = self.max_new_tokens, self.min_new_tokens
            yield "min_new_tokens", f"must be <= max_new_tokens={most}, got {least}; lower it or raise max_new_tokens"
        grammar_among(self._grammars)

    @cached_property
    def _grammars(self) -> dict[str, Grammar | None]:
        return {
            "json_schema": None if self.json_schema is None else schema_grammar(self.json_schema),
            "regex": None if self.regex is None else Grammar(GrammarKind.REGEX, self.regex),
            "ebnf": None if self.ebnf is None else Grammar(GrammarKind.EBNF, self.ebnf),
        }

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """Return the grammar of the output, with the field that requests it."""
        return grammar_among(self._grammars)

    def params(self, defaults: Mapping[str, float]) -> SamplingParams:
        return self.sampling_params(self.max_new_tokens, self.min_new_tokens, self.grammar, defaults)


class GenerateBody(RequestFields, RuledBody, NullableBody):
    """The body of ``POST /generate``: exactly one of ``text`` and ``input_ids``."""

    foreign = GENERATE_FIELDS
    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: SamplingBody = SamplingBody()
    return_logprob: bool = False
    top_logprobs_num: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    logprob_start_len: int = Field(
        default=-1, ge=-1, le=MAX_INT32, description="return the prompt's logprobs too, from this position on; -1: none"
    )
    lora_path: LoraName | None = Field(default=None, description="the name of the LoRA to use")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if (self.text is None) == (self.input_ids is None):
            given = "neither" if self.text is None else "both"
            yield "", f"exactly one of text and input_ids must be given, got {given}; send one of them"
        for field, default in (("top_logprobs_num", 0), ("logprob_start_len", -1)):
            if (value := getattr(self, field)) != default and not self.return_logprob:
                yield field, f"needs return_logprob=true, got {field}={value} without it; set return_logprob"


class OutputLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The natural-log probability of one output token, and the most likely ones as (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# A logprob, its token id, and the token's text, which is null: clients decode ids.
InputLogprob = tuple[float | None, int, None]
InputTopLogprob = tuple[float, int, None]


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The cached tokens of a prompt by tier: in the KV cache on the device, or in host memory.

    The names are SGLang's (pull request 17648, and the samples in its documentation of the native API).
    """

    device: int
    host: int


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Data about the text. Token counts are totals so far; ``output_logprobs`` is present only on request.

    So are the three lists about the prompt, with an entry for each token from ``logprob_start_len`` on: its logprob,
    the most likely tokens at its position, and its rank among all tokens. The first entry is null: the logits before it
    are not computed.
    """

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    matched_stop: str | int | msgspec.UnsetType = msgspec.UNSET
    output_logprobs: tuple[OutputLogprob, ...] | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: tuple[InputLogprob, ...] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: tuple[tuple[InputTopLogprob, ...] | None, ...] | msgspec.UnsetType = msgspec.UNSET
    input_token_ranks: tuple[int | None, ...] | msgspec.UnsetType = msgspec.UNSET


# Lists that grow with every piece of an output; unset unless requested.
META_LISTS = ("output_logprobs", "input_token_logprobs", "input_top_logprobs", "input_token_ranks")


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``/generate``; in a stream, one event with the text since the last one.

    With n > 1 the reply is a list of these, numbered by ``index``. ``vector`` is the prompt's vector from an embedding
    model, in fp32; ``/v1/embeddings`` shows it.
    """

    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
    vector: bytes | msgspec.UnsetType = msgspec.UNSET


def parse_body(model: type[Body], data: bytes) -> Body:
    """Decode a request's body as its type. Raises ApiError (400), which names field, rule and value."""
    try:
        return model.model_validate_json(data or b"{}")
    except ValidationError as exc:
        raise invalid_body(exc, model) from exc


def read_timeout(query: Mapping[str, str], maximum_s: float) -> float | None:
    """Return the ``timeout`` of a query, in seconds. Raises ApiError (400)."""
    unknown = set(query) - {"timeout"}
    if unknown:
        message = f"the only parameter here is timeout, got {', '.join(sorted(unknown))}; remove it"
        raise ApiError.invalid(message, param=min(unknown))
    text = query.get("timeout")
    return None if text is None else timeout_of(text, maximum_s)


def timeout_of(text: str, maximum_s: float) -> float:
    """Parse a time in seconds. Raises ApiError (400)."""
    try:
        timeout_s = float(text)
    except ValueError as exc:
        raise ApiError.at("timeout", f"must be a number of seconds, got {text!r}") from exc
    if not 0 <= timeout_s <= maximum_s:
        raise ApiError.at("timeout", f"must be from 0 to {maximum_s:g} seconds, got {text}")
    return timeout_s
