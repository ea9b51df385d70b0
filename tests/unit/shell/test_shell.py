"""``scripted shell``: sessions from text, what they show, what they change, and the tests that they write."""

from __future__ import annotations

import io
from typing import Any

import pytest
from every_case import every_case
from rich.console import Console
from scripted_lockstep.tiers.sim.runner import EngineSim
from typer.testing import CliRunner

from engine.core.config import EngineConfig
from scripted.cli import app
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.refusals import BadCommand
from scripted.report.failure import ServerDied
from scripted.script.loader import load_test
from scripted.script.options import ScriptOptions
from scripted.shell import DebugSession, FilePrompt, TerminalPrompt
from scripted.shell.command_line import OWN_WORDS, completions, help_text, read_command
from scripted.shell.statements import StepOn, VerbCall, lines_of

PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
RACE = ["start prompt_len=125 max_new_tokens=2", "until state.in_flight and state.queues_clear", "flush"]
MUTANT = "flush-ignores-in-flight"
# As a run with a mutant is audited everywhere: after each step the ledger would see the bug before it shows.
AT_THE_END = ScriptOptions(check_every_step=False)


class Typed:
    """A session that was fed with these lines, and what it showed."""

    def __init__(
        self, *lines: str, config: Any = None, adapter: str = DEFAULT_ADAPTER, mutant: str | None = None
    ) -> None:
        known = adapter_named(adapter)
        config = config or (PP4 if adapter == DEFAULT_ADAPTER else known.read_config({}))
        out = io.StringIO()
        console = Console(file=out, width=120)
        prompt = FilePrompt(io.StringIO("\n".join(lines) + "\n"), console.print)
        self.session = DebugSession(known, config, prompt, console, mutant=mutant)
        self.passed = self.session.run()
        self.output = out.getvalue()

    @property
    def script(self) -> list[str]:
        return list(lines_of(self.session.statements))

    @property
    def states(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("step ") and ": waiting=" in line]


WORDS = Typed().session.words
HELP = help_text(WORDS)


def test_the_flagship_race_by_hand():
    typed = Typed(*RACE, "until r1.finished")
    assert typed.passed
    assert typed.session.refused == 0
    assert "r1 ended: length, 2 tokens" in typed.output
    assert "call_1 /flush_cache -> 400: flush refused" in typed.output
    assert "in_flight=2" in typed.output
    assert typed.states[1].startswith("step 2: waiting=[] chunked=None running=[] in flight: #0 prefill of r1")
    assert typed.script == [
        'r1 = t.start_req(rid="r1", prompt_len=125, max_new_tokens=2)',
        "yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)",
        "call_1 = t.flush_cache()",
        "yield from t.run_until(lambda: r1.finished)",
    ]


def test_undo_leaves_the_engine_as_if_it_had_not_been():
    straight = Typed(*RACE[:2], "step 3", "abort r1", "step 4")
    detour = Typed(*RACE, "until r1.finished", "undo 2", "step 3", "pause retract", "undo", "abort r1", "step 4")
    assert detour.states[-1] == straight.states[-1]
    assert detour.script == straight.script
    digest = straight.output.splitlines()[-1]
    assert "digest" in digest
    assert detour.output.splitlines()[-1] == digest


