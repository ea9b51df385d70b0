"""Rewrites expressions with look-aheads, and the negation of expressions, as expressions without either.

An expression becomes a deterministic automaton by its derivatives, and the automaton an expression. Bounds keep the
time small, because the front end's event loop rewrites schemas that clients wrote.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final, TypeAlias

from engine.grammar.expressions import (
    ALL,
    ANY_TEXT,
    NOT_ASCII,
    WORD,
    Behind,
    Chars,
    Choice,
    Edge,
    Look,
    Node,
    Nodes,
    Ranges,
    Repeat,
    UnreadableError,
    class_text,
    read,
)
from engine.grammar.narrowed import narrowed

_MOST_STATES: Final = 120
_MOST_CLASSES: Final = 80
_MOST_CHARS: Final = 20_000
# While states are removed, over all removals.
_MOST_WRITTEN: Final = 400_000
_MOST_STEPS: Final = 60_000
_REMEMBERED: Final = 256
# What an expression must have to need a rewrite.
_NEEDS_REWRITE: Final = re.compile(r"\(\?<?[=!]|\\[bB]")
_LAST_LOOK_BEHIND: Final = re.compile(
    r"(?P<before>.*)(?P<look>\(\?<[=!](?:\[[^\]\\]*\]|\\?[^()\[\]|\\])\))\$", re.DOTALL
)
_QUANTIFIERS: Final = ("*", "+", "?", "{")
_EMPTY: Final = "(?:)"
# The pattern of no text.
NOTHING: Final = r"^[^\s\S]$"


class MatchesNothingError(UnreadableError):
    """Raised for an expression that matches no text."""


@dataclass(frozen=True)
class All:
    """All of these texts' properties hold."""

    parts: frozenset[Formula]


@dataclass(frozen=True)
class Some:
    """At least one of them holds."""

    parts: frozenset[Formula]


@dataclass(frozen=True)
class Negated:
    part: Formula


# What must hold of the rest of a text: a sequence that matches all of it, or a combination.
Formula: TypeAlias = "bool | Nodes | All | Some | Negated"
# What precedes a position: None at the begin, else of which of the classes to look behind for the character is.
Before: TypeAlias = "frozenset[Ranges] | None"


@functools.lru_cache(_REMEMBERED)
def plain_parts(pattern: str) -> tuple[str, ...] | None:
    """Return patterns without look-aheads that together match what a pattern matches.

    The pattern itself if it has none; None for one that cannot be rewritten.
    """
    if not _NEEDS_REWRITE.search(pattern):
        return (pattern,)
    if (simple := narrowed(pattern)) is not None:
        return (simple,)
    try:
        return _leading_parts(pattern) or (_anchored(_expression(_search(read(pattern, forbids=False)))),)
    except (UnreadableError, RecursionError):
        return None


@functools.lru_cache(_REMEMBERED)
def plain(pattern: str, *, is_whole: bool = False) -> str | None:
    """Return one expression without look-aheads; ``is_whole`` for one that matches whole texts."""
    if not _NEEDS_REWRITE.search(pattern):
        return pattern
    if (simple := narrowed(pattern)) is not None:
        return simple
    try:
        nodes = read(pattern, forbids=False)
        text = _expression(nodes if is_whole else _search(nodes))
        return text if is_whole else _anchored(text)
    except (UnreadableError, RecursionError):
        return None


@functools.lru_cache(_REMEMBERED)
def negated_pattern(pattern: str) -> str | None:
    """Return a pattern of the texts that a pattern does not match; None if it cannot be written, or matches all."""
    try:
        return _anchored(_expression(Negated(_search(read(pattern, forbids=True)))))
    except (UnreadableError, RecursionError):
        return None


@functools.lru_cache(_REMEMBERED)
def pattern_of_both(patterns: tuple[str, ...], excluded: tuple[str, ...] = ()) -> str | None:
    """Return a pattern of what all of some patterns match and none of the others; None if it cannot be written."""
    try:
        wanted: list[Formula] = [_search(read(pattern, forbids=False)) for pattern in patterns]
        unwanted: list[Formula] = [_not(_search(read(pattern, forbids=True))) for pattern in excluded]
        return _anchored(_expression(_all([*wanted, *unwanted])))
    except MatchesNothingError:
        return NOTHING
    except (UnreadableError, RecursionError):
        return None


