"""Memory that is given back: what is read again is what it was."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from engine.model.openvino.memory import forget_read_pages, give_back_garbage

PAGES = 64


def resident_kib(path: Path) -> int:
    """What of a file's mappings lies in this process's memory."""
    found, own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.startswith("VmFlags"):
            own = line.endswith(str(path))
        elif own and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only there are pages given back")
def test_pages_of_a_mapped_file_are_forgotten_and_come_back(tmp_path: Path) -> None:
    path = (tmp_path / "weights.bin").resolve()
    data = bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256)
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == data
        before = resident_kib(path)
        forget_read_pages(path)
        assert resident_kib(path) < before == PAGES * mmap.PAGESIZE // 1024
        assert mapped[:] == data


def test_what_was_written_into_a_mapping_stays(tmp_path: Path) -> None:
    path = (tmp_path / "weights.bin").resolve()
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:4] = b"ours"
        forget_read_pages(path)
        assert mapped[:4] == b"ours"


def test_giving_back_garbage_keeps_what_is_alive() -> None:
    alive = [bytearray(b"x") * 1_000_000 for _ in range(3)]
    give_back_garbage()
    assert all(len(part) == 1_000_000 for part in alive)
