"""The report of a failed script: the line, the reason, the steps, and the next action."""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path

import pytest
from scripted_lockstep.tiers.server.stacks import readable_stack

from engine import EngineConfig
from scripted import (
    BadCall,
    ScriptDefinitionError,
    ScriptedSim,
    ScriptError,
    ScriptFailed,
    ScriptOptions,
    ScriptTimeout,
    ServerDied,
)
from scripted.report.failure import Activity, FailureKind, FailureReport, ProcessStack
from scripted.report.frames import Frame

PP2 = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64)
REPORT_WIDTH = 120


def run(script, **options) -> ScriptError:
    with ScriptedSim.start(PP2) as sim, pytest.raises(ScriptError) as caught:
        sim.run(script, options=ScriptOptions(**options))
    return caught.value


def fails(t):
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 4, f"{len(r.output_ids)} tokens"


def test_failing_script_shows_line_steps_and_state() -> None:
    """A refused call raises with status and body (D02).

    A budget counts steps, and shows the state when it is spent (D07).
    """
    error = run(fails, replay="pytest here")
    assert isinstance(error, ScriptFailed)
    text = str(error)
    assert "in fails\n>       assert len(r.output_ids) == 4" in text
    assert "E       3 tokens" in text
    assert "decode" in text
    assert "ends: length" in text
    assert "in flight: nothing" in text
    assert "sim tier, pp_size=2" in text
    assert "Replay:  pytest here" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("E ")) <= REPORT_WIDTH


def fails_long_after(t):
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    yield from t.run_until_finished(r)
    for _ in range(200):
        yield
    assert len(r.output_ids) == 4


def fails_long_after_in_a_fleet(t):
    fleet = t.engines("e0")
    r = fleet["e0"].start_req(prompt_len=100, max_new_tokens=3)
    yield from t.run_until(lambda: r.finished)
    for _ in range(200):
        yield
    assert len(r.output_ids) == 4


@pytest.mark.parametrize("script", [fails_long_after, fails_long_after_in_a_fleet])
def test_the_table_shows_the_steps_in_which_something_happened(script) -> None:
    """D07: idle steps before the end are counted in one row."""
    rows = str(run(script)).partition("The last steps")[2]
    assert re.search(r"1 +\d+ +generate", rows), rows
    assert re.search(r"\bends:", rows), rows
    assert re.search(r"\.\. .*19\d steps like these", rows), rows


def spends(t):
    r = t.start_req(prompt_len=100, max_new_tokens=30)
    yield from t.run_until_finished(r, max_steps=5)


def test_spent_budget_shows_the_state_at_the_scripts_line() -> None:
    """A budget counts steps, and shows the state when it is spent (D07)."""
    text = str(run(spends))
    assert "scripted-1 did not finish within 5 steps; step 5: waiting=[]" in text
    assert "scripted/script/waits.py" not in text


def never_ends(t):
    while True:
        yield


def test_script_without_end_is_stopped_by_its_budget_of_steps() -> None:
    """A budget counts steps, and shows the state when it is spent (D07)."""
    assert "ran its max_steps=20 steps" in str(run(never_ends, max_steps=20))


def never_yields(t):
    yield
    while True:
        pass


def test_script_that_neither_yields_nor_ends_is_stopped() -> None:
    """D06: at its own line."""
    error = run(never_yields, timeout_s=0.05)
    assert isinstance(error, ScriptTimeout)
    assert "did not end within timeout_s=0.05" in str(error)
    assert "in never_yields" in str(error)


def forgets(t):
    r = t.start_req(prompt_len=10)
    t.run_until_finished(r)
    yield


def yields_a_wait(t):
    yield t.run_until_idle()


def yields_a_number(t):
    yield 3


def asks_in_vain(t):
    yield from t.run_until(lambda: t.state.nonsense)


def waits_for_a_value(t):
    yield from t.run_until(t.state.queues_clear)


