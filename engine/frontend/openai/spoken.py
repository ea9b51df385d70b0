"""One choice of a chat whose answer has parts: the deltas of its stream, and the message that they add up to.

Owns indices and ids of calls, and why the choice ended. The message in one is made of the same deltas, so that a stream
and an answer in one cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from msgspec import UNSET

from engine.frontend.dialect import AnswerParser
from engine.frontend.openai.answers import (
    CalledFunction,
    CalledFunctionDelta,
    ChatDelta,
    ChatMessage,
    ToolCall,
    ToolCallDelta,
)
from engine.frontend.protocol import GenerateAnswer
from engine.frontend.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from engine.frontend.sessions import Shaping
from engine.messages import FinishReason

# Characters that are looked through for calls before the event loop turns: 10 ms where there is nothing but calls.
CHARS_A_TURN: Final = 4096
# The protocol's reason for an answer that waits for its calls to be answered.
TOOL_CALLS = "tool_calls"


class SpokenChoice:
    """``new_id`` makes ids of calls, ``count`` is told of each whether it is whole.

    ``named``: the client named the function to be called.
    ``end_of_reasoning`` is the token that ends reasoning, None where it is not one token.
    """

    def __init__(
        self,
        parser: AnswerParser,
        new_id: Callable[[], str],
        count: Callable[[bool], None],
        *,
        named: bool,
        end_of_reasoning: int | None,
    ) -> None:
        self._parser = parser
        self._new_id = new_id
        self._count_call = count
        self._named = named
        self._end_of_reasoning = end_of_reasoning
        self._calls = 0
        self._in_call = False
        self._has_reasoned = False
        self._reasoning_ended = False
        self._tokens_of_reasoning = 0

    def deltas(self, piece: GenerateAnswer) -> list[ChatDelta]:
        """What is new with a piece of the answer; a call's beginning and its arguments are deltas of their own."""
        self._count_tokens(piece.output_ids)
        parts = self._parser.push(piece.text)
        if piece.meta_info.finish_reason is not None:
            parts += self._parser.flush()
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        if piece.meta_info.finish_reason is not None and self._in_call:
            self._count_call(False)
        return deltas

    def message(self, answer: GenerateAnswer) -> Shaping[ChatMessage]:
        deltas = []
        for part in turns_of(answer):
            deltas += self.deltas(part)
            yield
        return _message(deltas)

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Why the choice ended, in the protocol's words. A call that was cut is no reason to answer it."""
        if reason is FinishReason.STOP and self._calls and not self._in_call and not self._named:
            return TOOL_CALLS
        return reason

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None where they cannot be told from others."""
        if self._end_of_reasoning is None:
            return None
        return self._tokens_of_reasoning if self._has_reasoned else 0

    def _count_tokens(self, ids: tuple[int, ...]) -> None:
        if self._reasoning_ended or self._end_of_reasoning is None:
            return
        self._reasoning_ended = self._end_of_reasoning in ids
        self._tokens_of_reasoning += ids.index(self._end_of_reasoning) + 1 if self._reasoning_ended else len(ids)

    def _delta(self, part: Part) -> ChatDelta | None:
        match part:
            case Reasoning(text):
                self._has_reasoned = True
                return ChatDelta(reasoning_content=text)
            case Content(text):
                return ChatDelta(content=text)
            case CallBegun(name, call_id):
                if self._in_call:
                    self._count_call(False)
                self._calls += 1
                self._in_call = True
                function = CalledFunctionDelta(name=name, arguments="")
                return self._of_call(function, call_id or self._new_id())
            case CallArguments(text):
                return self._of_call(CalledFunctionDelta(arguments=text))
            case CallEnded():
                self._in_call = False
                self._count_call(True)
                return None

    def _of_call(self, function: CalledFunctionDelta, call_id: str | None = None) -> ChatDelta:
        index = self._calls - 1
        if call_id is None:
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=function)])
        return ChatDelta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)])


def turns_of(answer: GenerateAnswer) -> Iterator[GenerateAnswer]:
    """An answer in parts, each short enough to be looked through in one turn of the event loop."""
    text, going = answer.text, msgspec.structs.replace(answer.meta_info, finish_reason=None)
    ids = answer.output_ids
    while len(text) > CHARS_A_TURN:
        yield msgspec.structs.replace(answer, text=text[:CHARS_A_TURN], output_ids=ids, meta_info=going)
        text, ids = text[CHARS_A_TURN:], ()
    yield msgspec.structs.replace(answer, text=text, output_ids=ids)


def _message(deltas: Iterable[ChatDelta]) -> ChatMessage:
    """What deltas add up to, as clients add them up."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        content += [delta.content] if isinstance(delta.content, str) else []
        reasoning += [delta.reasoning_content] if isinstance(delta.reasoning_content, str) else []
        for call in delta.tool_calls or ():
            if isinstance(call.id, str) and isinstance(call.function.name, str):
                calls.append((call.id, call.function.name, []))
            if isinstance(call.function.arguments, str):
                calls[call.index][2].append(call.function.arguments)
    return ChatMessage(
        content="".join(content) or None,
        reasoning_content="".join(reasoning) or UNSET,
        tool_calls=[
            ToolCall(id=call_id, function=CalledFunction(name=name, arguments="".join(arguments)))
            for call_id, name, arguments in calls
        ]
        or UNSET,
    )
