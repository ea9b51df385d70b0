"""Translates a recording into a schedule: names, prompts and lengths in a schedule's terms, and when results arrive.

Notes name everything that a schedule cannot express. An adapter derives from ``Translator`` to interpret its events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from scripted.core.account import OWN_ENDS, RequestMessage
from scripted.core.action import Action
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.machine import EventT
from scripted.core.phrases import common_start
from scripted.core.placed_action import Placed
from scripted.core.prompts import Piece, Recipe, recipe_from
from scripted.core.schedule import Schedule

_RecordT = TypeVar("_RecordT")
# The length of an output that was cut off: it would have continued.
ENDLESS = 1 << 30
# Fewer equal tokens than this may be a coincidence.
_LEAST_CHUNK = 4


class RecordedStep(NamedTuple, Generic[EventT]):
    """A step's input, the id of the microbatch that it launched, or None, and the tokens that it sent, by rid."""

    now: float
    events: Sequence[EventT]
    launched: int | None
    said: Sequence[tuple[str, Sequence[int]]] = ()


class _Turn(NamedTuple):
    """A request that a later one may continue: its name in the schedule, its prompt, and its output so far."""

    name: str
    prompt: tuple[int, ...]
    said: list[int]


class _Made(NamedTuple):
    """A recorded prompt in a schedule's terms: the request that it continues, and pieces after ``begun`` tokens."""

    pieces: tuple[Piece, ...] = ()
    after: str = ""
    cut: int | None = None
    begun: int = 0

    @property
    def end(self) -> int:
        return self.begun + sum([piece.length for piece in self.pieces])

    def first(self, tokens: int) -> _Made:
        """Return the part that makes the first ``tokens`` tokens of the prompt."""
        left, pieces = tokens - self.begun, []
        for piece in self.pieces:
            if left > 0:
                pieces.append(piece._replace(length=min(left, piece.length)))
            left -= piece.length
        return self._replace(pieces=tuple(pieces))


class Translated(NamedTuple):
    """A schedule, its ``steps`` that correspond to the recorded steps, and ``notes`` on what was lost.

    ``plans``: the launches of the recorded steps, with requests named as in the schedule. ``same_steps`` counts the
    steps with equal launches, once the schedule has been run.
    """

    schedule: Schedule
    steps: Sequence[int]
    plans: Sequence[object]
    notes: tuple[str, ...]
    same_steps: int = 0


