"""Scripts for a scheduler that this project did not write: ordinary pytest tests, honest reports, and no engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from any_scheduler import BROKEN, FIXED, OUTSIDE, REPOSITORY, ended
from forked_commands import ForkedCommands

from scripted import BadCall, ScriptDefinitionError, ScriptFailed, scripted
from scripted.core.adapters import adapter_named

pytest_plugins = ["pytester"]

PLUGIN = "scripted.pytest_plugin"

HEAD = f"from scripted import scripted\n\n@scripted(adapter={BROKEN!r})\n"
FOUND = (
    HEAD
    + """def test_found(t):
    t.start_req(rid="a", prompt_len=4, max_new_tokens=1)
    yield
    t.abort("a")
    t.flush_cache()
    yield
    t.start_req(rid="c", prompt_len=5, max_new_tokens=1)
    yield
"""
)
FINE = """
import pytest
from scripted import scripted

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def thing():
    return object()


@scripted(adapter={adapter!r}, blocks=10)
@pytest.mark.parametrize("count", [1, 3])
def test_tokens(t, count, thing):
    r = t.start_req(prompt_len=5, max_new_tokens=count)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == count
    assert type(thing) is object


class TestGroup:
    @scripted(adapter={adapter!r}, must_reach=["in flight"])
    def test_window(self, t):
        r = t.start_req(prompt_len=20, max_new_tokens=2)
        yield
        t.sometimes("in flight", t.state.in_flight)
        yield from t.run_until_finished(r)
"""


@pytest.fixture
def pytest_of(pytester: pytest.Pytester, commands: ForkedCommands):
    """Run pytest on a file of this text, with these arguments."""

    def run(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_scripts=text)
        return commands.pytest(pytester, "--scripted-vet", "off", *arguments)

    return run


# -- pytest --


def test_scripts_are_ordinary_tests(pytest_of) -> None:
    """D01, D03: parametrized, with fixtures, in classes; the summary counts what was compared."""
    result = pytest_of(FINE.format(adapter=FIXED), "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_tokens?sim-1?*PASSED*", "*test_window?sim?*PASSED*", "3 scripts, *3 outputs*"])


def test_a_failure_shows_line_steps_and_counts(pytest_of) -> None:
    """D06: with the plan of the very step that broke the promise."""
    result = pytest_of(FOUND)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "test_scripts.py:11: in test_found",
            ">       yield",
            "E       Violation: c reads block 0, which was written before the cache was flushed",
            "The scheduler broke a promise in step 3.",
            "The last steps before the end:",
            "*1 *5  start a (4 + 1 tokens)  #0 prefill a?0:4? in blocks 0 *",
            "*2 *7  abort a * a -> ends: abort",
            "*3 *10  result #0 (*)*#1 prefill c?4:5? in blocks 0 1 *",
            "State:   step 3: waiting=0 running=1 in_flight=1 blocks_free=10",
            "Engine:  *adapter.py, sim tier, the default configuration",
            "Replay:  pytest 'test_scripts.py::test_found?sim?' --tier sim",
        ]
    )


def test_the_adapter_is_found_from_a_folder_above_the_test(pytester: pytest.Pytester, commands: ForkedCommands) -> None:
    """The name is as it would be from the repository's root, and pytest was started elsewhere."""
    pytester.mkdir("repo").joinpath("adapters").mkdir()
    adapters = pytester.path / "repo/adapters"
    adapters.joinpath("mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(FIXED).parent)!r})\nfrom fixed import ADAPTER\n"
    )
    tests = pytester.path / "repo/tests"
    tests.mkdir()
    tests.joinpath("test_mine.py").write_text(FINE.format(adapter="adapters/mine.py"))
    result = commands.pytest(pytester, "--vet", "off", tests, "--rootdir", tests)
    result.assert_outcomes(passed=3)


def test_a_mutant_of_the_adapter_makes_its_test_red(pytest_of) -> None:
    """D11: the option takes the mutants of the adapters of the collected scripts too."""
    own = HEAD.replace(BROKEN, OUTSIDE) + (
        "def test_chunks(t):\n"
        "    r = t.start_req(prompt_len=30, max_new_tokens=3)\n"
        "    yield from t.run_until(lambda: r.computed == 30)\n"
        "    call = t.flush_cache()\n"
        "    yield from t.run_until_finished(r)\n"
        "    assert call.status == 400\n"
    )
    pytest_of(own).assert_outcomes(passed=1)
    result = pytest_of(own, "--mutant", "flush-ignores-in-flight")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*flush-ignores-in-flight is switched on*", "*--mutant flush-ignores-in-flight"])
    unknown = pytest_of(FINE.format(adapter=FIXED), "--mutant", "no-such-bug")
    assert unknown.ret == pytest.ExitCode.USAGE_ERROR
    unknown.stderr.fnmatch_lines(["*--mutant: *no-such-bug*"])
    shared = pytest_of(FINE.format(adapter=FIXED), "-p", "xdist", "-n", "1", "--mutant", "no-such-bug")
    shared.assert_outcomes(failed=3)
    shared.stdout.fnmatch_lines(["E*ScriptDefinitionError: --mutant: *no-such-bug*"])


