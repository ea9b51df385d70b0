"""Strategies of the search: each chooses additions to a base workload from its adapter's extras, and runs nothing."""

from __future__ import annotations

import functools
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import ClassVar, Final, TypeAlias

from scripted.core.action import Action, SearchBase
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.run import Cell
from scripted.core.schedule import Schedule

# Events target at most this many requests of a workload; the others are alike.
_TARGETS_LIMIT: Final = 4
# Nothing happens after an event that ends a run, so only one in this many runs may have such an event.
_FATAL_EVERY_RUNS: Final = 8
# Random events may come up to this many steps after the workload's end; in half of the runs at most a few.
_LATE_STEPS: Final = 10
_FEW_EVENTS: Final = 3
# In half of the runs the events are close together, so that each meets the effects of others.
_GAPS: Final = (0, 0, 1, 1, 2, 4)
# The share of events that are redrawn until they have something to act on, and the limit of redraws.
_ACTING: Final = 0.8
_TRIES: Final = 30
# Actors act on a scheduler: clients, operators, and the pipeline, which returns results one by one.
_PIPELINE: Final = -1
_MOST_ACTORS: Final = 4
_MOST_ACTIONS: Final = 3


def extras_of(schedule: Schedule) -> tuple[Action, ...]:
    """Return all possible additions to a workload in a fixed order."""
    actions = [placed.action for placed in schedule.placed]
    starts = [action for action in actions if action.is_start]
    adapter = schedule.adapter
    base = SearchBase(
        schedule.config,
        adapter.limits_of(schedule.config),
        starts=tuple(starts[:_TARGETS_LIMIT]),
        kinds=frozenset(map(type, actions)),
    )
    return tuple(extra for action in adapter.actions for extra in action.extras(base))


# The state that an action would meet in the run now; None if it has nothing to act on.
Meets = Callable[[Action], Cell | None]
# Whether an action, added before this step, has an effect of its own.
Distinguishes = Callable[[int, Action], bool]


def _distinct(step: int, action: Action) -> bool:
    del step, action
    return True


class Drawn:
    """Additions whose steps are drawn before a run and whose actions are drawn in their steps.

    This way each has something to act on, regardless of earlier ones. ``placed`` are the additions so far; ``name``
    identifies the run.
    """

    def __init__(self, name: str, steps: Sequence[int], choose: Callable[[Meets], Action]) -> None:
        self.name = name
        self.steps = steps
        self.placed: tuple[Placed, ...] = ()
        self._choose = choose

    def come(self, step: int, meets: Meets) -> Sequence[Placed]:
        """Draw the additions for this step and append them to ``placed``. Steps must come in order."""
        here = [Placed(step, self._choose(meets)) for one in self.steps[len(self.placed) :] if one == step]
        self.placed += tuple(here)
        return here


Addition: TypeAlias = tuple[Placed, ...] | Drawn


class Strategy(ABC):
    """A ``complete`` strategy ends when it has tried everything of its kind; the others never end."""

    complete: ClassVar[bool]

    @abstractmethod
    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, is_distinct: Distinguishes = _distinct
    ) -> Iterator[Addition]:
        """Yield additions to the workload ``base``, whose own run takes ``steps`` steps, from number ``first`` on.

        Each is a tuple of Placed, or Drawn. Equal calls yield the same. A complete strategy leaves out actions that are
        not distinct at their step.
        """


