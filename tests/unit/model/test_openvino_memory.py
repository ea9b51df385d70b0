"""Memory that is given back: what is read again is what it was."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from pathlib import Path

import pytest
from resident_pages import resident_kib

from engine.model.file_pages import give_back_garbage, read_pages_given_back

PAGES = 64
PATIENCE_S = 30.0


@pytest.mark.skipif(sys.platform != "linux", reason="only there are pages given back")
def test_pages_of_a_mapped_file_are_forgotten_and_come_back(tmp_path: Path) -> None:
    path = (tmp_path / "weights.bin").resolve()
    data = bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256)
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == data
        assert resident_kib(path) == PAGES * mmap.PAGESIZE // 1024
        with read_pages_given_back(path):
            until = time.monotonic() + PATIENCE_S
            while resident_kib(path) and time.monotonic() < until:
                time.sleep(0.001)
            assert resident_kib(path) == 0, "they are given back while the block is computed"
            assert mapped[:] == data
        assert resident_kib(path) == 0
        assert mapped[:] == data
        assert not [thread for thread in threading.enumerate() if thread.name == "given-back"]


def test_what_was_written_into_a_mapping_stays(tmp_path: Path) -> None:
    path = (tmp_path / "weights.bin").resolve()
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:4] = b"ours"
        with read_pages_given_back(path):
            pass
        assert mapped[:4] == b"ours"


def test_giving_back_garbage_keeps_what_is_alive() -> None:
    alive = [bytearray(b"x") * 1_000_000 for _ in range(3)]
    give_back_garbage()
    assert all(len(part) == 1_000_000 for part in alive)
