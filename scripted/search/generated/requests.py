"""What generated targets of every adapter have in common: how long prompts are and what they share, when they come and
what they are called; and events, which are what the adapter's actions say can be added.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from scripted.core.action import Action
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.generated.covering import Row
from scripted.search.strategies import extras_of

REQUEST_FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "requests": ("one", "several", "many", "stream"),
    "prompts": ("short", "bounds", "alike"),
    "sharing": ("none", "all", "parts", "blocks", "turns"),
    "rids": ("prefixes", "again"),
    "arrival": ("together", "in-line", "apart"),
    "outputs": ("one", "long"),
    "stops": ("some",),
}
EVENT: Final = "event-"
# Requests of a target by its level; None is the default.
_COUNTS: Final = {None: (2, 4), "one": (1, 1), "several": (5, 8), "many": (9, 14), "stream": (26, 34)}
# Of a stream, how many come in a step, in tenths: at each rate some configuration has always one that waits.
_STREAM_RATES: Final = (5, 10, 20, 30)
# Steps between two requests that begin.
_GAPS: Final = {None: (0, 1, 1, 2, 4, 9), "together": (0,), "in-line": (1,), "apart": (7, 9, 12, 16)}
_OUTPUTS: Final = {None: (1, 2, 2, 3, 5, 9), "one": (1,), "long": (8, 12, 20, 27)}
# Some of the tokens that a simulated model says; the first few are those of one that says little else.
_STOPS: Final = (33, 34, 35, 36, 50, 77, 100, 120)
_SEEDS: Final = 3
# What is shared where the row does not say; a seed is that of other prompts or not.
_CONTENTS: Final = ("seed", "seed", "seed", "parts", "parts", "blocks")
_MOST_EVENTS: Final = 3
# Of an event that ends something by itself after a time, how much of that time passes.
_PARTS_OF_TIME: Final = (0.5, 1.0, 1.0, 1.5)
_LATE_STEPS: Final = 12


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens that a prompt may be as long as, below or above. ``bounds`` are those beyond which none fits.

    ``most`` is how long a prompt is unless it is at a bound.
    """

    block: int
    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    most: int


def drawn_requests(row: Row, rng: random.Random, marks: Marks) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps and the fields of a workload's requests, as the row has them."""
    if row.get("requests") == "stream":
        yield from _stream(row, rng, marks)
        return
    count = rng.randint(*_COUNTS[row.get("requests")])
    step = 1
    starts: list[dict[str, Any]] = []
    alike = _length(row, rng, marks)
    # Among many small ones one may be of any size, which they pass.
    large = rng.choice((-1, 0, 1, 1))
    for index in range(count):
        length = alike if row.get("prompts") == "alike" else _length(row, rng, marks)
        content = row.get("sharing") or rng.choice(_CONTENTS)
        if content == "blocks":
            length = min(max(length, 2 * marks.block + rng.randint(0, 2)), marks.most)
        if count > _COUNTS["several"][1] and index != large:
            length = min(length, 2 * marks.block + 1)
        fields = {"rid": _rid(row, rng, index), "prompt": length, "new": rng.choice(_OUTPUTS[row.get("outputs")])}
        fields |= _content(content, rng, length, marks.block, starts, index)
        if "stops" in row and rng.random() < 0.7:
            fields["stop"] = rng.choice(_STOPS)
        starts.append(fields)
        yield step, fields
        gap = rng.choice(_GAPS[row.get("arrival")])
        step += gap if count <= _COUNTS["several"][1] else min(gap, 2)


def _stream(row: Row, rng: random.Random, marks: Marks) -> Iterator[tuple[int, dict[str, Any]]]:
    """Small requests that share a prefix keep coming, and near the first of them are one or two that are other."""
    count, rate = rng.randint(*_COUNTS["stream"]), rng.choice(_STREAM_RATES)
    others = sorted(rng.sample(range(2, 9), rng.choice((1, 1, 2))))
    lengths = {index: _length(row, rng, marks) for index in others}
    # What has left comes back: now it finds more than those that are alike, and is alone with it.
    again = rng.choice((None, rng.randint(12, 20)))
    # A whole block is what they find in a cache, so that a policy may prefer them.
    alike = rng.randint(*rng.choice(((1, marks.block), (marks.block + 1, 2 * marks.block + 1))))
    for index in range(count):
        fields = {"rid": _rid(row, rng, index), "prompt": alike, "new": rng.choice((1, 1, 2, 3)), "seed": 0}
        other = others[0] if index == again else index
        if other in lengths:
            new = rng.choice(_OUTPUTS[row.get("outputs")])
            fields |= {"prompt": lengths[other], "seed": other + 1, "new": new}
        yield 1 + index * 10 // rate, fields


