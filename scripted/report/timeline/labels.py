"""The short name that a request has on a page: no two requests of a page share one.

Owns the choice of what a long rid keeps: its head and its tail, or for its tail the part in which it differs
from others that are alike there. So the end of a label tells requests apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

from scripted.core.phrases import printable

# A rid of this many characters is its own label; "scripted-1" is one.
_CHARACTERS: Final = 10
_HEAD: Final = 3
_TAIL: Final = 5
# Of the part in which rids with the same head and tail differ.
_MIDDLE: Final = 5


def labels_of(rids: Iterable[str]) -> dict[str, str]:
    """A label for every rid, printable and distinct."""
    alike: dict[str, list[str]] = {}
    for rid in dict.fromkeys(rids):
        alike.setdefault(_head_and_tail(printable(rid)), []).append(rid)
    labels: dict[str, str] = {}
    taken = {label for label, group in alike.items() if len(group) == 1}
    for label, group in alike.items():
        for rid, wanted in zip(group, [label] if len(group) == 1 else _with_middles(group), strict=True):
            labels[rid] = wanted if len(group) == 1 else _free(wanted, taken)
            taken.add(labels[rid])
    return labels


def _head_and_tail(name: str) -> str:
    return name if len(name) <= _CHARACTERS else f"{name[:_HEAD]}..{name[-_TAIL:]}"


def _with_middles(rids: Sequence[str]) -> list[str]:
    """Labels for rids with the same head and tail: what lies between what all of them begin and end with."""
    names = [printable(rid) for rid in rids]
    begin = _common_start(names)
    end = _common_start([name[begin:][::-1] for name in names])
    middles = [name[begin : len(name) - end][:_MIDDLE] for name in names]
    return [f"{name[:_HEAD]}..{middle}" for name, middle in zip(names, middles, strict=True)]


def _common_start(names: Sequence[str]) -> int:
    """How many characters all of them begin with."""
    return len(list(takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))))


def _free(label: str, taken: set[str]) -> str:
    """The label, with a number when it is taken."""
    numbered, number = label, 1
    while numbered in taken:
        number += 1
        numbered = f"{label}~{number}"
    return numbered