class Exhaustive(Strategy):
    """Every ``events`` extra events, each at most ``window_steps`` after the one before it.

    Bound: it tries all such runs, so a scheduler that passes has no bug that any of them shows. A first event that is
    not distinct is left out: another run shows the same.
    """

    complete = True

    def __init__(self, events: int = 1, *, window_steps: int = 2) -> None:
        self._events = events
        self._window_steps = window_steps

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, is_distinct: Distinguishes = _distinct
    ) -> Iterator[tuple[Placed, ...]]:
        """Iterate over steps, then kinds, first events outermost, so that runs with a common prefix are adjacent.

        One action of each fatal kind comes before all others: its runs are the shortest.
        """
        del name
        extras = extras_of(base)
        fatal = {action.kind: action for action in reversed(extras) if action.is_fatal}
        ordered = sorted(extras, key=lambda action: fatal.get(action.kind) is not action)
        return itertools.islice(self._all(ordered, steps, is_distinct), first, None)

    def _all(self, extras: Sequence[Action], steps: int, is_distinct: Distinguishes) -> Iterator[tuple[Placed, ...]]:
        for step, action in itertools.product(range(1, steps + 1), extras):
            if is_distinct(step, action):
                for later in self._later(extras, step, self._events - 1):
                    yield (Placed(step, action), *later)

    def _later(self, extras: Sequence[Action], step: int, events: int) -> Iterator[tuple[Placed, ...]]:
        """Yield every ``events`` events that follow an event of this step."""
        if not events:
            yield ()
            return
        for at, action in itertools.product(range(step, step + self._window_steps + 1), extras):
            for later in self._later(extras, at, events - 1):
                yield (Placed(at, action), *later)


class _Seeded(Strategy):
    """Yields endless runs, each a function of the seed, the workload and the run's number."""

    complete = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, is_distinct: Distinguishes = _distinct
    ) -> Iterator[Addition]:
        del is_distinct
        every = self._every(base)
        for run in itertools.count(first):
            key = f"{self._seed}/{name}/{run}"
            rng = random.Random(key)  # noqa: S311 - the same from the same seed
            survivable = [action for action in every if not action.is_fatal] if rng.randrange(_FATAL_EVERY_RUNS) else ()
            yield self._drawn(key, rng, survivable or every, steps)

    def _every(self, base: Schedule) -> Sequence[Action]:
        return extras_of(base)

    @abstractmethod
    def _drawn(self, key: str, rng: random.Random, extras: Sequence[Action], steps: int) -> Addition:
        """Draw the additions of one run from these extras."""


class RandomEvents(_Seeded):
    """Adds up to ``most_events`` events per run, of any kind at any step; most have something to act on.

    For long campaigns where completeness is out of reach. Bound: each run of k such events, none fatal, has at least
    the probability (1 / (4 * most_events)) * (1 / (5 * steps * kinds)) ** k; a run with a fatal event has an eighth of
    that, a run with events after the workload's end a third.
    """

    def __init__(self, seed: int, *, most_events: int = 12) -> None:
        super().__init__(seed)
        self._most_events = most_events

    def _every(self, base: Schedule) -> Sequence[Action]:
        return (*extras_of(base), *base.adapter.undoing)

    def _drawn(self, key: str, rng: random.Random, extras: Sequence[Action], steps: int) -> Drawn:
        # Events may come after the workload's own end, because earlier events make it longer.
        last = steps + rng.choice((0, 0, _LATE_STEPS))
        most = rng.choice((_FEW_EVENTS, self._most_events))
        at = sorted(rng.randint(1, last) for _ in range(rng.randint(1, most)))
        if rng.random() < 0.5:
            at = list(itertools.accumulate(rng.choices(_GAPS, k=len(at) - 1), initial=rng.choice(at)))
        return Drawn(key, at, functools.partial(self._choose, rng, extras))

    def _choose(self, rng: random.Random, extras: Sequence[Action], meets: Meets) -> Action:
        action = rng.choice(extras)
        if rng.random() < _ACTING:
            for _ in range(_TRIES):
                if meets(action) is not None:
                    break
                action = rng.choice(extras)
        return action


