"""Expressions without look-aheads, and negations of expressions, match what Python's expressions say."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from thinned import thinned

from engine.grammar.automata import negated_pattern, plain, plain_parts

PATTERNS = [
    r"^(?=.*[A-Z])(?=.*\d).{8,}$",
    r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[@$!%*?&])[A-Za-z\d@$!%*?&]{8,}$",
    r"^(?!admin$).*",
    r"^(?!admin$)[a-z]+$",
    r"^((?!foo).)*$",
    r"\bword\b",
    r"^(?!\s)(?!.*\s$)[\s\S]+$",
    r"^(?!-)(?!.*--)[a-z0-9-]{1,63}(?<!-)$",
    r"^(?!(?:con|prn|aux|nul)$)\w+$",
    r"^[a-z](?!.*__)[a-z_]*$",
    r"^(?!x-).*$",
    r"^(?!(a|b)$)",
    r"foo(?=bar)",
    r"^(?:(?!\.\.)[\w./-])+$",
    r"^(?!000|666|9\d{2})\d{3}$",
    r"^(?=.*\S).+$",
    r"^a|(?!b)c$",
    r"^(?=[a-z])[a-z0-9]|x$",
    r"^(?!.*[<>]).{1,200}$",
    r"(?<!a)b(?<=b)\B",
    r"^(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*$",
    r"^(?=.{1,20}$)((?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)+[A-Za-z]{2,}$",
    r"(?!a)[ab](?<!b)c|^(?=\w)(?!\d).{2,}(?<=[a-c])(?<!b)$",
    r"^(?=(a|b)?)(?:(?!c)|d)*x??\x41\u0042\u{43}[\]\d-]$",
]
# Their negation would have too many states, or too large classes; that of their parts has not.
TOO_LARGE_TO_NEGATE = {PATTERNS[number] for number in (0, 1, 7, 14, 18, 20, 21)}


def _ending_at_the_end(pattern: str, flag: re.RegexFlag = re.ASCII) -> re.Pattern[str]:
    """The pattern in Python's dialect, whose dollar also matches before a newline."""
    pattern = re.sub(r"\\[xu]\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    ends = re.sub(r"\[(?:\\.|[^\]])*\]|\\.|\$", lambda found: r"\Z" if found[0] == "$" else found[0], pattern)
    return re.compile(ends, flag)


def _texts(pattern: str, count: int) -> list[str]:
    rng = random.Random(pattern)
    letters = [letter for letter in pattern if letter.isalnum() or letter in "-_.@!<> "] + list("aZ9 -.\nABC]")
    words = [*re.findall("[a-zA-Z]{2,}", pattern), "ABC-", "Aa1!Aa1!", "ab", "foobar", "a word."]
    some = ["".join(rng.choice(letters) for _ in range(rng.randrange(12))) for _ in range(count)]
    return ["", *words, *some, *(text[:3] + rng.choice(words) + text[8:] for text in some)]


@pytest.mark.parametrize("pattern", thinned(PATTERNS, one_in=2))
def test_an_expression_without_look_aheads_matches_the_same_texts(pattern: str) -> None:
    parts, one, negated = plain_parts(pattern), plain(pattern), negated_pattern(pattern)
    assert parts is not None
    rewritten = [_ending_at_the_end(part) for part in parts]
    assert not any("(?=" in part or "(?!" in part or "(?<" in part or "\\b" in part for part in parts)
    judge, whole = _ending_at_the_end(pattern), one and _ending_at_the_end(one)
    inverse = negated and _ending_at_the_end(negated)
    assert inverse or pattern in TOO_LARGE_TO_NEGATE
    seen = set()
    for text in _texts(pattern, 150):
        expected = judge.search(text) is not None
        seen.add(expected)
        assert all(part.search(text) for part in rewritten) is expected, text
        assert not whole or (whole.search(text) is not None) is expected, text
        assert not inverse or (inverse.search(text) is None) is expected, text
    assert seen == {True, False}


