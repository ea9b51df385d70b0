"""Targets by number: ``generated:17`` is the same schedule in every process, drawn from the space of its adapter."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from scripted.core.named import adapter_named
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.generated.covering import Row, covering_rows

__all__ = ["Row", "Space", "first_of", "generated_schedule", "generated_target", "number_of", "row_of"]

_NAME: Final = re.compile(r"generated:(\d{1,10})")
# Targets of one covering array; the next ones have an array of their own, so that a large number costs no more.
_BLOCK: Final = 1000
_SEEDS: Final = 1_000_000
# So many targets of an array have every feature by itself, without a twist.
_PLAIN_TARGETS: Final = 20
# Of the others in each group of so many the first has one, which may hide what is in the rest of it; the last is a
# scene, which has no row of the array.
_GROUP_TARGETS: Final = 4
# The share of a row's features that a scene has: most would keep it from happening.
_KEPT: Final = 0.3
TWIST: Final = "twist"
# The numbers of a row are drawn again as often as this, when together they make no configuration. Of rows with many
# settings of vLLM's two draws of a hundred make one.
_DRAWS: Final = 1000


class Space(Protocol):
    """What can be drawn for an adapter. ``features`` are settings, kinds of requests and of events, each with the
    levels that are not its default. A space may have ``twists`` too, names of what a row has beside features: one of
    them by turns, as its ``twist``; and ``scenes``, twists that need features, each with the levels that it needs.
    """

    @property
    def features(self) -> dict[str, tuple[str, ...]]: ...

    @property
    def triples(self) -> tuple[str, ...]:
        """The features of which any three levels meet too; of all others any two do."""
        ...

    def allows(self, row: Row) -> bool:
        """Whether there is a configuration with all of this."""
        ...

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """A schedule with all of this; what the row does not say is as it is by default, numbers are drawn.

        Raises ValueError or ScriptDefinitionError for numbers that make no configuration.
        """
        ...


def generated_target(number: int) -> str:
    return f"generated:{number}"


def first_of(seed: int) -> int:
    """The number of the first target that a search with this seed takes; those of two seeds are others."""
    return seed % _SEEDS * _BLOCK


def number_of(target: str) -> int | None:
    """The number of such a text; None for any other. Raises ScriptDefinitionError for one without a number."""
    found = _NAME.fullmatch(target)
    if found is None and target.partition(":")[0] == "generated":
        raise ScriptDefinitionError(f"a generated target is generated:NUMBER with at most ten digits, got {target!r}")
    return int(found[1]) if found else None


def row_of(number: int, of: str) -> Row:
    """What is on in the target of this number."""
    space, rows, place = space_of(of), _rows(number // _BLOCK, of), number % _BLOCK
    twists, scenes = getattr(space, "twists", ()), getattr(space, "scenes", {})
    turn, member = divmod(place - _PLAIN_TARGETS, _GROUP_TARGETS)
    if turn < 0:
        return rows[place]
    row = rows[place - turn - (member == _GROUP_TARGETS - 1) if scenes else place]
    if member == 0 and twists:
        return {**row, TWIST: twists[turn % len(twists)]}
    if member == _GROUP_TARGETS - 1 and scenes:
        return _scene(space, row, list(scenes)[turn % len(scenes)], random.Random(number))  # noqa: S311 - the same
    return row


def _scene(space: Any, row: Row, name: str, rng: random.Random) -> Row:
    needs = {**{feature: rng.choice(levels) for feature, levels in space.scenes[name].items()}, TWIST: name}
    wanted = {**{feature: level for feature, level in row.items() if rng.random() < _KEPT}, **needs}
    return wanted if space.allows(wanted) else needs


@functools.lru_cache(maxsize=1024)
def generated_schedule(number: int, of: str) -> Schedule:
    """The schedule of this number. Raises ScriptDefinitionError for an adapter that declares no space."""
    row, space = row_of(number, of), space_of(of)
    for draw in range(_DRAWS):
        try:
            return space.draw(row, random.Random(f"{number}/{draw}"))  # noqa: S311 - the same from the same number
        except (ValueError, ScriptDefinitionError) as exc:
            refused = exc
    raise HarnessError(
        f"{generated_target(number)} of {of} makes no configuration in {_DRAWS} draws of {dict(row)}: {refused}; its "
        "space allows what cannot be"
    )


def space_of(of: str) -> Space:
    """The adapter's space. Raises ScriptDefinitionError where it has none."""
    space: Space | None = getattr(adapter_named(of), "space", None)
    if space is None:
        raise ScriptDefinitionError(
            f"the adapter {of} declares no space to generate targets from; search its workloads with --corpus, or make "
            "the adapter with scripted.sdk.SchedulerAdapter, which has one"
        )
    return space


class _Rows(Sequence[Row]):
    """The rows of one covering array, as far as they were asked for."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._made: list[Row] = []

    def __len__(self) -> int:
        return _BLOCK

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] # one row is asked for
        while len(self._made) <= index:
            self._made.append(next(self._rows))
        return self._made[index]


@functools.lru_cache(maxsize=64)
def _rows(block: int, of: str) -> Sequence[Row]:
    space = space_of(of)
    return _Rows(covering_rows(space.features, space.allows, block, triples=space.triples))