def test_an_undo_of_more_than_there_is_changes_nothing():
    typed = Typed("step 2", "undo 2", "state")
    assert "! there are 1 commands to undo, got undo 2" in typed.output
    assert typed.script == ["for _ in range(2):", "    yield"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("start rid=r1", "rid must be unique among live requests"),
        ("start prompt_len=0", "start_req() takes prompt_len >= 1, a whole number, got 0"),
        ("until missing.finished", "NameError: name 'missing' is not defined; names are t, r1, state"),
        ("until chunked", "NameError: name 'chunked' is not defined (did you mean 'state.chunked'?)"),
        ("until state.step == 0", "the predicate never held within 400 steps"),
        ("until r1.finished and 1 / 0", "ZeroDivisionError"),
        ("exhaust_kv 99999", "is at most"),
        ("release 0", "release_results() takes n >= 1"),
        ("fail 9", "stage must be 0 to 3 with pp_size=4, got 9"),
        ("disconnect missing", "disconnect() takes a handle"),
        ("start stream=7", "stream must be true or false"),
        ("pause slowly", "pause_generation() takes one of retract, in_place, abort, got 'slowly'"),
        ("flush soon", "flush_cache() takes timeout_s in virtual seconds, or None, got 'soon'"),
        ("flush -1", "timeout"),
        ("advance nan", "t.clock.advance() takes seconds >= 0, got 'nan'"),
    ],
)
def test_a_command_that_fails_changes_nothing(line, why):
    without = Typed("start prompt_len=20", "step 2", "step 1")
    typed = Typed("start prompt_len=20", "step 2", line, "step 1")
    assert why in typed.output
    assert "! nothing was changed" in typed.output
    assert typed.session.refused == 1
    assert typed.passed
    assert typed.states[-1] == without.states[-1]
    assert typed.output.splitlines()[-1] == without.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("bogus", "there is no command 'bogus'; help"),
        ("flsh", "there is no command 'flsh' (did you mean 'flush'?)"),
        ("start_req prompt_len=8", "there is no command 'start_req' (did you mean 'start'?)"),
        ("help bogus", "help takes a word of the scheduler, got 'bogus'"),
        ("step x", "step takes a whole number, got 'x'"),
        ("step 0", "step takes 1 to 10000 steps"),
        ("step 1 2", "step takes a whole number, got 1 2"),
        ("until (", "until takes a Python expression"),
        ("until (yield)", "only looks"),
        ("until (x := 1)", "only looks"),
        ("start speed=9", "got an unexpected keyword argument 'speed'"),
        ("start rid=a-b", "it must be a name that is free"),
        ("start rid=t", "it must be a name that is free"),
        ("start rid=len", "it must be a name that is free"),
        ("start rid=call_1", "it must be a name that is free"),
        ("abort", "abort takes r, got nothing"),
        ("continue now", "continue takes nothing after it, got now"),
        ("undo 0", "undo takes 1 or more"),
        ("history 0", "history takes 1 step or more"),
        ("save it.py", "test_<name>.py"),
        ("save test_it.txt", "test_<name>.py"),
        ("hold 'x", "a quote that does not end"),
    ],
)
def test_what_is_no_command_is_refused_in_words(line, why):
    with pytest.raises(BadCommand) as refusal:
        read_command(line, [], WORDS)
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("step", ["yield"]),
        ("until len(r1.output_ids) >= 2 and not state.paused", None),
        (
            "start rid=a priority=2 ignore_eos=true",
            ['a = t.start_req(rid="a", prompt_len=16, priority=2, ignore_eos=True)'],
        ),
        ("abort_all", ["call_1 = t.abort_all()"]),
        ("abort a-b", ['call_1 = t.abort("a-b")']),
        ("flush 2.5", ["call_1 = t.flush_cache(2.5)"]),
        ("flush timeout_s=2.5", ["call_1 = t.flush_cache(timeout_s=2.5)"]),
        ("pause in_place", ['call_1 = t.pause_generation("in_place")']),
        ("continue", ["call_1 = t.continue_generation()"]),
        ("hold", ["t.hold_results()"]),
        ("release", ["t.release_results()"]),
        ("release 2", ["t.release_results(2)"]),
        ("exhaust_rows 1", ["t.exhaust_rows(1)"]),
        ("release_exhausted", ["t.release_exhausted()"]),
        ("evict", ["t.evict()"]),
        ("disconnect a", ["t.disconnect(a)"]),
        ("start rid=b prompt_ids=[1,2]", ['b = t.start_req(rid="b", prompt_ids=[1, 2])']),
        ("advance 3", ["t.clock.advance(3)"]),
    ],
)
def test_a_command_is_a_line_of_script(line, script):
    expected = script or ["yield from t.run_until(lambda: len(r1.output_ids) >= 2 and (not t.state.paused))"]
    started = VerbCall('a = t.start_req(rid="a")', "a", "a")
    assert list(lines_of([read_command(line, [started], WORDS)])) == expected


