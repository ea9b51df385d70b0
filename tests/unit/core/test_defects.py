"""Tables of known defects: read with bounds, found by adapter, written by a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted.core.defects import Defect, Upstream, add_known, defects_of, read_defects
from scripted.core.refusals import ScriptDefinitionError

LOST = Defect(
    id="mine-1",
    title='A "quoted" title \\ with \u2028 and \x7f',
    schedules=("adapter=mine.py; 1 start a prompt=3",),
    upstream=(Upstream("54028"),),
    because="nobody uses it",
)
DAMAGED = {
    "no TOML": "[[defect",
    "no id": "[[defect]]\ntitle = 'x'",
    "an unknown field": "[[defect]]\nid = 'x'\nschedule = 'y'",
    "another type": "[[defect]]\nid = 3",
    "an id twice": "[[defect]]\nid = 'x'\n[[defect]]\nid = 'x'",
    "a culprit that is no text": "[[defect]]\nid = 'x'\nreach = { who = 3 }",
}


def test_what_a_project_writes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    add_known(file, LOST)
    other = Defect(id="mine-2", schedules=("adapter=other.py; 1 flush",))
    add_known(file, other)
    assert read_defects(file).defect == (LOST, other)
    assert defects_of("mine.py", file) == (LOST,)
    with pytest.raises(ScriptDefinitionError, match="has the defect 'mine-1'; delete"):
        add_known(file, LOST)


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "known.toml"
    file.write_text(text)
    with pytest.raises(ScriptDefinitionError, match=r"known\.toml (is not a table of known defects|has the defect)"):
        read_defects(file)


def test_a_table_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "known.toml"
    add_known(file, LOST)
    monkeypatch.setattr("scripted.core.defects._SIZE_LIMIT_BYTES", file.stat().st_size - 1)
    with pytest.raises(ScriptDefinitionError, match=r"known\.toml has \d+ bytes; a table of known defects has at most"):
        read_defects(file)


def test_an_adapter_brings_its_table(tmp_path: Path) -> None:
    """Adapters of engines that are not installed have theirs too; a role has the defects of its own schedules."""
    nothing = tmp_path / "none.toml"
    assert "vllm-image-never-encoded" in {one.id for one in defects_of("vllm", nothing)}
    fleets = {one.id for one in defects_of("sglang-fleet", nothing)}
    assert "sglang-prefill-abort-not-told" in fleets
    assert fleets.isdisjoint(one.id for one in defects_of("sglang", nothing))
    assert defects_of("lockstep", nothing) == ()
