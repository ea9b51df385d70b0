"""A covering array: rows of a few features that together contain every compatible pair of levels.

Each row is a swarm (Groce et al., Swarm Testing, 2012): a few features are on and all others off, because a feature may
suppress others. Features that need the same setting are a family, and a row has features of half of the families.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

# The level of each feature that is on.
Row = Mapping[str, str]
_Level = tuple[str, str]
_FEWEST_ON: Final = 6
_MOST_ON: Final = 18
# The share of families without a feature in a row. Each of many features of one family would bring it into most rows.
_SILENT: Final = 0.5


def pairs_of(features: Mapping[str, Sequence[str]], allows: Callable[[Row], bool]) -> list[tuple[_Level, _Level]]:
    """Return every compatible pair of levels of different features."""
    levels = [(feature, level) for feature, levels in features.items() for level in levels]
    pairs = itertools.combinations(levels, 2)
    return [(one, other) for one, other in pairs if one[0] != other[0] and allows(dict([one, other]))]


def covering_rows(
    features: Mapping[str, Sequence[str]],
    allows: Callable[[Row], bool],
    seed: int,
    *,
    triples: Sequence[str] = (),
    families: Mapping[str, str] | None = None,
) -> Iterator[dict[str, str]]:
    """Yield rows that cover all pairs, and all triples of the features ``triples``; then rows that cover them again.

    ``families`` maps features to their families; a feature need not have one. Endless, and the same for equal
    arguments. Greedy: rows begin alternately with an uncovered pair and an uncovered triple. They grow to a random
    size, each time by the level with the most new pairs, then the most new triples, then the fewest rows so far, so
    that each level is in one of the first few rows.
    """
    rng = random.Random(seed)  # noqa: S311 - the same from the same seed
    pairs = pairs_of(features, allows)
    levels = [(feature, level) for feature, levels in features.items() for level in levels]
    numbers = {level: number for number, level in enumerate(levels)}
    together = _together(pairs, numbers)
    if not pairs:
        # No two levels are compatible: use one feature at a time.
        yield from itertools.cycle([dict([level]) for level in levels if allows(dict([level]))] or [{}])
    core = {number for number, (feature, _) in enumerate(levels) if feature in triples}
    kin = [(families or {}).get(feature, "") for feature, _ in levels]
    threes = _threes_of(core, together)
    while True:
        rng.shuffle(pairs)
        rng.shuffle(threes)
        missing, wanted, used = together.copy(), set(threes), [0] * len(levels)
        thirds = _thirds_of(threes)
        for start in _in_turn(
            ((numbers[one], numbers[other]) for one, other in pairs if missing[numbers[one]] >> numbers[other] & 1),
            (three for three in threes if three in wanted and allows(dict(levels[number] for number in three))),
        ):
            silent = _silent(kin, start, rng)
            row = _row(levels, start, together, missing, thirds, used, allows, rng, silent)
            _mark_covered(row, missing, used)
            _mark_triples(core.intersection(row), wanted, thirds)
            yield dict(levels[number] for number in row)


def _silent(kin: Sequence[str], start: tuple[int, ...], rng: random.Random) -> set[int]:
    """Draw the families without a feature in a row that begins with ``start``; return their levels."""
    begun = {kin[number] for number in start}
    families = [family for family in dict.fromkeys(kin) if family]
    silent = {family for family in families if rng.random() < _SILENT} - begun
    return {number for number, family in enumerate(kin) if family in silent}


def _mark_covered(row: Collection[int], missing: list[int], used: list[int]) -> None:
    """Mark this row's pairs as covered, and count one more use of each level."""
    on = sum(1 << number for number in row)
    for number in row:
        missing[number] &= ~on
        used[number] += 1


def _together(pairs: Iterable[tuple[_Level, _Level]], numbers: Mapping[_Level, int]) -> list[int]:
    """Return, for each level, the levels that it is compatible with as a bit set."""
    together = [0] * len(numbers)
    for one, other in pairs:
        together[numbers[one]] |= 1 << numbers[other]
        together[numbers[other]] |= 1 << numbers[one]
    return together


def _mark_triples(on: Iterable[int], wanted: set[tuple[int, int, int]], thirds: dict[int, dict[int, int]]) -> None:
    """Mark the triples of these levels as covered."""
    covered = wanted.intersection(itertools.combinations(sorted(on), 3))
    wanted -= covered
    for three in covered:
        for here, there in itertools.permutations(three, 2):
            thirds[here][there] &= ~(1 << sum(three) - here - there)


def _threes_of(core: Collection[int], together: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return every triple of levels of ``core`` whose pairs are compatible."""
    return [
        (one, two, three)
        for one, two, three in itertools.combinations(sorted(core), 3)
        if together[one] >> two & together[one] >> three & together[two] >> three & 1
    ]


def _thirds_of(threes: Iterable[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """Return, for each pair of levels, the third levels of uncovered triples as a bit set."""
    thirds: dict[int, dict[int, int]] = {}
    for three in threes:
        for here, there in itertools.permutations(three, 2):
            beside = thirds.setdefault(here, {})
            beside[there] = beside.get(there, 0) | 1 << sum(three) - here - there
    return thirds


def _in_turn(*all_of: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield from each in turn, lazily, until all are exhausted."""
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
    thirds: Mapping[int, Mapping[int, int]],
    used: Sequence[int],
    allows: Callable[[Row], bool],
    rng: random.Random,
    silent: Collection[int],
) -> list[int]:
    row, size = list(start), rng.randint(_FEWEST_ON, _MOST_ON)
    on = sum(1 << number for number in row)
    candidates = [number for number in rng.sample(range(len(levels)), len(levels)) if number not in silent]
    while len(row) < size:
        # Levels of one feature are incompatible.
        candidates = [number for number in candidates if together[number] & on == on]
        if not candidates:
            break
        news = [(missing[number] & on).bit_count() for number in candidates]
        most, inside = max(news), [number for number in row if number in thirds]
        best = max(
            (number for number, new in zip(candidates, news, strict=True) if new == most),
            key=lambda number: (_triples(thirds.get(number), inside, on), -used[number]),
        )
        candidates.remove(best)
        if allows(dict(levels[number] for number in (*row, best))):
            row.append(best)
            on |= 1 << best
    return row


def _triples(thirds: Mapping[int, int] | None, inside: Sequence[int], on: int) -> int:
    """Count the new triples that a level forms with two levels that are on."""
    return 0 if thirds is None else sum([(thirds.get(number, 0) & on).bit_count() for number in inside])
