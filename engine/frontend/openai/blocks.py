"""An answer as a sequence of blocks: reasoning, text and calls of tools, one after the other.

What the protocols have in common that show an answer so, whole and as a stream. Both are made of the same changes, so
that they cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from engine.frontend.openai.answers import ChatDelta
from engine.frontend.openai.shapes import Counts, plain_deltas, spelled_logprobs
from engine.frontend.openai.spoken import SpokenChoice, turns_of
from engine.frontend.protocol import GenerateAnswer, MetaInfo
from engine.frontend.sessions import Shaping, finished
from engine.frontend.token_texts import TokenTexts
from engine.messages import FinishReason


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class Block:
    """``index`` counts the blocks of the answer; ``name`` and ``call_id`` are those of a call.

    ``logprobs`` are the insides of the lists of its tokens' logprobs, where they are shown.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call_id: str = ""
    written: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was written so far; of a call, its arguments."""
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


class BlockShape(ABC):
    """The part of a protocol's shape that takes an answer of one choice apart.

    ``new_choice`` makes what finds the parts of an answer; None: it is plain text. ``texts`` spell the logprobs of an
    answer that is plain text; None: they are not shown.
    """

    end = b""

    def __init__(self, new_choice: Callable[[], SpokenChoice] | None, texts: TokenTexts | None = None) -> None:
        self._spoken = None if new_choice is None else new_choice()
        self._texts = texts
        self._counts = Counts(1)
        self._meta: MetaInfo | None = None
        self._blocks: list[Block] = []
        self._is_open = self._is_over = False

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        logprobs = b"" if self._texts is None else (yield from spelled_logprobs(answers[0], self._texts))
        for part in turns_of(answers[0]):
            for _ in self._changes(part, says=bool(logprobs)):
                continue
            yield
        if logprobs:
            self._blocks[0].logprobs = [logprobs]
        return self._answer()

    def events(self, index: int, piece: GenerateAnswer) -> Iterator[msgspec.Struct]:  # noqa: ARG002 - there is one
        """The events that show a piece of the answer; the first piece has what begins it before them."""
        if self._meta is None:
            self._meta = piece.meta_info
            self._counts.note(0, piece.meta_info)
            yield from self._first_events()
        logprobs = b"" if self._texts is None else finished(spelled_logprobs(piece, self._texts))
        for change in self._changes(piece, says=bool(logprobs)):
            if isinstance(change, Grown) and logprobs:
                change.block.logprobs.append(logprobs)
                change = change._replace(logprobs=logprobs)
            yield from self._shown(change)

    @abstractmethod
    def _answer(self) -> msgspec.Struct:
        """What is known of the answer so far."""

    @abstractmethod
    def _first_events(self) -> Iterator[msgspec.Struct]: ...

    @abstractmethod
    def _shown(self, change: Change) -> Iterator[msgspec.Struct]: ...

    def _changes(self, piece: GenerateAnswer, *, says: bool = False) -> Iterator[Change]:
        """What a piece changes. One that ``says`` more than text does so with an empty text too."""
        self._meta = piece.meta_info
        deltas = plain_deltas(piece) if self._spoken is None else self._spoken.deltas(piece)
        if says and not deltas:
            deltas = [ChatDelta(content="")]
        self._counts.note(0, piece.meta_info)
        if self._spoken is not None and self._spoken.reasoning_tokens is not None:
            self._counts.reasoning[0] = self._spoken.reasoning_tokens
        for delta in deltas:
            yield from self._of_delta(delta)
        if piece.meta_info.finish_reason is not None:
            self._is_over = True
            yield from self._ended()

    @property
    def _reason(self) -> FinishReason | None:
        """Why the answer ended; None while it goes on."""
        return self._meta.finish_reason if self._is_over and self._meta is not None else None

    def _is_cut(self, block: Block) -> bool:
        """Whether the answer ended early, in this block."""
        return self._reason not in (None, FinishReason.STOP) and block is self._blocks[-1]

    def _of_delta(self, delta: ChatDelta) -> Iterator[Change]:
        if isinstance(delta.reasoning_content, str):
            yield from self._grown(BlockKind.REASONING, delta.reasoning_content)
        if isinstance(delta.content, str):
            yield from self._grown(BlockKind.TEXT, delta.content)
        for call in delta.tool_calls or ():
            if isinstance(call.id, str) and isinstance(call.function.name, str):
                yield from self._begun(Block(BlockKind.CALL, len(self._blocks), call.function.name, call.id))
            if call.function.arguments:
                yield from self._grown(BlockKind.CALL, call.function.arguments)

    def _grown(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if not self._is_open or self._blocks[-1].kind is not kind:
            yield from self._begun(Block(kind, len(self._blocks)))
        self._blocks[-1].written.append(text)
        yield Grown(self._blocks[-1], text)

    def _begun(self, block: Block) -> Iterator[Change]:
        yield from self._ended()
        self._blocks.append(block)
        self._is_open = True
        yield Begun(block)

    def _ended(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield Ended(self._blocks[-1])
