"""``scripted new``: the test that it writes, and the names that it refuses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from scripted_lockstep.tiers.sim.runner import EngineSim
from typer.testing import CliRunner

from engine import EngineConfig
from engine.core.errors import ConfigError
from scripted.cli import app
from scripted.cli.new import new_test, write_lint_rules
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.report.failure import ServerDied
from scripted.report.new_files import command_of, write_new
from scripted.script.loader import load_test
from scripted.script.options import ScriptOptions
from scripted.search.written_test import Draft, script_text
from scripted.shell.saved import save_session
from scripted.shell.statements import Statement, StepOn, VerbCall


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_what_is_written_passes_at_once(tmp_path, pp_size):
    path = new_test("it_is_mine", folder=tmp_path, settings={"pp_size": str(pp_size)})
    test = load_test(str(path), "test_it_is_mine")
    assert test.config.pp_size == pp_size
    assert test.tiers == ("sim", "server")
    done = EngineSim(test.config).run(test.script, options=test.options)
    assert done.reached == {test.options.must_reach[0]: 1}
    assert done.compared == 1


@pytest.mark.parametrize("pp_size", [1, 4])
def test_what_is_written_fails_under_its_mutant(tmp_path, pp_size):
    path = new_test("it_is_mine", folder=tmp_path, settings={"pp_size": str(pp_size)})
    assert "Mutant: flush-ignores-in-flight." in path.read_text()
    test = load_test(str(path), "test_it_is_mine")
    # Audited at the end, as every run with a mutant is.
    options = ScriptOptions(check_every_step=False)
    with pytest.raises(ServerDied, match="This request holds the node from another tree"):
        EngineSim(test.config, mutant="flush-ignores-in-flight").run(test.script, options=options)


def test_what_is_written_for_another_scheduler_passes_at_once(tmp_path):
    adapter = "examples/your_scheduler/fixed.py"
    done = CliRunner().invoke(app, ["new", "mine", "--dir", str(tmp_path), "--adapter", adapter])
    assert done.exit_code == 0
    assert "scripted vet" in done.output
    test = load_test(str(tmp_path / "test_mine.py"), "test_mine")
    passed = adapter_named(adapter).run_script(test.script, {}, config=test.config, options=test.options, mutant=None)
    assert passed.reached == {test.options.must_reach[0]: 1}


def test_a_project_without_suites_gets_tests_without_a_registration(tmp_path, monkeypatch):
    """Another project's `ci` may be a package of its own: what is written must not import it."""
    (tmp_path / "ci").mkdir()
    monkeypatch.chdir(tmp_path)
    written = [new_test("mine").read_text()]
    config = EngineConfig(pp_size=2)
    typed: list[Statement] = [VerbCall('t.start_req(rid="r1", prompt_len=4)', "r1", "r1"), StepOn(1)]
    save_session(tmp_path / "test_saved.py", adapter_named(DEFAULT_ADAPTER), config, typed)
    written.append((tmp_path / "test_saved.py").read_text())
    written.append(script_text(Draft(Schedule.parse("default; 1 start a prompt=3"), ()), name="found"))
    for text in written:
        assert "from engine import EngineConfig" in text
        assert not re.search(r"^(from|import) ci\b", text, re.MULTILINE)
        assert "register" not in text
        compile(text, "written", "exec")


@pytest.mark.parametrize("name", ["", "Big", "1st", "a-b", "test_it", "a b", "../a", "a.py"])
def test_a_bad_name_is_refused(tmp_path, name):
    with pytest.raises(ScriptDefinitionError, match="a test is named by small letters"):
        new_test(name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_in_any_folder_is_refused(tmp_path):
    there = new_test("race", folder=tmp_path / "inner")
    there.write_text("mine")
    for folder in (tmp_path, tmp_path / "inner"):
        with pytest.raises(ScriptDefinitionError, match="is there already; choose another name"):
            new_test("race", folder=folder)
    assert there.read_text() == "mine"
    with pytest.raises(ScriptDefinitionError, match="is there already"):
        write_new(there, "yours")
    assert there.read_text() == "mine"


def test_stages_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="pp_size"):
        new_test("race", folder=tmp_path, settings={"pp_size": "0"})
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_how_to_run_it(tmp_path):
    done = CliRunner().invoke(app, ["new", "race", "--dir", str(tmp_path), "--pp-size", "2"])
    assert done.exit_code == 0
    path = tmp_path / "test_race.py"
    hint = ["and see what it would notice:", f"scripted vet {path}"]
    rules = f"{tmp_path / 'ruff.toml'} is written: ruff's rules that find tests of nothing"
    assert done.output.splitlines() == [f"{path} is written; run it:", command_of(path), rules, *hint]


def test_the_rules_find_tests_of_nothing(tmp_path):
    path = new_test("race", folder=tmp_path)
    assert write_lint_rules(tmp_path) == tmp_path / "ruff.toml"
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", tmp_path]
    assert subprocess.run(ruff, check=False).returncode == 0
    path.write_text(
        "def test_race(t):\n    yield\n    t.state == 3\n    t.state\n    assert (t, 1)\n    assert t == t\n"
    )
    found = subprocess.run(ruff, check=False, capture_output=True, text=True).stdout
    assert all(rule in found for rule in ("B015", "B018", "F631", "PLR0124")), found


@pytest.mark.parametrize("settings", [{"ruff.toml": ""}, {"pyproject.toml": "[tool.ruff.lint]\n"}])
def test_settings_of_a_project_are_left_alone(tmp_path, settings):
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tests").mkdir()
    assert write_lint_rules(tmp_path / "tests") is None
    assert list((tmp_path / "tests").iterdir()) == []