def _search(nodes: Nodes) -> Nodes:
    return (*ANY_TEXT, *nodes, *ANY_TEXT)


def _anchored(expression: str) -> str:
    return f"^(?:{expression})$"


def _leading_parts(pattern: str) -> tuple[str, ...] | None:
    """Return the look-aheads at the begin of a pattern and its rest, each as a pattern; None for any other pattern."""
    if not pattern.startswith("^"):
        return None
    parts: list[str | None] = []
    rest = pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        body = f"^(?:{rest[3:end]})"
        part = plain(body) if rest[2] == "=" else negated_pattern(body)
        if rest[end + 1 :].startswith(_QUANTIFIERS):
            return None
        parts.append(part)
        rest = rest[end + 1 :]
    last = _LAST_LOOK_BEHIND.fullmatch(rest)
    if last is not None:
        rest = f"{last['before']}$"
        parts.append(plain(f"{last['look']}$"))
    if _NEEDS_REWRITE.search(rest):
        rest = narrowed(rest) or rest
    if not parts or None in parts or _NEEDS_REWRITE.search(rest) or _has_alternatives(rest):
        return None
    return (*[part for part in parts if part is not None], *([f"^{rest}"] if rest not in ("", ".*") else []))


def _has_alternatives(rest: str) -> bool:
    """Return whether a look-ahead before a pattern belongs to its first alternative only."""
    nodes = read(rest, forbids=False) if "|" in rest else ()
    return len(nodes) == 1 and isinstance(nodes[0], Choice) and len(nodes[0].options) > 1


def _closing(group: str) -> int:
    """Return the position of the bracket that closes the group at the begin of a text."""
    depth, in_class, at = 0, False, 0
    while at < len(group):
        letter = group[at]
        if letter == "\\":
            at += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if not depth:
                return at
        at += 1
    raise UnreadableError("missing )")


def _expression(formula: Formula) -> str:
    """Return an expression of the whole texts of which a formula holds."""
    return _Automaton(formula).expression()