def is_refused(t):
    t.start_req(prompt_len=9000)
    yield


def prompts_twice(t):
    t.start_req(prompt_len=3, text="abc")
    yield


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (forgets, "write 'yield from t.run_until_finished(scripted-1)'"),
        (yields_a_wait, "write 'yield from t.run_until_idle()'"),
        (yields_a_number, "a script yields nothing, got 3"),
        (asks_in_vain, "t.state has no 'nonsense'; it has step"),
        (waits_for_a_value, "write a lambda"),
        (is_refused, "refused with 400: the prompt has 9000 tokens"),
        (prompts_twice, "exactly one of prompt_len, prompt_ids and text"),
    ],
)
def test_mistake_is_explained_at_the_scripts_line(script, words: str) -> None:
    """D02: the harness's own lines are not shown."""
    text = str(run(script))
    assert words in text
    assert f"in {script.__name__}" in text
    assert "in _" not in text.split("State:")[0]


def stops_the_engine(t):
    r = t.start_req(prompt_len=10)
    yield
    t.scheduler.books.in_flight.clear()
    yield from t.run_until_finished(r)


def test_broken_books_are_reported_with_the_scripts_position() -> None:
    text = str(run(stops_the_engine))
    assert "IntegrityError" in text
    assert "in stops_the_engine" in text


def dies(t):
    t.scheduler.planner.plan = None
    yield


def test_scheduler_that_dies_is_named_with_its_traceback() -> None:
    """D06: and the step that it died in."""
    error = run(dies)
    assert isinstance(error, ServerDied)
    assert "The scheduler process was the first to die" in str(error)
    assert "planner.plan()" in str(error)
    assert "DIED HERE" in str(error)


def kills(t):
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    late = t.start_req(prompt_len=100, prompt_seed=1, max_new_tokens=3)
    yield
    refused = t.start_req(prompt_len=10)
    t.kill_stage(1)
    yield from t.run_until_all_finished([r, late, refused])
    for request in (r, late, refused):
        assert (request.finish_reason, request.client.finish_reason) == ("error", "error")
        assert "stage-1" in request.client.error
        assert "stage-1" in request.error


def test_script_goes_on_after_it_killed_a_stage() -> None:
    """D06, D09: every client learns which stage died, even for a request that had only just arrived."""
    with ScriptedSim.start(PP2) as sim:
        assert sim.run(kills).spent


def not_a_script(t):
    return 3


def test_function_that_never_yields_is_refused() -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    with ScriptedSim.start(PP2) as sim, pytest.raises((ScriptDefinitionError, ScriptFailed), match="generator"):
        sim.run(not_a_script)


def misses(t):
    t.sometimes("a window", condition=False)
    yield


def test_window_that_was_never_reached_is_named() -> None:
    """A race test fails if its window never opened (D03)."""
    assert "never reached 'a window'" in str(run(misses, must_reach=("a window",)))


def test_notes_of_bad_calls_change_nothing() -> None:
    def script(t):
        for call in (
            lambda: t.release_results(0),
            lambda: t.kill_stage(2),
            lambda: t.pause_generation("hard"),
            lambda: t.sometimes("", True),
            lambda: t.advance_to_stage(None, "middle"),
        ):
            with pytest.raises(BadCall):
                call()
        yield
        assert t.history[0].events == ()

    with ScriptedSim.start(PP2) as sim:
        sim.run(script)


# -- the report itself --


def timeout_of(*stacks: ProcessStack) -> str:
    return FailureReport(kind=FailureKind.TIMEOUT, error="late", stacks=stacks).render()


