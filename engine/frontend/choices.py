"""Several generations that answer one HTTP request: sent together, read as they come, aborted together.

Owns their order and their common end; each keeps its own text. Pieces are made when they are asked for, all that are
there at once, by the code that sends them on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from engine.frontend.answer import is_shown, joined
from engine.frontend.detokenizer import Decoder
from engine.frontend.engine_client import EngineClient
from engine.frontend.errors import LORA_PARAM, ApiError
from engine.frontend.generation import Generation, TimedOut
from engine.frontend.metrics import Metrics
from engine.frontend.order import Order
from engine.frontend.protocol import GenerateAnswer
from engine.messages import TokenOutput

__all__ = ["OUTPUTS_A_TURN", "TOKENS_A_TURN", "Choices", "IndexedPiece"]

# Prompt tokens that are sent before the event loop turns: 2 ms of them. All choices of a long prompt may take 100 ms.
TOKENS_A_TURN: Final = 262_144
# Outputs that become pieces before the event loop turns: a client that took nothing for a while has many.
OUTPUTS_A_TURN: Final = 32

IndexedPiece = tuple[int, GenerateAnswer]


class Choices:
    """The answers of the requests of ``order``, which ``send`` sends.

    ``on_output`` is called when an output has come, or a failure.
    """

    def __init__(self, client: EngineClient, decoder: Decoder, metrics: Metrics, order: Order) -> None:
        self._client = client
        self._decoder = decoder
        self._metrics = metrics
        self._order = order
        self._generations: list[Generation] = []
        self._aborted = False
        self._outputs: deque[tuple[int, TokenOutput | ApiError]] = deque()
        self._ended = 0
        self._has_shown = False
        self._overdue: list[tuple[int, TimedOut]] = []
        self._failure: ApiError | None = None
        self.on_output: Callable[[], None] = _ignore

    async def send(self) -> bool:
        """Send all in order; the event loop turns in between when prompts are long. False when ``abort`` came first.

        What was sent by then is aborted, and nothing else is sent. Raises ApiError when one is refused: the others are
        aborted.
        """
        tokens = 0
        try:
            for index, message in enumerate(self._order.messages):
                if tokens >= TOKENS_A_TURN:
                    tokens = 0
                    await asyncio.sleep(0)
                if self._aborted:
                    return False
                times, hand_over = self._metrics.begin(), partial(self._take, index)
                generation = Generation(
                    self._client, self._decoder, message, times, hand_over, grammar_field=self._order.grammar_field
                )
                self._generations.append(generation)
                tokens += len(message.prompt_ids)
        except (ApiError, asyncio.CancelledError):
            self.abort()
            raise
        return True

    def abort(self) -> None:
        """Ask the scheduler to end all of them; a no-op for those that have ended."""
        self._aborted = True
        for generation in self._generations:
            generation.abort()

    @property
    def has_more(self) -> bool:
        """True while ``pieces`` would give or raise something at once."""
        return bool(self._outputs) or self._failure is not None

    @property
    def is_over(self) -> bool:
        """True once the last choice has ended, and its last piece was given."""
        return self._ended == len(self._generations) and not self.has_more

    def pieces(self) -> list[IndexedPiece]:
        """The pieces that are there, up to a bound, with the index of their choice, in the order in which they came.

        Raises ApiError, after what came before it, when a choice was refused or failed; the others are aborted then. A
        choice whose time was over before its first token fails the answer only if no other choice has a token.
        """
        pieces: list[IndexedPiece] = []
        try:
            if self._failure is not None:
                raise self._failure
            for _ in range(min(len(self._outputs), OUTPUTS_A_TURN)):
                pieces += self._shown(*self._outputs.popleft())
        except ApiError as exc:
            self._failure = exc
            self._outputs.clear()
            self.abort()
            if not pieces:
                raise
        return pieces

    async def next_pieces(self) -> list[IndexedPiece]:
        """The next pieces, at least one; none once all were given. Raises ApiError as ``pieces`` does."""
        while not (pieces := self.pieces()) and not self.is_over:
            if not self.has_more:
                await self._come()
        return pieces

    async def whole(self) -> list[GenerateAnswer]:
        """The answers in one, by index. Raises ApiError as ``pieces`` does."""
        answers: list[list[GenerateAnswer]] = [[] for _ in self._generations]
        try:
            while pieces := await self.next_pieces():
                for index, piece in pieces:
                    answers[index].append(piece)
        finally:
            self.abort()
        return list(map(joined, answers))

    def _take(self, index: int, output: TokenOutput | ApiError) -> None:
        self._outputs.append((index, output))
        self.on_output()

    async def _come(self) -> None:
        """Wait for an output."""
        came = asyncio.Event()
        self.on_output = came.set
        try:
            await came.wait()
        finally:
            self.on_output = _ignore

    def _shown(self, index: int, output: TokenOutput | ApiError) -> list[IndexedPiece]:
        """What an output shows. Raises ApiError."""
        if isinstance(output, ApiError):
            raise self._named(output)
        self._ended += output.finish_reason is not None
        try:
            piece = self._generations[index].piece(output)
            pieces = [(index, piece)] if is_shown(piece) else []
        except TimedOut as exc:
            self._overdue.append((index, exc))
            pieces = []
        except ApiError as exc:
            raise self._named(exc) from exc
        self._has_shown = self._has_shown or bool(pieces)
        if self._overdue and self._has_shown:
            pieces += [(overdue, end.piece) for overdue, end in self._overdue]
            self._overdue.clear()
        elif self._overdue and self._ended == len(self._generations):
            raise self._overdue[0][1]
        return pieces

    def _named(self, error: ApiError) -> ApiError:
        """An error of the LoRA, by the field that asked for it."""
        return error.naming(self._order.lora_field) if error.body.error.param == LORA_PARAM else error


def _ignore() -> None:
    """Outputs wait until they are asked for."""
