"""Schedules of a adapter of the SDK written as tests: the same steps, the same failure, and none without the bug."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from forked_commands import ForkedCommands
from thinned import thinned

from scripted import ScriptDefinitionError, ScriptFailed
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.schedule import Schedule
from scripted.script.loader import load_test
from scripted.search.execution import execute, record
from scripted.search.mutant_search import find_mutant
from scripted.search.shrinking import shrink
from scripted.search.targets import workload_named
from scripted.search.written_test import Draft, rehearse, script_text, write_test

ROOT = Path(__file__).resolve().parents[3]
BROKEN = "examples/your_scheduler/adapter.py"
FIXED = "examples/your_scheduler/fixed.py"
MUTANTS = "tests/registered/sdk/example_adapter.py"
OUTSIDE = "examples/lockstep/outside.py"
NO_FLUSH = "examples/engines/window_pool.py"
FOUND = "1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start c prompt=5 new=1"
WORDS = "c reads block 0, which was written before the cache was flushed"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def schedule_of(text: str, adapter: str, settings: str = "") -> Schedule:
    return Schedule.parse(f"adapter={adapter} {settings}; {text}")


def text_of(schedule: Schedule) -> str:
    lines = tuple(rehearse(schedule, execute(schedule)))
    return script_text(Draft(schedule, lines, execute(schedule).failure), name="written")


def loaded(text: str, folder: Path) -> Any:
    path = folder / "test_written.py"
    path.write_text(text, encoding="ascii")
    return load_test(str(path), "test_written")


def run(test: Any, script: Any = None, mutant: str | None = None) -> Any:
    known: Any = adapter_named(test.adapter)
    return known.run_script(script or test.script, {}, config=test.config, options=test.options, mutant=mutant)


def test_what_a_search_finds_becomes_a_test_that_fails_alike(tmp_path: Path, commands: ForkedCommands) -> None:
    """From the command to pytest, like a user."""
    written = tmp_path / "test_found.py"
    explore = ["-m", "scripted", "explore", "aborted", "--adapter", BROKEN, "--no-keep", "--to-script", str(written)]
    done = commands.run(*explore)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the test of 4 events fails on the scheduler as it is" in done.stdout
    pytest_run = ["-m", "pytest", "-p", "no:cacheprovider", str(written)]
    failed = commands.run(*pytest_run)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    # The request has got a smaller name.
    assert f"E       Violation: b{WORDS[1:]}" in failed.stdout
    text = written.read_text(encoding="ascii")
    written.write_text(text.replace(f'adapter="{BROKEN}"', f'adapter="{FIXED}"'), encoding="ascii")
    passed = commands.run(*pytest_run)
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_the_text_says_what_must_not_happen() -> None:
    text = write_test([schedule_of(FOUND, BROKEN)], name="Found it").text
    assert text is not None
    docstring, body = text.split('"""')[1:]
    assert f"Goal: this must not happen: step 3: Violation: {WORDS}" in " ".join(docstring.split())
    assert f"scripted replay 'adapter={BROKEN}; {FOUND}'" in " ".join(docstring.split())
    assert body.strip().splitlines() == [
        "from scripted import scripted",
        "",
        "",
        f'@scripted(adapter="{BROKEN}")',
        "def test_found_it(t):",
        "    t.smoke()  # every promise is judged in each step; nothing else is asserted here",
        '    a = t.start_req(rid="a", prompt_len=4, prompt_seed=0, max_new_tokens=1)',
        "    yield",
        '    t.abort("a")',
        "    t.flush_cache()",
        "    yield",
        '    c = t.start_req(rid="c", prompt_len=5, prompt_seed=0, max_new_tokens=1)',
        "    yield",
        "    yield from t.run_until_idle()",
    ]


# What makes a scheduler slower breaks no promise: scripts see it, a search does not.
SLOWER = ("half-of-the-budget", "prefixes-are-never-hit")


@pytest.mark.parametrize(
    "mutant",
    thinned((name for name in adapter_named(str(ROOT / MUTANTS)).mutant_names if name not in SLOWER), one_in=3),
)
def test_a_mutant_is_found_and_written_as_a_test(mutant: str, tmp_path: Path) -> None:
    """D11: the search finds it unaided; the test is red with it, in the schedule's words, and green without it."""
    adapter: Any = adapter_named(MUTANTS)
    found = find_mutant(mutant, MUTANTS)
    assert found.finding is not None
    with adapter.switched_on(mutant):
        shrunk = shrink(workload_named(found.finding.target, MUTANTS).with_placed(found.finding.extra)).schedule
        failure = execute(shrunk).failure
    assert failure is not None
    written = write_test([shrunk], name="written", mutant=mutant)
    assert written.text is not None, written.said
    assert f"Mutant: {mutant}." in written.text
    assert "passes without it" in written.said[-1]
    test = loaded(written.text, tmp_path)
    with pytest.raises(ScriptFailed) as caught:
        run(test, mutant=mutant)
    assert caught.value.report.error == f"{failure.type}: {failure.text}"
    assert run(test).steps > 0


