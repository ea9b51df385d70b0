"""Targets by number: ``generated:17`` is the same schedule in every process, drawn from its adapter's space.

Draws everything that adapters have in common: prompt lengths and shared prefixes, arrivals, request ids, and events
from the adapter's extra actions.
"""

from __future__ import annotations

import functools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from scripted.core.action import Action, rid_of
from scripted.core.adapters import adapter_named
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed_action import Placed
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.conversations import drawn_retry, drawn_turns
from scripted.search.covering import Row, covering_rows
from scripted.search.strategies import extras_of

_NAME: Final = re.compile(r"generated:(\d{1,10})")
# Targets per covering array. The next ones have their own array, so that a large number costs no more.
_BLOCK: Final = 1000
_SEARCHES: Final = 1_000_000
# The first targets of an array have one feature each, without a scenario.
_PLAIN_TARGETS: Final = 20
# In each later group of targets, the first has a rare scenario, which may hide the rest of its events; the last is a
# scene and takes no row of the array.
_GROUP_TARGETS: Final = 4
# The share of a row's features that a scene keeps: most features would suppress it.
_KEPT: Final = 0.3
SCENARIO: Final = "scenario"
# One in this many targets has further turns. They are drawn last, so that nothing else depends on them.
_CONVERSATION_EVERY: Final = 3
# How often the numbers of a row are redrawn if they make no configuration. With many settings of vLLM, two draws in a
# hundred make one.
_DRAWS: Final = 1000


# The fields of a request by name, as each adapter's action for requests takes them.
RequestFields: TypeAlias = dict[str, Any]


