"""Schedules as tests: what is written was seen red with the bug and green without it, or is not written at all."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from base_workloads import WORKLOADS
from rich.console import Console
from scripted_lockstep.mutants.gallery import switched_on
from scripted_lockstep.tiers.sim.runner import EngineSim
from thinned import thinned

from engine.core.messages import FlushCache
from engine.core.scheduler import Scheduler, StepResult
from scripted.cli.console import save_test
from scripted.core.protocol import WrittenTest
from scripted.core.schedule import Schedule
from scripted.report.failure import ScriptError
from scripted.script.loader import load_test
from scripted.script.scripted_test import ScriptedTest
from scripted.search.execution import Prefixes, execute
from scripted.search.strategies import RandomEvents
from scripted.search.written_test import Line, write_test

FLUSH = "flush-ignores-in-flight"
RACE = Schedule.parse("pp_size=2 max_total_tokens=512; 1 start a prompt=5; 2 flush")
# Only the death of a stage shows this one, and a script cannot kill the stage of an engine that has one.
DEATH = "death-looks-like-a-normal-end"
DEATH_OF_THE_ONLY_STAGE = Schedule.parse("max_total_tokens=512; 1 start a prompt=5; 2 kill")


def loaded(written: WrittenTest, folder: Path, name: str = "test_it") -> ScriptedTest:
    path = folder / "test_written.py"
    path.write_text(written.text or "", encoding="ascii")
    return load_test(str(path), name)


@pytest.mark.parametrize(
    ("mutant", "line"),
    [
        (FLUSH, "pp_size=2 max_total_tokens=512; 1 start a prompt=5; 2 flush"),
        ("abort-waits-for-a-token", "pp_size=2 max_total_tokens=512; 1 start a prompt=5; 3 disconnect a"),
        (
            "resume-cuts-the-output",
            "pp_size=2 max_total_tokens=512; 1 start b prompt=1 new=3; 2 pause; 3 continue; 5 abort b",
        ),
        ("death-blames-another-stage", "pp_size=2 max_total_tokens=512; 1 start if prompt=5; 2 kill"),
    ],
)
def test_a_written_test_fails_with_the_mutant_and_passes_without(mutant: str, line: str, tmp_path: Path) -> None:
    schedule = Schedule.parse(line)
    written = write_test([schedule], name=f"it {mutant}", mutant=mutant)
    assert written.said[-1].endswith(f"fails with {mutant} and passes without it")
    assert line in " ".join((written.text or "").split())
    test = loaded(written, tmp_path, f"test_it_{mutant.replace('-', '_')}")
    EngineSim(test.config).run(test.script, options=test.options)
    with pytest.raises(ScriptError):
        EngineSim(test.config, mutant=mutant).run(test.script, options=test.options)


def test_a_pause_that_the_schedule_never_ends_is_ended_in_the_test(tmp_path: Path) -> None:
    """The bug breaks the run before its pause is ended; the healthy engine would wait forever."""
    mutant = "pause-does-not-stop-launches"
    schedule = Schedule.parse("max_total_tokens=512; 1 start a prompt=5; 2 pause mode=in_place")
    with switched_on(mutant):
        assert not execute(schedule).implied
    written = write_test([schedule], name="it", mutant=mutant)
    assert "t.continue_generation()" in (written.text or "")
    test = loaded(written, tmp_path)
    EngineSim(test.config).run(test.script, options=test.options)


@pytest.mark.parametrize(
    ("opened", "ended"),
    [
        ("2 pause mode=in_place", "t.continue_generation()"),
        ("4 hold", "t.release_results()"),
        ("4 stall stage=1", "t.resume_stage(1)"),
        ("2 pressure rows=0", "t.release_exhausted()"),
    ],
)
def test_what_a_broken_run_leaves_open_is_ended(opened: str, ended: str) -> None:
    """Without a mutant there is no healthy engine to ask; the test must pass all the same when the bug is mended."""
    step = int(opened.split()[0]) + 1
    schedule = Schedule.parse(f"pp_size=2 max_total_tokens=512; 1 start a prompt=5; {opened}; {step} abort a")
    with switched_on("abort-waits-for-a-token"):
        written = write_test([schedule], name="it")
    assert written.said[-1].endswith("fails on the scheduler as it is")
    assert ended in (written.text or "")


def test_a_refusal_is_one_of_one_request_and_not_of_its_rid(tmp_path: Path) -> None:
    schedule = Schedule.parse("max_total_tokens=512; 1 start a prompt=5; 2 start a prompt=5; 20 start a prompt=5")
    written = write_test([schedule], name="it")
    assert (written.text or "").count("pytest.raises(RequestRefused)") == 1
    test = loaded(written, tmp_path)
    EngineSim(test.config).run(test.script, options=test.options)


def test_a_bug_that_the_short_form_does_not_show_is_written_in_the_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush of the search's own ends each of its runs; the harness's flush after a script is another one."""
    step = Scheduler.step

    def broken(self: Scheduler, events: tuple[object, ...], now: float) -> StepResult:
        assert not any(isinstance(event, FlushCache) and event.call_id.startswith("call-") for event in events)
        return step(self, events, now)  # type: ignore[arg-type]

    schedule = Schedule.parse("max_total_tokens=512; 1 start a prompt=5")
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "step", broken)
        written = write_test([schedule], name="it")
        test = loaded(written, tmp_path)
        with pytest.raises(ScriptError):
            EngineSim(test.config).run(test.script, options=test.options)
    assert written.said == (
        "not kept: a test of its events: it passes on the scheduler as it is",
        "the test of 1 event fails on the scheduler as it is",
    )
    EngineSim(test.config).run(test.script, options=test.options)


