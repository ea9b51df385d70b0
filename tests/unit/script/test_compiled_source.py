"""Compiled files are kept beside their sources, and used for the same source alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted.script import counted_source
from scripted.script.counted_source import counted

SOURCE = b"import json\n\ndef script(t):\n    assert all(one for one in t)\n    yield\n"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were compiled, in order."""
    files: list[str] = []
    right = counted_source._counted

    def note(source: bytes, file: str, *, negatable: bool) -> counted_source.CountedSource:
        files.append(file)
        return right(source, file, negatable=negatable)

    monkeypatch.setattr(counted_source, "_counted", note)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    return files


def test_a_file_is_compiled_once(tmp_path: Path, compiled: list[str]) -> None:
    file = str(tmp_path / "test_it.py")
    first, second = (counted(SOURCE, file, negatable=False) for _ in range(2))
    assert (first.sites, first.imported, first.code) == (second.sites, second.imported, second.code)
    assert compiled == [file]
    assert first.imported == ("json",)
    assert [site.line for site in first.sites] == [4]


@pytest.mark.parametrize("damage", ["another source", "another way", "cut", "no writing", "garbage", "one bit"])
def test_it_is_compiled_again_where_what_is_kept_is_not_of_it(
    tmp_path: Path, compiled: list[str], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, source = str(tmp_path / "test_it.py"), SOURCE
    monkeypatch.setattr("sys.dont_write_bytecode", damage == "no writing")
    counted(source, file, negatable=False)
    for kept in (tmp_path / "__pycache__").glob("*"):
        content = kept.read_bytes()
        flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        kept.write_bytes({"cut": content[:-7], "garbage": b"\xff" * 40, "one bit": flipped}.get(damage, content))
    if damage == "another source":
        source = SOURCE.replace(b"all(", b"any(")
    again = counted(source, file, negatable=damage == "another way")
    assert compiled == [file, file]
    assert again.sites[0].text.startswith("any" if damage == "another source" else "all")


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "__pycache__").write_text("a file")
    counted(SOURCE, str(tmp_path / "test_it.py"), negatable=False)
    assert len(compiled) == 1
    assert [place.name for place in tmp_path.iterdir()] == ["__pycache__"]


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    counted(SOURCE, str(tmp_path / "test_it.py"), negatable=False)
    assert len(compiled) == 1
    assert list((tmp_path / "__pycache__").iterdir()) == []
