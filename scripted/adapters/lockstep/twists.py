"""What a generated target of the engine has beside its features: orders and amounts that are rarely drawn one by one.

A request that is ended while it is in flight, a queue in which nothing fits but what came last, an operator who asks
for another amount. Drawn after all else, so that the rest of a target is what it is without.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from engine.limits import Limits
from engine.messages import PauseMode
from scripted.adapters.lockstep.actions import (
    AbortEverything,
    AbortRequest,
    DisconnectClient,
    HoldResults,
    PauseServing,
    Press,
    ReleaseResults,
    Relieve,
    StartRequest,
)
from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

CAUGHT: Final = "caught"
CROWD: Final = "crowd"
PRESSED: Final = "pressed-again"
# By how often each is drawn.
TWISTS: Final = (CAUGHT, CROWD, CAUGHT, PRESSED)
# More than are tried in one step.
_CROWD: Final = (15, 19)
_LARGEST: Final = 60
_ROWS: Final = 3


def twisted(twist: str, rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """What is added to a schedule. Where a crowd would take long, a request is caught."""
    if twist == PRESSED:
        return _pressed_again(rng, schedule, limits)
    tokens = 6 * limits.total_pages * limits.page_size // 10
    tokens = min(tokens, limits.context_length - 2, tokens if limits.chunking else limits.prefill_budget_tokens)
    if twist == CROWD and 1 < tokens <= _LARGEST:
        return _crowd(rng, tokens, limits)
    return _caught(rng, schedule)


def _caught(rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Results are held, and what they are of ends meanwhile; mostly something else happens then, too.

    Half of them have a twin that comes with it or after it: what one has in flight, the other one shares or waits for.
    """
    starts = [(placed.step, placed.action) for placed in schedule.placed if isinstance(placed.action, StartRequest)]
    # A long prompt is in flight for longer than others.
    step, start = rng.choice((rng.choice(starts), max(starts, key=lambda one: one[1].prompt)))
    rid = start.rid
    ends: list[Action] = [AbortRequest(rid=rid), DisconnectClient(rid=rid), PauseServing(mode=PauseMode.RETRACT)]
    ends += [AbortRequest(rid=rid), AbortEverything(), PauseServing(mode=PauseMode.ABORT)]
    held = step + rng.choice((0, 0, 1, 1, 2, 4, 8))
    end = held + rng.randint(1, 3)
    if rng.random() < 0.5:
        twin = msgspec.structs.replace(start, rid=f"{rid}-w", seed=rng.choice((start.seed, 7)))
        yield Placed(step + rng.choice((0, 0, 1, 2)), twin)
    yield Placed(held, HoldResults())
    yield Placed(end, rng.choice(ends))
    if rng.random() < 0.7:
        others = [extra for extra in extras_of(schedule) if not extra.is_start]
        yield Placed(held + rng.randint(0, 5), rng.choice((*ends, *others)))
    yield Placed(end + rng.randint(1, 5), ReleaseResults(count=rng.choice((None, 1, 1, 2))))


def _crowd(rng: random.Random, tokens: int, limits: Limits) -> Iterator[Placed]:
    """One request has most of the pool, none of those that come then fits beside it, and the last ones are small."""
    step = rng.randint(1, 4)
    yield Placed(step, StartRequest(rid="q", prompt=tokens, new=rng.randint(4, 16), seed=9, ignore_eos=True))
    for number in range(rng.randint(*_CROWD)):
        step += rng.choice((0, 0, 0, 1))
        yield Placed(step, StartRequest(rid=f"q{number}", prompt=tokens, new=1, seed=10 + number))
    for number in range(rng.randint(1, 3)):
        step += rng.choice((0, 0, 1, 3))
        yield Placed(step, StartRequest(rid=f"t{number}", prompt=rng.randint(1, limits.page_size), new=1, seed=8))


def _pressed_again(rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """An operator asks for one amount and then for others, more of it or less."""
    most = {"pages": limits.total_pages // 2, "rows": _ROWS, "window": limits.window_pages // 2}
    what = rng.choice([name for name, count in most.items() if count])
    step = rng.randint(1, schedule.last_step)
    for _ in range(rng.randint(2, 4)):
        yield Placed(step, Press(**{what: rng.randint(0, most[what])}))
        step += rng.randint(0, 5)
    yield Placed(step, Relieve())
