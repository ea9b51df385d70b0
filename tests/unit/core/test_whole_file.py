"""Small files on a full disk: the old content stays, and no part of the new."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.whole_file import open_whole, write_whole
from scripted.core.defects import Defect, add_known
from scripted.search.failure_database import FailureDatabase, SavedFailure

KNOWN = Defect(id="a", title="a", schedules=("adapter=vllm; 1 start a",), because="it is")
SAVED = SavedFailure(adapter="lockstep", schedule="1 start a prompt=1", signature="s", text="t")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the first three bytes of every file."""

    def fail(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    "write",
    [
        lambda file: write_whole(file, b"new content"),
        lambda file: add_known(file, KNOWN),
        lambda file: FailureDatabase(file).replace(SAVED),
    ],
    ids=["any file", "known defects", "failures"],
)
def test_a_full_disk_leaves_the_old_content(write: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "old"
    file.write_text("")
    with pytest.raises(OSError, match="No space left"):
        write(file)
    assert [one.name for one in tmp_path.iterdir()] == ["old"]
    assert file.read_text() == ""


def test_a_file_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft has the suffix of its file, by which a folder is cleared."""
    drafts: list[str] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: (drafts.append(path.suffix), write(path, data))[1])
    write_whole(tmp_path / "kv-0.address", b"unix:/a#b")
    assert drafts == [".address"]
    assert (tmp_path / "kv-0.address").read_bytes() == b"unix:/a#b"


def write_half(place: Path) -> None:
    with open_whole(place) as file:
        file.write(b"half")
        assert [one.name for one in place.parent.glob("*.rec")] == ["run.rec"]
        raise OSError("full")


def test_a_large_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A reader by suffix meets no draft; where writing fails, the file of before stays."""
    place = tmp_path / "run.rec"
    place.write_bytes(b"before")
    with pytest.raises(OSError, match="full"):
        write_half(place)
    assert place.read_bytes() == b"before"
    with open_whole(place) as file:
        file.write(b"after")
    assert (place.read_bytes(), place.stat().st_mode & 0o777) == (b"after", 0o600)
    assert [*tmp_path.iterdir()] == [place]