class Translator(ABC, Generic[EventT]):
    """Translates the steps of one recording. ``names``: the schedule's names of requests, by rid.

    ``steps``: the schedule's steps that correspond to the recorded ones. ``lengths``: output lengths in tokens by rid,
    in the order of the rid's requests. ``timed``: the times of the steps matter. ``guesses``: results depend on draft
    tokens guessed from the text.
    """

    def __init__(
        self,
        actions: Iterable[type[Action]],
        *,
        depth: int,
        page_size: int,
        lengths: dict[str, list[int]],
        timed: bool,
        guesses: bool,
    ) -> None:
        self.names: dict[str, str] = {}
        self.steps: list[int] = []
        self._actions = tuple(actions)
        self._depth = depth
        self._page_size = page_size
        # Prompts share pages behind different beginnings only where a page is more than a token.
        self._chunk = 0 if page_size == 1 else -(-_LEAST_CHUNK // page_size) * page_size
        self._lengths = lengths
        self._timed = timed
        self._guesses = guesses
        self._made: dict[tuple[int, ...], _Made] = {}
        # Where each chunk of tokens first occurred, and how many tokens of each seed are in use.
        self._chunks: dict[tuple[int, ...], Piece] = {}
        self._used: dict[int, int] = {}
        # The last request of each rid.
        self._turns: dict[str, _Turn] = {}
        # The step of the schedule that launches each microbatch, by id.
        self._launches: dict[int, int] = {}

    # -- defined by adapters --

    @abstractmethod
    def batch_of(self, event: EventT) -> int | None:
        """Return the id of the microbatch whose result this event is; None for another event."""

    def opening(self) -> Iterable[Action]:
        return (HoldResults(),)

    def releases(self, events: Sequence[EventT]) -> Iterable[Action]:
        """Return the actions that make the world's events arrive in exactly this step."""
        results = sum([self.batch_of(event) is not None for event in events])
        return (ReleaseResults(count=results),) if results else ()

    # -- the schedule --

    def translated(
        self,
        empty: Schedule,
        recorded: Iterable[RecordedStep[EventT]],
        records: Iterable[_RecordT],
        plan_of: Callable[[_RecordT, Mapping[str, str]], object],
    ) -> Translated:
        """Fill an empty schedule with the recorded steps; ``records`` are the same steps, with their plans."""
        schedule = empty.with_placed(self.placed(recorded))
        plans = [plan_of(record, self.names) for record in records]
        return Translated(schedule, self.steps, plans, tuple(self.notes()))

    def placed(self, recorded: Iterable[RecordedStep[EventT]]) -> Iterator[Placed]:
        """Yield the placed actions. Results are held, and each is released in the step in which it arrived."""
        yield from (Placed(1, action) for action in self.opening())
        now = 0.0
        fails: dict[int, Action] = {}
        for one in recorded:
            step = self._step_of(one)
            self.steps.append(step)
            if self._timed and one.now > now:
                yield Placed(step, AdvanceClock(seconds=one.now - now))
            now = one.now
            yield from (Placed(step, action) for action in self.releases(one.events))
            for event in one.events:
                action, batch = action_of(event, self._actions, self), self.batch_of(event)
                if action is not None and batch is not None:
                    fails[self._launches[batch]] = action
                elif action is not None:
                    yield Placed(step, action)
                if isinstance(event, RequestMessage):
                    self._turns[event.rid] = _Turn(self.name_of(event.rid), event.prompt_ids, [])
            for rid, token_ids in one.said:
                if rid in self._turns:
                    self._turns[rid].said.extend(token_ids)
            if one.launched is not None:
                self._launches[one.launched] = step
        yield from (Placed(step, action) for step, action in fails.items())

    def notes(self) -> Iterator[str]:
        """Yield notes on the parts of the recording that the schedule lacks."""
        if self._guesses:
            yield "guesses depend on the text, and a schedule's text differs, so other guesses are right in it"
        yield from self.own_notes()

    def own_notes(self) -> Iterable[str]:
        """Return the adapter's notes."""
        return ()

    def _step_of(self, one: RecordedStep[EventT]) -> int:
        """Return the first step in which all results of the recorded one are due, ``depth`` steps after their launch.

        A live pipeline may have been faster.
        """
        batches = [batch for event in one.events if (batch := self.batch_of(event)) is not None]
        return max(
            [self.steps[-1] + 1 if self.steps else 1, *(self._launches[batch] + self._depth for batch in batches)]
        )

    # -- for Action.read_back --

    def name_of(self, rid: str) -> str:
        """Return the schedule's name of a request, also before it begins: an event may name it earlier."""
        return self.names.setdefault(rid, f"r{len(self.names) + 1}")

    def length_of(self, rid: str, most: int) -> int:
        """Return the output length of the request that begins, at most ``most``."""
        lives = self._lengths.get(rid)
        return max(0, min(lives.pop(0) if lives else most, most))

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        """Return a recipe for a prompt that shares as much with earlier requests as this one does."""
        common, like = self._most_like(prompt)
        turn = self._turn_of(prompt)
        if turn is not None and turn.begun >= common:
            made = turn
        elif common < self._page_size and common < len(prompt):
            made = _Made()
        else:
            made = self._made[like].first(common)
        made = made._replace(pieces=tuple(self._continued(prompt, made)))
        self._made.setdefault(prompt, made)
        self._note_chunks(prompt, made)
        return msgspec.structs.replace(recipe_from(made.pieces), after=made.after, cut=made.cut, begun=made.begun)

    def _most_like(self, prompt: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Find the earlier prompt that shares the most tokens of its own with this one, and their number."""
        shared = [(common_start([prompt, other]), other) for other in self._made]
        own = [one for one in shared if one[0] > self._made[one[1]].begun]
        return max(own, key=lambda one: (one[0], len(one[1])), default=(0, ()))

    def _turn_of(self, prompt: tuple[int, ...]) -> _Made | None:
        """Return the beginning of a prompt that continues an earlier request, past its prompt and into its output."""
        best = None
        for turn in self._turns.values():
            begun = common_start([prompt, (*turn.prompt, *turn.said)])
            if begun > max(len(turn.prompt), 0 if best is None else best.begun):
                best = _Made(after=turn.name, cut=begun - len(turn.prompt), begun=begun)
        return best

    def _continued(self, prompt: tuple[int, ...], made: _Made) -> list[Piece]:
        """Return the pieces of a whole prompt: the given ones, chunks of earlier prompts, and new tokens."""
        pieces, at = list(made.pieces), made.end
        while at < len(prompt):
            until = min(len(prompt), (at // self._chunk + 1) * self._chunk) if self._chunk else len(prompt)
            last = pieces[-1] if pieces else None
            piece = self._chunks.get(prompt[at:until]) or self._new_tokens(last, until - at)
            if last is not None and (last.seed, last.end) == (piece.seed, piece.first):
                pieces[-1] = last._replace(length=last.length + piece.length)
            else:
                pieces.append(piece)
            at = until
        return pieces

    def _new_tokens(self, last: Piece | None, count: int) -> Piece:
        """Return tokens that no earlier prompt used: the last piece's seed continues if its next tokens are unused."""
        seed = len(self._used) + 1 if last is None or last.end < self._used[last.seed] else last.seed
        first = self._used.get(seed, 0)
        self._used[seed] = first + count
        return Piece(seed, first, count)

    def _note_chunks(self, prompt: tuple[int, ...], made: _Made) -> None:
        """Note the origin of each chunk of a prompt that lies within one piece."""
        at = made.begun
        for piece in made.pieces if self._chunk else ():
            for place in range(-(-at // self._chunk) * self._chunk, at + piece.length - self._chunk + 1, self._chunk):
                chunk = Piece(piece.seed, piece.first + place - at, self._chunk)
                self._chunks.setdefault(prompt[place : place + self._chunk], chunk)
            at += piece.length


class Lengths:
    """Output lengths in tokens by rid, in the order of the rid's requests; ENDLESS for an output that was cut off."""

    def __init__(self) -> None:
        self.by_rid: dict[str, list[int]] = {}
        self._sent: dict[str, int] = {}

    def tell(self, rid: str, tokens: int, finish_reason: str | None) -> None:
        """Count tokens sent to a client, and note the end of its request."""
        sent = self._sent.pop(rid, 0) + tokens
        if finish_reason is None:
            self._sent[rid] = sent
        else:
            self.by_rid.setdefault(rid, []).append(sent if finish_reason in OWN_ENDS else ENDLESS)


def action_of(event: object, actions: Iterable[type[Action]], reader: object) -> Action | None:
    """Find the action that became this event; None for an event of no action."""
    for action in actions:
        if action.event is type(event) and (found := action.read_back(event, reader)) is not None:
            return found
    return None