def test_hang_deadlock_and_slowness_are_told_apart() -> None:
    """A dead server is reported with its cause, a hang with every stack (D06)."""
    waits = ProcessStack("stage-0 (pid 1)", "in poll")
    stopped = ProcessStack("stage-1 (pid 2)", "", Activity.STOPPED)
    busy = ProcessStack("scheduler (pid 3)", "in loop", Activity.COMPUTES)
    assert "stage-1 (pid 2) is stopped by a signal (SIGSTOP): nothing can get past it" in timeout_of(waits, stopped)
    assert "scheduler (pid 3) still computes" in timeout_of(waits, busy)
    assert "which is a deadlock" in timeout_of(waits, waits)
    assert "--- stage-0 (pid 1) waits ---\nin poll" in timeout_of(waits)


def dumps_its_stack(t, file):
    yield
    with Path(file).open("w") as dump:
        faulthandler.dump_traceback(dump)
    yield


def test_a_script_that_does_not_come_to_its_next_yield_is_named(tmp_path: Path) -> None:
    """D06: found in Python's own stack dump, independently of the harness's function names."""
    with ScriptedSim.start(PP2) as sim:
        sim.run(dumps_its_stack, str(tmp_path / "stack"))
    stack = ProcessStack("scheduler (pid 4)", (tmp_path / "stack").read_text())
    line = dumps_its_stack.__code__.co_firstlineno + 3
    assert f"does not come to its next yield: it is at {__file__}:{line}." in timeout_of(stack)


def test_dead_process_leads_the_headline() -> None:
    report = FailureReport(kind=FailureKind.DIED, error="gone\nand more", dead_process="stage-1", cause="killed")
    assert report.headline == "the stage-1 process died: gone"
    assert "The stage-1 process was the first to die:\nkilled" in report.render()


def test_stack_is_shown_without_what_every_process_has() -> None:
    stage = 'Current thread 0x1 (most recent call first):\n  File "/x/stage.py", line 1 in run\n'
    start = '  File "/x/engine/server/launch/child.py", line 147 in _run\n  File "/x/preload.py", line 3 in main'
    idle = 'Thread 0x2 (most recent call first):\n  File "/x/y.py", line 1 in end_with_supervisor'
    assert readable_stack(f"{idle}\n\n{stage}{start}") == stage.rstrip()


def test_a_thread_that_waits_for_another_shows_where() -> None:
    """The innermost line of a deadlock is the library's own; everything from there on was left out."""
    header = "Thread 0x3 (most recent call first):"
    waits = ['  File "/lib/threading.py", line 324 in wait', '  File "/x/pages.py", line 9 in take']
    start = ['  File "/lib/threading.py", line 982 in run', '  File "/lib/threading.py", line 1045 in _bootstrap_inner']
    assert readable_stack("\n".join([header, *waits, *start])) == "\n".join([header, *waits])


def test_a_failure_under_a_mutant_is_expected() -> None:
    report = FailureReport(kind=FailureKind.FAILED, error="assert 1 == 2", mutant="abort-ignores-in-flight")
    assert "Mutant:  abort-ignores-in-flight is switched on: this failure is expected" in report.render()


def test_the_schedulers_own_lines_are_shown() -> None:
    frame = Frame("scheduler.py", 7, "schedule", "raise KeyError(block)")
    report = FailureReport(kind=FailureKind.FAILED, error="KeyError: 3", inside=(frame,)).render()
    assert re.search(r"In the scheduler:\n.*scheduler.py:7: in schedule\n>? +raise KeyError\(block\)", report), report


def waits_for_what_is_over(t):
    r = t.start_req(prompt_len=5, max_new_tokens=2)
    t.sometimes("it has begun", True)
    yield from t.run_until_finished(r)
    yield from t.advance_to_stage(r, "first_chunk")


def test_a_wait_for_a_request_that_has_ended_ends_with_it() -> None:
    """D07: and a window that was open is noted at its step."""
    error = run(waits_for_what_is_over)
    assert "it ended before (length), and a prompt that is not split counts no chunks" in str(error)
    assert [(note.step, note.text) for note in error.report.notes if not note.line] == [(0, "it has begun")]
