"""The demo's story and its verdict, on runs of its script in the sim tier."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from scripted_lockstep.demo.race import flush_race
from scripted_lockstep.demo.show import BUG, Half, Race
from scripted_lockstep.mutants import mutant_named
from scripted_lockstep.tiers.sim.runner import EngineSim

from scripted.api import RecordedRun, run_script
from scripted.script.decorator import spec_of
from scripted.script.loader import load_test

REGISTERED = Path(__file__).parents[2] / "registered/pipeline/test_flush_in_flight.py"


def run_race(mutant: str | None) -> RecordedRun:
    return run_script(flush_race, tier="sim", title="race", mutant=mutant)


@pytest.fixture(scope="module")
def bug() -> RecordedRun:
    return run_race(BUG)


@pytest.fixture(scope="module")
def engine() -> RecordedRun:
    return run_race(None)


def half(outcome: RecordedRun, *, with_bug: bool) -> Half:
    return Half(title="half", mutant=mutant_named(BUG) if with_bug else None, outcome=outcome, pids={"scheduler": 7})


def test_the_story_tells_the_turning_points(bug, engine):
    crash, refusal = Race.of(bug.trace.log), Race.of(engine.trace.log)
    assert [step for step, _ in crash.sentences()] == [2, 3, 7]
    assert [step for step, _ in refusal.sentences()] == [2, 3, 14]
    told = " ".join(sentence for _, sentence in crash.sentences())
    assert "200" in told
    assert "another tree" in told
    assert "refused 400: in_flight=2" in " ".join(sentence for _, sentence in refusal.sentences())


def test_both_halves_show_what_they_should(bug, engine):
    assert half(bug, with_bug=True).problems() == []
    assert half(engine, with_bug=False).problems() == []


def test_a_half_that_shows_something_else_is_a_failure(bug, engine):
    """The demo must be able to fail."""
    assert len(half(engine, with_bug=True).problems()) == 3
    assert len(half(bug, with_bug=False).problems()) == 3


def test_a_run_without_its_window_is_no_race(engine):
    assert Race.of(msgspec.structs.replace(engine.trace.log, steps=engine.trace.log.steps[:1])) is None
    assert half(dataclasses.replace(engine, trace=None), with_bug=False).problems()


def test_what_is_printed_is_ascii_and_has_table_and_story(bug):
    out = io.StringIO()
    half(bug, with_bug=True).show(Console(file=out, width=118, color_system=None, highlight=False, markup=False))
    text = out.getvalue()
    assert text.isascii()
    assert "scheduler (7)" in text
    assert "DIED HERE" in text
    assert "step 3" in text


def test_the_demo_runs_the_race_of_the_registered_test(engine):
    """Same configuration and same plans: the demo shows what the suite tests."""
    registered = load_test(str(REGISTERED), "test_flush_while_chunk_results_are_in_flight")
    assert registered.config == spec_of(flush_race).config
    with EngineSim(registered.config) as sim:
        run = run_script(registered.script, config=registered.config, harness=sim)
    assert shapes(run) == shapes(engine)


def shapes(run: RecordedRun) -> list[list[str]]:
    """Where each segment of each microbatch starts and how long it is: the plan without the names of requests."""
    return [[share.positions for share in step.launched.shares] for step in run.trace.log.steps if step.launched]
