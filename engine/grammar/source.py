"""Translates clients' grammars into definitions for the library, and locates faults in them.

Pure functions. Finding a fault needs neither a tokenizer nor a vocabulary.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine.core.messages import Grammar, GrammarKind
from engine.grammar.automata import plain
from engine.grammar.complements import kinds_of
from engine.grammar.distinct import can_be_filled, crowded_parts, has_distinct_containers, needs_guard
from engine.grammar.followable import followable, misreads
from engine.grammar.list_alternatives import DISTINCT
from engine.grammar.patterns import QUIET
from engine.grammar.rule_ends import endless_rule
from engine.grammar.schema_ends import endless_place, listed, target_in

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS: Final = 262_144
# The most rules of a GBNF grammar: the library takes a time for its conversion that grows with their square.
_MOST_RULES: Final = 1_000
# Precedes a schema in a Lark grammar.
_JSON_RULE: Final = "%json"
_decoder = json.JSONDecoder()
_BOOLEANS: Final = ("true", "false")
# Whitespace between two JSON tokens. Without a bound a bad model fills its whole output with spaces.
_WHITESPACE: Final = r"[ \t\n\r]{0,32}"
# The JSON spacing of the models' training, without room for endless whitespace.
SPACING: Final[JsonCompileOptions] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords that hold schemas by name or by number, and keywords that hold one. Definitions come first.
_SCHEMAS_BY_NAME: Final = ("$defs", "definitions", "properties", "patternProperties")
_SCHEMAS_IN_LINE: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties", "not")
# Keywords that references in any part may point to.
_SHARED: Final = ("$defs", "definitions")
# The most parts of a schema to examine: each costs a compilation.
_MOST_LOOKS: Final = 200
# The options line of a Lark grammar; without options in a converted grammar.
_OPTIONS: Final = "%llguidance"
_NO_OPTIONS: Final = f"{_OPTIONS} {{}}\n"
_UNFORCED: Final = f'{_OPTIONS} {{"no_forcing": true}}'
# The library's word for a state without a next token.
_NOTHING_FOLLOWS: Final = "NoExtension"
_ENDLESS_PART: Final = (
    "it has no finite value, because it requires itself; make it optional, or allow null, an empty list or another "
    "value there"
)
_ENDLESS_RULE: Final = (
    "it has no finite text, because each alternative of the rule {!r} needs a rule that never ends; give it an "
    "alternative that ends"
)
_MISREAD: Final = (
    "it has an integer that is no double of 64 bits, or only such integers; describe it as a string, because others "
    "would be taken for it"
)
# The library's messages on unsupported keywords.
_OVERLAPPING: Final = "oneOf constraints are not supported"
_TOO_LARGE: Final = "schema too large"
_UNSATISFIABLE: Final = "Unsatisfiable schema"
_UNIMPLEMENTED: Final = "Unimplemented keys"
_ELSEWHERE: Final = "Resource '"
_TOO_DEEP: Final = "recursion limit exceeded"
_MOST_LEVELS: Final = 124
_UNDECIDED: Final = "Unable to determine if regex is empty"
_TOO_MANY_ITEMS: Final = "items; max is"
# What the library's patterns lack, in its words.
_NOT_IN_PATTERNS: Final = ("look-around", "lookarounds", "backreferences")
_OF_ONE_OF: Final = "use anyOf, or make them exclusive by a required property with a different const in each"
_OF_SCALARS: Final = "use anyOf, or give them types, values or bounds that exclude each other"
_LENIENT: Final = 'set "x-guidance": {"lenient": true} in the schema, which leaves these keywords to the model'
# The sign of a definition in GBNF, an escape there, and the codes that are no character or need no long escape.
_GBNF: Final = "::="
_ESCAPE: Final = re.compile(r"\\(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|.)", re.DOTALL)
_SURROGATES: Final = range(0xD800, 0xE000)
# Texts, classes and comments in GBNF, and a repetition that is all or the end of a repeated group.
_REPEATED_END: Final = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\#[^\n]*)|(?P<end>[*+?]|\{[\d\s,]*\})(?=\s*\)\s*[*+?{])""",
    re.DOTALL,
)
_ASCII: Final = 0x80
# The second byte makes the library build the automaton of a long repetition.
_FIRST_BYTES: Final = 2


class Fault(NamedTuple):
    """A fault of a grammar. ``place`` is a JSON pointer into a schema, empty for the whole grammar."""

    message: str
    place: str = ""


