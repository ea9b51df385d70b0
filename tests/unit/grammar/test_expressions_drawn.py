"""Expressions drawn with a seed, against Python's: over all short texts, in each way in which they are rewritten."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Collection

from texts_of_grammars import allowed

from engine.core.messages import Grammar, GrammarKind
from engine.grammar.automata import negated_pattern, pattern_of_both, plain, plain_parts
from engine.grammar.patterns import is_found
from engine.grammar.rule_ends import endless_rule
from engine.grammar.source import fault_of, schema_grammar

Draw = random.Random
LETTERS = "ab1 "
TEXTS = ["".join(letters) for length in range(4) for letters in itertools.product(LETTERS, repeat=length)]
ATOMS = ("a", "b", "1", " ", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\D", r"[^\w]", r"\x61", "[a-b1]", r"[\s\d]")
COUNTS = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}", "*?", "+?")


def sequence(draw: Draw, depth: int, *, looks: bool) -> str:
    return "".join(item(draw, depth, looks=looks) for _ in range(draw.randint(1, 3)))


def item(draw: Draw, depth: int, *, looks: bool) -> str:
    kind = draw.random()
    if looks and kind < 0.2:
        return f"({draw.choice(['?=', '?!'])}{sequence(draw, depth - 1, looks=False) if depth else draw.choice(ATOMS)})"
    if looks and kind < 0.3:
        return draw.choice([r"\b", r"\B", "(?<=a)", "(?<!b)", "(?<=[a1])", "^", "$"])
    if depth and kind < 0.5:
        options = [sequence(draw, depth - 1, looks=looks) for _ in range(draw.randint(1, 2))]
        return f"({draw.choice(['?:', ''])}{'|'.join(options)}){draw.choice(COUNTS)}"
    return draw.choice(ATOMS) + draw.choice(COUNTS)


def expression(draw: Draw) -> str:
    return f"{draw.choice(['', '^', '^'])}{sequence(draw, 1, looks=True)}{draw.choice(['', '$', '$'])}"


def judge(pattern: str) -> re.Pattern[str]:
    """The same in Python's dialect: its dollar also matches before a newline, of which the texts have none, and its
    opposite of a word boundary nothing in the empty text."""
    coded = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    return re.compile(coded.replace(r"\B", r"(?!\b)"), re.ASCII)


def matched(pattern: str) -> set[str]:
    found = judge(pattern).search
    return {text for text in TEXTS if found(text)}


def test_an_expression_is_rewritten_to_one_with_the_same_texts() -> None:
    draw, left = Draw(3), [0, 0, 0]
    for _ in range(60):
        pattern = expression(draw)
        expected = matched(pattern)
        one, parts, negated = plain(pattern), plain_parts(pattern), negated_pattern(pattern)
        # Neither what matches no text can be written, nor the negation of what matches each.
        unwritten = (one is None and expected, parts is None and expected, negated is None and expected != {*TEXTS})
        left = [count + bool(one) for count, one in zip(left, unwritten, strict=True)]
        assert one is None or matched(one) == expected, pattern
        assert parts is None or set.intersection(*map(matched, parts)) == expected, pattern
        assert negated is None or matched(negated) == {*TEXTS} - expected, pattern
    # The negations of two have too many states.
    assert left == [0, 0, 2]


def test_expressions_are_combined() -> None:
    """Texts that all of some match, and none of others."""
    draw, left = Draw(4), 0
    for _ in range(30):
        patterns = tuple(expression(draw) for _ in range(draw.randint(1, 3)))
        kept = draw.randint(1, len(patterns))
        both = pattern_of_both(patterns[:kept], patterns[kept:])
        left += both is None
        expected = set.intersection(*map(matched, patterns[:kept])).difference(*map(matched, patterns[kept:]))
        assert both is None or matched(both) == expected, patterns
    assert not left


def test_a_pattern_of_a_schema_takes_the_texts_that_it_matches() -> None:
    """Anywhere in a string; an expression by itself matches the whole output."""
    draw, refused = Draw(5), 0
    quoted = {json.dumps(text): text for text in TEXTS}
    for _ in range(40):
        pattern = expression(draw)
        grammar = schema_grammar({"type": "string", "pattern": pattern})
        whole = Grammar(GrammarKind.REGEX, pattern)
        expected, of_whole = matched(pattern), {text for text in TEXTS if judge(pattern).fullmatch(text)}
        if fault_of(grammar) is None:
            assert {quoted[text] for text in allowed(grammar, quoted)} == expected, pattern
        refused += fault_of(grammar) is not None and bool(expected)
        if is_found(pattern, "") is not None:
            assert {text for text in TEXTS if is_found(pattern, text)} == expected, pattern
        if fault_of(whole) is None:
            assert set(allowed(whole, TEXTS)) == of_whole, pattern
    assert not refused


NAMES = ("start", "a", "b", "c")
# What a rule may have, and whether it has a finite text by itself.
PIECES = {'"x"': True, "/y/": True, '%json {"const": 1}': True, "%json false": False, "<[7]>": True}
# How often, and whether none is enough.
OFTEN = {"": False, "*": True, "?": True, "+": False, "{2}": False, "{0,2}": True, "{1,}": False, "~ 0..2": True}
OFTEN_DRAWN = (*OFTEN, "", "", "")
# Whether a body has a finite text, if these rules have.
Ends = Callable[[Collection[str]], bool]


def body(draw: Draw, depth: int = 1) -> tuple[str, Ends]:
    """The body of a rule in Lark, and when it has a finite text."""
    options = [sequence_of_rules(draw, depth) for _ in range(draw.randint(1, 2))]
    return " | ".join(text for text, _ in options), lambda ends: any(one(ends) for _, one in options)


def sequence_of_rules(draw: Draw, depth: int) -> tuple[str, Ends]:
    pieces = [piece(draw, depth) for _ in range(draw.randint(1, 2))]
    return " ".join(text for text, _ in pieces), lambda ends: all(one(ends) for _, one in pieces)


def piece(draw: Draw, depth: int) -> tuple[str, Ends]:
    kind = draw.random()
    if depth and kind < 0.3:
        inner, inner_ends = body(draw, depth - 1)
        if draw.random() < 0.3:
            return f"[{inner}]", lambda _: True
        text, needs = f"({inner})", inner_ends
    elif kind < 0.7:
        name = draw.choice(NAMES)
        text, needs = name, lambda ends: name in ends
    else:
        text = draw.choice([*PIECES])
        is_finite = PIECES[text]
        text, needs = f"({text})" if "%" in text else text, lambda _: is_finite
    often = draw.choice(OFTEN_DRAWN)
    return f"{text}{often}", needs if not OFTEN[often] else lambda _: True


def test_a_rule_without_a_finite_text_is_found() -> None:
    """By a fixpoint over conditions that were written with the rules."""
    draw, seen = Draw(6), set()
    for _ in range(800):
        bodies = {name: body(draw) for name in NAMES}
        ends = set[str]()
        for _ in NAMES:
            ends |= {name for name, (_, needs) in bodies.items() if needs(ends)}
        reached = {"start"}
        for _ in NAMES:
            reached |= {name for one in reached for name in re.findall(r"\b(?:start|a|b|c)\b", bodies[one][0])}
        lark = "\n".join(f"{name}: {text}" for name, (text, _) in bodies.items())
        found = endless_rule(lark)
        assert (found is None and reached <= ends) or found in reached - ends, lark
        seen.add(found)
    assert seen == {None, *NAMES}
