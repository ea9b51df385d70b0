"""Files of results: a place that cannot be written is refused before the work, and every command asks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thinned import thinned
from typer.testing import CliRunner

from ci.cli import app as ci_app
from lockstep.errors import UnwritableFileError
from lockstep.output_files import require_writable, write_output

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["there.txt", "new.txt", "new/folder/new.txt"])
def test_a_file_that_can_be_written_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (tmp_path / "there.txt").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    require_writable("--trace", path)
    assert sorted(tmp_path.rglob("*")) == before
    write_output(path, "new")
    assert path.read_text() == "new"


def test_what_is_no_place_for_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for name, why in (("", "it is a folder"), ("file/x", "is no folder"), ("file/x/y", "is no folder")):
        with pytest.raises(UnwritableFileError, match=f"--trace must name a file that can be written, .*{why}"):
            require_writable("--trace", tmp_path / name)
    # What root may write is a matter of the file system, so the answer is given here.
    monkeypatch.setattr("lockstep.output_files.os.access", lambda *_: False)
    for name in ("file", "new", "new/x"):
        with pytest.raises(UnwritableFileError, match="is closed to writing"):
            require_writable("--trace", tmp_path / name)


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/dev/full") as told:
        write_output(Path("/dev/full"), "text")
    assert told.value.errno == errno.ENOSPC


@pytest.mark.parametrize("words", thinned(["-m engine config", "-m scripted gallery list", "-m ci --help"], one_in=3))
def test_what_stdout_cannot_take_is_no_traceback(words: str) -> None:
    """A full disk is one line; a character that the encoding lacks is a question mark."""
    command, surroundings = (
        [sys.executable, *words.split()],
        {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode
    assert len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=surroundings, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["--json", "--junit"])
def test_a_suite_refuses_before_it_runs(monkeypatch, tmp_path: Path, flag: str) -> None:
    monkeypatch.setattr("ci.cli.run_files", None)
    done = CliRunner().invoke(ci_app, ["suite", "--suite", "base-cpu", "--root", str(REPOSITORY), flag, str(tmp_path)])
    assert "the results cannot be written to" in str(done.exception)
