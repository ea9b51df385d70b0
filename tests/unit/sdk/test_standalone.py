"""Findings as tests of a scheduler's own classes: what is not kept, and who writes none."""

from __future__ import annotations

import pytest

from scripted import api
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.standalone import what_is_wrong

EXAMPLE = "adapter=examples/your_scheduler/adapter.py"


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [("assert not 1, 'it waits'", True), ("assert 1", False), ("raise_nothing", False), ("import scripted", False)],
)
def test_a_file_is_kept_if_it_fails_as_it_says_and_alone(body: str, is_kept: bool) -> None:
    wrong = what_is_wrong(f"def test_it():\n    {body}\n", "AssertionError: ")
    assert (wrong is None) == is_kept


@pytest.mark.parametrize(
    ("schedule", "mutant", "words"),
    [
        ("default; 1 start a prompt=4", None, "lockstep writes no standalone tests; leave --standalone out"),
        ("default; 1 start a prompt=4", "abc", "a standalone test knows no mutant: leave --mutant abc"),
        (f"{EXAMPLE}; 1 start a prompt=4", None, "writes no standalone tests, for it has no standalone="),
    ],
)
def test_who_writes_none_says_why(schedule: str, mutant: str | None, words: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=words):
        api.write_test(schedule, mutant=mutant, standalone=True)
