"""Turns a body of the OpenAI protocol into an order: one request for each choice.

Owns prompts, ids of choices, the room left for output, and the rules for combining the grammars of tools, reasoning and
structured output. Sends and compiles nothing.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from engine.core.limits import Limits
from engine.core.messages import Generate, Grammar
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody, NamedToolBody, OpenAiBody, ToolBody
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.schema.invalid_body import invalid_body
from engine.frontend.schema.native import parse_body
from engine.frontend.sessions.requests import (
    MAX_PROMPT_LOGPROBS,
    Order,
    ServedModel,
    check_fits,
    check_prompt_logprobs,
    check_vocabulary,
    rids_of,
    sampling_of,
    tokenize,
)
from engine.frontend.text.dialect import Parsing
from engine.frontend.text.reasoning import ReasoningStart
from engine.frontend.text.tools.argument_schemas import properties_of
from engine.frontend.text.tools.call_grammar import after_reasoning, calls_if_any, calls_or_answer, required_calls
from engine.frontend.text.tools.families import FAMILIES
from engine.grammar.source import schema_grammar

logger = logging.getLogger(__name__)


def completion_order(data: bytes, served: ServedModel) -> Order:
    """Return the order of a completion: all choices of the first prompt, then of the next. Raises ApiError."""
    body = parse_body(CompletionBody, data)
    lora = requested_lora(body.model, served)
    prompts = [
        tokenize(served, prompt, param="prompt", special=body.add_special_tokens is not False)
        if isinstance(prompt, str)
        else tuple(prompt)
        for prompt in body.prompts
    ]
    order = _order(body, "cmpl", prompts, served, param="prompt", top=body.logprobs, lora=lora)
    return msgspec.structs.replace(order, echo=_echoed(body, served), top_logprobs=body.logprobs or 0)


def chat_order(data: bytes, served: ServedModel) -> Order:
    """Return the order of a chat completion. Raises ApiError, also if the model has no chat template."""
    return order_of_chat(parse_body(ChatBody, data), served, "chatcmpl")


def order_of_chat(body: ChatBody, served: ServedModel, prefix: str) -> Order:
    """Return the order of a chat of any protocol; ``prefix`` begins a generated id. Raises ApiError.

    Fields that the protocol repeats in its reply go into ``Order.shown_request``.
    """
    lora = requested_lora(body.model, served)
    text, prompt = chat_prompt(body, served)
    top = body.top_logprobs if body.logprobs else None
    order = _order(body, prefix, [prompt], served, param="messages", top=top, lora=lora)
    return _with_calls(order, body, served.dialect.start_after(text), served)


def chat_prompt(body: ChatBody, served: ServedModel) -> tuple[str, tuple[int, ...]]:
    """Return the prompt of a chat as text and as token ids. Raises ApiError."""
    _require_parser(body.offered_tools, served)
    text = served.template.render(
        [message.for_template for message in body.messages],
        body.template_variables,
        ask=not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_last=body.continue_final_message,
        documents=body.documents,
        tools=[tool.for_template for tool in body.offered_tools],
    )
    # The template places the special tokens; the tokenizer must not add its own.
    return text, tokenize(served, text, param="messages", special=bool(body.add_special_tokens))


def require_model(model: str | None, served: str) -> None:
    """Raise ApiError (404) for a model that is not served here."""
    if model is not None and model != served:
        raise ApiError(
            ErrorType.NOT_FOUND,
            f"model must be {served!r}, the only one served here, got {model!r}; see /v1/models",
            param="model",
        )


def requested_lora(model: str | None, served: ServedModel) -> str | None:
    """Return the LoRA that a client requests as a model; None for the served model itself.

    Raises ApiError (404) on a server without LoRAs. The scheduler refuses unknown names.
    """
    if model is None or model == served.model_name:
        return None
    if not served.limits.max_loras:
        require_model(model, served.model_name)
    return model


def _order(
    body: OpenAiBody,
    prefix: str,
    prompts: list[tuple[int, ...]],
    served: ServedModel,
    *,
    param: str,
    top: int | None,
    lora: str | None,
) -> Order:
    limits, rid = served.limits, _answer_id(body, prefix)
    check_vocabulary(body.stop_token_ids, limits.vocab_size, "stop_token_ids")
    check_vocabulary(tuple(body.logit_bias), limits.vocab_size, "logit_bias")
    prompts = [_truncated(body, prompt_ids, limits) for prompt_ids in prompts]
    messages = _messages(body, rid, prompts, served, param=param, top=top, lora=lora)
    _check_shown_prompts(body, messages)
    return Order(
        rid=rid,
        messages=tuple(messages),
        stream=body.stream,
        n=body.n,
        logprobs=top is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        cached_tokens_details=body.return_cached_tokens_details,
        token_ids=body.return_token_ids,
        shows_special=not body.skip_special_tokens,
        shows_stop=body.include_stop_str_in_output,
        prompt_logprobs=body.prompt_logprobs,
        grammar_field=None if body.grammar is None else body.grammar[0],
        lora=lora,
    )


def _messages(
    body: OpenAiBody,
    rid: str,
    prompts: Sequence[tuple[int, ...]],
    served: ServedModel,
    *,
    param: str,
    top: int | None,
    lora: str | None,
) -> list[Generate]:
    """Return the requests of all choices of each prompt. Raises ApiError (400)."""
    limits, top_of_prompt = served.limits, body.top_of_prompt
    messages: list[Generate] = []
    rids = rids_of(rid, len(prompts) * body.n)
    for prompt_ids in prompts:
        check_vocabulary(prompt_ids, limits.vocab_size, param)
        sampling = body.sampling(_most_new_tokens(body, len(prompt_ids), limits), served.sampling_defaults)
        check_fits(len(prompt_ids), sampling.max_new_tokens, limits, param)
        for choice in range(body.n):
            # One choice computes the logprobs of a shared prompt for all; in a stream the other choices cannot wait for
            # it.
            asks = top_of_prompt is not None and (body.stream or not choice)
            messages.append(
                Generate(
                    rid=rids[len(messages)],
                    prompt_ids=prompt_ids,
                    sampling=sampling_of(sampling, choice),
                    priority=body.priority,
                    return_logprob=top is not None,
                    top_logprobs_num=top or 0,
                    prompt_logprobs_from=0 if asks else -1,
                    prompt_top_logprobs_num=(top_of_prompt or 0) if asks else 0,
                    timeout_s=body.timeout_s,
                    waiting_timeout_s=body.waiting_timeout_s,
                    lora=lora,
                    cache_salt=body.cache_salt,
                )
            )
    return messages


def _check_shown_prompts(body: OpenAiBody, messages: Sequence[Generate]) -> None:
    """Raise ApiError (400) for a reply that would repeat too much of its prompts."""
    param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_logprobs(messages, param, values_each=body.shown_of_prompt)
    shown_ids = sum(len(message.prompt_ids) for message in messages) if body.return_token_ids else 0
    if shown_ids > MAX_PROMPT_LOGPROBS:
        raise ApiError.at(
            "return_token_ids",
            f"must show at most {MAX_PROMPT_LOGPROBS} token ids of prompts, counted for each choice, got "
            f"{shown_ids}; leave it out, or request fewer choices",
        )


def _truncated(body: OpenAiBody, prompt_ids: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    """Return the requested tail of a prompt."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    if most < 0:
        most = max(1, limits.context_length - max([1, *body.asked_tokens.values()]))
    return prompt_ids[-most:]