class _Automaton:
    """The deterministic automaton of a formula, over classes of characters that it does not tell apart."""

    def __init__(self, formula: Formula) -> None:
        self._steps = 0
        nodes = [node for one in _sequences(formula) for node in _nodes_of(one)]
        self._behind = {node.ranges for node in nodes if isinstance(node, Behind)}
        if any(isinstance(node, Edge) and node.kind in "bB" for node in nodes):
            self._behind |= {WORD, NOT_ASCII}
        self._classes = _classes_of(self._behind | {node.ranges for node in nodes if isinstance(node, Chars)})
        start: tuple[Formula, Before] = formula, None
        states = {start: 0}
        self._targets: list[list[int]] = []
        self._accepts: list[bool] = []
        todo = [start]
        while todo:
            state = todo.pop()
            row = []
            for one in self._classes:
                code = one[0][0]
                then = self._derived(*state, code), self._after(code)
                if then not in states:
                    states[then] = len(states)
                    todo.append(then)
                row.append(states[then])
            if len(states) > _MOST_STATES:
                raise UnreadableError("too many states")
            self._targets += [[]] * (states[state] + 1 - len(self._targets))
            self._accepts += [False] * (states[state] + 1 - len(self._accepts))
            self._targets[states[state]] = row
            self._accepts[states[state]] = self._ends(*state)

    def _after(self, code: int) -> frozenset[Ranges]:
        return frozenset([ranges for ranges in self._behind if _contains(ranges, code)])

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise UnreadableError("too many steps")

    def _derived(self, formula: Formula, before: Before, code: int) -> Formula:
        """Return what must hold of the rest after a character."""
        if isinstance(formula, bool):
            return formula
        if isinstance(formula, Negated):
            return _not(self._derived(formula.part, before, code))
        if isinstance(formula, All):
            return _all([self._derived(part, before, code) for part in formula.parts])
        if isinstance(formula, Some):
            return _some([self._derived(part, before, code) for part in formula.parts])
        return self._followed(formula, before, code, frozenset())

    def _followed(self, nodes: Nodes, before: Before, code: int, entered: frozenset[Repeat]) -> Formula:
        """Return what follows a sequence after a character; ``entered`` are repetitions that have taken none yet."""
        self._count()
        if not nodes:
            return False
        head, rest = nodes[0], nodes[1:]
        if isinstance(head, Chars):
            return _simplest(rest) if _contains(head.ranges, code) else False
        if isinstance(head, Choice):
            return _some([self._followed((*option, *rest), before, code, entered) for option in head.options])
        if isinstance(head, Look):
            seen = self._followed((*head.body, *ANY_TEXT), before, code, frozenset())
            if head.is_negative:
                seen = _not(seen)
            return False if seen is False else _all([seen, self._followed(rest, before, code, entered)])
        if isinstance(head, Edge | Behind):
            holds = _holds(head, before, self._after(code))
            return self._followed(rest, before, code, entered) if holds else False
        skipped = self._followed(rest, before, code, entered) if not head.low else False
        if head.high == 0 or head in entered:
            return skipped
        more = Repeat(head.body, max(head.low - 1, 0), None if head.high is None else head.high - 1)
        again = self._followed((*head.body, more, *rest), before, code, entered | {head})
        return _some([skipped, again])

    def _ends(self, formula: Formula, before: Before) -> bool:
        """Return whether a formula holds of the empty text."""
        if isinstance(formula, bool):
            return formula
        if isinstance(formula, Negated):
            return not self._ends(formula.part, before)
        if isinstance(formula, All):
            return all(self._ends(part, before) for part in formula.parts)
        if isinstance(formula, Some):
            return any(self._ends(part, before) for part in formula.parts)
        return all(self._is_nothing(node, before) for node in formula)

    def _is_nothing(self, node: Node, before: Before) -> bool:
        self._count()
        if isinstance(node, Chars):
            return False
        if isinstance(node, Choice):
            return any(self._ends(option, before) for option in node.options)
        if isinstance(node, Look):
            return self._ends(node.body, before) != node.is_negative
        if isinstance(node, Repeat):
            return not node.low or self._ends(node.body, before)
        return _holds(node, before, None)

    def expression(self) -> str:
        """Return the automaton as an expression, by removing one state after the other."""
        groups = _merged(self._targets, self._accepts)
        start, end = -1, -2
        ways: dict[int, dict[int, str]] = defaultdict(dict)
        for state, group in enumerate(groups):
            by_target: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for ranges, target in zip(self._classes, self._targets[state], strict=True):
                by_target[groups[target]] += ranges
            for target, ranges_to in by_target.items():
                ways[group][target] = class_text(tuple(ranges_to))
            if self._accepts[state]:
                ways[group][end] = _EMPTY
        ways[start][groups[0]] = _EMPTY
        _drop_dead(ways, end)
        written = 0
        while len(ways) > 1:
            state = min((one for one in ways if one != start), key=lambda one: _weight(ways, one))
            written += _weight(ways, state)
            if written > _MOST_WRITTEN:
                raise UnreadableError("too long")
            _remove(ways, state)
        if end not in ways[start]:
            raise MatchesNothingError
        return ways[start][end]


def _remove(ways: dict[int, dict[int, str]], state: int) -> None:
    out = ways.pop(state)
    loop = out.pop(state, None)
    around = "" if loop is None else f"(?:{loop})*" if not _is_single(loop) else f"{loop}*"
    for others in ways.values():
        into = others.pop(state, None)
        if into is None:
            continue
        for target, text in out.items():
            through = "".join(one for one in (_grouped(into), around, _grouped(text)) if one != _EMPTY) or _EMPTY
            others[target] = f"{others[target]}|{through}" if target in others else through
            if len(others[target]) > _MOST_CHARS:
                raise UnreadableError("too long")