def test_what_no_script_can_show_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Neither form is kept, the schedule as it was found is tried next, and a file that is there stays as it is."""
    path, said = tmp_path / "test_kept.py", io.StringIO()
    path.write_text("# mine\n")
    console = Console(file=said, width=400)
    assert not save_test(console, [DEATH_OF_THE_ONLY_STAGE], path, name="it", mutant=DEATH)
    assert path.read_text() == "# mine\n"
    assert f"it passes with {DEATH}; left out: 2 kill (kill_stage() needs stages" in said.getvalue()
    assert f"no test is written as {path}" in said.getvalue()
    as_found = Schedule.parse("pp_size=2 max_total_tokens=512; 1 start a prompt=5; 2 kill")
    assert save_test(console, [DEATH_OF_THE_ONLY_STAGE, as_found], path, name="it", mutant=DEATH)
    assert f"fails with {DEATH} and passes without it" in said.getvalue()


def test_a_test_that_is_red_for_a_reason_of_its_own_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Line(one.step, one.action) for one in RACE.placed]
    monkeypatch.setattr("scripted.search.written_test.rehearse", lambda *_: lines)
    monkeypatch.setattr(
        "scripted.search.written_test.script_text",
        lambda draft, name: (
            "from scripted import scripted\nfrom engine import EngineConfig\n"
            "@scripted(EngineConfig())\ndef test_it(t):\n    yield\n    t.evict(1)\n"
        ),
    )
    with switched_on(FLUSH):
        written = write_test([RACE], name="it")
    assert written.text is None
    assert (
        "it fails on the scheduler as it is for another reason: BadCall: evict() takes 0 to 0 pages" in written.said[0]
    )
    written = write_test([RACE], name="it", mutant=FLUSH)
    assert written.text is None
    assert f"it fails without {FLUSH} too" in written.said[0]


@pytest.mark.parametrize("name", thinned(list(WORKLOADS)[1::6], one_in=4))
def test_the_test_of_any_schedule_passes_on_a_healthy_engine(name: str) -> None:
    """No engine is broken here: a written test that is red lies."""
    prefixes = Prefixes(WORKLOADS[name])
    for extra in itertools.islice(RandomEvents(5, most_events=4).additions(name, prefixes.base, prefixes.steps), 3):
        prefixes.execute_drawn(extra)
        written = write_test([prefixes.base.with_placed(extra.placed)], name="it")
        assert written.text is not None, written.said
        assert written.said[-1] == "the schedule does not fail; the test of it passes"
