"""Scripts are found by file and name, with pytest's assertions, and again when the file has changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripted import ScriptDefinitionError
from scripted.script.loader import load_script, load_test

SCRIPT = "def script(t):\n    value = {}\n    assert value == 2\n    yield\n"
HEAD = "from engine import EngineConfig\nfrom scripted import scripted\n\n"
TEST = f"{HEAD}@scripted(EngineConfig())\ndef test_it(t):\n    yield\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "test_scripts.py"


def test_assertions_show_values(file: Path) -> None:
    file.write_text(SCRIPT.format(3))
    with pytest.raises(AssertionError, match="assert 3 == 2"):
        next(load_script(str(file), "script")(None))


def test_only_a_changed_file_has_new_tests(file: Path) -> None:
    file.write_text(TEST)
    first = load_test(str(file), "test_it").script
    assert load_test(str(file), "test_it").script is first
    file.write_text(f"{TEST}\n")
    assert load_test(str(file), "test_it").script is not first


def test_a_script_finds_no_global_as_another_one_left_it(file: Path) -> None:
    """A server's process runs many scripts of a file; in the sim tier each has a child of its own."""
    file.write_text("SEEN = []\ndef script(t):\n    SEEN.append(1)\n    assert len(SEEN) == 1\n    yield\n")
    for _ in range(2):
        next(load_script(str(file), "script")(None))


def test_decorated_test_is_found_with_its_script(file: Path) -> None:
    file.write_text(TEST)
    assert load_test(str(file), "test_it").script.__code__ == load_script(str(file), "test_it").__code__


@pytest.mark.parametrize("text", ["x = 3\n", "def script(t):\n    return 3\n", "script = 3\n"])
def test_what_is_no_generator_function_is_refused(file: Path, text: str) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    file.write_text(text)
    with pytest.raises(ScriptDefinitionError, match="no generator function 'script' at its top level"):
        load_script(str(file), "script")


def test_file_without_that_test_names_those_it_has(file: Path) -> None:
    file.write_text(TEST)
    with pytest.raises(ScriptDefinitionError, match="its scripts are test_it"):
        load_test(str(file), "test_other")


def test_import_paths_of_the_caller_are_used(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "a_module_beside_the_script.py").write_text("VALUE = 2\n")
    file.write_text(f"from a_module_beside_the_script import VALUE\n{SCRIPT.format('VALUE')}")
    assert load_script(str(file), "script", [str(folder)])
    monkeypatch.delitem(sys.modules, "a_module_beside_the_script")


def test_a_file_that_starts_a_server_while_one_imports_it_is_refused(tmp_path: Path) -> None:
    """Each server imports the file of its script; without a rule the first script waited forever."""
    file = tmp_path / "script.py"
    start = "ScriptedServer.start(EngineConfig())"
    file.write_text(f"from engine import EngineConfig\nfrom scripted import ScriptedServer\n{start}\n")
    with pytest.raises(ScriptDefinitionError, match=r"servers would start servers without end; .*__main__"):
        load_script(str(file), "script")