def _most_new_tokens(body: OpenAiBody, prompt_tokens: int, limits: Limits) -> int:
    """Return the maximum output tokens after a prompt: the requested number, else the protocol's default or the room
    left.

    Raises ApiError (400) for a number that exceeds the context, rather than truncating the output silently.
    """
    in_context = limits.context_length - prompt_tokens
    if in_context < 1 and body.max_new_tokens != 0:
        return 1  # The prompt alone is too long; its own check refuses it.
    for name, tokens in body.asked_tokens.items():
        if tokens > in_context:
            raise ApiError.too_long(
                f"{name} must be <= {in_context}, which context_length={limits.context_length} leaves after a "
                f"prompt of {prompt_tokens} tokens, got {tokens}: this model's maximum context length is "
                f"{limits.context_length} tokens; lower it",
                param=name,
            )
    if body.max_new_tokens is not None:
        return body.max_new_tokens
    # The KV of the very last token is never written.
    room = min(in_context, limits.total_pages * limits.page_size + 1 - prompt_tokens)
    return max(1, min(room, body.default_new_tokens or room), body.min_tokens)


def _echoed(body: CompletionBody, served: ServedModel) -> tuple[str, ...]:
    """Return each prompt as text for an echo."""
    if not body.echo:
        return ()
    decode = served.tokenizer.decode
    return tuple(
        prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=False) for prompt in body.prompts
    )


def _answer_id(body: OpenAiBody, prefix: str) -> str:
    """Return the id of the reply: the client's own, or a new one."""
    rid = body.rid or body.request_id or f"{prefix}-{uuid.uuid4().hex}"
    user = body.safety_identifier or body.user
    if user is not None:
        logger.debug("request %s is of user %r", rid, user)
    return rid


