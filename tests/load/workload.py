"""The requests of a load run's clients, seeded, so that a run can be repeated.

Owns the kinds of behaviour, their bodies and how often each is chosen. Sends nothing and judges nothing.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NATIVE = "/generate"
COMPLETIONS = "/v1/completions"
# How many prefixes prompts begin with, so that the tree has something to share, to lock and to evict.
PREFIXES = 6
PREFIX_CHARS = (16, 160)
TAIL_CHARS = (4, 120)
LONG_TAIL_CHARS = (300, 500)
NEW_TOKENS = (4, 48)
# Of requests to which something is done in the middle.
LONG_NEW_TOKENS = (48, 160)
# A client that aborts or goes away does so after this many events of its stream.
EVENTS_BEFORE = (0, 12)
PRIORITIES = (-1, 2)
BACK_OFF_S = (0.1, 0.5)
LETTERS = "abcdefghijklmnopqrstuvwxyz \u20ac"


class Behaviour(StrEnum):
    """A client's behaviour with one request."""

    STREAM = "stream"
    WHOLE = "whole"
    CHOICES = "choices"
    LONG_PROMPT = "long_prompt"
    STOP_STRING = "stop_string"
    ABORT = "abort"
    DISCONNECT = "disconnect"
    DUPLICATE = "duplicate"
    BAD = "bad"


WEIGHTS = {
    Behaviour.STREAM: 34,
    Behaviour.WHOLE: 8,
    Behaviour.CHOICES: 6,
    Behaviour.LONG_PROMPT: 10,
    Behaviour.STOP_STRING: 8,
    Behaviour.ABORT: 10,
    Behaviour.DISCONNECT: 12,
    Behaviour.DUPLICATE: 6,
    Behaviour.BAD: 6,
}
# Each breaks one rule: of JSON, of a field, between fields, of the vocabulary, of the context, of the KV cache.
BAD_BODIES: tuple[dict[str, Any] | str, ...] = (
    "{",
    {"text": ""},
    {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": -1}},
    {"text": "x", "sampling_params": {"temprature": 1}},
    {"text": "x", "input_ids": [1]},
    {"input_ids": [10**6], "stream": True},
    {"text": "x" * 9000},
    {"text": "x", "sampling_params": {"max_new_tokens": 8000}},
)


@dataclass(frozen=True)
class Ask:
    """One request of one client. ``act_after`` counts the events of its stream before an abort or a disconnect."""

    rid: str
    behaviour: Behaviour
    path: str
    body: bytes
    choices: int = 1
    new_tokens: int = 0
    stop: str | None = None
    greedy: bool = False
    act_after: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """True when the answer is asked for as a stream."""
        return bool(self.fields.get("stream"))


class Workload:
    """The asks of one client, one after the other."""

    def __init__(self, seed: int, client: int) -> None:
        self._random = random.Random(f"{seed}/{client}")
        # Every client has the same prefixes.
        self._prefixes = [_text(random.Random(f"{seed}/prefix-{number}"), PREFIX_CHARS) for number in range(PREFIXES)]
        self._client = client
        self._asked = 0

    def next_ask(self) -> Ask:
        """Draw this client's next request."""
        self._asked += 1
        rid = f"c{self._client}-{self._asked}"
        behaviour = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if behaviour is Behaviour.BAD:
            bad = self._random.choice(BAD_BODIES)
            data = bad if isinstance(bad, str) else json.dumps({"rid": rid} | bad)
            return Ask(rid, behaviour, NATIVE, data.encode())
        return self._choices(rid) if behaviour is Behaviour.CHOICES else self._native(rid, behaviour)

    def pause_s(self, *, refused: bool) -> float:
        """The client's pause before its next request: usually none, and longer after a Retry-After."""
        if refused:
            return self._random.uniform(*BACK_OFF_S)
        return self._random.random() * 0.05 if self._random.random() < 0.3 else 0.0

    def _native(self, rid: str, behaviour: Behaviour) -> Ask:
        long = behaviour in (Behaviour.ABORT, Behaviour.DISCONNECT, Behaviour.DUPLICATE)
        new_tokens = self._random.randint(*(LONG_NEW_TOKENS if long else NEW_TOKENS))
        stop = self._random.choice("etaoins") if behaviour is Behaviour.STOP_STRING else None
        sampling = self._sampling(new_tokens) | ({"stop": stop} if stop is not None else {})
        fields = {
            "rid": rid,
            "text": self._prompt(LONG_TAIL_CHARS if behaviour is Behaviour.LONG_PROMPT else TAIL_CHARS),
            "stream": behaviour is not Behaviour.WHOLE,
            "priority": self._random.randint(*PRIORITIES),
            "sampling_params": sampling,
        }
        return Ask(
            rid=rid,
            behaviour=behaviour,
            path=NATIVE,
            body=json.dumps(fields).encode(),
            new_tokens=new_tokens,
            stop=stop,
            greedy=sampling["temperature"] == 0,
            act_after=self._random.randint(*EVENTS_BEFORE),
            fields=fields,
        )

    def _choices(self, rid: str) -> Ask:
        choices, new_tokens = self._random.randint(2, 3), self._random.randint(*NEW_TOKENS)
        fields = {
            "rid": rid,
            "prompt": self._prompt(TAIL_CHARS),
            "stream": self._random.random() < 0.7,
            "n": choices,
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "seed": self._random.randrange(2**32),
        }
        body = json.dumps(fields).encode()
        return Ask(rid, Behaviour.CHOICES, COMPLETIONS, body, choices=choices, new_tokens=new_tokens, fields=fields)

    def _sampling(self, new_tokens: int) -> dict[str, Any]:
        """Half of the requests are greedy, so that they can be compared; a few of the others have filters."""
        if self._random.random() < 0.5:
            return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": self._random.random() < 0.5}
        filters = self._random.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 1.0}])
        return {"max_new_tokens": new_tokens, "temperature": 0.8, "seed": self._random.randrange(2**32), **filters}

    def _prompt(self, tail_chars: tuple[int, int]) -> str:
        return self._random.choice(self._prefixes) + _text(self._random, tail_chars)


def _text(chance: random.Random, chars: tuple[int, int]) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(*chars)))
