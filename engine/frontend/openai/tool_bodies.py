"""What clients send about tools: which there are, whether one is to be called, and which were called before.

Owns the rules of these fields. Arguments go to a chat template as an object where they are one: most templates write
them as JSON themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, JsonValue
from pydantic_core import from_json

from engine.frontend.protocol import NullableBody
from engine.frontend.tools.call_grammar import OfferedTool

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_CALL_ID_CHARS = 256


class FunctionBody(NullableBody):
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments; left out: it has none."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool = Field(
        default=False, description="every call of it keeps to its schema; where calls are required, all do"
    )


class ToolBody(NullableBody):
    type: Literal["function"]
    function: FunctionBody

    @property
    def offered(self) -> OfferedTool:
        function = self.function
        return OfferedTool(name=function.name, parameters=function.parameters, strict=function.strict)

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as a chat template takes it: what models were trained on, without what only engines read."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


class NamedFunctionBody(NullableBody):
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class NamedToolBody(NullableBody):
    """``tool_choice`` for one function."""

    type: Literal["function"]
    function: NamedFunctionBody


ToolChoice = Literal["none", "auto", "required"] | NamedToolBody


class CalledFunctionBody(NullableBody):
    """The function that was called, and its arguments as the model wrote them."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    arguments: str


class ToolCallBody(NullableBody):
    """A call in an assistant's message. ``index``, which pieces of a stream have, changes nothing."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunctionBody
    index: int | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """The call as a chat template takes it. Arguments that are no object stay text: a model's answer may be cut."""
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def unknown_tools(tools: Sequence[ToolBody], choice: str | NamedToolBody | None) -> Iterator[tuple[str, str]]:
    """The rules that are broken by two tools of one name, and by a choice that no tool can keep."""
    names = [tool.function.name for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        yield "tools", f"must have different names, got {twice!r} twice; rename one"
    if choice in (None, "none", "auto"):
        return
    if not tools:
        asked = repr(choice) if isinstance(choice, str) else f"the function {choice.function.name!r}"
        yield "tool_choice", f"needs tools, got {asked} without any; send tools or leave it out"
    if isinstance(choice, NamedToolBody) and choice.function.name not in names:
        known = ", ".join(map(repr, names))
        yield "tool_choice", f"must name one of the tools ({known}), got {choice.function.name!r}; name one"


def _arguments(written: str) -> JsonValue:
    """The object that was written; no arguments at all are an empty one, and what is no object stays as it is."""
    if not written.strip():
        return {}
    try:
        value: JsonValue = from_json(written)
    except ValueError:
        return written
    return value if isinstance(value, dict) else written