def _require_parser(tools: Sequence[ToolBody], served: ServedModel) -> None:
    """Raise ApiError (400) for tools that the chat template cannot show, or whose calls no parser can find."""
    if not tools:
        return
    if served.dialect.family is None:
        raise ApiError.at(
            "tools",
            f"need a parser for the model's calls, but this server has none, got {len(tools)} tools; leave them "
            f"out, or start the server with tool_call_parser set to {' or '.join(map(repr, FAMILIES))}",
        )
    if not served.template.knows_tools:
        raise ApiError.at(
            "tools",
            f"need a chat template that shows them to the model, but this model's does not, got {len(tools)} tools; "
            "leave them out, or describe them in a message",
        )


def _with_calls(order: Order, body: ChatBody, start: ReasoningStart | None, served: ServedModel) -> Order:
    """Return the order of a chat whose output is parsed from ``start`` on. Raises ApiError (400)."""
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
            properties={tool.function.name: properties_of(tool.function.parameters) for tool in tools},
        ),
    )
    if not tools:
        return order if start is None else _with_reasoning(order, start, served)
    return _with_call_grammar(order, body, start, served)


def _with_call_grammar(order: Order, body: ChatBody, start: ReasoningStart | None, served: ServedModel) -> Order:
    """Add the grammar that ``tool_choice``, strict tools and structured output require."""
    form, special_ids = served.dialect.form, served.special_ids
    assert form is not None, "tools are refused without a parser"
    field, answer = order.grammar_field, order.messages[0].sampling.grammar
    offered = [tool.offered for tool in body.offered_tools]
    if body.required_tools:
        if field is not None:
            raise ApiError.at(
                field, "and a tool_choice that requires a call cannot both restrict the output; leave one of them out"
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
        raise ApiError.at(
            field,
            "and tools must be distinguishable from the beginning of an output, but this model's calls, or a "
            f"{answer.kind.value}, are not; leave one out",
        )
    return _with_grammar(order, grammar, field, ((field, answer), *_schemas(body, strict)))


def _schemas(body: ChatBody, tools: Sequence[ToolBody]) -> tuple[tuple[str, Grammar], ...]:
    """Return the argument schemas of tools with their places in the body. Raises ApiError (400) unless all are
    objects.
    """
    schemas = []
    for tool in tools:
        place = f"tools.{body.tools.index(tool)}.function.parameters"
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise ApiError.invalid(
                f"{place}.type must be 'object', because arguments have names, got {kind!r}; describe an object",
                param=place,
            )
        schemas.append((place, schema_grammar(tool.offered.schema)))
    return tuple(schemas)


def _with_reasoning(order: Order, start: ReasoningStart, served: ServedModel) -> Order:
    """Extend the grammar of the output by the reasoning before it."""
    field, grammar = order.grammar_field, order.messages[0].sampling.grammar
    if field is None or grammar is None:
        return order
    whole = after_reasoning(grammar, start, served.special_ids)
    if whole is None:
        if start is ReasoningStart.MARKED:
            return order  # The model can answer without reasoning.
        raise ApiError.at(
            field,
            f"of a {grammar.kind.value} needs an output without reasoning, but the prompt enables reasoning; switch "
            "it off with chat_template_kwargs, or use a JSON schema, a regex or choices",
        )
    return _with_grammar(order, whole, field, ((field, grammar),))


def _with_grammar(order: Order, grammar: Grammar, field: str, parts: tuple[tuple[str, Grammar], ...]) -> Order:
    messages = tuple(
        msgspec.structs.replace(message, sampling=msgspec.structs.replace(message.sampling, grammar=grammar))
        for message in order.messages
    )
    return msgspec.structs.replace(order, messages=messages, grammar_field=field, grammar_parts=parts)


_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


class Translation:
    """Translates bodies of another protocol to chats, and field names in errors back.

    ``names`` maps a chat's fields, as errors write them, to the protocol's.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        fields = "|".join(re.escape(name) for name in self._names)
        self._pattern = re.compile(rf"{_QUOTED}|(?<!\w)(?:{fields})(?!\w)")

    def chat(self, fields: Mapping[str, Any]) -> ChatBody:
        """Return the chat with these fields, without those that are None. Raises ApiError with the protocol's field
        names.
        """
        try:
            return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as exc:
            raise invalid_body(exc, ChatBody).reworded(self.reword) from exc

    def order(self, make: Callable[[], Order]) -> Order:
        """Return the order that ``make`` makes, with the protocol's field names. Raises ApiError with these names."""
        try:
            order = make()
        except ApiError as exc:
            raise exc.reworded(self.reword) from exc
        return msgspec.structs.replace(
            order,
            grammar_field=None if order.grammar_field is None else self.reword(order.grammar_field),
            grammar_parts=tuple((self.reword(place), grammar) for place, grammar in order.grammar_parts),
        )

    def reword(self, text: str) -> str:
        """Replace field names by the protocol's, except in quotations of the client."""
        return self._pattern.sub(lambda found: self._names.get(found[0], found[0]), text)