OWN_HELP, OF_THE_SCHEDULER = HELP.split("To the scheduler, or a clause of a schedule (help WORD says more):\n")
HELP_WORDS = [
    part.split()[0]
    for text in (*(line.split("  ")[0] for line in OWN_HELP.splitlines()), OF_THE_SCHEDULER)
    for part in text.replace(",\n", ", ").split(", ")
]


@every_case("word", HELP_WORDS)
def test_every_command_of_the_help_is_one(word):
    """The help names no command that is none: without its arguments a word is read, or refused for their sake."""
    why = ""
    try:
        read_command(word, [], WORDS)
    except BadCommand as exc:
        why = str(exc)
    assert not why or why.startswith(f"{word} takes")


def test_the_help_names_the_commands_and_fits_the_smallest_terminal():
    assert set(HELP_WORDS) == {*OWN_WORDS, *WORDS}
    lines = HELP.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("", ["step", "until", "start", "flush"]),
        ("st", ["step", "state", "start"]),
        ("help exhaust_r", ["exhaust_rows"]),
        ("start ", ["prompt_len=", "max_new_tokens="]),
        ("abort ", ["a"]),
        ("until ", []),
        ("step ", []),
    ],
)
def test_a_line_is_completed_by_what_may_stand_there(line, some):
    before = [read_command("start rid=a", [], WORDS)]
    offered = completions(line, WORDS, before)
    assert set(some) <= set(offered)
    assert bool(offered) is bool(some)


def test_a_terminal_offers_what_fits(monkeypatch):
    readline = pytest.importorskip("readline")
    taken = []
    monkeypatch.setattr(readline, "set_completer", taken.append)
    monkeypatch.setattr(readline, "get_line_buffer", lambda: "start pro")
    monkeypatch.setattr(readline, "get_endidx", lambda: 9)
    TerminalPrompt().complete_with(lambda line: ["prompt_len=", "profile", line])
    assert [taken[0]("pro", number) for number in range(3)] == ["prompt_len=", "profile ", None]


def test_an_undo_shows_the_state_that_it_leads_back_to():
    typed = Typed("start", "step 2", "step", "undo")
    assert typed.states[-1] == typed.states[-3]
    assert typed.output.splitlines()[-2] == typed.states[-1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("start a promt=70", "'KIND [RID] [name=value ...]', got 'start a promt=70' (Object contains unknown field"),
        ("pressure", "'pressure' does nothing; say what it acts on"),
        ("pressure pages=2 rows=1", "more than one command here: write 'exhaust_kv 2', then 'exhaust_rows 1'"),
        ("presure pages=2", "(did you mean 'pressure'?)"),
        ("3 start a prompt=70", "write 'step 3', then 'start a prompt=70'"),
    ],
)
def test_a_clause_that_is_none_is_refused_in_words(line, why):
    with pytest.raises(BadCommand) as refusal:
        read_command(line, [], WORDS, adapter_named(DEFAULT_ADAPTER).actions)
    assert why in str(refusal.value)


def test_a_clause_runs_and_is_saved(tmp_path):
    path = tmp_path / "test_clauses.py"
    typed = Typed(
        "hold",
        "start a prompt=70",
        "start b prompt=40 shared=16 tail=1",
        "step 9",
        "release count=1",
        "release",
        "until a.finished and b.finished",
        f"save {path}",
    )
    assert typed.session.refused == 0, typed.output
    assert typed.script[1] == 'a = t.start_req(rid="a", prompt_len=70, prompt_seed=0, max_new_tokens=2)'
    test = load_test(str(path), "test_clauses")
    assert EngineSim(test.config).run(test.script, options=test.options).steps > 9


