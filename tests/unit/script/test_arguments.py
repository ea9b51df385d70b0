"""Arguments of a script arrive in the scheduler's process as what they were, or are refused by name."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from scripted_lockstep.tiers.server.wire import decode_command

from engine.core.messages import encode
from scripted import BadCall
from scripted.script.arguments import check_plain, packed, unpacked
from scripted.script.wire import RunScript


class Colour(enum.IntEnum):
    RED = 1


PLAIN: list[Any] = [
    None,
    True,
    7,
    -(2**63),
    2**64 - 1,
    1.5,
    "text",
    b"bytes",
    Path("/a folder/b\udcff"),
    (),
    (1, 2),
    [(1, [2, (3,)]), ()],
    {"a": (1, {"b": (2,)}), 3: [None]},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_plain_value_arrives_as_it_was(value: Any) -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""
    check_plain({"value": value})
    sent = encode(RunScript(file="f", name="n", args=packed([value]), kwargs=packed({"k": value})))
    command = decode_command(sent)
    assert isinstance(command, RunScript)
    assert repr(unpacked(command.args)) == repr([value]), "a tuple is a tuple, a list a list"
    assert repr(unpacked(command.kwargs)) == repr({"k": value})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "sizes is a set, which cannot travel"),
        (frozenset(), "sizes is a frozenset, which cannot travel"),
        (Colour.RED, "sizes is a Colour, which cannot travel .*of an enum its .value"),
        ([1, {"a": ({2},)}], r"sizes\[1\]\['a'\]\[0\] is a set"),
        ({(1, 2): 3}, r"sizes has the key \(1, 2\), a tuple; use strings or whole numbers"),
        ({Colour.RED: 3}, "a Colour; use strings or whole numbers"),
        (2**64, "has more than 64 bits"),
        (object(), "sizes is a object"),
        (lambda: 1, "sizes is a function"),
    ],
)
def test_what_would_arrive_as_something_else_is_refused(value: Any, words: str) -> None:
    with pytest.raises(BadCall, match=words):
        check_plain({"sizes": value})
