"""A covering array: rows of a few features each, so that every two levels that go together meet in one, and of some
features every three.

Each row is a swarm (Groce et al., Swarm Testing, 2012): a few features are on, all others off, because a feature may
keep others from ever happening.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

# Of each feature that is on, its level.
Row = Mapping[str, str]
_Level = tuple[str, str]
_FEWEST_ON: Final = 6
_MOST_ON: Final = 18


def pairs_of(features: Mapping[str, Sequence[str]], allows: Callable[[Row], bool]) -> list[tuple[_Level, _Level]]:
    """Every two levels of different features that go together."""
    levels = [(feature, level) for feature, levels in features.items() for level in levels]
    pairs = itertools.combinations(levels, 2)
    return [(one, other) for one, other in pairs if one[0] != other[0] and allows(dict([one, other]))]


def covering_rows(
    features: Mapping[str, Sequence[str]], allows: Callable[[Row], bool], seed: int, *, triples: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Endless; all pairs are covered, and all triples of the features ``triples``, then all are covered again.

    Equal arguments yield the same. Greedy: a row begins with a pair that no row has yet, every other one with such a
    triple, and is given the level that brings the most new pairs, until it is as large as it was drawn to be. Of equal
    levels it is the one that the fewest rows have: each is in one of the first few.
    """
    rng = random.Random(seed)  # noqa: S311 - the same from the same seed
    pairs = pairs_of(features, allows)
    levels = [(feature, level) for feature, levels in features.items() for level in levels]
    numbers = {level: number for number, level in enumerate(levels)}
    together = [0] * len(levels)
    for one, other in pairs:
        together[numbers[one]] |= 1 << numbers[other]
        together[numbers[other]] |= 1 << numbers[one]
    if not pairs:
        # Nothing goes with anything else: one feature at a time.
        alone = [dict([level]) for level in levels if allows(dict([level]))]
        yield from itertools.cycle(alone or [{}])
    core = {number for number, (feature, _) in enumerate(levels) if feature in triples}
    threes = [
        (one, two, three)
        for one, two, three in itertools.combinations(sorted(core), 3)
        if together[one] >> two & together[one] >> three & together[two] >> three & 1
    ]
    while True:
        rng.shuffle(pairs)
        rng.shuffle(threes)
        missing, wanted, used = together.copy(), set(threes), [0] * len(levels)
        for start in _in_turn(
            ((numbers[one], numbers[other]) for one, other in pairs if missing[numbers[one]] >> numbers[other] & 1),
            (three for three in threes if three in wanted and allows(dict(levels[number] for number in three))),
        ):
            row = _row(levels, start, together, missing, used, allows, rng)
            on = sum(1 << number for number in row)
            for number in row:
                missing[number] &= ~on
                used[number] += 1
            wanted.difference_update(itertools.combinations(sorted(core.intersection(row)), 3))
            yield dict(levels[number] for number in row)


def _in_turn(*all_of: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """One of each, until none has any more. Each is asked for when it is needed."""
    left = list(all_of)
    while left:
        turn = left.pop(0)
        for one in turn:
            yield one
            left.append(turn)
            break


def _row(
    levels: Sequence[_Level],
    start: tuple[int, ...],
    together: Sequence[int],
    missing: Sequence[int],
    used: Sequence[int],
    allows: Callable[[Row], bool],
    rng: random.Random,
) -> list[int]:
    row, size = list(start), rng.randint(_FEWEST_ON, _MOST_ON)
    on = sum(1 << number for number in row)
    candidates = rng.sample(range(len(levels)), len(levels))
    while len(row) < size:
        # Levels of one feature do not go together.
        candidates = [number for number in candidates if together[number] & on == on]
        if not candidates:
            break
        best = max(candidates, key=lambda number: ((missing[number] & on).bit_count(), -used[number]))
        candidates.remove(best)
        if allows(dict(levels[number] for number in (*row, best))):
            row.append(best)
            on |= 1 << best
    return row
