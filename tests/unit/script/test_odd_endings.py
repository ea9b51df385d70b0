"""Scripts that end in odd ways: what stopped them, and what they hid, is in the report, and the engine goes on."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine import EngineConfig
from lockstep.errors import MAX_TEXT_CHARS
from scripted import BadCall, BudgetSpent, ScriptDefinitionError, ScriptedSim, ScriptError, ScriptFailed, ScriptOptions

CONFIG = EngineConfig(pp_size=2, chunked_prefill_size=64)


class Speechless(Exception):
    """A user's exception whose text cannot be read."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def catches_the_end_of_its_budget(t):
    with contextlib.suppress(BudgetSpent):
        while True:
            yield


def fails_while_it_cleans_up(t):
    try:
        yield
        raise LookupError("the first failure")
    finally:
        raise OSError("and the second")


def never_gets_past_its_finally(t):
    try:
        yield
        raise LookupError("the first failure")
    finally:
        while True:
            yield


def raises_a_group(t):
    yield
    raise ExceptionGroup("both", [LookupError("one"), ExceptionGroup("inner", [OSError("other")])])


def raises_what_has_no_text(t):
    yield
    raise Speechless


def closes_itself(t):
    yield
    raise GeneratorExit


def calls_a_property(t):
    yield
    t.is_fully_idle()


def kills_a_stage_twice(t):
    t.start_req(prompt_len=10)
    yield
    t.stall_stage(0)
    t.kill_stage(1)
    t.resume_stage(0)
    t.kill_stage(1)


def finds_nothing(t):
    yield
    next(iter(t.state.waiting))


def forgets_a_wait(t):
    r = t.start_req(prompt_len=5)
    yield
    t.run_until_finished(r)
    assert r.finished


def sends_one(t):
    yield from t.run_until_finished(t.start_req(prompt_len=5))


def forgets_a_helper(t):
    yield
    waiting = sends_one(t)
    assert t.forward_ct, waiting


async def awaits(t):
    yield t.state


def hands_on_to_an_async_helper(t):
    yield
    yield from awaits(t)


def waits_for_a_list(t):
    r = t.start_req(prompt_len=5)
    yield from t.run_until_finished([r])


def asks_for_a_count_that_pages_do_not_have(t):
    yield
    assert t.state.kv.free_pages


def takes_the_partly_prefilled_one_for_a_list(t):
    r = t.start_req(prompt_len=200)
    yield
    assert t.state.chunked != [r.rid]


def looks_into_the_partly_prefilled_one(t):
    t.start_req(prompt_len=200, rid="batch_10")
    yield
    assert "batch_1" in t.state.chunked


def misspells_a_kind(t):
    t.start_req(prompt_len=5)
    assert t.state.arrived[0].kind != "strat"
    yield


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            finds_nothing,
            r"next\(iter\(t.state.waiting\)\)\nE +RuntimeError: .*; next\(\) found nothing: give it a default",
        ),
        (forgets_a_wait, r"before it t.run_until_finished\(scripted-1\) did nothing: write 'yield from "),
        (hands_on_to_an_async_helper, "; nothing awaits in a script: write the helper without async"),
        (waits_for_a_list, "finish_reason=None>]; for several write run_until_all_finished"),
        (asks_for_a_count_that_pages_do_not_have, "no attribute 'free_pages'; it has total, free, cached, held"),
        (takes_the_partly_prefilled_one_for_a_list, "is the rid of one request; it can never be .'scripted-1'."),
        (looks_into_the_partly_prefilled_one, "'batch_1' is looked for in 'batch_10', the rid of one request"),
        (misspells_a_kind, r"it can never be 'strat' .did you mean 'start'\?"),
        (catches_the_end_of_its_budget, "the script ran its max_steps=4 steps"),
        (fails_while_it_cleans_up, "OSError: and the second\nE +while it handled LookupError: the first failure"),
        (never_gets_past_its_finally, "max_steps=4 steps.*while it handled LookupError: the first failure"),
        (raises_a_group, "both .2 sub-exceptions.\nE +LookupError: one\nE +ExceptionGroup: inner.*\nE +OSError: other"),
        (raises_what_has_no_text, r"Speechless: \(its text raises ZeroDivisionError\)"),
        (closes_itself, "the script was left by GeneratorExit"),
        (calls_a_property, "'bool' object is not callable; it is a value and not a method: leave the parentheses out"),
        (kills_a_stage_twice, r"t.kill_stage\(1\) needs stages that run, and stage-1 has died"),
    ],
)
def test_an_odd_end_is_a_failure_at_the_script_s_line(script: Callable[..., Any], words: str) -> None:
    """D02, D07: and not the death of the engine."""
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed) as caught:
        sim.run(script, options=ScriptOptions(max_steps=4))
    text = str(caught.value)
    assert re.search(words, text, re.DOTALL), text
    assert f"in {script.__name__}" in text


LONG = "x" * 1_000_000


def raises_a_long_text(t):
    yield
    raise LookupError(f"begins {LONG} ends")


def compares_with_a_long_word(t):
    r = t.start_req(prompt_len=5, max_new_tokens=1)
    yield from t.run_until_finished(r)
    assert r.finish_reason == LONG


def looks_for_a_long_verb(t):
    yield
    getattr(t, LONG)


def dies_of_a_long_text(t):
    t.scheduler.step = lambda *_: raises(f"begins {LONG} ends")
    yield


def raises(text: str) -> None:
    raise LookupError(text)


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        (raises_a_long_text, " ends"),
        (compares_with_a_long_word, ""),
        (looks_for_a_long_verb, ""),
        (dies_of_a_long_text, " ends"),
    ],
)
def test_a_report_quotes_a_long_value_in_part(script: Callable[..., Any], ends: str) -> None:
    """D02: a value of a megabyte, whose text was in the report twice."""
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptError) as caught:
        sim.run(script)
    text = str(caught.value)
    assert len(text) < 5 * MAX_TEXT_CHARS
    assert re.search(rf"xx\.\.\. \(98\d{{4}} more\) \.\.\.xx+'?.*{ends}", text)


def test_a_failure_names_the_helper_that_never_ran_before_it() -> None:
    """D02: the assertion may have failed because of it."""
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed) as caught:
        sim.run(forgets_a_helper, options=ScriptOptions(must_assert=True))
    assert re.search(r"before it \S+:\d+: sends_one\(...\) was made there and never ran", str(caught.value))


def takes(t, tokens, *, more):
    yield from t.run_until_finished(t.start_req(prompt_len=5, max_new_tokens=tokens + more))


def test_a_partial_is_its_function_and_arguments() -> None:
    """D01: both tiers find a script by its name."""
    with ScriptedSim.start(CONFIG) as sim:
        assert sim.run(functools.partial(takes, more=1), 2).steps == 1 + 3 * 2
        with pytest.raises(ScriptDefinitionError, match="arguments before t"):
            sim.run(functools.partial(takes, 2), more=1)
        with pytest.raises(ScriptDefinitionError, match="is not a generator function"):
            sim.run(BadCall)


def releases_grammars_that_it_does_not_hold(t):
    t.release_grammars(1)
    for _ in range(2):
        yield from t.run_until_finished(t.start_req(prompt_len=5, regex="[ab]{2}"), max_steps=20)


def test_a_release_of_what_is_not_held_holds_nothing() -> None:
    """D02: the second grammar was never ready."""
    with ScriptedSim.start(CONFIG) as sim:
        sim.run(releases_grammars_that_it_does_not_hold)