def schema_grammar(schema: Any) -> Grammar:
    """Return the grammar of a JSON schema, given as an object or as text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def definition_of(grammar: Grammar) -> str:
    """Return the library's definition of a grammar. Raises ValueError for text in another language.

    If a grammar may force a long text, the model chooses the tokens of forced text. Otherwise the tokenizer splits it,
    which is cheap and matches the model's training.
    """
    definition = _forcing_definition_of(grammar)
    return _unforced(grammar, definition) if may_force_too_much(grammar) else definition


def _unforced(grammar: Grammar, definition: str) -> str:
    """Return a definition without forced tokens, in Lark, the only language with that option."""
    if grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX):
        (part,) = json.loads(definition)["grammars"]
        schema = part["json_schema"]
        definition = part["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    definition = definition.removeprefix(_NO_OPTIONS)
    return definition if _OPTIONS in definition else f"{_UNFORCED}\n{definition}"


def _forcing_definition_of(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = rewritten_schema(grammar)
        text = grammar.text if schema is None else json.dumps(schema)
        if text in _BOOLEANS:  # Such a schema has no place for options.
            return LLMatcher.grammar_from_json_schema(text)
        if has_distinct_containers(schema):
            return LLMatcher.grammar_from_json_schema(text, overrides=SPACING)
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(plain(grammar.text, is_whole=True) or grammar.text)
    if grammar.kind is GrammarKind.CHOICE:
        return grammar_from("choice", grammar.text)
    return _with_bounded_json(grammar_from("ebnf", _with_groups(_with_short_escapes(grammar.text))))


def _with_short_escapes(text: str) -> str:
    """Return a GBNF grammar whose characters by number are written as themselves, or by two digits if they are ASCII.

    The conversion to Lark drops the leading zeros of longer numbers, and then has no escape.
    """
    return _ESCAPE.sub(_short_escape, text) if _GBNF in text else text


def _with_groups(text: str) -> str:
    """Return a GBNF grammar in which no repeated group is one repetition, as in ``("a"+)?``.

    The conversion to Lark drops the brackets of such a group, and then has two signs in a row.
    """
    return _REPEATED_END.sub(lambda found: found["text"] or f'{found["end"]} ""', text) if _GBNF in text else text


def _short_escape(found: re.Match[str]) -> str:
    code = int(found["short"] or found["long"] or "", 16) if found["short"] or found["long"] else None
    if code is None or code > sys.maxunicode or code in _SURROGATES:
        return found[0]
    return f"\\x{code:02x}" if code < _ASCII else chr(code)


def _with_bounded_json(lark: str) -> str:
    """Return a Lark grammar with rewritten schemas, and bounded whitespace unless they set it."""
    written, at = [], 0
    while (found := lark.find(_JSON_RULE, at)) >= 0:
        start = found + len(_JSON_RULE)
        start += len(lark[start:]) - len(lark[start:].lstrip())
        try:
            schema, end = _decoder.raw_decode(lark, start)
        except (ValueError, RecursionError):  # Not a schema: the library reports it.
            written.append(lark[at:start])
            at = start
            continue
        if isinstance(schema, dict):
            schema = {"x-guidance": {"whitespace_pattern": _WHITESPACE}} | (followable(schema) or schema)
        written.append(f"{lark[at:start]}{json.dumps(schema)}")
        at = end
    return "".join([*written, lark[at:]])


def rewritten_schema(grammar: Grammar) -> Any:
    """Return the schema as the library gets it, with marks at lists of distinct items; None if there is none."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return None
    try:
        return followable(json.loads(grammar.text), marks_distinct=True)
    except (ValueError, RecursionError):
        return None  # The library explains it.


def fault_of(grammar: Grammar) -> Fault | None:
    """Return why a grammar allows no output, and where; None if it does. Takes as long as compiling it."""
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        return Fault(f"it must have at most {MAX_GRAMMAR_CHARS} characters, got {len(grammar.text)}")
    try:
        grammar.text.encode()
    except UnicodeEncodeError as exc:  # JSON can spell half of a surrogate pair.
        return Fault(f"it must be Unicode text, but has {exc.reason} at character {exc.start}")
    rules = grammar.text.count(_GBNF) if grammar.kind is GrammarKind.EBNF else 0
    if rules > _MOST_RULES:
        return Fault(f"it must have at most {_MOST_RULES} rules, got {rules}; write a rule used once in its place")
    endless = _endless(grammar)
    if endless is not None:
        return endless
    message = _complaint(grammar)
    if not message:
        return None
    # The size of the whole is no part's fault.
    is_of_all = message.startswith((_TOO_LARGE, _TOO_DEEP)) or _TOO_MANY_ITEMS in message
    has_place = grammar.kind is GrammarKind.JSON_SCHEMA and not is_of_all
    place = _place_in(grammar.text, message) if has_place else ""
    return Fault(_remedied(message, grammar.text, place), place)