MUTANT = """
from adapter import Config, Machine

from scripted.sdk import Capabilities, Limits, Mutant, SchedulerAdapter


ADAPTER = SchedulerAdapter(
    "mutants",
    config=Config,
    machine=Machine,
    limits=lambda config: Limits(
        block_size=4, blocks=config.blocks, batch_tokens=16, batch_requests=4, context_tokens=48, depth=2
    ),
    can=lambda _: Capabilities(),
    mutants=[
        Mutant(
            name="never-freed", origin="a test", bug="the ended stay registered", signature="", test="",
            target="scheduler:Scheduler._end", cut="del self.requests[request.id]", becomes="pass",
        )
    ],
)
"""


def test_a_mutant_that_only_the_adapter_knows(pytester: pytest.Pytester, pytest_of) -> None:
    """The gallery has no such bug, and is not asked for it when a collected script knows it."""
    folder = str(Path(FIXED).parent)
    pytester.makepyfile(mutants=f"import sys\nsys.path.insert(0, {folder!r})\n{MUTANT}")
    text = FINE.format(adapter="mutants.py")
    pytest_of(text, "-q").assert_outcomes(passed=3)
    result = pytest_of(text, "--mutant", "never-freed")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        ["The scheduler raised this in step *, after the end of the script.", "Mutant:  never-freed is switched on*"]
    )


def test_a_script_imports_no_engine(tmp_path: Path) -> None:
    """D12: a test file of another scheduler runs without this engine and what only it needs."""
    file = tmp_path / "test_here.py"
    file.write_text(
        FINE.format(adapter=FIXED)
        + "\n\ndef test_nothing_else():\n"
        + "    import sys\n"
        + "    heavy = {'engine', 'torch', 'zmq', 'fastapi', 'uvicorn', 'transformers', 'pydantic'}\n"
        + "    assert not heavy & {name.partition('.')[0] for name in sys.modules}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "--vet", "off", str(file)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


# -- refused where it is decorated --


def script(t):
    yield


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"adapter": "no/such/adapter.py"}, "there is no file 'no/such/adapter.py'"),
        ({"adapter": FIXED, "block": 4}, "has no setting 'block' .did you mean 'blocks'"),
        ({"adapter": FIXED, "blocks": "many"}, "a setting of .* cannot be read"),
        ({"config": 5}, "a script takes an EngineConfig .*, got 5"),
        ({"adapter": 5}, "adapter is the name of an adapter, got 5"),
        ({"adapter": "vllm-fleet"}, "vLLM|runs no scripts"),
        ({"adapter": "lockstepp"}, "an adapter is .*sglang, sglang-fleet, transformers, vllm, vllm-fleet, a file"),
        ({"adapter": FIXED, "tiers": ("server",)}, "no live server, .*; leave out tiers"),
        ({"adapter": FIXED, "oracle": False}, "a judge that checks every token; leave out oracle"),
        ({"adapter": FIXED, "must_reach": "window"}, "write must_reach="),
        ({"adapter": FIXED, "config": 5}, "takes settings by name, or one Config; got 5"),
        ({"blocks": 12}, "@scripted takes a configuration; .* or @scripted.adapter=...."),
        ({"config": script}, r"takes a configuration; write @scripted\(EngineConfig\(...\)\) above the function"),
    ],
)
def test_what_cannot_be_a_script_is_refused(arguments: dict[str, Any], words: str) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    with pytest.raises(ScriptDefinitionError, match=words):
        scripted(**arguments)(script)


def test_a_setting_beside_an_engine_is_refused_by_name() -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    from engine import EngineConfig

    with pytest.raises(ScriptDefinitionError, match=r"no option 'max_step' \(did you mean 'max_steps'\?\)"):
        scripted(EngineConfig(), max_step=3)


def test_the_configuration_may_be_given_as_a_whole() -> None:
    config = adapter_named(FIXED).read_config({"blocks": "9"})
    assert scripted(config, adapter=FIXED)(script).scripted.config == config  # type: ignore[attr-defined]
    assert scripted(adapter=FIXED, blocks=9)(script).scripted.config == config  # type: ignore[attr-defined]


# -- reports --


def test_a_window_that_was_never_open_fails() -> None:
    """A race test fails if its window never opened (D03)."""

    def closed(t):
        t.sometimes("window", t.state.in_flight)
        yield

    with pytest.raises(ScriptFailed, match="the script never reached 'window'"):
        ended(closed, must_reach=("window",))

    def other(t):
        yield
        t.sometimes("windows", condition=True)

    with pytest.raises(ScriptFailed, match=r"names 'windows', which is not in must_reach .did you mean 'window'"):
        ended(other, must_reach=("window",))


