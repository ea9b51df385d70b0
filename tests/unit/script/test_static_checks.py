"""Values that say nothing of an engine, and would pass unnoticed, are refused where a script uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripted import BadCall
from scripted.script.static_checks import Asked, Method, check_count, check_predicate, several, truth_of

WRONG: dict[str, Callable[[], object]] = {
    "a generator as a condition": lambda: truth_of((one for one in ()), "the condition"),
    "a function as a condition": lambda: truth_of(len, "the condition"),
    "a truth value as a number": lambda: check_count("f()", "n", True),
    "nothing as a number": lambda: check_count("f()", "n", 0),
    "a fraction": lambda: check_count("f()", "n", 1.5),
    "a predicate with an argument": lambda: check_predicate(lambda one: one),
    "a predicate that is no function": lambda: check_predicate(3),
    "no handle": lambda: several([], int),
    "one handle": lambda: several(3, int),
    "a method beside a number": lambda: Method("t.state", len) == 3,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_says_nothing_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(BadCall):
        wrong()


def test_what_says_something_is_taken() -> None:
    assert truth_of([0], "the condition")
    assert not truth_of([], "the condition")
    assert check_count("f()", "n", 3) == 3
    check_predicate(lambda: True)
    check_predicate(dict)
    assert several((one for one in (1, 2)), str) == [1, 2]
    assert Method("t.state", len) != None  # noqa: E711 - the comparison is what is tested


def test_a_method_cannot_be_set() -> None:
    class Context(Asked):
        def verb(self) -> int:
            return 1

    t: Any = Context()
    t._seal()
    with pytest.raises(BadCall, match=r"t\.verb is a method and cannot be set to 3; call it"):
        t.verb = 3
    t.mine = 3
    assert (t.verb(), t.mine) == (1, 3)