def test_the_shell_of_a_role_is_an_engine_of_it_and_a_fleet_has_none():
    run = CliRunner()
    role = run.invoke(app, ["shell", "--adapter", "lockstep-decode"], input="hold-transfers\nstep\n")
    assert role.exit_code == 0, role.output
    fleet = run.invoke(app, ["shell", "--adapter", "lockstep-fleet"], input="step\n")
    assert "use the adapter lockstep, and t.engines('p0', 'd0')" in str(fleet.exception)


def test_names_of_requests_and_calls_count_on():
    first = read_command("start", [], WORDS)
    second = read_command("start", [first, StepOn(1)], WORDS)
    assert (first.name, second.name) == ("r1", "r2")
    assert read_command("flush", [first, read_command("flush", [], WORDS)], WORDS).name == "call_2"


def test_memory_results_and_time():
    typed = Typed(
        "start prompt_len=20 max_new_tokens=3",
        "hold",
        "step 12",
        "release 1",
        "step 1",
        "release",
        "pause retract",
        "advance 2",
        "step 8",
        "continue",
        "until t.is_fully_idle",
        "evict",
        "exhaust_kv 1",
        "state",
        "release_exhausted",
        "requests",
        "history 2",
        "script",
        "help",
    )
    assert typed.passed, typed.output
    assert typed.session.refused == 0
    assert "r1 ended: length, 3 tokens" in typed.output
    assert "1 free, 0 cached, 1023 held (1023 reserved) of 1024" in typed.output
    assert "| r1  | finished |" in typed.output
    assert "FLUSH" not in typed.output
    assert HELP.splitlines()[0] in typed.output


def test_a_death_is_shown_and_undone(tmp_path):
    typed = Typed(
        *RACE, "until r1.finished", "step", "history 2", "script", "undo 2", "until r1.finished", mutant=MUTANT
    )
    assert "This request holds the node from another tree" in typed.output
    assert "! the scheduler is dead; undo first" in typed.output
    assert typed.output.count("DIED HERE") == 2
    assert typed.passed
    assert "r1 ended: length, 2 tokens" in typed.output


def test_a_session_that_ends_dead_has_not_passed():
    assert not Typed(*RACE, "until r1.finished", mutant=MUTANT).passed


def test_a_saved_session_passes_and_fails_under_its_mutant(tmp_path):
    path = tmp_path / "test_saved_race.py"
    typed = Typed(*RACE, "until r1.finished", "start rid=late", "step", f"save {path}", "step")
    assert f"{path}: 6 commands" in typed.output
    assert typed.script[-1] == "yield", "the session goes on after a save"
    text = path.read_text()
    assert 'assert r1.finish_reason == "length"' in text
    assert "assert call_1.status == 400" in text
    assert "assert not late.finished" in text
    test = load_test(str(path), "test_saved_race")
    assert test.config == PP4
    assert EngineSim(test.config).run(test.script, options=test.options).steps == 15
    with pytest.raises(ServerDied, match="another tree"):
        EngineSim(test.config, mutant=MUTANT).run(test.script, options=AT_THE_END)


def test_a_session_that_died_under_a_mutant_is_saved_as_the_test_that_finds_it(tmp_path):
    path = tmp_path / "test_found.py"
    typed = Typed(*RACE, "until r1.finished", f"save {path}", mutant=MUTANT)
    assert not typed.passed
    assert f"Mutant: {MUTANT}." in path.read_text()
    test = load_test(str(path), "test_found")
    assert EngineSim(test.config).run(test.script).steps > 0


def test_save_overwrites_nothing_and_writes_no_empty_test(tmp_path):
    path = tmp_path / "test_mine.py"
    empty = Typed("start", f"save {path}")
    assert "the session runs no step" in empty.output
    assert not path.exists()
    path.write_text("mine")
    assert "is there already" in Typed("step", f"save {path}").output
    assert path.read_text() == "mine"


