"""What a chat's tools and its reasoning make of its order: what answers are looked through for, and their grammar.

Owns which fields may say together what an output must be. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.dialect import Parsing
from engine.frontend.errors import ApiError
from engine.frontend.lark import after_reasoning
from engine.frontend.openai.bodies import ChatBody
from engine.frontend.openai.tool_bodies import NamedToolBody, ToolBody
from engine.frontend.order import Order
from engine.frontend.reasoning import ReasoningStart
from engine.frontend.served_model import ServedModel
from engine.frontend.tools.argument_values import properties_of
from engine.frontend.tools.call_grammar import calls_if_any, calls_or_answer, required_calls
from engine.frontend.tools.families import FAMILIES
from engine.grammar import schema_grammar
from engine.messages import Grammar

__all__ = ["require_parser", "with_calls"]


def require_parser(tools: Sequence[ToolBody], served: ServedModel) -> None:
    """Raise ApiError (400) for tools that the model cannot be told of, or whose calls could not be found."""
    if not tools:
        return
    if served.dialect.family is None:
        raise ApiError.invalid(
            f"tools need a parser of the model's calls, and this server has none for it, got {len(tools)} tools; leave "
            f"them out, or start the server with tool_call_parser set to {' or '.join(map(repr, FAMILIES))}",
            param="tools",
        )
    if not served.template.knows_tools:
        raise ApiError.invalid(
            f"tools need a chat template that shows them to the model, and this model's does not, got {len(tools)} "
            "tools; leave them out, or describe them in a message",
            param="tools",
        )


def with_calls(order: Order, body: ChatBody, start: ReasoningStart | None, served: ServedModel) -> Order:
    """The order of a chat whose answers begin with reasoning as ``start`` says. Raises ApiError (400)."""
    tools = body.offered_tools
    if start is None and not tools:
        return order
    order = msgspec.structs.replace(
        order,
        parsing=Parsing(
            tools=tuple(tool.function.name for tool in tools) or None,
            parallel=body.parallel_tool_calls,
            named=isinstance(body.tool_choice, NamedToolBody),
            reasoning=start,
            properties={tool.function.name: properties_of(tool.function.parameters) for tool in tools}
            if served.dialect.needs_properties
            else {},
        ),
    )
    if not tools:
        return order if start is None else _with_reasoning(order, start, served)
    return _with_call_grammar(order, body, start, served)


def _with_call_grammar(order: Order, body: ChatBody, start: ReasoningStart | None, served: ServedModel) -> Order:
    """The same with what ``tool_choice``, strict tools and another field say that the output must be."""
    form, special_ids = served.dialect.form, served.special_ids
    assert form is not None, "tools are refused without a parser"
    field, answer = order.grammar_field, order.messages[0].sampling.grammar
    offered = [tool.offered for tool in body.offered_tools]
    if body.required_tools:
        if field is not None:
            raise ApiError.invalid(
                f"{field} and a tool_choice that requires a call cannot both say what the output must be; leave one of "
                "them out",
                param=field,
            )
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedToolBody)
        required = [tool.offered for tool in body.required_tools]
        forced = required_calls(form, required, start, special_ids, several=several)
        return _with_grammar(order, forced, "tool_choice", _schemas(body, body.required_tools))
    strict = [tool for tool in body.offered_tools if tool.function.strict]
    if field is None or answer is None:
        if not strict:
            return order
        return _with_grammar(order, calls_if_any(form, offered, start, special_ids), "tools", _schemas(body, strict))
    grammar = calls_or_answer(form, offered, answer, start, special_ids)
    if grammar is None:
        raise ApiError.invalid(
            f"{field} and tools must be told apart from the beginning of an output, which this model's calls, or a "
            f"{answer.kind.value}, do not allow; leave one out",
            param=field,
        )
    return _with_grammar(order, grammar, field, ((field, answer), *_schemas(body, strict)))


def _schemas(body: ChatBody, tools: Sequence[ToolBody]) -> tuple[tuple[str, Grammar], ...]:
    """The schemas that calls of these tools are held to, with their places. Raises ApiError (400) for no object's."""
    schemas = []
    for tool in tools:
        place = f"tools.{body.tools.index(tool)}.function.parameters"
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise ApiError.invalid(
                f"{place}.type must be 'object', because arguments are named, got {kind!r}; describe an object",
                param=place,
            )
        schemas.append((place, schema_grammar(tool.offered.schema)))
    return tuple(schemas)


def _with_reasoning(order: Order, start: ReasoningStart, served: ServedModel) -> Order:
    """The same with room for reasoning before what the grammar describes, which is the answer."""
    field, grammar = order.grammar_field, order.messages[0].sampling.grammar
    if field is None or grammar is None:
        return order
    whole = after_reasoning(grammar, start, served.special_ids)
    if whole is None:
        if start is ReasoningStart.MARKED:
            return order  # The model can answer without reasoning.
        raise ApiError.invalid(
            f"{field} of a {grammar.kind.value} needs an answer without reasoning, and the prompt asks for reasoning; "
            "switch it off by chat_template_kwargs, or write a JSON schema, a regex or choices",
            param=field,
        )
    return _with_grammar(order, whole, field, ((field, grammar),))


def _with_grammar(order: Order, grammar: Grammar, field: str, parts: tuple[tuple[str, Grammar], ...]) -> Order:
    messages = tuple(
        msgspec.structs.replace(message, sampling=msgspec.structs.replace(message.sampling, grammar=grammar))
        for message in order.messages
    )
    return msgspec.structs.replace(order, messages=messages, grammar_field=field, grammar_parts=parts)