def _endless(grammar: Grammar) -> Fault | None:
    """Return a required part of a grammar that requires itself, or a constant that would be misread."""
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if (place := endless_place(schema)) is not None:
                return Fault(_ENDLESS_PART, place)
            return Fault(_MISREAD) if misreads(schema) else None
        if grammar.kind is not GrammarKind.EBNF:
            return None
        rule = endless_rule(_forcing_definition_of(grammar))
        return None if rule is None else Fault(_ENDLESS_RULE.format(rule))
    except BaseException:  # noqa: BLE001 - not a grammar, which the library explains better, or its panic
        return None


def _remedied(message: str, text: str, place: str) -> str:
    """Replace a remedy that needs the library's options, which clients cannot set, by one for clients."""
    if message.startswith(_UNSATISFIABLE) and '"oneOf"' in text:
        return f"{message}, or the alternatives of oneOf cannot be told apart; {_telling_apart(text, place)}"
    if message.startswith(_OVERLAPPING):
        return f"several alternatives of oneOf may match; {_telling_apart(text, place)}"
    if message.startswith(_UNIMPLEMENTED):
        return f"{message}; leave them out, or {_LENIENT}"
    if any(what in message for what in _NOT_IN_PATTERNS):
        return f"{message}; leave it out of the pattern, or say in the prompt what it is for"
    if message.startswith(_ELSEWHERE):
        return f"{message}; copy what it names into $defs"
    if message.startswith(_TOO_DEEP):
        return (
            f"its parts are within each other too deeply: at most {_MOST_LEVELS} levels of JSON are read, of which "
            "rewriting adds some; move inner ones into $defs"
        )
    if message.startswith(_UNDECIDED):
        return "its patterns are too large to be combined; write one pattern, or leave some of them out"
    if _TOO_MANY_ITEMS in message:
        return f"{message}; let fewer parts be optional or alternatives in one place"
    return message


def _telling_apart(text: str, place: str) -> str:
    """Return the remedy for the ``oneOf`` at a place: only objects can have a property that tells them apart."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return _OF_ONE_OF
    found = target_in(root, {"$ref": f"#{place}"})
    alternatives = listed(found[1], "oneOf") if found is not None and isinstance(found[1], dict) else []
    meant = [(target_in(root, one) or ("", one))[1] for one in alternatives if isinstance(one, dict)]
    kinds = {kind for one in meant if isinstance(one, dict) for kind in kinds_of(one)}
    return _OF_SCALARS if kinds and "object" not in kinds else _OF_ONE_OF


def why_stuck(matcher: Any) -> str:
    """Return why a matcher of the library failed: no token may follow, or it hit a limit of the library.

    The library names the limit, its bound and the value reached.
    """
    said: str = matcher.get_error().strip().partition("\n")[0]
    return "nothing may come there" if said.startswith(_NOTHING_FOLLOWS) else said


def _complaint(grammar: Grammar) -> str:
    """Return the library's objection to a grammar, empty if it accepts it."""
    from llguidance import LLMatcher

    try:
        # The library's own words for this kind of grammar.
        return (
            LLMatcher.validate_grammar(_forcing_definition_of(grammar)).strip()
            or _dead_end(definition_of(grammar))
            or _crowded(grammar)
        )
    except BaseException as exc:  # noqa: BLE001 - a panic of the library is no Exception
        return str(exc) or type(exc).__name__


def _crowded(grammar: Grammar) -> str:
    """Return what needs more distinct items or names than there are, as a sentence; empty if nothing does."""
    schema = rewritten_schema(grammar)
    for part, mark, needed in crowded_parts(schema):
        alone = schema_grammar({name: schema[name] for name in _SHARED if name in schema} | part)
        if can_be_filled(definition_of(alone), rewritten_schema(alone)):
            continue
        if mark != DISTINCT:
            return f"an object needs {needed} distinct names, but has fewer to choose from; lower minProperties"
        return f"a list needs {needed} distinct items, but has fewer to choose from; lower minItems or minContains"
    if needs_guard(schema) and not can_be_filled(definition_of(grammar), schema):
        return "its lists or objects need more distinct items or names than there are; lower minItems or minProperties"
    return ""