EVERY_VERB = (
    "1 start a prompt=30 new=3; 2 hold; 2 start b prompt=20 seed=1 new=2 priority=1; 4 advance seconds=1.5; "
    "5 release count=1; 6 pause mode=retract; 7 flush; 9 continue; 9 release; 10 abort b; "
    "11 start c prompt=12 shared=8 tail=3 stop=40; 12 fail; "
    "20 start d prompt=12 parts=0:4,3:4:4 seed=5"
)


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        *((FIXED, text) for text in adapter_named(str(ROOT / FIXED)).workloads.values()),
        *((OUTSIDE, text) for text in adapter_named(OUTSIDE).workloads.values()),
        pytest.param(OUTSIDE, f"default; {EVERY_VERB}", id="every-verb"),
        pytest.param(OUTSIDE, "default; 1 start a prompt=30; 3 hold; 5 pause mode=in_place", id="left-open"),
        pytest.param(FIXED, "default; 1 start a prompt=9 new=9; 2 start a prompt=5; 30 start a prompt=5", id="again"),
    ],
)
def test_a_script_has_the_steps_of_its_schedule(adapter: str, text: str, tmp_path: Path) -> None:
    """Events, plans, replies and counts of every step that has any, up to the very end."""
    schedule = Schedule.parse(text, of=adapter)
    outcome, expected = record(schedule)
    assert outcome.failure is None
    test = loaded(text_of(schedule), tmp_path)
    kept: list[Any] = []

    def watched(t: Any) -> Generator[None, None, None]:
        kept.append(t.run)
        yield from test.script(t)

    run(test, watched)
    assert _busy(kept[0].records) == _busy(expected)


def _busy(records: list[Any]) -> list[Any]:
    return [one for one in records if one.step.events or one.stepped.replies or one.stepped.microbatch]


def test_what_is_never_settled_is_not_waited_for(tmp_path: Path) -> None:
    """A request that waits forever is the end's own finding; a wait of the script would only run out of steps."""
    mutant = "what-cannot-fit-is-taken"
    text = write_test([schedule_of("1 start a prompt=60", MUTANTS)], name="written", mutant=mutant).text
    assert text is not None
    assert "run_until_idle" not in text
    with pytest.raises(ScriptFailed, match=r"nothing happens any more, but something waits forever: a .preempted."):
        run(loaded(text, tmp_path), mutant=mutant)


def test_settings_are_arguments_of_the_decorator(tmp_path: Path) -> None:
    text = text_of(schedule_of(FOUND, FIXED, "blocks=9 block_size=8"))
    assert f'@scripted(adapter="{FIXED}", blocks=9, block_size=8)' in text
    test = loaded(text, tmp_path)
    assert (test.config.blocks, test.config.block_size) == (9, 8)


def test_a_schedule_that_does_not_fail_becomes_a_test_that_passes() -> None:
    written = write_test([schedule_of(FOUND, FIXED)], name="fine")
    assert written.said == ("the schedule does not fail; the test of it passes",)
    assert written.text is not None
    assert "Goal: every promise is kept." in written.text


def test_the_first_schedule_that_makes_a_test_is_written() -> None:
    written = write_test([schedule_of(FOUND, BROKEN), schedule_of("1 start a prompt=4", BROKEN)], name="two")
    assert written.text is not None
    assert "step 3: Violation" in written.text


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("assert t.state.step == 99", "it fails with ended-request-is-remembered with another text than the schedule"),
        ("return", "it passes with ended-request-is-remembered"),
    ],
)
def test_a_test_that_does_not_show_the_bug_is_not_kept(line: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: a text that is not what it says is refused with what was seen of it."""
    head = f'from scripted import scripted\n\n\n@scripted(adapter="{MUTANTS}")\n'
    text = f"{head}def test_it(t):\n    t.smoke()\n    yield\n    {line}\n"
    monkeypatch.setattr("scripted.search.written_test.script_text", lambda *_, **__: text)
    written = write_test([schedule_of(FOUND, MUTANTS)], name="it", mutant="ended-request-is-remembered")
    assert written.text is None
    assert written.said[0].startswith(f"not kept: a test of its events: {why}")


def test_a_script_of_a_adapter_is_no_target_of_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "test_written.py"
    path.write_text(text_of(schedule_of(FOUND, FIXED)), encoding="ascii")
    with pytest.raises(ScriptDefinitionError, match=r"is a script of the adapter .*fixed.py; run it with pytest"):
        adapter_named(DEFAULT_ADAPTER).script_target(f"{path}::test_written")


@pytest.mark.parametrize(("adapter", "flushes"), [(FIXED, True), (NO_FLUSH, False)])
def test_a_test_of_all_steps_flushes_only_what_knows_a_flush(adapter: str, flushes: bool, tmp_path: Path) -> None:
    schedule = schedule_of("1 start a prompt=5 new=2", adapter)
    outcome = execute(schedule)
    draft = Draft(schedule, tuple(rehearse(schedule, outcome)), steps=outcome.steps, settled=True)
    text = script_text(draft, name="written")
    assert ("t.flush_cache()" in text) == flushes
    run(loaded(text, tmp_path))
