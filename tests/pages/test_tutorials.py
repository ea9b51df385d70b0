"""The other tutorials, followed word for word. ``make pages`` runs them: together they take a minute."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from followed_pages import ROOT, follow

COPIED = ("engine", "lockstep", "scripted", "adapters", "examples", "ci", "tests/registered")


@pytest.mark.parametrize(("page", "commands"), [("search_and_shrink", 7)])
def test_the_tutorial_is_true(page: str, commands: int, tmp_path: Path) -> None:
    """D: what a newcomer types gives what the page says, output and exit status."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name)
    assert follow(ROOT / f"docs/{page}.md", tmp_path) == commands