def test_budgets_say_what_stands_in_the_way() -> None:
    """A budget counts steps, and shows the state when it is spent (D07)."""

    def held(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        t.hold_results()
        yield from t.run_until_finished(r, max_steps=9)

    with pytest.raises(ScriptFailed, match=r"did not finish within 9 steps; .*results are held, 1 batch in flight"):
        ended(held)

    def paused(t):
        t.pause_generation("in_place")
        yield
        t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_idle(max_steps=9)

    with pytest.raises(ScriptFailed, match=r"generation is paused .in_place., until t.continue_generation"):
        ended(paused, OUTSIDE)

    def idle(t):
        yield from t.run_until(lambda: t.state.running, max_steps=3)

    with pytest.raises(ScriptFailed, match="the scheduler is idle, so no further step can change anything"):
        ended(idle)

    def endless(t):
        while True:
            yield

    with pytest.raises(ScriptFailed, match="the script ran its max_steps=7 steps") as caught:
        ended(endless, max_steps=7)
    assert caught.value.report.frames[-1].function == "endless"  # type: ignore[attr-defined]


def test_what_a_script_leaves_is_counted() -> None:
    """D03: what may be meant is no failure."""

    def leaves(t):
        t.start_req(rid="a", prompt_len=4, max_new_tokens=2)
        t.flush_cache()
        t.abort("unknown")
        t.find_req_by_rid("other")
        yield
        t.sometimes("window", condition=True)
        t.flush_cache()
        with pytest.raises(BadCall):
            t.release_results(0)

    assert ended(leaves).loose_ends == {
        "requests alive at the end": 1,
        "calls without an answer at the end": 1,
        "answers never looked at": 1,
        "windows not in must_reach": 1,
        "questions about rids that never were": 1,
        "aborts of rids that never were": 1,
        "bad calls that the script caught": 1,
    }

    def idles(t):
        yield
        t.fail_next_step(0)

    assert ended(idles, OUTSIDE).loose_ends == {
        "failures of a stage that no step met": 1,
        "scripts in which no step had anything to do": 1,
    }


def test_what_the_scheduler_raises_is_shown_with_its_own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """D06: the script's line, then the scheduler's."""
    known: Any = adapter_named(FIXED)
    machine = type(known.new_parts(known.read_config({}), record=False)[0])

    def crash(machine: Any) -> None:
        raise KeyError("lost")

    step = machine.step
    monkeypatch.setattr(machine, "step", lambda self, events, now: crash(self) if events else step(self, events, now))

    def script(t):
        yield
        t.start_req(prompt_len=4, max_new_tokens=2)
        yield

    with pytest.raises(ScriptFailed) as caught:
        ended(script)
    text = str(caught.value)
    assert "E       KeyError: 'lost'" in text
    assert "The scheduler raised this in step 2." in text
    assert 'raise KeyError("lost")' in text
    assert re.search(r"X +2 +\d+ +start scripted-1 \(4 \+ 2 tokens\).* DIED HERE", text)
    assert "X step 2 failed: KeyError: 'lost'" in text


def test_what_comes_after_the_end_of_a_script_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """D04: requests that are alive run to their end, and nothing may be left of them."""
    known: Any = adapter_named(FIXED)
    scheduler = type(known.new_parts(known.read_config({}), record=False)[0].scheduler)
    monkeypatch.setattr(scheduler, "_give_back", lambda self, request: None)

    def script(t):
        t.start_req(prompt_len=4, max_new_tokens=2)
        yield

    with pytest.raises(ScriptFailed, match=r"blocks_free is 10 instead of 12|is not idle") as caught:
        ended(script)
    text = str(caught.value)
    named = re.search(r"broke a promise in step (\d+), after the end of the script", text)
    assert named is not None
    last = named[1]
    assert re.search(rf"^ X +{last} ", text, re.MULTILINE), "the table marks the step that the report names"
    assert f"X step {last} failed: " in text
    assert f"State:   step {last}: " in text


def test_what_a_scheduler_sets_when_it_is_made_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """D04: it is not what the script has changed; vLLM sets variables of the environment when it is imported."""
    known: Any = adapter_named(FIXED)
    scheduler = type(known.new_parts(known.read_config({}), record=False)[0].scheduler)
    made = scheduler.__init__
    monkeypatch.setenv("SET_BY_A_SCHEDULER", "before")

    def setting(self: Any, *args: Any) -> None:
        os.environ["SET_BY_A_SCHEDULER"] = "made"
        made(self, *args)

    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert len(r.output_ids) == 2

    monkeypatch.setattr(scheduler, "__init__", setting)
    ended(script, must_assert=True)
    assert os.environ["SET_BY_A_SCHEDULER"] == "made"


def test_a_script_that_ended_cannot_be_used() -> None:
    kept: list[Any] = []

    def script(t):
        kept.append(t)
        yield

    ended(script)
    with pytest.raises(BadCall, match="this t belongs to a script that has ended"):
        _ = kept[0].state
