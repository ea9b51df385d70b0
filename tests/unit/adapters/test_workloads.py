"""The library of base workloads: names are unique, and shared settings stand in the schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_lockstep.space import workloads

from scripted.sdk.workloads import read_workloads


def _write(folder: Path, text: str) -> Path:
    path = folder / "workloads.txt"
    path.write_text(text)
    return path


def test_shared_settings_and_wrapped_lines(tmp_path: Path) -> None:
    text = "# Two.\nBOTH: a=1\nEND: 2 flush;\n    3 flush\n\none: BOTH b=2; 1 flush;\n    END\n# The other.\nother: X\n"
    texts, shared = read_workloads(_write(tmp_path, text), "my-")
    assert texts == {"my-one": "a=1 b=2; 1 flush; 2 flush; 3 flush", "my-other": "X"}
    assert shared == {"BOTH": "a=1", "END": "2 flush; 3 flush"}


def test_each_workload_has_a_name_of_its_own(tmp_path: Path) -> None:
    """F: of two workloads of one name the search would run one."""
    with pytest.raises(AssertionError, match="two workloads called one"):
        read_workloads(_write(tmp_path, "one: default; 1 flush\none: default; 2 flush\n"))
    in_file, _ = read_workloads(Path(workloads.__file__).with_suffix(".txt"))
    at_bounds = set(workloads.TEXTS) - set(in_file)
    assert len(at_bounds) == 44
