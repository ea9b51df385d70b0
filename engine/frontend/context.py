"""The front end as its routes see it: settings, numbers, tokenizer, orders, tokens, access rules, client, state.

Owns nothing of a request; made once a process, before the first request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request
from tokenizers import Tokenizer

from engine.clock import MonotonicClock
from engine.frontend.auth import Access
from engine.frontend.body_reader import BodyReader
from engine.frontend.detokenizer import Decoder
from engine.frontend.dialect import PLAIN, Dialect, Parsing
from engine.frontend.engine_client import EngineClient
from engine.frontend.grammar_check import GrammarCheck
from engine.frontend.marker_decoder import MarkerDecoders
from engine.frontend.metrics import Metrics
from engine.frontend.order import Order
from engine.frontend.orders import OrderTaker
from engine.frontend.origins import Origins
from engine.frontend.token_answers import TokenAnswers
from engine.limits import Limits
from engine.settings import ServerSettings

__all__ = ["FrontEnd"]


@dataclass
class FrontEnd:
    """Everything that the routes need. ``pids`` are the engine's processes by name, known once all are ready.

    ``created_s`` is the start in seconds since the epoch. ``loras`` are the paths of those that were loaded and not
    unloaded, by name, as the scheduler has answered.
    """

    settings: ServerSettings
    limits: Limits
    tokenizer: Tokenizer
    client: EngineClient
    access: Access
    orders: OrderTaker
    token_answers: TokenAnswers
    dialect: Dialect = PLAIN
    serving: bool = False
    pids: dict[str, int] = field(default_factory=dict)
    created_s: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    bodies: BodyReader = field(init=False)
    origins: Origins = field(init=False)
    grammars: GrammarCheck = field(init=False)
    decoders: MarkerDecoders = field(init=False)
    loras: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        clock = MonotonicClock()
        self.metrics = Metrics(self.model_name, clock)
        self.grammars = GrammarCheck(self.limits, clock, self.metrics.grammar_check.observe)
        self.bodies = BodyReader(self.settings.max_body_bytes)
        self.origins = Origins(self.settings.origins)
        self.decoders = MarkerDecoders(self.tokenizer)
        self.loras = dict(self.limits.loras)

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.settings.model_name

    async def take_order(self, kind: str, request: Request) -> Order:
        """The order of a request to the route of a kind, which can be carried out. Raises ApiError."""
        order = await self.orders.take(kind, request, self.bodies)
        await self.grammars.look(order)
        return order

    def decoder_of(self, parsing: Parsing | None) -> Decoder:
        """What gives an answer its text: with the markers in it that it is looked through for."""
        return self.tokenizer if parsing is None else self.decoders.showing(self.dialect.markers(parsing))
