"""One choice of a chat as a sequence of blocks: reasoning, text and tool calls.

Shared by all chat protocols: whole replies and streams are built from the same changes, so that they cannot differ.
Owns the indices and ids of calls, and the finish reason of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec

from engine.core.messages import FinishReason
from engine.frontend.schema.native import GenerateAnswer
from engine.frontend.sessions.sessions import Shaping
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from engine.frontend.text.tools.families import CallParser

# The characters to search for calls in one turn of the event loop: 10 ms if the text is nothing but calls.
CHARS_A_TURN: Final = 4096
# The protocol's finish reason for an output with calls.
TOOL_CALLS = "tool_calls"


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class Block:
    """A block. ``index`` is its position in the choice; ``name``, ``call_id`` and ``call_index`` are set for calls.

    ``is_cut``: it is a call whose arguments are not a complete JSON object.
    ``logprobs`` are encoded list items of its tokens' logprobs, if they are shown.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call_id: str = ""
    call_index: int = 0
    is_cut: bool = False
    written: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; for a call, its arguments."""
        return "".join(self.written)


class Begun(NamedTuple):
    block: Block


class Grown(NamedTuple):
    block: Block
    text: str
    logprobs: bytes = b""


class Ended(NamedTuple):
    block: Block


Change = Begun | Grown | Ended


def _ignore(whole: bool) -> None:
    """Ignore a call's end."""


class SpokenChoice:
    """A choice as blocks. ``parser`` finds its parts; None for plain text.

    ``new_id`` makes ids of calls; ``count`` gets, for each call, whether it is complete. ``named``: the client named
    the function to call. ``end_of_reasoning`` is the token that ends reasoning; None if it is not a single token.
    """

    def __init__(
        self,
        parser: AnswerParser | None = None,
        new_id: Callable[[], str] = CallParser.new_id,
        count: Callable[[bool], None] = _ignore,
        *,
        named: bool = False,
        end_of_reasoning: int | None = None,
    ) -> None:
        self.blocks: list[Block] = []
        # The finish reason; None while the choice continues.
        self.end: FinishReason | None = None
        self.is_plain = parser is None
        self._parser = parser
        self._new_id = new_id
        self._count_call = count
        self._named = named
        self._end_of_reasoning = end_of_reasoning
        self._calls = 0
        self._in_call = False
        self._has_cut_call = False
        self._reasoning_ended = False
        self._tokens_of_reasoning = 0

    def changes(self, piece: GenerateAnswer, *, says: bool = False) -> Iterator[Change]:
        """Yield the changes of a piece. With ``says``, a piece without text yields a change too."""
        self._count_tokens(piece.output_ids)
        parts, blocks = self._parts(piece), self.blocks
        for part in [Content("")] if says and not parts else parts:
            if isinstance(part, CallEnded):
                self._in_call = False
                self._count_call(True)
                continue
            if isinstance(part, CallBegun) or not blocks or blocks[-1].kind is not _KINDS[type(part)]:
                if blocks:
                    self._note_cut_call()
                    yield Ended(blocks[-1])
                blocks.append(self._new_block(part))
                yield Begun(blocks[-1])
            if not isinstance(part, CallBegun):
                blocks[-1].written.append(part.text)
                yield Grown(blocks[-1], part.text)
        if piece.meta_info.finish_reason is not None:
            self._note_cut_call()
            self.end = piece.meta_info.finish_reason
            if self._has_cut_call and _is_the_models_end(piece):
                self.end = FinishReason.LENGTH  # An output with arguments that are not JSON was truncated.
            if self.blocks:
                yield Ended(self.blocks[-1])

    def take(self, answer: GenerateAnswer, *, says: bool = False) -> Shaping[None]:
        """Take a whole output, in parts short enough for one turn of the event loop."""
        text, going = answer.text, msgspec.structs.replace(answer.meta_info, finish_reason=None)
        last = max(0, len(text) - 1) // CHARS_A_TURN * CHARS_A_TURN
        for start in range(0, last + 1, CHARS_A_TURN):
            part = msgspec.structs.replace(
                answer,
                text=text[start : start + CHARS_A_TURN],
                output_ids=() if start else answer.output_ids,
                meta_info=answer.meta_info if start == last else going,
            )
            for _ in self.changes(part, says=says):
                continue
            yield

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the protocol's finish reason."""
        end = self.end or reason
        if end is FinishReason.STOP and self._calls and not self._has_cut_call and not self._named:
            return TOOL_CALLS
        return end

    def _note_cut_call(self) -> None:
        if self._in_call:
            self.blocks[-1].is_cut = self._has_cut_call = True
            self._in_call = False
            self._count_call(False)

    @property
    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens so far; None if they cannot be distinguished."""
        if self._end_of_reasoning is None:
            return None
        # Reasoning comes first.
        if not self.blocks or self.blocks[0].kind is not BlockKind.REASONING:
            return 0
        return self._tokens_of_reasoning

    def is_cut(self, block: Block) -> bool:
        """Return whether the output was truncated in this block."""
        if block.kind is BlockKind.CALL:
            return block.is_cut
        return self.end not in (None, FinishReason.STOP) and block is self.blocks[-1]

    def _parts(self, piece: GenerateAnswer) -> list[Part]:
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        parts = self._parser.push(piece.text)
        if piece.meta_info.finish_reason is None:
            return parts
        return parts + self._parser.flush(stopped=_is_the_models_end(piece))

    def _count_tokens(self, ids: tuple[int, ...]) -> None:
        if self._reasoning_ended or self._end_of_reasoning is None:
            return
        self._reasoning_ended = self._end_of_reasoning in ids
        self._tokens_of_reasoning += ids.index(self._end_of_reasoning) + 1 if self._reasoning_ended else len(ids)

    def _new_block(self, part: Reasoning | Content | CallBegun | CallArguments) -> Block:
        if not isinstance(part, CallBegun):
            return Block(_KINDS[type(part)], len(self.blocks))
        self._in_call = True
        self._calls += 1
        return Block(BlockKind.CALL, len(self.blocks), part.name, part.id or self._new_id(), self._calls - 1)


def _is_the_models_end(piece: GenerateAnswer) -> bool:
    """Return whether the model ended the text itself, rather than a limit or a stop string."""
    meta = piece.meta_info
    return meta.finish_reason is FinishReason.STOP and not isinstance(meta.matched_stop, str)


_KINDS = {Reasoning: BlockKind.REASONING, Content: BlockKind.TEXT, CallArguments: BlockKind.CALL}

# A function that makes the splitter of a choice.
NewChoice = Callable[[], SpokenChoice]
