"""Further turns for generated targets: prompts that continue earlier prompts and outputs, or repeat them.

These are the everyday workloads of a prefix cache: a chat, a regenerated answer, an agent that sends tool results, a
retry after an abort. The module knows no scheduler: a turn is a copy of a start with another ``after``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed_action import Placed, parse_action
from scripted.core.schedule import Schedule

# A conversation continues one of the first requests; a stream has dozens.
_FIRST_STARTS: Final = 6
# How many tokens a user adds; a tool's result is longer.
_SAID_BY_USERS: Final = (0, 1, 1, 2, 3, 5, 9)
_RESULTS_OF_TOOLS: Final = (4, 8, 13, 21)
_MOST_TURNS: Final = 4
# Steps from a request's beginning until its results are late.
_LATE_FROM: Final = (0, 1, 1, 2, 3, 5)


@runtime_checkable
class StartsTurns(Protocol):
    """An action that starts a request, which may continue another request's prompt and output."""

    rid: str
    prompt: int
    new: int
    seed: int
    after: str
    cut: int | None


def drawn_turns(rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Draw one conversation that continues a request of the schedule; empty if none can be continued."""
    found = _drawn_start(rng, schedule)
    if found is not None:
        step, start = found
        ends = step + 3 + rng.choice((1, 1, 2, 3)) * start.new
        yield from rng.choice(_KINDS)(rng, start, step, ends, schedule)


def drawn_retry(rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Draw a client that gives up a request whose result is late, and sends another under the same id.

    The late result belongs to the first of the two. Draws nothing if no request can be sent again.
    """
    found = _drawn_start(rng, schedule)
    if found is None:
        return
    step, start = found
    at = step + rng.choice(_LATE_FROM)
    yield Placed(at, HoldResults())
    at += rng.choice((0, 0, 1, 2))
    yield Placed(at, parse_action(f"abort {start.rid}", schedule.adapter.actions))
    at += rng.choice((0, 1, 1, 2))
    yield Placed(at, _replaced(start, seed=start.seed + rng.choice((0, 1, 1))))
    yield Placed(at + rng.choice((1, 2, 3, 5)), ReleaseResults())


def _drawn_start(rng: random.Random, schedule: Schedule) -> tuple[int, StartsTurns] | None:
    """Draw one of the first requests that can be continued, with its step; None if there is none."""
    starts = [(one.step, one.action) for one in schedule.placed if isinstance(one.action, StartsTurns)]
    return rng.choice(starts[:_FIRST_STARTS]) if starts else None


# The arguments: the draw, the request, its first step, its estimated last step, the schedule.
_Kind = Callable[[random.Random, StartsTurns, int, int, Schedule], Iterator[Placed]]


def _chat(rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule) -> Iterator[Placed]:
    """Send several turns in sequence, each after the end of the previous one, or a little too early."""
    del step, schedule
    yield from _chain(rng, start, ends, rng.randint(1, _MOST_TURNS), _SAID_BY_USERS)


def _agent(rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule) -> Iterator[Placed]:
    """Send a tool's result as soon as the tool is called."""
    del step, schedule
    yield from _chain(rng, start, ends, rng.randint(2, _MOST_TURNS), _RESULTS_OF_TOOLS)


def _chain(rng: random.Random, start: StartsTurns, ends: int, turns: int, sizes: Sequence[int]) -> Iterator[Placed]:
    after = start.rid
    for number in range(turns):
        turn = _turn(start, f"{start.rid}-t{number}", after, rng.choice(sizes), seed=number)
        yield Placed(ends, turn)
        after = f"{start.rid}-t{number}"
        ends += rng.choice((1, 3, 3 + start.new, 6 + 2 * start.new))


def _branches(rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule) -> Iterator[Placed]:
    """Send two continuations of one request: cut at any token, whole, or edited."""
    del schedule
    at = rng.choice((ends, ends, rng.randint(step + 1, ends)))
    for number in range(2):
        cut = rng.choice((None, None, rng.randint(0, max(0, start.new)), max(0, start.new - 1)))
        yield Placed(at, _turn(start, f"{start.rid}-b{number}", start.rid, rng.choice(_SAID_BY_USERS), number, cut))
        at += rng.choice((0, 0, 1, 4))


def _while_it_runs(
    rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule
) -> Iterator[Placed]:
    """Continue the partial output of a request that is still running."""
    del schedule
    turn = _turn(start, f"{start.rid}-w", start.rid, rng.choice(_SAID_BY_USERS), 0)
    yield Placed(rng.randint(step + 1, max(step + 1, ends - 1)), turn)


def _after_its_abort(
    rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule
) -> Iterator[Placed]:
    """Abort a request and immediately continue it or send it again."""
    at = rng.randint(step, ends)
    yield Placed(at, parse_action(f"abort {start.rid}", schedule.adapter.actions))
    at += rng.choice((0, 0, 1, 1, 2))
    if rng.random() < 0.5:
        yield Placed(at, _turn(start, f"{start.rid}-c", start.rid, rng.choice(_SAID_BY_USERS), 0))
    else:
        yield Placed(at, _replaced(start, rid=f"{start.rid}-c"))


def _prefixes(rng: random.Random, start: StartsTurns, step: int, ends: int, schedule: Schedule) -> Iterator[Placed]:
    """Send a prompt that is a prefix or an extension of another one."""
    del schedule
    shorter = rng.randint(1, max(1, start.prompt))
    prompt = rng.choice((shorter, shorter, start.prompt + rng.choice(_RESULTS_OF_TOOLS)))
    yield Placed(rng.randint(step, ends), _replaced(start, rid=f"{start.rid}-p", prompt=prompt))


_KINDS: Final[Sequence[_Kind]] = (
    _chat,
    _chat,
    _agent,
    _branches,
    _branches,
    _while_it_runs,
    _after_its_abort,
    _prefixes,
)


def _turn(start: StartsTurns, rid: str, after: str, prompt: int, seed: int, cut: int | None = None) -> Action:
    """Make a turn with the fields of the first request, but without its prefix from another prompt."""
    return _replaced(start, rid=rid, after=after, cut=cut, prompt=prompt, seed=seed, shared=0, tail=0, parts="")


def _replaced(start: StartsTurns, **fields: object) -> Action:
    assert isinstance(start, Action)
    return msgspec.structs.replace(start, **fields)
