"""The page "Your first race in ten minutes", followed word for word in a copy of the tree."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from followed_pages import COPIED, INSTALLATION, ROOT, blocks, check_quotes, commands_of, follow, in_a_shell
from forked_commands import ForkedCommands

PAGE = ROOT / "docs/first_race.md"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in COPIED:
        # With the bytecode, which is valid for files of the same size and time.
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if (ROOT / ".ci").is_dir():
        shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


@pytest.mark.nightly
def test_the_page_is_true(tree: Path, commands: ForkedCommands) -> None:
    """D: what a newcomer types gives what the page says, output and exit status."""

    def run(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
        program, *words = shlex.split(command)
        if program != "pytest":
            return in_a_shell(command, folder, environment)
        done = commands.run("-m", "pytest", *words, cwd=folder, env=environment)
        return done.returncode, done.stdout

    assert follow(PAGE, tree, run) == 10


def test_the_page_names_an_installation_that_exists() -> None:
    listed = [command for file, block in blocks(PAGE.read_text()) if not file for command, _ in commands_of(block)]
    assert tuple(listed[:2]) == INSTALLATION
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_quote_that_is_not_there_is_found() -> None:
    check_quotes("x", ["a  b", "c"], "0\na b\nc d\n")
    with pytest.raises(AssertionError, match="quotes 'a'"):
        check_quotes("x", ["c", "a"], "a\nc\n")
