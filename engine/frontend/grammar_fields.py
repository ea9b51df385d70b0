"""The fields of bodies that say what an output must be, in the spellings of both protocols.

Owns their types and the rule that there is one at most. Whether a grammar can be followed is asked later, beside the
event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticKnownError, from_json

from engine.grammar import MAX_GRAMMAR_CHARS, schema_grammar
from engine.messages import Grammar, GrammarKind

__all__ = [
    "Choices",
    "GrammarText",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "Schema",
    "StructuredOutputs",
    "TextFormat",
    "choice_grammar",
    "grammar_among",
]

MAX_CHOICES = 1024
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 4096
# Any object: all that json_object promises.
_ANY_OBJECT = {"type": "object"}

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


def _require_json(text: str) -> str:
    """Raise PydanticKnownError for a text that is no JSON, or is nested deeper than a body may be."""
    try:
        from_json(text)
    except ValueError as exc:
        raise PydanticKnownError("json_invalid", {"error": str(exc)}) from exc
    return text


# As an object, or as its text.
Schema = dict[str, JsonValue] | bool | Annotated[GrammarText, AfterValidator(_require_json)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES), Field(fail_fast=True)
]


class _Part(BaseModel):
    """A part of a body that accepts only its own fields; null stands for a field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class TextFormat(_Part):
    """``response_format`` of plain text."""

    type: Literal["text"]

    @property
    def grammar(self) -> None:
        """Anything may be said."""


class JsonObjectFormat(_Part):
    """``response_format`` of some JSON object."""

    type: Literal["json_object"]

    @property
    def grammar(self) -> Grammar:
        """Any object."""
        return schema_grammar(_ANY_OBJECT)


class NamedSchema(_Part):
    """The schema of a ``response_format``. It is followed with ``strict`` and without; name and text change nothing."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    json_schema: dict[str, JsonValue] | bool = Field(default=True, alias="schema")
    strict: bool = Field(default=True, description="every schema is followed strictly")


class JsonSchemaFormat(_Part):
    """``response_format`` of JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def grammar(self) -> Grammar:
        """Its schema."""
        return schema_grammar(self.json_schema.json_schema)


class StructuredOutputs(_Part):
    """``structured_outputs``: exactly one of the first five."""

    json_: Schema | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="in GBNF or Lark")
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] = Field(default=False, description="not honoured: only false")
    disable_additional_properties: Literal[False] = Field(default=False, description="not honoured: only false")
    whitespace_pattern: None = Field(None, description="not honoured: only null")
    structural_tag: None = Field(None, description="not honoured: only null")

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if grammar_among(self.grammars) is None:
            raise ValueError(
                f"structured_outputs must hold one of {', '.join(self.grammars)}, got none of them; name one or leave "
                "structured_outputs out"
            )
        return self

    @property
    def grammars(self) -> dict[str, Grammar | None]:
        """What each of its fields says, by the field."""
        return {
            "structured_outputs.json": None if self.json_ is None else schema_grammar(self.json_),
            "structured_outputs.regex": None if self.regex is None else Grammar(GrammarKind.REGEX, self.regex),
            "structured_outputs.choice": None if self.choice is None else choice_grammar(self.choice),
            "structured_outputs.grammar": None if self.grammar is None else Grammar(GrammarKind.EBNF, self.grammar),
            "structured_outputs.json_object": schema_grammar(_ANY_OBJECT) if self.json_object else None,
        }


def choice_grammar(choices: list[str]) -> Grammar:
    """The grammar of exactly one of these texts."""
    return Grammar(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))


def grammar_among(grammars: Mapping[str, Grammar | None]) -> tuple[str, Grammar] | None:
    """The one that is given, with its field; None when none is. Raises ValueError for more than one."""
    given = [(field, grammar) for field, grammar in grammars.items() if grammar is not None]
    if len(given) > 1:
        names = " and ".join(field for field, _ in given)
        raise ValueError(f"at most one field may say what the output must be, got {names}; send one of them")
    return given[0] if given else None
