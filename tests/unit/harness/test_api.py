"""The five functions: what they give to a Python caller, and that the page about them is right."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig
from scripted import ScriptDefinitionError, api
from scripted.core.schedule import Schedule
from scripted.report.timeline import render_timeline
from scripted.report.trace import TraceError, read_trace, write_trace

ROOT = Path(__file__).resolve().parents[3]
BUG = "flush-ignores-in-flight"
RACE = "pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush"
EXAMPLE = str(ROOT / "examples/your_scheduler/adapter.py")
FIXED = str(ROOT / "examples/your_scheduler/fixed.py")


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code.replace("examples/your_scheduler/adapter.py", EXAMPLE), "api.md", "exec"), {})
    assert "c reads block 0, which was written before the cache was flushed" in said.getvalue()
    assert "1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start b prompt=5 new=1" in said.getvalue()
    assert "In the scheduler" not in said.getvalue()
    assert "The scheduler broke a promise in step 3." in said.getvalue()


def test_a_finding_brings_its_adapter_and_its_mutant() -> None:
    report = api.explore("one-row", mutant=BUG, stop_at_first=True)
    (finding,) = report.findings.values()
    assert (finding.adapter, finding.mutant) == ("lockstep", BUG)
    small = api.shrink(finding)
    assert small.fails
    assert len(small.schedule.placed) <= 3
    assert not api.replay(small.schedule, mutant=BUG).passed
    assert api.replay(small.schedule).passed
    assert f"Mutant: {BUG}." in (api.write_test(finding).text or "")


def test_a_replay_says_what_met_nothing_and_where_a_scheduler_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.core.scheduler import Scheduler

    assert api.replay("default; 1 start a prompt=1 new=1; 20 abort a").unreached == ("20 abort a",)
    step = Scheduler.step

    def broken(self: Scheduler, events: Any, now: float) -> Any:
        if any(type(event).__name__ == "FlushCache" for event in events):
            raise KeyError("lost")
        return step(self, events, now)

    monkeypatch.setattr(Scheduler, "step", broken)
    again = api.replay(RACE)
    assert again.error == "KeyError: 'lost'"
    assert re.fullmatch(r".*test_api\.py:\d+, in broken", again.where)


@pytest.mark.parametrize("adapter", ["lockstep", FIXED])
def test_a_script_of_any_adapter_leaves_a_trace_that_can_be_viewed(adapter: str, tmp_path: Path) -> None:
    def script(t: Any) -> Any:
        r = t.start_req(prompt_len=5, max_new_tokens=2)
        yield from t.run_until_idle()
        assert len(r.output_ids) == 2

    known: Any = api.adapter_named(adapter)
    run = api.run_script(script, config=known.read_config({}), adapter=adapter)
    assert run.passed
    assert run.trace is not None
    write_trace(tmp_path / "run.jsonl", run.trace)
    again = read_trace(tmp_path / "run.jsonl")
    assert again == run.trace
    assert again.header.adapter == adapter
    page = render_timeline([again])
    assert "ends: length" in page
    assert "start " in page or "generate " in page


RACE_FILE = """
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64))
def test_race(t, tokens=125):
    r = t.start_req(prompt_len=tokens, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
"""


def test_a_trace_of_a_script_is_run_again_and_compared(tmp_path: Path) -> None:
    """Also a failure, with its mutant and arguments; the replay of a changed script ends at the first difference."""
    file, kept = tmp_path / "test_race.py", tmp_path / "run.jsonl"
    file.write_text(RACE_FILE)
    for mutant in (None, "flush-ignores-in-flight"):
        run = api.run_script(f"{file}::test_race", arguments={"tokens": 120}, mutant=mutant)
        assert run.trace is not None
        write_trace(kept, run.trace)
        again = api.replay(kept)
        assert (again.log, again.differs) == (run.trace.log, None)
        assert (again.error, again.passed) == (None if run.error is None else run.error.report.headline, run.passed)
        assert len(api.replay(kept, until=2).log.steps) == 2
    assert "step 3, answered: flush -> 200" in (api.replay(kept, mutant="flush-answers-but-does-nothing").differs or "")
    file.write_text(RACE_FILE.replace("max_new_tokens=2", "max_new_tokens=1"))
    changed = api.replay(kept)
    assert changed.differs is not None
    assert not changed.passed


@pytest.mark.parametrize("adapter", ["lockstep", FIXED])
def test_a_trace_of_a_schedule_is_run_again_and_compared(adapter: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.jsonl"
    run = api.replay("default; 1 start a prompt=9 new=2" if adapter == "lockstep" else "twins", adapter=adapter)
    write_trace(kept, run.trace("a schedule"))
    again = api.replay(kept)
    assert (again, again.passed) == (run, True)


def test_a_trace_that_says_nothing_of_its_run_is_refused(tmp_path: Path) -> None:
    def script(t: Any) -> Any:
        t.smoke()
        yield

    run = api.run_script(script, config=EngineConfig())
    assert run.trace is not None
    write_trace(tmp_path / "run.jsonl", run.trace)
    with pytest.raises(TraceError, match=r"does not say how to repeat it: .*`scripted run FILE::NAME --trace FILE`"):
        api.replay(tmp_path / "run.jsonl")


def test_a_script_that_fails_is_a_result() -> None:
    def script(t: Any) -> Any:
        yield
        assert t.state.step == 7

    run = api.run_script(script, config=EngineConfig())
    assert not run.passed
    assert run.error is not None
    assert run.error.report.headline == "assert 1 == 7"
    assert run.trace is not None
    assert run.trace.header.outcome == run.error.report.headline


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: api.explore("no-such-workload"), "no workload is called"),
        (lambda: api.explore(minutes=0), "minutes must be more than 0"),
        (lambda: api.replay("default"), "has no actions"),
        (lambda: api.run_script(lambda t: None), "it needs a configuration"),
        (lambda: api.shrink(""), "a schedule must not be empty"),
    ],
)
def test_what_cannot_be_run_is_refused(call: Any, why: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=why):
        call()


def test_a_schedule_object_is_as_good_as_its_line() -> None:
    assert api.replay(Schedule.parse(RACE)).log == api.replay(RACE).log
    assert api.write_test(Schedule.parse(RACE)).text is not None
