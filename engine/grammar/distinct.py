"""Keeps the items of lists distinct: forbids tokens that repeat an item, or after which every item would repeat one.

The library cannot remember items. A guard follows the output beside the library's matcher, and narrows its masks.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.grammar.complements import kinds_of
from engine.grammar.json_positions import (
    DISTINCT_NAMES,
    Frame,
    Mode,
    NotJsonError,
    Position,
    RepeatedError,
    Target,
    Walk,
)
from engine.grammar.list_alternatives import DISTINCT
from engine.grammar.patterns import QUIET
from engine.grammar.schema_ends import listed, named, target_in

# How often one mask may look beyond a token, and how many tokens ahead; then a token counts as one that leads on.
_MOST_LOOKS: Final = 512
_FARTHEST_LOOK: Final = 128
_MOST_REMEMBERED: Final = 4096
_IN_STRINGS: Final = (Mode.STRING, Mode.ESCAPE)
_IN_NAMES: Final = (Mode.KEY_STRING, Mode.KEY_ESCAPE)
_INSIDE: Final = (*_IN_STRINGS, *_IN_NAMES, Mode.SCALAR)
_BEFORE: Final = (Mode.VALUE, Mode.KEY)
_CONTAINERS: Final = (b"[", b"{")
_CLOSING: Final = frozenset(b"]}")
_MAY_END_ITEM: Final = frozenset(b'",]} \t\n\r')
# Keywords that may leave few strings or numbers.
_NARROWS: Final = {
    "string": ("enum", "const", "pattern", "format", "maxLength"),
    "number": ("enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# What a string and a number begin with.
_FIRST: Final = {"string": b'"', "number": b"-0123456789"}
_WHOLE: Final = re.compile(rb'\s*(?:"(?:[^"\\]|\\.)*"|[^"\s].*[\s,\]}]|[\[\]{}])', re.DOTALL)
_LOOSE: Final = re.compile(rb'\s*[^"\sa-z]|\s+[a-z]|\s+\Z')
_INDENTED: Final = re.compile(rb'\s+"')
# The begin of an item after another one.
_CROSSING: Final = re.compile(rb'.,[ \t\n\r"\[{]*[^ \t\n\r"\[{]', re.DOTALL)
_MOST_DEPTH: Final = 8
_CHOICES: Final = ("anyOf", "oneOf")
_ZEROS: Final = (b"0", b"-0")
# The longest text to try whether a list can be filled.
_MOST_BYTES: Final = 4000
_CLOSERS: Final = b'"]},'


# The keywords of an object that narrow no value of its properties.
_OF_PLAIN_OBJECTS: Final = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "default", "examples")
)


class Vocabulary:
    """The bytes of each token, and which tokens can complete an item."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._sorted = sorted(range(len(texts)), key=texts.__getitem__)
        self._in_order = [texts[token] for token in self._sorted]
        # The length of the longest token by its first byte.
        self._longest = [0] * 256
        for text in texts:
            if text:
                self._longest[text[0]] = max(self._longest[text[0]], len(text))
        self.ids: dict[bytes, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            self.ids[text].append(number)
        # May complete an item outside a string, or a string.
        self.ends = np.array([not _MAY_END_ITEM.isdisjoint(text) for text in texts], np.bool_)
        self.spaces = np.array([bool(text) and not text.strip(b" \t\n\r") for text in texts], np.bool_)
        self.closes = np.array([not _CLOSING.isdisjoint(text) for text in texts], np.bool_)
        self.quotes = np.array([b'"' in text for text in texts], np.bool_)
        # May be a whole item, or begin one whose text is written in several ways.
        self.wholes = np.array([bool(_WHOLE.match(text)) for text in texts], np.bool_)
        self.indented = np.array([bool(_INDENTED.match(text)) for text in texts], np.bool_)
        self.loose = np.array([bool(_LOOSE.match(text)) for text in texts], np.bool_)
        # May demand another item, or even have its begin.
        self.demands = np.array([b"," in text for text in texts], np.bool_)
        self.crosses = np.array([bool(_CROSSING.search(text)) for text in texts], np.bool_)

    def begins_of(self, text: bytes) -> Iterator[int]:
        """Yield the tokens with which this text begins."""
        for end in range(1, min(len(text), self._longest[text[0]]) + 1 if text else 1):
            yield from self.ids.get(text[:end], ())

    def beginning_with(self, prefix: bytes) -> list[int]:
        """Return the tokens that begin with these bytes, which do not end with 255; none for no bytes."""
        if not prefix:
            return []
        first = bisect.bisect_left(self._in_order, prefix)
        return self._sorted[first : bisect.bisect_left(self._in_order, prefix[:-1] + bytes([prefix[-1] + 1]), first)]


class Guard:
    """The distinct lists of one compiled grammar."""

    def __init__(self, schema: Any, vocabulary: Vocabulary) -> None:
        self._schema = schema
        self.vocabulary = vocabulary
        self.walk = Walk(schema, self.target)
        self._free_names: dict[int, tuple[bytes, ...] | None] = {}
        # Tokens that may be anywhere between two JSON tokens, and change nothing.
        self.idle = vocabulary.spaces & (not has_distinct_containers(schema))

    def target(self, schema: Any) -> Any:
        found = target_in(self._schema, schema) if isinstance(schema, dict) else None
        return schema if found is None else found[1]

    def has_free_part(self, schema: Any, begun: bytes) -> bool:
        """Return whether a part of an open object is still to come that has infinitely many values; False in doubt."""
        if id(schema) not in self._free_names:
            self._free_names[id(schema)] = self._free_names_of(self.target(schema))
        names = self._free_names[id(schema)]
        return names is not None and (not names or any(name not in begun for name in names))

    def _free_names_of(self, schema: Any) -> tuple[bytes, ...] | None:
        """Return the required names with free values, none if it may have any further name; None if no part is free."""
        if not isinstance(schema, dict) or schema.get("type") != "object" or not schema.keys() <= _OF_PLAIN_OBJECTS:
            return None
        if schema.get("additionalProperties", True) in (True, {}):
            return ()
        properties = named(schema, "properties")
        free = [
            f'"{name}"'.encode()
            for name in listed(schema, "required")
            if isinstance(name, str)
            and name.isidentifier()
            and any(is_free(properties.get(name), kind, self.target) for kind in _NARROWS)
        ]
        return tuple(free) or None

    def begin(self) -> Distinctness:
        return Distinctness(self)


class Distinctness:
    """The items of one request's output, a function of that output."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._vocabulary = guard.vocabulary
        self._walk = guard.walk
        self._text = bytearray()
        self._positions = [Position()]
        self._looks = 0
        # By list, place and text of an open item, how many tokens may follow that neither complete an item nor follow
        # one; the place only counts where items have their own schemas.
        self._ways: dict[tuple[int, int, bytes], int] = {}
        # By list, its items and the text of the open one.
        self._followers: dict[tuple[int, tuple[bytes, ...], bytes], frozenset[int]] = {}

    def roll_back(self, tokens: int) -> None:
        if tokens:
            self._ways.clear()
            self._followers.clear()
        del self._positions[len(self._positions) - tokens :]
        del self._text[self._positions[-1].at :]

    def take(self, tokens: Sequence[int]) -> int:
        """Take tokens of the output; return how many come before one that repeats an item."""
        for taken, token in enumerate(tokens):
            more = self._vocabulary.texts[token]
            try:
                position = self._walk.moved(self._positions[-1], self._text, more)
            except RepeatedError:
                return taken
            except NotJsonError:  # An end token, or what the library will refuse.
                position = self._positions[-1]
                more = b""
            self._text += more
            self._positions.append(position)
        return len(tokens)

    def narrow(self, matcher: Any, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask without the tokens that repeat an item or lead to nothing else.

        ``matcher`` is the library's, after the same output.
        """
        self._looks = _MOST_LOOKS
        forbidden = self._forbidden(matcher, allowed, self._positions[-1], bytes(self._text), ahead=0)
        if not forbidden:
            return allowed
        narrowed = allowed.copy()
        narrowed[forbidden] = False
        return narrowed

    def _forbidden(
        self, matcher: Any, allowed: NDArray[np.bool_], position: Position, text: bytes, *, ahead: int
    ) -> list[int]:
        """Return the tokens to forbid; if ``ahead`` of the output only until one leads on."""
        forbidden = []
        to_try = self._to_try(allowed, position, text)
        if ahead:  # What closes a list leads on soonest.
            to_try.sort(key=self._vocabulary.closes.__getitem__, reverse=True)
        for token in to_try:
            try:
                then = self._walk.moved(position, text, self._vocabulary.texts[token])
            except RepeatedError:
                forbidden.append(token)
            except NotJsonError:
                pass
            else:
                if self._may_die(then, text, token) and not self._leads_on(matcher, token, then, text, ahead + 1):
                    forbidden.append(token)
                elif ahead:
                    break
        return forbidden

    def _leads_on(self, matcher: Any, token: int, then: Position, text: bytes, ahead: int) -> bool:
        """Return whether some text that repeats no item follows a token; True in doubt."""
        longer = text + self._vocabulary.texts[token]
        outer = next(frame for frame in then.frames if frame.is_distinct)
        place = outer.size if any("prefixItems" in one for one in outer.schemas) else 0
        key = outer.opened, place, _begun(outer, longer)
        if self._ways.get(key, 0) > len(self._spent(then, longer)):
            return True
        self._looks -= 1
        if self._looks < 0 or ahead > _FARTHEST_LOOK:
            return True
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return False
        bits = np.frombuffer(after.compute_bitmask(), np.uint8)
        if after.is_error():
            return False
        allowed = np.unpackbits(bits, bitorder="little", count=len(self._vocabulary.texts)).view(np.bool_)
        idle = 0 if then.mode in _INSIDE else int(np.count_nonzero(allowed & self._guard.idle))
        others = int(np.count_nonzero(allowed)) - idle - len(tried := self._to_try(allowed, then, longer))
        if outer.start is not None:
            self._ways[key] = others + sum(1 for one in self._spent(then, longer) if allowed[one])
        if others > 0:
            return True
        return len(tried) > len(self._forbidden(after, allowed, then, longer, ahead=ahead))

    def _spent(self, position: Position, text: bytes) -> set[int]:
        """Return the tokens that follow another item or complete it once more."""
        spent: set[int] = set()
        for frame in position.frames:
            if frame.is_distinct:
                spent |= self._following(frame, text)
                spent.update(one for rest in _rests(frame, text) for one in self._vocabulary.beginning_with(rest))
        return spent

    def _to_try(self, allowed: NDArray[np.bool_], position: Position, text: bytes) -> list[int]:
        """Return the allowed tokens that may complete an item or follow the text of one."""
        vocabulary, mode = self._vocabulary, position.mode
        lists = [frame for frame in position.frames if frame.is_distinct]
        if not lists:
            return self._ids(allowed, vocabulary.crosses)
        last = position.frames[-1]
        is_free = all(self._is_free(frame, b"") for frame in lists)
        found = vocabulary.crosses if is_free else vocabulary.demands
        if any(frame.texts and _begun(frame, text)[:1] in _CONTAINERS for frame in lists):
            found = found | vocabulary.closes  # Names in another order, and numbers written otherwise.
        if mode in (*_IN_STRINGS, *_IN_NAMES):
            found = found & vocabulary.quotes
        resembling = [
            frame
            for frame in lists
            if _resembles(frame, text) and (frame.is_list or frame.start is not None or mode in (Mode.KEY, Mode.AFTER))
        ]
        more: set[int] = set()
        if last.is_distinct and last.is_list and mode is Mode.SCALAR:
            return self._ids(allowed, allowed)
        if last.is_distinct and mode is (Mode.VALUE if last.is_list else Mode.KEY):
            found = vocabulary.wholes | vocabulary.loose
            if not self._is_free(last, b'"'):
                found = found | vocabulary.indented
        elif lists == [last] and mode in (_IN_STRINGS if last.is_list else _IN_NAMES):
            if b"\\u" in text[last.start :]:
                found = vocabulary.quotes
            more = {one for rest in _rests(last, text) for one in vocabulary.beginning_with(rest)}
        elif resembling:
            found = vocabulary.quotes if mode in (*_IN_STRINGS, *_IN_NAMES) else vocabulary.ends
        more.update(one for frame in resembling for one in self._following(frame, text))
        tokens = self._ids(allowed, found if mode in _INSIDE else found & ~self._guard.idle)
        return [*tokens, *(one for one in more.difference(tokens) if allowed[one])]

    @staticmethod
    def _ids(allowed: NDArray[np.bool_], found: NDArray[np.bool_]) -> list[int]:
        ids: list[int] = np.flatnonzero(allowed & found).tolist()
        return ids

    def _following(self, frame: Frame, text: bytes) -> frozenset[int]:
        """Return the tokens after which the open item is still the begin of another one."""
        begun = _begun(frame, text)
        key = frame.opened, frame.texts, begun
        found = self._followers.get(key)
        if found is None:
            has_any_string = self._is_free(frame, b'"')
            rests = [rest for rest in _rests(frame, text) if not (has_any_string and rest[-1:] == b'"')]
            found = frozenset([one for rest in rests for one in self._vocabulary.begins_of(rest)])
            if len(self._followers) > _MOST_REMEMBERED:
                self._followers.clear()
            self._followers[key] = found
        return found

    def _may_die(self, position: Position, text: bytes, token: int) -> bool:
        """Return whether every continuation may repeat an item."""
        whole = text + self._vocabulary.texts[token]
        return any(
            frame.is_distinct
            and frame.values
            and (frame.start is not None or (frame is position.frames[-1] and position.mode in _BEFORE))
            and _resembles(frame, whole)
            and not self._is_free(frame, _begun(frame, whole))
            for frame in position.frames
        )

    def _is_free(self, frame: Frame, begun: bytes) -> bool:
        """Return whether an item that begins so can become one of infinitely many."""
        if begun in _ZEROS or (begun[:1] != b'"' and b"e" in begun.lower()):
            return False
        if not frame.is_list:
            return all(one.get("additionalProperties") is not False for one in frame.schemas)
        kinds = [kind for kind, signs in _FIRST.items() if begun[:1] in signs]
        items = [one["items"] for one in frame.schemas if "items" in one]
        if any("prefixItems" in one for one in frame.schemas):
            return False
        if begun[:1] in (b"", b"{") and len(items) == 1 and self._guard.has_free_part(items[0], begun):
            return True
        return any(all(is_free(one, kind, self._guard.target) for one in items) for kind in kinds)


def _begun(frame: Frame, text: bytes) -> bytes:
    """Return the text of a list's open item."""
    return b"" if frame.start is None else text[frame.start :]


def _rests(frame: Frame, text: bytes) -> list[bytes]:
    """Return what makes the open item the same as each other one that begins so."""
    begun = _begun(frame, text)
    return [one[len(begun) :] for one in frame.texts if one.startswith(begun)]


def _resembles(frame: Frame, text: bytes) -> bool:
    """Return whether the open item of a list may become one of the others."""
    if frame.start is None:
        return bool(frame.texts)
    begun = text[frame.start :]
    # Numbers and characters by number have several spellings.
    if begun[:1] != b'"' and begun[:1] not in b"[{":
        return bool(frame.texts)
    return (b"\\u" in begun and bool(frame.texts)) or any(one.startswith(begun) for one in frame.texts)


def is_free(schema: Any, kind: str, target: Target, depth: int = 0) -> bool:
    """Return whether a schema allows infinitely many strings or numbers, whatever they begin with; False in doubt."""
    if schema is True or depth > _MOST_DEPTH:
        return schema is True
    if not isinstance(schema, dict):
        return False
    meant = target(schema)
    if meant is not schema and not is_free(meant, kind, target, depth + 1):
        return False
    types = schema.get("type", [kind])
    kinds = {"number" if one == "integer" else one for one in (types if isinstance(types, list) else [types])}
    if kind not in kinds or any(name in schema for name in _NARROWS[kind]):
        return False
    for name in ("anyOf", "oneOf"):
        if listed(schema, name) and not any(is_free(one, kind, target, depth + 1) for one in listed(schema, name)):
            return False
    return all(is_free(one, kind, target, depth + 1) for one in listed(schema, "allOf"))


def needs_guard(schema: Any) -> bool:
    return any(True for word in (DISTINCT, DISTINCT_NAMES) for _ in _marked(schema, word))


def crowded_parts(schema: Any) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield the parts that need several distinct items or names of which there may be too few, their mark, and how
    many.

    Without those in alternatives, of which another one may do.
    """

    def target(part: Any) -> Any:
        found = target_in(schema, part) if isinstance(part, dict) else None
        return part if found is None else found[1]

    for part in _marked_outside_of_choices(schema, DISTINCT):
        described, needed = list(_together(part, target)), _least(part, "minItems", target)
        items = [one.get("items", True) for one in described]
        has_places = any("prefixItems" in one for one in described)
        is_sure = not has_places and any(all(is_free(one, kind, target) for one in items) for kind in _NARROWS)
        if needed > 1 and not is_sure:
            yield part, DISTINCT, needed
    for part in _marked_outside_of_choices(schema, DISTINCT_NAMES):
        yield part, DISTINCT_NAMES, _least(part, "minProperties", target)


def _together(part: dict[str, Any], target: Target, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a part and what else may describe its values."""
    yield part
    found = target(part)
    within = [one for name in ("allOf", *_CHOICES) for one in listed(part, name)]
    for one in (*([found] if found is not part else []), *within) if depth < _MOST_DEPTH else ():
        if isinstance(one, dict):
            yield from _together(one, target, depth + 1)


def _least(part: Any, limit: str, target: Target, depth: int = 0) -> int:
    """Return how many items or names the values of a part have at least, by one of its limits."""
    if not isinstance(part, dict) or depth > _MOST_DEPTH:
        return 0
    found = target(part)
    whole = [*([found] if found is not part else []), *listed(part, "allOf")]
    needed = [_least(one, limit, target, depth + 1) for one in whole]
    for name in _CHOICES:
        needed += [min((_least(one, limit, target, depth + 1) for one in listed(part, name)), default=0)]
    own = part.get(limit)
    return max(own if isinstance(own, int) else 0, *needed)


def can_be_filled(definition: str, schema: Any) -> bool:
    """Return whether a text of this grammar, each item of its lists another one, comes to an end; True in doubt."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, definition, log_level=QUIET)
    items = Guard(schema, Vocabulary([bytes([byte]) for byte in range(256)])).begin()
    for _ in range(_MOST_BYTES):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error() or matcher.is_accepting():
            break
        allowed = np.flatnonzero(items.narrow(matcher, bits[:256].view(np.bool_))).tolist()
        if not allowed:
            return False
        token = next((one for one in _CLOSERS if one in allowed), allowed[-1])
        matcher.consume_token(token)
        items.take([token])
    return True


def has_distinct_containers(schema: Any) -> bool:
    """Return whether the items of a distinct list may be lists or objects, which one spacing makes comparable."""
    return any(
        not kinds_of(found).isdisjoint(("array", "object"))
        for part in _marked(schema, DISTINCT)
        for found in _alternatives(part.get("items"), schema)
    )


def _alternatives(schema: Any, root: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the schemas of which a value has at least one, references resolved."""
    found = target_in(root, schema) if isinstance(schema, dict) else None
    part = schema if found is None else found[1]
    choices = listed(part, "anyOf") or listed(part, "oneOf") if isinstance(part, dict) else []
    if choices and depth < _MOST_DEPTH:
        for one in choices:
            yield from _alternatives(one, root, depth + 1)
    else:
        yield part if isinstance(part, dict) else {}


def _marked(schema: Any, word: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a schema with a mark."""
    yield from (part for part in _parts_in(schema) if part.get(word) is True)


def _marked_outside_of_choices(schema: Any, word: str) -> Iterator[dict[str, Any]]:
    """Yield the parts with a mark, or in whose ``allOf`` one has it, but none in alternatives."""
    for part in _parts_in(schema, leaves_out=_CHOICES):
        beside = [one for one in listed(part, "allOf") if isinstance(one, dict)]
        if any(one.get(word) is True for one in (part, *beside)):
            yield part


def _parts_in(schema: Any, *, leaves_out: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the objects in a schema, but not those in the keywords that it ``leaves_out``."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += [one for name, one in part.items() if name not in leaves_out]
        elif isinstance(part, list):
            todo += part