def test_the_command_reads_a_file_and_tells_by_its_status():
    run = CliRunner()
    good = run.invoke(app, ["shell", "--pp-size", "1"], input="# a comment\n\nstart\nuntil r1.finished\nquit\nbogus\n")
    assert good.exit_code == 0, good.output
    assert "step 0> start" in good.output
    assert run.invoke(app, ["shell"], input="bogus\n").exit_code == 1
    assert run.invoke(app, ["shell", "--tier", "server"], input="").exit_code == 2


def test_an_expression_is_shown_and_only_looks():
    typed = Typed(
        "start", "step 2", "show r1.output_ids", "show state.waiting", "show t.flush_cache()", "show r1.outputs"
    )
    assert "\n()\n" in typed.output
    assert "! show takes an expression that only looks, got 't.flush_cache()'" in typed.output
    assert "! AttributeError: 'RequestHandle' object has no attribute 'outputs'" in typed.output
    assert typed.script == ['r1 = t.start_req(rid="r1", prompt_len=16)', "for _ in range(2):", "    yield"]


OUTSIDE = pytest.mark.parametrize("adapter", ["examples/your_scheduler/fixed.py", "examples/lockstep/outside.py"])


@OUTSIDE
def test_a_scheduler_of_another_adapter_by_hand(adapter, tmp_path):
    """Its verbs, counts and history; the saved file is its own test."""
    path = tmp_path / "test_saved.py"
    config = adapter_named(adapter).read_config({"chunked_prefill_size": "8"} if "outside" in adapter else {})
    typed = Typed(
        "start prompt_len=20 max_new_tokens=3",
        "until state.in_flight",
        "hold",
        "flush",
        "step 2",
        "state",
        "requests",
        "history 2",
        "release",
        "abort r1",
        "undo",
        "until r1.finished",
        "help",
        f"save {path}",
        config=config,
        adapter=adapter,
    )
    assert typed.passed, typed.output
    assert typed.session.refused == 0
    assert "call_1 /flush_cache -> 400" in typed.output
    assert "| counts    | waiting 0, " in typed.output
    assert "| r1  | running |" in typed.output
    assert "prefill r1[" in typed.output
    assert "r1 ended: length, 3 tokens" in typed.output
    assert "start [NAME=VALUE ...]" in typed.output
    assert "profile" not in typed.output, "a verb of the engine alone"
    test = load_test(str(path), "test_saved")
    assert (test.adapter, test.config) == (adapter, config)
    assert adapter_named(adapter).run_script(test.script, {}, config=config, options=test.options, mutant=None).steps


def test_a_scheduler_of_another_adapter_dies_by_hand():
    typed = Typed(
        "start prompt_len=20",
        "step 2",
        "abort r1",
        "step 8",
        "state",
        "history 2",
        "undo 2",
        "until r1.finished",
        adapter="tests/registered/sdk/example_adapter.py",
        mutant="aborts-end-nothing",
    )
    assert "r1 is told [107] (None), but it has ended (abort)" in typed.output
    assert "debug_session.py" not in typed.output, "a line of the shell says nothing"
    assert "! the scheduler is dead; undo first" in typed.output
    assert typed.passed, typed.output


def test_a_verb_that_an_adapter_does_not_declare_is_no_word():
    typed = Typed("pause keep", "pausing", adapter="examples/your_scheduler/fixed.py")
    assert "! there is no command 'pause'" in typed.output


def test_the_command_takes_the_settings_of_an_adapter():
    run = CliRunner()
    shell = ["shell", "--adapter", "examples/your_scheduler/fixed.py"]
    good = run.invoke(app, [*shell, "--set", "blocks=20"], input="show state.blocks_free\n")
    assert good.exit_code == 0, good.output
    assert "\n20\n" in good.output
    for wrong in (["--pp-size", "2"], ["--set", "pages=20"], ["--mutant", "none-such"]):
        assert run.invoke(app, [*shell, *wrong], input="").exit_code, wrong
