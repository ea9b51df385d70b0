"""Adapters by name, and schedules that name theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "examples/your_scheduler/adapter.py"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_adapter_is_found_once_and_keeps_the_name_it_was_found_by() -> None:
    adapter = adapter_named(EXAMPLE)
    assert adapter is adapter_named(EXAMPLE)
    assert adapter.name == EXAMPLE


def test_an_installed_module_has_an_adapter_as_an_attribute() -> None:
    assert adapter_named("scripted_lockstep.adapter:ADAPTER").workloads == adapter_named(DEFAULT_ADAPTER).workloads


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dynamo", "an adapter is lockstep, lockstep-decode, lockstep-fleet, lockstep-prefill, lockstep-sessions, sgl"),
        ("no/such/file.py", "there is no file 'no/such/file.py'"),
        ("scripted.nothing:ADAPTER", "cannot be loaded: No module named 'scripted.nothing'"),
        ("scripted.core.phrases:ADAPTER", "module 'scripted.core.phrases' has no attribute 'ADAPTER'"),
        ("scripted.core.phrases:plural", "is not an adapter: it has no actions, new_parts, workloads"),
        ("examples/your_scheduler/scheduler.py", "has no ADAPTER"),
    ],
)
def test_anything_else_is_refused_with_what_a_adapter_is(name: str, words: str) -> None:
    with pytest.raises(ScriptDefinitionError) as caught:
        adapter_named(name)
    assert words in str(caught.value)


def test_a_schedule_names_a_adapter_that_is_not_the_engine() -> None:
    text = f"adapter={EXAMPLE} blocks=9; 1 start a prompt=5; 3 abort a"
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    assert Schedule.parse("blocks=9; 1 start a prompt=5; 3 abort a", of=EXAMPLE) == schedule
    assert schedule.config.blocks == 9


def test_a_schedule_has_the_actions_of_its_adapter_alone() -> None:
    with pytest.raises(ScriptDefinitionError, match="got '1 kill'; the kinds are flush, hold, "):
        Schedule.parse(f"adapter={EXAMPLE}; 1 kill")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bloks=9", "has no setting 'bloks' (did you mean 'blocks'?)"),
        ("blocks=many", "a setting of examples/your_scheduler/adapter.py cannot be read"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(ScriptDefinitionError) as caught:
        Schedule.parse(f"adapter={EXAMPLE} {words}; 1 start a prompt=5")
    assert said in str(caught.value)


def test_a_wrong_adapter_on_the_command_line_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from scripted.cli.main import main

    sys.argv = ["scripted", "explore", "--adapter", "nothing"]
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capfd.readouterr().err.startswith("scripted: an adapter is lockstep")


def test_an_adapter_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    """Else the next adapter imports its neighbours, and a module of the same name is gone."""
    adapter_named(EXAMPLE)
    module, paths = sys.modules.get("adapter"), list(sys.path)
    broken = tmp_path / "adapter.py"
    broken.write_text("import a_scheduler_that_is_not_on_the_path\n")
    with pytest.raises(ScriptDefinitionError, match="a_scheduler_that_is_not_on_the_path"):
        adapter_named(str(broken))
    assert module is not None
    assert (sys.modules.get("adapter"), sys.path) == (module, paths)


def test_an_adapter_for_another_version_of_the_api_is_refused(tmp_path):
    path = tmp_path / "old_adapter.py"
    path.write_text("class Old:\n    actions = new_parts = workloads = ()\n    api = 0\n\n\nADAPTER = Old()\n")
    with pytest.raises(
        ScriptDefinitionError, match="is written for version 0 of the adapter API, this Lockstep has ver"
    ):
        adapter_named(str(path))


def test_an_adapter_whose_own_package_is_hidden_is_told(tmp_path):
    path = tmp_path / "engine_adapter.py"
    path.write_text("from engine.of_theirs import Scheduler\n")
    with pytest.raises(
        ScriptDefinitionError, match="'engine' is Lockstep's package here, so give yours a place inside"
    ):
        adapter_named(str(path))


@pytest.mark.parametrize("is_absolute_first", [True, False])
def test_all_paths_to_a_file_lead_to_one_adapter_with_one_name(tmp_path, monkeypatch, is_absolute_first):
    """No earlier lookup decides which name its schedules carry."""
    monkeypatch.setattr("scripted.core.adapters._START", tmp_path)
    path = tmp_path / f"own_adapter_{is_absolute_first}.py"
    path.write_text("class Own:\n    actions = new_parts = workloads = ()\n\n\nADAPTER = Own()\n")
    monkeypatch.chdir(tmp_path)
    names = sorted([str(path), path.name], reverse=not is_absolute_first)
    first, second = map(adapter_named, names)
    assert first is second
    assert first.name == path.name
    monkeypatch.chdir(tmp_path.parent)
    assert adapter_named(f"{tmp_path.name}/{path.name}") is first
    assert first.name == path.name


def test_a_lookup_by_module_leaves_an_installed_adapter_its_name() -> None:
    assert adapter_named("scripted_lockstep.adapter:ADAPTER") is adapter_named(DEFAULT_ADAPTER)
    assert adapter_named(DEFAULT_ADAPTER).name == DEFAULT_ADAPTER
