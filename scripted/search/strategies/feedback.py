"""Feedback: what reaches a new abstract state is kept, and later runs go on from there, changed and crossed.

Greybox fuzzing with the states of a model as its coverage (Gulcan et al., Model-guided Fuzzing of Distributed Systems,
OOPSLA 2025), over the abstract states that ``scripted/search/abstract.py`` reads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.strategies.random_events import DEFAULT_MOST_EVENTS, Drawing

Extra = tuple[Placed, ...]
_MOST_EVENTS: Final = DEFAULT_MOST_EVENTS
# So many are drawn afresh first: what goes on from the first few is more alike than it is worth.
_FRESH_RUNS: Final = 8
_NEAR_STEPS: Final = 4
_CORPUS_LIMIT: Final = 400
# How much the newest run says of what its way of drawing brings.
_NEWEST_WEIGHT: Final = 0.1


class _Kept(NamedTuple):
    """What was added, and the steps before which the run was in states that were new then."""

    extra: Extra
    steps: tuple[int, ...]


class Feedback:
    """``batch_runs`` runs make one corpus, which begins empty: a unit of a campaign finds the same in every process.

    The first runs are those of swarm. Later ones are drawn afresh like them, or from the corpus; the way that lately
    brought more new states is taken more often. Bound: none but that of swarm, for the fresh ones. What it finds beyond
    that lies near what was new.
    """

    complete = False
    batch_runs: int = 1000

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._corpus: list[_Kept] = []
        self._seen: set[Hashable] = set()
        # New states that a run brings: one that is drawn afresh, and one from the corpus.
        self._gains = [1.0, 1.0]
        self._from_corpus = False

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, acting: Sequence[Collection[Action]] = ()
    ) -> Iterator[Extra]:
        """Endless; each but the first depends on what ``learn`` was told of those before it."""
        drawing = Drawing(base, steps, acting)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            chosen = drawing.kinds(rng)
            fresh, kept = self._gains
            may_go_on = bool(self._corpus) and run >= first + _FRESH_RUNS
            self._from_corpus = may_go_on and rng.random() * (fresh + kept) < kept
            if not self._from_corpus:
                yield drawing.events(rng, chosen, _MOST_EVENTS)
            else:
                yield self._changed(rng, drawing, chosen)[:_MOST_EVENTS]

    def learn(self, extra: Extra, states: Sequence[tuple[int, Hashable]]) -> None:
        """The run with these additions was in these states, each with the step that came next."""
        new = tuple([step for step, state in states if state not in self._seen])
        self._gains[self._from_corpus] += _NEWEST_WEIGHT * (len(new) - self._gains[self._from_corpus])
        if new:
            self._seen.update(state for _, state in states)
            self._corpus.append(_Kept(extra, new))
            del self._corpus[:-_CORPUS_LIMIT]

    def _changed(self, rng: random.Random, drawing: Drawing, extras: Sequence[Action]) -> Extra:
        # Of two the newer one: what was reached last has been gone on from least.
        kept = self._corpus[max(rng.randrange(len(self._corpus)), rng.randrange(len(self._corpus)))]
        step = rng.choice(kept.steps)
        events = [placed for placed in kept.extra if placed.step < step]
        match rng.randrange(4):
            case 0:
                other = rng.choice(self._corpus)
                start = rng.choice(other.steps)
                events += [Placed(step + one.step - start, one.action) for one in other.extra if one.step >= start]
            case 1:
                events = _with_one_changed(rng, kept.extra, extras)
        # Some at once, where it was new, and the others later.
        last = max(drawing.steps, step + _NEAR_STEPS)
        for _ in range(rng.randint(1, max(1, _MOST_EVENTS - len(events)))):
            at = rng.randint(step, step + _NEAR_STEPS if rng.randrange(2) else last)
            events.append(drawing.event(rng, extras, at, may_undo=True))
        return tuple(sorted(events, key=lambda placed: placed.step))


def _with_one_changed(rng: random.Random, extra: Extra, extras: Sequence[Action]) -> list[Placed]:
    events = list(extra)
    at = rng.randrange(len(events))
    match rng.randrange(3):
        case 0:
            events[at] = Placed(max(1, events[at].step + rng.randint(-2, 2)), events[at].action)
        case 1:
            events[at] = Placed(events[at].step, rng.choice(extras))
        case _:
            del events[at]
    return events