def _weight(ways: dict[int, dict[int, str]], state: int) -> int:
    """Return about how many characters the removal of a state adds."""
    into = [len(others[state]) for one, others in ways.items() if one != state and state in others]
    out = [len(text) for target, text in ways[state].items() if target != state]
    loop = len(ways[state].get(state, ""))
    return sum(into) * len(out) + sum(out) * len(into) + loop * len(into) * len(out)


def _drop_dead(ways: dict[int, dict[int, str]], end: int) -> None:
    """Remove the states from which no end can be reached."""
    alive = {end}
    while more := {one for one, out in ways.items() if one not in alive and not alive.isdisjoint(out)}:
        alive |= more
    for one in [one for one in ways if one not in alive]:
        del ways[one]
    for out in ways.values():
        for target in [target for target in out if target not in alive]:
            del out[target]


def _merged(targets: list[list[int]], accepts: list[bool]) -> list[int]:
    """Return the group of each state; states of a group accept the same texts."""
    groups = [int(one) for one in accepts]
    while True:
        signs = [(groups[state], *(groups[target] for target in row)) for state, row in enumerate(targets)]
        numbers = {sign: number for number, sign in enumerate(dict.fromkeys(signs))}
        if len(numbers) == len(set(groups)):
            return groups
        groups = [numbers[sign] for sign in signs]


def _is_single(text: str) -> bool:
    return text.startswith("[") and "]" not in text[1:-1]


def _grouped(text: str) -> str:
    return text if _is_single(text) or "|" not in text else f"(?:{text})"


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _holds(node: Edge | Behind, before: Before, after: Before) -> bool:
    """Return whether a position is as a node demands it; ``after`` is None at the end of a text."""
    if isinstance(node, Behind):
        return (before is not None and node.ranges in before) != node.is_negative
    if node.kind in "^$":
        return (before if node.kind == "^" else after) is None
    if any(side is not None and NOT_ASCII in side for side in (before, after)):
        return node.in_doubt
    is_boundary = (before is not None and WORD in before) != (after is not None and WORD in after)
    return is_boundary == (node.kind == "b")


def _simplest(nodes: Nodes) -> Formula:
    return True if nodes == ANY_TEXT else nodes


def _not(formula: Formula) -> Formula:
    if isinstance(formula, bool):
        return not formula
    return formula.part if isinstance(formula, Negated) else Negated(formula)


def _all(parts: list[Formula]) -> Formula:
    flat = frozenset(one for part in parts for one in (part.parts if isinstance(part, All) else (part,)))
    if False in flat:
        return False
    flat -= {True}
    return True if not flat else next(iter(flat)) if len(flat) == 1 else All(flat)


def _some(parts: list[Formula]) -> Formula:
    flat = frozenset(one for part in parts for one in (part.parts if isinstance(part, Some) else (part,)))
    if True in flat:
        return True
    flat -= {False}
    return False if not flat else next(iter(flat)) if len(flat) == 1 else Some(flat)


def _sequences(formula: Formula) -> list[Nodes]:
    if isinstance(formula, Negated):
        return _sequences(formula.part)
    if isinstance(formula, All | Some):
        return [one for part in formula.parts for one in _sequences(part)]
    return [] if isinstance(formula, bool) else [formula]


def _nodes_of(nodes: Nodes) -> list[Node]:
    found: list[Node] = []
    for node in nodes:
        found.append(node)
        if isinstance(node, Repeat | Look):
            found += _nodes_of(node.body)
        elif isinstance(node, Choice):
            found += [one for option in node.options for one in _nodes_of(option)]
    return found


def _classes_of(sets: set[Ranges]) -> list[Ranges]:
    """Return the classes of characters that none of these sets tells apart."""
    cuts = sorted({cut for ranges in (*sets, ALL) for low, high in ranges for cut in (low, high + 1)})
    classes: dict[tuple[bool, ...], list[tuple[int, int]]] = defaultdict(list)
    for low, after in itertools.pairwise(cuts):
        if _contains(ALL, low):
            classes[tuple(_contains(ranges, low) for ranges in sets)].append((low, after - 1))
    if len(classes) > _MOST_CLASSES:
        raise UnreadableError("too many classes of characters")
    return [tuple(ranges) for ranges in classes.values()]
