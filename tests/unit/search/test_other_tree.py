"""``--against``: only what the scheduler of another tree does not do, in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.other_tree import other_tree

EXAMPLE = Path(__file__).parents[3] / "examples/your_scheduler"
# Of the example's scheduler as it is: the bug that its page shows.
OLD = "was written before the cache was flushed"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with an example scheduler: the commit ``base`` has its bug, and the working tree another one too."""
    folder = tmp_path_factory.mktemp("own-tree")
    for name in ("adapter.py", "scheduler.py"):
        # Modules are kept by their names; those of other tests have the same.
        text = (EXAMPLE / name).read_text(encoding="utf-8").replace("from scheduler import", "from mine import")
        (folder / {"adapter.py": "mine_adapter.py", "scheduler.py": "mine.py"}[name]).write_text(text, encoding="utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "base"], ["tag", "base"]):
        subprocess.run([*git, *words], cwd=folder, check=True, capture_output=True)
    return folder


def plant(folder: Path, cut: str, becomes: str) -> None:
    path = folder / "mine.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(cut) == 1
    path.write_text(text.replace(cut, becomes), encoding="utf-8")


def test_only_what_the_base_does_not_fail_is_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule that is shown passes at the base; the example's own bug, which both have, is no finding."""
    plant(repository, "reversed(request.blocks)", "request.blocks[:1]")
    monkeypatch.chdir(repository)
    words = ["explore", "--adapter", "mine_adapter.py", "--schedules", "60", "--stop-at-first", "--no-keep"]
    found = CliRunner().invoke(app, [*words, "--against", "base"])
    assert found.exit_code == 1, found.output
    assert OLD not in found.output
    assert "FAILED: 1 kind of failure" in found.output
    schedule = found.output.partition("scripted replay '")[2].partition("'")[0]
    with other_tree("base", "mine_adapter.py") as base:
        assert base.failure_of(Schedule.parse(schedule), "") is None
    same = CliRunner().invoke(app, [*words, "--against", str(repository)])
    assert same.exit_code == 0, same.output
    assert f"that {repository} has too" in same.output


REFUSED: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "no commit": (lambda _: "no-such-commit", "mine_adapter.py", "takes a folder, or a commit of the repository of"),
    "another scheduler's": (lambda _: "base", str(EXAMPLE / "adapter.py"), "from elsewhere, and nothing from"),
    "without the adapter": (lambda folder: str(folder), "mine_adapter.py", "cannot be loaded with its scheduler"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tree_that_is_none_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where, adapter, why = REFUSED[name]
    monkeypatch.chdir(repository)
    with pytest.raises(ScriptDefinitionError, match=why), other_tree(where(tmp_path), adapter):
        pass