class Swarm(RandomEvents):
    """Draws the events of each run from half of the kinds, selected by a coin toss for each.

    Groce et al., Swarm Testing, ISSTA 2012: a kind that hides bugs, such as a flush that leaves an eviction nothing to
    evict, is absent from half of the runs. Bound: a share of 1 / 2 ** (i + j) of all runs has j given kinds and none of
    i others.
    """

    def _drawn(self, key: str, rng: random.Random, extras: Sequence[Action], steps: int) -> Drawn:
        kinds = {kind for kind in dict.fromkeys(action.kind for action in extras) if rng.random() < 0.5}
        return super()._drawn(key, rng, [action for action in extras if action.kind in kinds] or extras, steps)


class _Actors(_Seeded):
    """Lets one actor act in each step, or the pipeline return one result."""

    def _drawn(self, key: str, rng: random.Random, extras: Sequence[Action], steps: int) -> tuple[Placed, ...]:
        del key
        actors = [
            [rng.choice(extras) for _ in range(rng.randint(1, _MOST_ACTIONS))]
            for _ in range(rng.randint(1, _MOST_ACTORS))
        ]
        left = [iter(actions) for actions in actors]
        placed = [Placed(1, HoldResults())]
        for step, actor in enumerate(self._turns(rng, [len(actions) for actions in actors], steps), 1):
            placed.append(Placed(step, ReleaseResults(count=1) if actor == _PIPELINE else next(left[actor])))
        return tuple(placed)

    @abstractmethod
    def _turns(self, rng: random.Random, left: list[int], steps: int) -> Iterable[int]:
        """Return the actor of each step, given each actor's remaining actions."""


class Pct(_Actors):
    """Gives actors random priorities that change at a few random points; the highest priority acts next.

    Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010. ``depth``
    counts the orderings that matter; each run makes one priority change fewer. Bound: once the actors are drawn, a bug
    of that depth is hit with a probability of at least 1 / (n * k ** (depth - 1)), for n actors and k steps.
    """

    depth: ClassVar = 3

    def _turns(self, rng: random.Random, left: list[int], steps: int) -> Iterator[int]:
        """Return the actor with the highest priority that has an action left; the pipeline always has one."""
        order = [*range(len(left)), _PIPELINE]
        rng.shuffle(order)
        changes = set(rng.sample(range(2, steps + 2), min(self.depth - 1, steps)))
        for step in range(1, steps + 1):
            if step in changes:
                order.append(order.pop(0))
            actor = next(actor for actor in order if actor == _PIPELINE or left[actor])
            if actor != _PIPELINE:
                left[actor] -= 1
            yield actor


class Surw(_Actors):
    """Makes every order of the added events and the results equally likely.

    A random walk that picks the next actor uniformly favours orders in which one actor ends early; this one weighs each
    actor by its remaining actions. Zhao et al., Selectively Uniform Concurrency Testing, ASPLOS 2025. The events that
    it selects are the added ones and the results. Bound: once the actors are drawn, each order of k events among n
    steps has the probability 1 / (n choose k) with one actor; with several, one over the multinomial coefficient of
    their action counts.
    """

    def _turns(self, rng: random.Random, left: list[int], steps: int) -> Iterable[int]:
        turns = [actor for actor, actions in enumerate(left) for _ in range(actions)]
        turns += [_PIPELINE] * (steps - len(turns))
        # Drawing in proportion to the remaining actions equals shuffling all of them.
        rng.shuffle(turns)
        return turns


class StrategyName(StrEnum):
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    SWARM = "swarm"
    PCT = "pct"
    SURW = "surw"


_SEEDED: Final[dict[StrategyName, type[_Seeded]]] = {
    StrategyName.RANDOM: RandomEvents,
    StrategyName.SWARM: Swarm,
    StrategyName.PCT: Pct,
    StrategyName.SURW: Surw,
}


def strategy_named(name: StrategyName, seed: int, events: int) -> Strategy:
    """Return a strategy. The exhaustive one adds ``events`` at a time; all others take ``seed``."""
    return Exhaustive(events) if name is StrategyName.EXHAUSTIVE else _SEEDED[name](seed)