class Space(ABC):
    """The space of targets that can be drawn for an adapter."""

    @property
    @abstractmethod
    def features(self) -> dict[str, tuple[str, ...]]:
        """Settings, kinds of requests and kinds of events, each with its levels other than the default."""

    @property
    def triples(self) -> tuple[str, ...]:
        """The features whose triples of levels are covered; for all others, pairs are."""
        return ()

    @property
    def families(self) -> Mapping[str, str]:
        """The setting that a feature needs, by the feature: features that need the same setting are a family."""
        return {}

    @property
    def rare_scenarios(self) -> Sequence[str]:
        """The scenarios of which a row may have one, in turn, beside its features."""
        return ()

    @property
    def scenes(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """The scenarios that need features, by name with the levels that each needs."""
        return {}

    @abstractmethod
    def allows(self, row: Row) -> bool:
        """Return whether some configuration has all of these levels."""

    @abstractmethod
    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Draw a schedule with all of these levels. Features outside the row keep their defaults; numbers are drawn.

        Raises ValueError or ScriptDefinitionError if the numbers make no configuration.
        """

    @abstractmethod
    def workload(self, config: Any, row: Row, rng: random.Random) -> Schedule:
        """Draw the requests of a row for this configuration. Raises ScriptDefinitionError if there are none."""


@runtime_checkable
class GeneratesTargets(Protocol):
    """An adapter that declares a space to generate targets from."""

    @property
    def space(self) -> Space: ...


def generated_target(number: int) -> str:
    return f"generated:{number}"


def first_of(seed: int) -> int:
    """Return the number of the first target of a search with this seed; different seeds take different targets."""
    return seed % _SEARCHES * _BLOCK


def number_of(target: str) -> int | None:
    """Return the number in ``generated:NUMBER``; None for another text. Raises ScriptDefinitionError for a bad one."""
    found = _NAME.fullmatch(target)
    if found is None and target.partition(":")[0] == "generated":
        raise ScriptDefinitionError(f"a generated target is generated:NUMBER with at most ten digits, got {target!r}")
    return int(found[1]) if found else None


def row_of(number: int, of: str) -> Row:
    """Return the features of the target with this number."""
    space, rows, place = space_of(of), _rows(number // _BLOCK, of), number % _BLOCK
    rare_scenarios, scenes = space.rare_scenarios, space.scenes
    turn, member = divmod(place - _PLAIN_TARGETS, _GROUP_TARGETS)
    if turn < 0:
        return rows[place]
    row = rows[place - turn - (member == _GROUP_TARGETS - 1) if scenes else place]
    if member == 0 and rare_scenarios:
        return {**row, SCENARIO: rare_scenarios[turn % len(rare_scenarios)]}
    if member == _GROUP_TARGETS - 1 and scenes:
        name = list(scenes)[turn % len(scenes)]
        return _scene(space, row, name, scenes[name], random.Random(number))  # noqa: S311 - the same
    return row


def _scene(space: Space, row: Row, name: str, needed: Mapping[str, tuple[str, ...]], rng: random.Random) -> Row:
    needs = {**{feature: rng.choice(levels) for feature, levels in needed.items()}, SCENARIO: name}
    wanted = {**{feature: level for feature, level in row.items() if rng.random() < _KEPT}, **needs}
    return wanted if space.allows(wanted) else needs


@functools.lru_cache(maxsize=1024)
def generated_schedule(number: int, of: str) -> Schedule:
    """Return the schedule with this number. Raises ScriptDefinitionError for an adapter without a space."""
    row, space = row_of(number, of), space_of(of)
    for draw in range(_DRAWS):
        try:
            schedule = space.draw(row, random.Random(f"{number}/{draw}"))  # noqa: S311 - the same from the same number
        except (ValueError, ScriptDefinitionError) as exc:
            refused = exc
        else:
            return _with_turns(_with_retry(schedule, row, number), number)
    raise HarnessError(
        f"{generated_target(number)} of {of} makes no configuration in {_DRAWS} draws of {dict(row)}: {refused}; "
        "allows() of its space must refuse these levels"
    )


def _with_retry(schedule: Schedule, row: Row, number: int) -> Schedule:
    """Use the id of a request in flight again in half of the targets that use ids again."""
    rng = random.Random(f"retry/{number}")  # noqa: S311 - the same from the same number
    if row.get("rids") != "again" or rng.random() < 0.5:
        return schedule
    return schedule.with_placed(list(drawn_retry(rng, schedule)))


def _with_turns(schedule: Schedule, number: int) -> Schedule:
    if number % _CONVERSATION_EVERY != _CONVERSATION_EVERY - 1:
        return schedule
    rng = random.Random(f"turns/{number}")  # noqa: S311 - the same from the same number
    return schedule.with_placed(list(drawn_turns(rng, schedule)))


def space_of(of: str) -> Space:
    """Return the adapter's space. Raises ScriptDefinitionError if it has none."""
    adapter = adapter_named(of)
    if not isinstance(adapter, GeneratesTargets):
        raise ScriptDefinitionError(
            f"the adapter {of} declares no space to generate targets from; search its workloads with --corpus, or make "
            "the adapter with scripted.sdk.SchedulerAdapter, which has one"
        )
    return adapter.space


class _Rows:
    """The rows of one covering array, computed on demand."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._made: list[Row] = []

    def __getitem__(self, index: int) -> Row:
        while len(self._made) <= index:
            self._made.append(next(self._rows))
        return self._made[index]


@functools.lru_cache(maxsize=64)
def _rows(block: int, of: str) -> _Rows:
    space = space_of(of)
    rows = covering_rows(space.features, space.allows, block, triples=space.triples, families=space.families)
    return _Rows(rows)


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
# The number of requests of a target by level; None is the default.
_COUNTS: Final = {
    None: (2, 4),
    "one": (1, 1),
    "several": (5, 8),
    "many": (9, 14),
    "stream": (26, 34),
    # Only scenes have it.
    "rounds": (8, 12),
}
# Arrivals of a stream a step, in tenths: at each rate some configuration always has a waiting request.
_STREAM_RATES: Final = (5, 10, 20, 30)
# Steps between two arrivals. In rounds, two requests arrive together, and the next two when both may have ended.
_GAPS: Final = {None: (0, 1, 1, 2, 4, 9), "together": (0,), "in-line": (1,), "apart": (7, 9, 12, 16)}
_GAPS_OF_PAIRS: Final = (12, 16, 20)
_OUTPUTS: Final = {None: (1, 2, 2, 3, 5, 9), "one": (1,), "long": (8, 12, 20, 27)}
# Some tokens that the simulated model samples; a model of few tokens samples mostly the first ones.
_STOPS: Final = (33, 34, 35, 36, 50, 77, 100, 120)
_SEEDS: Final = 3
# The shared prefix of a row that sets none; other prompts may have the same seed.
_CONTENTS: Final = ("seed", "seed", "seed", "parts", "parts", "blocks")
_MOST_EVENTS: Final = 3
# How much of its time limit passes after an event that expires.
_PARTS_OF_TIME: Final = (0.5, 1.0, 1.0, 1.5)
_LATE_STEPS: Final = 12
# Steps between two parts of a request's life. An answer takes a few steps, so most parts come before its end.
_PAUSES_BETWEEN_PARTS: Final = (1, 1, 2, 3, 5, 8)
# Steps from the arrival of a long prompt to an event, most of them among its chunks; and how often an event comes then.
_LIFE_STEPS: Final = (1, 1, 2, 2, 3)
_OFTEN: Final = 0.8


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens at, below or above which prompts are drawn. Beyond ``bounds`` no prompt fits.

    ``most`` is the longest prompt that is not drawn at a bound.
    """

    block: int
    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    most: int


def drawn_requests(row: Row, rng: random.Random, marks: Marks) -> Iterator[tuple[int, RequestFields]]:
    """Draw the steps and fields of a workload's requests from the row."""
    if row.get("requests") == "stream":
        yield from _stream(row, rng, marks)
        return
    count, is_small = rng.randint(*_COUNTS[row.get("requests")]), row.get("requests") == "many"
    step = 1
    starts: list[RequestFields] = []
    alike = _length(row, rng, marks)
    # Among many small requests, one may have any size; the others overtake it.
    large = rng.choice((-1, 0, 1, 1))
    for index in range(count):
        length = alike if row.get("prompts") == "alike" else _length(row, rng, marks)
        content = row.get("sharing") or rng.choice(_CONTENTS)
        if content == "blocks":
            length = min(max(length, 2 * marks.block + rng.randint(0, 2)), marks.most)
        if is_small and index != large:
            length = min(length, 2 * marks.block + 1)
        rid, new = _rid(row, rng, index), rng.choice(_OUTPUTS[row.get("outputs")])
        if row.get("requests") == "rounds":
            # An answer that does not fit would be refused. The first of two lives as long as it can.
            room = max(1, marks.most - length)
            new = room if index % 2 == 0 else min(new, room)
        fields = {"rid": rid, "prompt": length, "new": new}
        fields |= _content(content, rng, length, marks.block, starts, index)
        if "stops" in row and rng.random() < 0.7:
            fields["stop"] = rng.choice(_STOPS)
        starts.append(fields)
        yield step, fields
        gap = rng.choice(_gaps(row, index))
        step += min(gap, 2) if is_small else gap


def _gaps(row: Row, index: int) -> Sequence[int]:
    if row.get("requests") == "rounds":
        return _GAPS_OF_PAIRS if index % 2 else (0,)
    return _GAPS[row.get("arrival")]


def _stream(row: Row, rng: random.Random, marks: Marks) -> Iterator[tuple[int, RequestFields]]:
    """Draw a stream of small requests that share a prefix, with one or two different ones near its beginning."""
    count, rate = rng.randint(*_COUNTS["stream"]), rng.choice(_STREAM_RATES)
    others = sorted(rng.sample(range(2, 9), rng.choice((1, 1, 2))))
    lengths = {index: _length(row, rng, marks) for index in others}
    # The different request returns, and alone finds more in the cache than the stream does.
    again = rng.choice((None, rng.randint(12, 20)))
    # They share a whole block, so they hit the cache and a policy may prefer them.
    alike = rng.randint(*rng.choice(((1, marks.block), (marks.block + 1, 2 * marks.block + 1))))
    for index in range(count):
        fields = {"rid": _rid(row, rng, index), "prompt": alike, "new": rng.choice((1, 1, 2, 3)), "seed": 0}
        other = others[0] if index == again else index
        if other in lengths:
            new = rng.choice(_OUTPUTS[row.get("outputs")])
            fields |= {"prompt": lengths[other], "seed": other + 1, "new": new}
        yield 1 + index * 10 // rate, fields


def _rid(row: Row, rng: random.Random, index: int) -> str:
    """Draw a request id; most are prefixes of others, and some repeat."""
    if row.get("rids") == "prefixes":
        return ("r-1", "r-10", "r", "r-100", "r-1x", "r-")[index] if index < 6 else f"r-1{index:03}"
    if row.get("rids") == "again" and index and rng.random() < 0.5:
        index = rng.randrange(index)
    return "abcdefgh"[index] if index < 8 else f"s{index}"


def _length(row: Row, rng: random.Random, marks: Marks) -> int:
    """Draw a length around a size or a multiple of it; at the bounds, also a length that does not fit.

    Only scenes have ``long`` prompts.
    """
    level = row.get("prompts")
    if level == "long":
        least = 2 * marks.most // 3
        return rng.randint(least, max(least, marks.most - 2))
    if level == "short":
        return rng.randint(1, marks.block + 1)
    if level == "bounds" and rng.random() < 0.5:
        return max(1, rng.choice(marks.bounds) + rng.choice((-2, -1, 0, 1)))
    length = rng.choice(marks.sizes) * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1))
    return max(1, min(length, marks.most))