def _rid(row: Row, rng: random.Random, index: int) -> str:
    """Most rids begin like others, or some come again."""
    if row.get("rids") == "prefixes":
        return ("r-1", "r-10", "r", "r-100", "r-1x", "r-")[index] if index < 6 else f"r-1{index:03}"
    if row.get("rids") == "again" and index and rng.random() < 0.5:
        index = rng.randrange(index)
    return "abcdefgh"[index] if index < 8 else f"s{index}"


def _length(row: Row, rng: random.Random, marks: Marks) -> int:
    """Around a size, or a few of it; at the bounds, also one that does not fit."""
    level = row.get("prompts")
    if level == "short":
        return rng.randint(1, marks.block + 1)
    if level == "bounds" and rng.random() < 0.5:
        return max(1, rng.choice(marks.bounds) + rng.choice((-2, -1, 0, 1)))
    length = rng.choice(marks.sizes) * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1))
    return max(1, min(length, marks.most))


def _content(
    level: str, rng: random.Random, length: int, block: int, others: Sequence[Mapping[str, Any]], index: int
) -> dict[str, int]:
    """The tokens of a prompt: its own, those of another one, or some of these, up to any place.

    With ``blocks`` what follows a shared prefix is the beginning of another prompt: equal blocks behind different
    prefixes.
    """
    seed = rng.randrange(_SEEDS)
    if level == "none":
        return {"seed": index}
    if level == "all":
        return {"seed": 0}
    if level == "turns" and index:
        # An earlier prompt again, as far as it went, or further.
        earlier = rng.choice(others)
        return {name: int(earlier[name]) for name in ("seed", "shared", "tail") if name in earlier}
    if level == "blocks" and index:
        # Of whole blocks, so that those behind them are the same blocks as at the beginning of the other one.
        other = rng.choice([int(one["seed"]) for one in others])
        prefix = rng.randrange(_SEEDS)
        blocks = rng.randint(1, max(1, (length - 1) // block - 1))
        return {"seed": prefix, "shared": blocks * block, "tail": other}
    if level == "parts":
        places = (1, block - 1, block, block + 1, 2 * block, length // 4, length // 2, length - block, length - 1)
        shared = rng.choice(places)
        if 0 < shared < length:
            return {"seed": 0, "shared": shared, "tail": 1 + index}
    return {"seed": seed}


def event_kinds(schedule: Schedule) -> tuple[str, ...]:
    """What the actions of an adapter can add to a schedule, by its kind; requests are drawn otherwise."""
    kinds = dict.fromkeys(_tag(extra) for extra in extras_of(schedule) if not extra.is_start)
    return tuple(EVENT + kind for kind in kinds)


def drawn_events(row: Row, rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """One to three events of each kind that is on, anywhere; some are undone a few steps later.

    Raises ValueError for a kind of which nothing can be added to this schedule.
    """
    wanted = [name.removeprefix(EVENT) for name in row if name.startswith(EVENT)]
    extras = [extra for extra in extras_of(schedule) if not extra.is_start] if wanted else []
    met = [placed.step for placed in schedule.placed if placed.step > 1 and not placed.action.is_start]
    for kind in wanted:
        of_kind = [extra for extra in extras if _tag(extra) == kind]
        if not of_kind:
            raise ValueError(f"nothing of the kind {kind!r} can be added to {str(schedule)!r}")
        for _ in range(rng.randint(1, _MOST_EVENTS)):
            action, last = rng.choice(of_kind), schedule.last_step + _LATE_STEPS
            step = rng.randint(last // 2 if action.is_fatal else 1, last)
            if action.is_fatal and met and rng.random() < 0.5:
                # What ends the whole run has something before it, often what has just begun.
                step = rng.choice(met) + rng.randint(0, 3)
            if not action.is_fatal:
                met.append(step)
            yield Placed(step, action)
            seconds = getattr(action, "timeout_s", None)
            if seconds is not None and rng.random() < 0.7:
                passed = AdvanceClock(seconds=seconds * rng.choice(_PARTS_OF_TIME))
                yield Placed(step + rng.randint(1, _LATE_STEPS // 2), passed)
            if schedule.adapter.undoing and rng.random() < 0.5:
                yield Placed(step + rng.randint(1, _LATE_STEPS), rng.choice(schedule.adapter.undoing))


def _tag(action: Action) -> str:
    return str(type(action).__struct_config__.tag)