@pytest.mark.parametrize(
    "pattern",
    [r"(a)(?=\1)", r"^(?i)(?=a)a", r"(?<=ab)c", r"(?=\p{L})", "(?=a)b", "(?=", "(?=a", "(?=a))", "(?=[b)", r"(?=\q)"],
)
def test_what_no_automaton_has_is_left(pattern: str) -> None:
    assert plain(pattern) is None
    assert plain_parts(pattern) is None


def test_classes_of_an_expression_that_forbids_are_larger() -> None:
    """An Arabic digit is a digit in some dialects: it neither counts as one, nor escapes where none may be."""
    needs, forbids = plain(r"^(?=.*\d)(?=.*\s).{9}$"), plain(r"^(?!.*\d)(?!.*\s)")
    assert needs is not None
    assert forbids is not None
    assert not _ending_at_the_end(needs).search("abcdefg\u0663\u3000")
    assert _ending_at_the_end(needs).search("abcdefg3 ")
    for text in ("abc\u0663", "abc\u3000"):
        assert not _ending_at_the_end(forbids).search(text)
    assert _ending_at_the_end(forbids).search("abc\u00e9")


@pytest.mark.parametrize(
    "pattern",
    [
        "^" + "".join(f"(?=.*{letter}.{{20}})" for letter in "abcdefgh") + ".*a(?!b)",
        "(?!" + "(a?" * 30 + ")*" * 30 + ")",
        "^(?:(?!" + "|".join(f"w{number}x" for number in range(200)) + ").)*$",
        r"\b(?:(?:a|b|c){0,99}){0,99}\b",
        "(?=" * 3000,
        "(?!a)" * 3000,
        "(?!(a?){5000})",
    ],
)
def test_an_expression_takes_bounded_time(pattern: str) -> None:
    """The front end's event loop rewrites the schemas of tools."""
    begun_s = time.process_time()
    plain(pattern)
    plain_parts(pattern)
    negated_pattern(pattern)
    assert time.process_time() - begun_s < 2


# Classes and edges on which dialects differ beyond ASCII.
IN_DOUBT = [
    *(rf"^(?=[{members}]+$)" for members in (r"^\d", r"\d_", r"^\W", r"^\W\d", r"\W\d", r"^\s", r"\S", r"^\D", r"a\D")),
    *(rf"^(?![{members}])" for members in (r"^\d", r"\d_", r"^\W\d", r"^\s", r"\S", r"\D")),
    *(
        r"\bab\b",
        r"^a\b",
        r"\ba",
        r"b\b",
        r"a\Bb",
        r"\Ba",
        r"b\B",
        r"^(?!.*\bab\b)",
        r"^(?!.*\Bb)",
        r"(?<=\w)a",
        r"(?<!\d)a",
    ),
]


@pytest.mark.parametrize("pattern", IN_DOUBT)
def test_what_is_in_doubt_is_taken_by_neither(pattern: str) -> None:
    """An expression allows what all dialects match, and its negation what none does."""
    one, negated = plain(pattern), negated_pattern(pattern)
    assert one is not None
    assert negated is not None
    takes, refuses = _ending_at_the_end(one), _ending_at_the_end(negated)
    dialects = [_ending_at_the_end(pattern, flag) for flag in (re.ASCII, re.UNICODE)]
    for letters in itertools.chain(*(itertools.product("ab1 _\u0663\u00e9\u3000", repeat=count) for count in range(4))):
        text = "".join(letters)
        found = {dialect.search(text) is not None for dialect in dialects}
        assert takes.search(text) is None or found == {True}, text
        assert refuses.search(text) is None or found == {False}, text
        assert not text.isascii() or (takes.search(text) is None) is (refuses.search(text) is not None), text


def test_a_word_beside_another_script_is_in_doubt() -> None:
    """Dialects differ on whether its letters are of a word."""
    needs, forbids = plain(r"\babc\b"), plain(r"^(?!.*\babc\b)")
    assert needs is not None
    assert forbids is not None
    for text, is_word in (("abc", True), ("x abc.", True), ("\u00e9abc", None), ("abcd", False)):
        assert bool(_ending_at_the_end(needs).search(text)) is (is_word is True)
        assert bool(_ending_at_the_end(forbids).search(text)) is (is_word is False)
