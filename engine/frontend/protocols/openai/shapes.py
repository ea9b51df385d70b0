"""Shapes the engine's outputs for the OpenAI protocol, whole or as events of a stream.

Owns ids, indices, the format of logprobs, and token counts; one object for each HTTP request. Sends nothing.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from engine.frontend.protocols.openai.answers import (
    CalledFunction,
    CalledFunctionDelta,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    Extension,
    PromptDetails,
    PromptTokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from engine.frontend.protocols.openai.chat_blocks import BlockKind, Change, Ended, Grown, NewChoice, SpokenChoice
from engine.frontend.schema.native import CachedTokensDetails, GenerateAnswer, InputTopLogprob, MetaInfo, OutputLogprob
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.sessions.sessions import DONE, Shape, Shaping, finished, listed, spelled
from engine.frontend.text.answer import Decoder, Detokenizer, TokenTexts, WholeDecoder

RankedPrompt = list[dict[str, PromptTokenLogprob] | None]
_Said = TypeVar("_Said", "_PromptEntry", OutputLogprob)


class Counts:
    """Token counts of all choices; ``n`` consecutive choices share a prompt."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[int, MetaInfo] = {}
        # By choice, if known.
        self._reasoning: dict[int, int] = {}

    def note(self, index: int, meta: MetaInfo, choice: SpokenChoice | None = None) -> None:
        self._last[index] = meta
        if choice is not None and (reasoning := choice.reasoning_tokens) is not None:
            self._reasoning[index] = reasoning

    def usage(self) -> Usage:
        prompts = self._prompts()
        prompt_tokens = sum(meta.prompt_tokens for meta in prompts)
        completion_tokens = sum(meta.completion_tokens for meta in self._last.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(meta.cached_tokens for meta in prompts)),
            completion_tokens_details=CompletionDetails(reasoning_tokens=sum(self._reasoning.values()))
            if self._reasoning
            else msgspec.UNSET,
        )

    def extension(self) -> Extension:
        """Return the cached tokens of all prompts by tier; they add up to the cached tokens of the usage."""
        details = [meta.cached_tokens_details for meta in self._prompts()]
        tiers = CachedTokensDetails(device=sum(one.device for one in details), host=sum(one.host for one in details))
        return Extension(cached_tokens_details=tiers)

    def _prompts(self) -> list[MetaInfo]:
        """Return the data of the first choice of each prompt, of those that have come."""
        return list({index // self._n: self._last[index] for index in sorted(self._last, reverse=True)}.values())


class _Shape(Shape):
    """The common base of completions and chats."""

    event: ClassVar[type[msgspec.Struct]]
    end = DONE

    def __init__(self, order: Order, served: ServedModel) -> None:
        self._head: dict[str, Any] = {
            "id": order.rid,
            "created": int(time.time()),
            "model": order.lora or served.model_name,
        }
        self._texts = TokenTexts(served.tokenizer)
        self._prompt_logprobs = order.prompt_logprobs
        self._logprobs = order.logprobs
        self._include_usage = order.include_usage
        self._continuous_usage = order.continuous_usage
        self._shows_tiers = order.cached_tokens_details
        self._prompt_ids = [one.prompt_ids for one in order.messages] if order.token_ids else []
        self._counts = Counts(order.n)

    def last_events(self) -> Iterator[msgspec.Struct]:
        """Yield the cached tokens by tier and the token counts, if requested."""
        if self._shows_tiers:
            yield self.event(**self._head, choices=[], sglext=self._counts.extension())
        if self._include_usage:
            yield self.event(**self._head, choices=[], usage=self._counts.usage())

    def _event_of(self, choice: CompletionChoice | ChatChunkChoice) -> msgspec.Struct:
        usage: Usage | msgspec.UnsetType | None = None if self._include_usage else msgspec.UNSET
        if self._continuous_usage:
            usage = self._counts.usage()
        return self.event(**self._head, choices=[choice], usage=usage)

    def _extension(self) -> Extension | msgspec.UnsetType:
        """Return the cached tokens by tier for a whole reply, if requested."""
        return self._counts.extension() if self._shows_tiers else msgspec.UNSET

    def _ids(self, piece: GenerateAnswer) -> tuple[int, ...] | msgspec.UnsetType:
        """Return the ids of a piece, if requested."""
        return piece.output_ids if self._prompt_ids else msgspec.UNSET


class CompletionShape(_Shape):
    """Shapes replies of ``/v1/completions``. With echo, each choice begins with its prompt."""

    event = CompletionAnswer

    def __init__(self, order: Order, served: ServedModel) -> None:
        super().__init__(order, served)
        self._tokenizer = WholeDecoder(served.tokenizer) if order.shows_special else served.tokenizer
        self._has_begun: set[int] = set()
        self._n = order.n
        self._echo = {index: order.echo[index // order.n] for index in range(len(order.echo) * order.n)}
        self._top_logprobs = order.top_logprobs
        self._echo_offsets = {
            index: EchoOffsets(served.tokenizer, self._texts, one)
            for index, one in self._echo.items()
            if order.logprobs
        }
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[msgspec.Struct]:
        choices: list[CompletionChoice] = []
        of_prompt: _OfPrompt | None = None
        for index, answer in enumerate(answers):
            if of_prompt is None or index % self._n == 0:
                # Consecutive choices share a prompt, whose logprobs came with the first one.
                of_prompt = yield from self._of_prompt(index, answer)
            choices.append((yield from self._choice(index, answer, of_prompt)))
            if len(answers) > 1:
                yield
        return CompletionAnswer(**self._head, choices=choices, usage=self._counts.usage(), sglext=self._extension())

    def events(self, index: int, piece: GenerateAnswer) -> Iterator[msgspec.Struct]:
        choice = finished(self._choice(index, piece, finished(self._of_prompt(index, piece))))
        if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids:
            yield self._event_of(choice)

    def _choice(self, index: int, piece: GenerateAnswer, of_prompt: _OfPrompt) -> Shaping[CompletionChoice]:
        self._counts.note(index, piece.meta_info)
        echo = self._echo.pop(index, "")
        logprobs = None
        if self._logprobs:
            offsets = self._offsets.setdefault(index, _Offsets(self._tokenizer, begin=len(echo)))
            said = yield from _columns(_entries(piece), offsets.before, self._texts, lambda entry: dict(entry.top))
            tokens, values, tops, places = map(listed, of_prompt.echoed, said)
            logprobs = CompletionLogprobs(tokens=tokens, token_logprobs=values, top_logprobs=tops, text_offset=places)
        begins = bool(self._prompt_ids) and index not in self._has_begun
        self._has_begun.add(index)
        return CompletionChoice(
            index=index,
            token_ids=self._ids(piece),
            prompt_token_ids=self._prompt_ids[index] if begins else msgspec.UNSET,
            text=echo + piece.text,
            logprobs=logprobs,
            finish_reason=piece.meta_info.finish_reason,
            prompt_logprobs=of_prompt.ranked,
        )

    def _of_prompt(self, index: int, piece: GenerateAnswer) -> Shaping[_OfPrompt]:
        offsets, most = self._echo_offsets.get(index), self._prompt_logprobs
        columns = (b"", b"", b"", b"")
        if offsets is not None:
            columns = yield from echoed(piece, self._top_logprobs, self._texts, offsets)
        values = msgspec.UNSET if most is None else (yield from ranked(piece, most, self._texts))
        return _OfPrompt(columns, values)


class ChatShape(_Shape):
    """Shapes replies of ``/v1/chat/completions``. ``new_choice`` makes the parser of a choice."""

    event = ChatChunk

    def __init__(self, order: Order, served: ServedModel, new_choice: NewChoice = SpokenChoice) -> None:
        super().__init__(order, served)
        self._choices = [new_choice() for _ in range(order.n)]
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[msgspec.Struct]:
        choices = []
        for index, answer in enumerate(answers):
            spoken = self._choices[index]
            yield from spoken.take(answer)
            self._counts.note(index, answer.meta_info, spoken)
            choices.append(
                ChatChoice(
                    index=index,
                    message=_message_of(spoken),
                    logprobs=(yield from self._spelled(answer)),
                    finish_reason=spoken.finish_reason(answer.meta_info.finish_reason),
                    token_ids=self._ids(answer),
                )
            )
        most = self._prompt_logprobs
        return ChatAnswer(
            **self._head,
            choices=choices,
            usage=self._counts.usage(),
            sglext=self._extension(),
            prompt_token_ids=self._prompt_ids[0] if self._prompt_ids else msgspec.UNSET,
            prompt_logprobs=msgspec.UNSET if most is None else (yield from ranked(answers[0], most, self._texts)),
        )

    def events(self, index: int, piece: GenerateAnswer) -> Iterator[msgspec.Struct]:
        """Yield the role before a choice's first piece, then an event for each delta."""
        spoken = self._choices[index]
        if index not in self._begun:
            self._begun.add(index)
            self._counts.note(index, piece.meta_info)
            # An output that may have other parts need not have content.
            yield self._delta(index, ChatDelta(role="assistant", content="" if spoken.is_plain else msgspec.UNSET))
        if spoken.is_plain:  # The common case, kept fast.
            deltas = [ChatDelta(content=piece.text)] if piece.text else []
        else:
            deltas = [delta for change in spoken.changes(piece) if (delta := _delta_of(change)) is not None]
        self._counts.note(index, piece.meta_info, spoken)
        logprobs = finished(self._spelled(piece))
        ids = self._ids(piece)
        if (logprobs is not None or ids) and not deltas:
            deltas = [ChatDelta(content="") if spoken.is_plain else ChatDelta()]
        for number, delta in enumerate(deltas):
            yield self._delta(index, delta, logprobs=None if number else logprobs, ids=msgspec.UNSET if number else ids)
        if piece.meta_info.finish_reason is not None:
            reason = spoken.finish_reason(piece.meta_info.finish_reason)
            yield self._delta(index, ChatDelta(), finish_reason=reason)

    def _delta(
        self,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> msgspec.Struct:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, token_ids=ids
        )
        event = self._event_of(choice)
        if delta.role is not msgspec.UNSET and self._prompt_ids:
            return msgspec.structs.replace(event, prompt_token_ids=self._prompt_ids[0])
        return event

    def _spelled(self, piece: GenerateAnswer) -> Shaping[ChatLogprobs | None]:
        entries = _entries(piece)
        if not self._logprobs or not entries:
            return None
        return ChatLogprobs(content=listed((yield from spelled_logprobs(piece, self._texts))))


def _message_of(spoken: SpokenChoice) -> ChatMessage:
    """Return the message of a choice; plain text may be empty."""

    def written(kind: BlockKind) -> str:
        return "".join(block.text for block in spoken.blocks if block.kind is kind)

    content = written(BlockKind.TEXT)
    calls = [
        ToolCall(id=block.call_id, function=CalledFunction(name=block.name, arguments=block.text))
        for block in spoken.blocks
        if block.kind is BlockKind.CALL
    ]
    return ChatMessage(
        content=content if content or spoken.is_plain else None,
        reasoning_content=written(BlockKind.REASONING) or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def _delta_of(change: Change) -> ChatDelta | None:
    """Return the delta of a change; a call's start and its arguments are separate deltas."""
    block = change.block
    if isinstance(change, Grown):
        if block.kind is BlockKind.TEXT:
            return ChatDelta(content=change.text)
        if block.kind is BlockKind.REASONING:
            return ChatDelta(reasoning_content=change.text)
        more = ToolCallDelta(index=block.call_index, function=CalledFunctionDelta(arguments=change.text))
        return ChatDelta(tool_calls=[more])
    if isinstance(change, Ended) or block.kind is not BlockKind.CALL:
        return None
    begun = CalledFunctionDelta(name=block.name, arguments="")
    call = ToolCallDelta(index=block.call_index, id=block.call_id, type="function", function=begun)
    return ChatDelta(tool_calls=[call])


class BlockShape(Shape):
    """Base of the shapes that show an output of one choice as blocks.

    ``texts`` spells the logprobs of an output that is plain text; None shows no logprobs.
    """

    def __init__(self, spoken: SpokenChoice, texts: TokenTexts | None = None) -> None:
        self._spoken = spoken
        self._texts = texts
        self._counts = Counts(1)
        self._meta: MetaInfo | None = None

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        (answer,) = answers
        logprobs = b"" if self._texts is None else (yield from spelled_logprobs(answer, self._texts))
        yield from self._spoken.take(answer, says=bool(logprobs))
        self._note(answer.meta_info)
        if logprobs:
            self._spoken.blocks[0].logprobs = [logprobs]
        return self._answer()

    def events(self, index: int, piece: GenerateAnswer) -> Iterator[msgspec.Struct]:  # noqa: ARG002 - there is one
        """Yield the events of a piece; the opening events precede the first piece."""
        if self._meta is None:
            self._meta = piece.meta_info
            self._counts.note(0, piece.meta_info)
            yield from self._first_events()
        logprobs = b"" if self._texts is None else finished(spelled_logprobs(piece, self._texts))
        for change in self._spoken.changes(piece, says=bool(logprobs)):
            if isinstance(change, Grown) and logprobs:
                change.block.logprobs.append(logprobs)
                change = change._replace(logprobs=logprobs)
            yield from self._shown(change)
        self._note(piece.meta_info)

    @abstractmethod
    def _answer(self) -> msgspec.Struct:
        """Return the reply so far."""

    @abstractmethod
    def _first_events(self) -> Iterator[msgspec.Struct]: ...

    @abstractmethod
    def _shown(self, change: Change) -> Iterator[msgspec.Struct]: ...

    def _note(self, meta: MetaInfo) -> None:
        self._meta = meta
        self._counts.note(0, meta, self._spoken)


def spelled_logprobs(piece: GenerateAnswer, texts: TokenTexts) -> Shaping[bytes]:
    """Encode the logprobs of a piece's tokens for chats and responses: the inside of a JSON list."""

    def spell(entry: OutputLogprob) -> ChatLogprob:
        return ChatLogprob(
            token=texts.text_of(entry.token_id),
            logprob=entry.logprob,
            bytes=list(texts.bytes_of(entry.token_id)),
            top_logprobs=[
                TopLogprob(token=texts.text_of(token_id), logprob=logprob, bytes=list(texts.bytes_of(token_id)))
                for token_id, logprob in entry.top
            ],
        )

    entries = _entries(piece)
    return (yield from spelled(entries, _width(entries), spell))


class _Offsets:
    """Text offsets of the tokens of one choice, from ``begin`` on."""

    def __init__(self, decoder: Decoder, *, begin: int = 0) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._chars = begin

    def before(self, token_id: int) -> int:
        """Return the next token's offset in characters; a token inside a character has that character's offset."""
        offset = self._chars
        self._chars += len(self._text_of(token_id))
        return offset

    def _text_of(self, token_id: int) -> str:
        return self._detokenizer.push(token_id)


def _entries(piece: GenerateAnswer) -> tuple[OutputLogprob, ...]:
    entries = piece.meta_info.output_logprobs
    return entries if isinstance(entries, tuple) else ()


# An offset takes three calls of the tokenizer, as long as encoding this many values.
_VALUES_OF_AN_OFFSET: Final = 16
# The contents of four lists: tokens, logprobs, most likely tokens, offsets.
_Columns = tuple[bytes, bytes, bytes, bytes]


class _PromptEntry(NamedTuple):
    """One token of a prompt. The first token has neither logprob nor rank."""

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[InputTopLogprob, ...]


class _OfPrompt(NamedTuple):
    """Logprobs of a prompt: echoed before the output's, and ranked."""

    echoed: _Columns
    ranked: RankedPrompt | msgspec.UnsetType


class EchoOffsets(_Offsets):
    """Text offsets of the tokens of one prompt, aligned to the end of its text."""

    def __init__(self, decoder: Decoder, texts: TokenTexts, echo: str) -> None:
        super().__init__(decoder)
        self._texts = texts
        self._echo = echo

    def _text_of(self, token_id: int) -> str:
        text = super()._text_of(token_id)
        if not text:
            # A special token has text only if the client wrote it.
            spelled = self._texts.text_of(token_id)
            text = spelled if self._echo.startswith(spelled, self._chars) else ""
        return text[: len(self._echo) - self._chars]


def echoed(piece: GenerateAnswer, most: int, texts: TokenTexts, offsets: EchoOffsets) -> Shaping[_Columns]:
    """Return the logprobs of an echoed prompt or a part of it, with the ``most`` most likely tokens."""
    entries = _prompt_entries(piece)
    return (yield from _columns(entries, offsets.before, texts, lambda one: {t: v for v, t, _ in one.top[:most]}))


def ranked(answer: GenerateAnswer, most: int, texts: TokenTexts) -> Shaping[RankedPrompt]:
    """Return, for each prompt token, its logprob and the ``most`` highest ones by token id."""

    def spell(entry: _PromptEntry) -> dict[str, PromptTokenLogprob] | None:
        return None if entry.logprob is None else _ranked_entry(entry, most, texts)

    result: RankedPrompt = listed((yield from spelled(_prompt_entries(answer), 1 + most, spell)))
    return result


def _columns(
    entries: Sequence[_Said],
    offset_of: Callable[[int], int],
    texts: TokenTexts,
    top_of: Callable[[_Said], dict[int, float]],
) -> Shaping[_Columns]:
    """Return tokens and their logprobs in the format of completions."""

    def spell_top(entry: _Said) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        best: dict[str, float] = {}
        for token_id, logprob in top_of(entry).items():
            # Of tokens with the same text the most likely one is shown.
            best.setdefault(texts.text_of(token_id), logprob)
        return best

    return (
        (yield from spelled(entries, 1, lambda entry: texts.text_of(entry.token_id))),
        (yield from spelled(entries, 1, lambda entry: entry.logprob)),
        (yield from spelled(entries, _width(entries), spell_top)),
        (yield from spelled(entries, _VALUES_OF_AN_OFFSET, lambda entry: offset_of(entry.token_id))),
    )


def _width(entries: Sequence[_PromptEntry] | Sequence[OutputLogprob]) -> int:
    """Return the number of values in each entry."""
    return 1 + len(entries[-1].top) if entries else 1


def _ranked_entry(entry: _PromptEntry, most: int, texts: TokenTexts) -> dict[str, PromptTokenLogprob]:
    said = (entry.token_id, entry.logprob, entry.rank)
    best = [(token, logprob, rank) for rank, (logprob, token, _) in enumerate(entry.top[:most], 1)]
    ranked_tokens: dict[str, PromptTokenLogprob] = {}
    for token, logprob, rank in (said, *best):
        if logprob is not None and rank is not None:
            text = texts.text_of(token)
            ranked_tokens[str(token)] = PromptTokenLogprob(logprob=logprob, rank=rank, decoded_token=text)
    return ranked_tokens


def _prompt_entries(answer: GenerateAnswer) -> list[_PromptEntry]:
    meta = answer.meta_info
    values = meta.input_token_logprobs or ()
    ranks = meta.input_token_ranks or ()
    tops = meta.input_top_logprobs or ((),) * len(values)
    return [
        _PromptEntry(token, logprob, rank, top or ())
        for (logprob, token, _), rank, top in zip(values, ranks, tops, strict=True)
    ]