def _content(
    level: str, rng: random.Random, length: int, block: int, others: Sequence[RequestFields], index: int
) -> dict[str, int]:
    """Draw the tokens of a prompt: its own, another prompt's, or another's up to any position.

    With ``blocks`` a shared prefix is followed by the beginning of another prompt: equal blocks behind different
    prefixes. In scenes with ``rounds`` a few prompts come back in turn, each after all others.
    """
    seed = rng.randrange(_SEEDS)
    if level == "none":
        return {"seed": index}
    if level == "all":
        return {"seed": 0}
    if level == "rounds":
        return {"seed": index % _SEEDS}
    if level == "turns" and index:
        # Repeat an earlier prompt, whole or extended.
        earlier = rng.choice(others)
        return {name: int(earlier[name]) for name in ("seed", "shared", "tail") if name in earlier}
    if level == "blocks" and index:
        # Whole blocks, so that the following blocks equal the first ones of the other prompt.
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
    """Return the kinds of actions that a search can add to a schedule, without requests."""
    kinds = dict.fromkeys(tag_of(extra) for extra in extras_of(schedule) if not extra.is_start)
    return tuple(EVENT + kind for kind in kinds)


def drawn_events(row: Row, rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Draw one to three events of each kind that is on, at any step; some are undone a few steps later.

    Raises ValueError for a kind without an addition to this schedule.
    """
    wanted = [name.removeprefix(EVENT) for name in row if name.startswith(EVENT)]
    extras = [extra for extra in extras_of(schedule) if not extra.is_start] if wanted else []
    met = [placed.step for placed in schedule.placed if placed.step > 1 and not placed.action.is_start]
    for kind in wanted:
        of_kind = [extra for extra in extras if tag_of(extra) == kind]
        if not of_kind:
            raise ValueError(f"nothing of the kind {kind!r} can be added to {str(schedule)!r}")
        if row.get("requests") == "rounds" and of_kind[0].target_rid is not None:
            yield from _in_turn(kind, rng, schedule)
            continue
        for _ in range(rng.randint(1, _MOST_EVENTS)):
            action, last = rng.choice(of_kind), schedule.last_step + _LATE_STEPS
            step = rng.randint(last // 2 if action.is_fatal else 1, last)
            if action.is_fatal and met and rng.random() < 0.5:
                # An event that ends the run comes after others, often just after they begin.
                step = rng.choice(met) + rng.randint(0, 3)
            if not action.is_fatal:
                met.append(step)
            yield Placed(step, action)
            seconds = msgspec.structs.asdict(action).get("timeout_s")
            if seconds is not None and rng.random() < 0.7:
                passed = AdvanceClock(seconds=seconds * rng.choice(_PARTS_OF_TIME))
                yield Placed(step + rng.randint(1, _LATE_STEPS // 2), passed)
            if schedule.adapter.undoing and rng.random() < 0.5:
                yield Placed(step + rng.randint(1, _LATE_STEPS), rng.choice(schedule.adapter.undoing))


def _in_turn(kind: str, rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Draw an event for most first requests of two, while its chunks are computed.

    Its memory is free at once, with a chunk in flight, and the second, which waits for it, may load its prefix there.
    """
    for first in [placed for placed in schedule.placed if placed.action.is_start][::2]:
        of_request = [extra for extra in extras_of(schedule.of_placed([first])) if tag_of(extra) == kind]
        if rng.random() < _OFTEN:
            yield Placed(first.step + rng.choice(_LIFE_STEPS), rng.choice(of_request))


def drawn_parts(row: Row, rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Draw the actions on each of the row's requests, within the time during which it is computed."""
    begun = {rid_of(placed.action): placed for placed in schedule.placed if placed.action.is_start}
    parts: dict[str, list[Action]] = {}
    for extra in extras_of(schedule):
        rid = extra.target_rid
        if rid is not None and rid in begun and extra.part_of in row:
            parts.setdefault(rid, []).append(extra)
    for rid, of_request in parts.items():
        step = begun[rid].step
        for _ in range(rng.randint(1, _MOST_EVENTS)):
            step += rng.choice(_PAUSES_BETWEEN_PARTS)
            yield Placed(step, rng.choice(of_request))


def tag_of(action: Action) -> str:
    """Return the tag of an action's clause, which names its feature; several kinds of events may share it."""
    return str(type(action).__struct_config__.tag)