def _dead_end(definition: str) -> str:
    """Return why the library gives up an accepted grammar at the first bytes of an output; empty if it does not.

    A left-recursive grammar allows nothing; a repetition may be too long for the library's automaton.
    """
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), definition, log_level=QUIET)
    if matcher.is_error():
        return ""  # It names tokens by id, and a byte has none.
    for _ in range(_FIRST_BYTES):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not allowed or matcher.is_stopped():
            break
        lowest = allowed & -allowed
        matcher.consume_token(lowest.bit_length() - 1)
    return f"it cannot be followed: {why_stuck(matcher)}" if matcher.is_error() else ""


def _place_in(text: str, message: str) -> str:
    """Return the pointer to the innermost part of a schema with the same objection."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    shared = {name: schema[name] for name in _SHARED if name in schema} if isinstance(schema, dict) else {}
    place, looks = "", 0
    while isinstance(schema, dict):
        for step, part in _parts_of(schema):
            looks += 1
            if looks > _MOST_LOOKS:
                return place
            whole = {**shared, **part} if isinstance(part, dict) else part
            if _complaint(schema_grammar(json.dumps(whole))) == message:
                place, schema = place + step, part
                break
        else:
            return place
    return place


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, with the steps of a JSON pointer to them."""
    for name in _SCHEMAS_BY_NAME:
        parts = schema.get(name)
        if isinstance(parts, dict):
            yield from ((f"/{name}/{_escaped(key)}", part) for key, part in parts.items())
    for name in (*_SCHEMAS_IN_LINE, "items"):
        parts = schema.get(name)
        if isinstance(parts, list):
            yield from ((f"/{name}/{index}", part) for index, part in enumerate(parts))
    for name in _SCHEMAS:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def patterns_in(grammar: Grammar) -> list[str]:
    """Return the patterns of the texts and names of a schema."""
    found = dict[str, bool]()
    for name, value in _fields_of(json.loads(grammar.text)):
        if name == "pattern" and isinstance(value, str):
            found[value] = True
        elif name == "patternProperties" and isinstance(value, dict):
            found |= dict.fromkeys(value, True)
    return list(found)


# Below this length a token costs less than 1 ms. An output uses no more of a forced text than its own length.
MOST_FORCED_CHARS: Final = 4096
# The minimum count of a repetition, which is forced. Lark also writes repetitions with a tilde.
_COUNT: Final = re.compile(r"(?:\{|~\s*)(\d{1,9})")


def may_force_too_much(grammar: Grammar) -> bool:
    """Return whether a grammar may force a text longer than ``MOST_FORCED_CHARS``; True if in doubt."""
    text = grammar.text
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return _forced_by_schema(json.loads(text)) > MOST_FORCED_CHARS
        if grammar.kind is GrammarKind.CHOICE:
            return max(map(len, json.loads(text)), default=0) > MOST_FORCED_CHARS
    except (ValueError, TypeError, RecursionError):
        return False  # Not JSON: `fault_of` reports it.
    line = max(map(len, text.splitlines()), default=0) if grammar.kind is GrammarKind.EBNF else len(text)
    return line * _repeated(text) > MOST_FORCED_CHARS


def _repeated(text: str) -> int:
    """Return the product of all counts, because repetitions may be nested."""
    product = 1
    for found in _COUNT.finditer(text):
        product *= max(1, int(found[1]))
        if product > MOST_FORCED_CHARS:
            break
    return product


def _forced_by_schema(schema: Any) -> int:
    """Estimate the forced characters: all constants, the longest name and pattern, times required list items."""
    chars, longest, entries = 0, 0, 1
    for name, value in _fields_of(schema):
        longest = max(longest, len(name))
        if name == "const" or (name == "enum" and isinstance(value, list) and len(value) == 1):
            chars += len(json.dumps(value))
        elif name == "enum" and isinstance(value, list):
            longest = max(longest, *(len(json.dumps(one)) for one in value), 0)
        elif name == "pattern" and isinstance(value, str):
            longest = max(longest, len(value) * _repeated(value))
        elif name == "minItems" and isinstance(value, int) and value > 1:
            entries = min(entries * value, MOST_FORCED_CHARS + 1)
    return (chars + longest) * entries


def _fields_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field of every object in a schema, without recursion: the client controls the depth."""
    open_parts = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            yield from part.items()
            open_parts += part.values()
        elif isinstance(part, list):
            open_parts += part
