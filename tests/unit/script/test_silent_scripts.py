"""Scripts that test nothing, in one pytest session with innocent ones between them: who notices each."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from silent_scripts import INNOCENT, SILENT, source_of
from thinned import thinned

from scripted.cli.single_run import vet

NAMES = list(SILENT)


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, commands: ForkedCommands) -> str:
    """The output of pytest for a file with each script that is asked for, and an innocent one behind each."""
    folder = tmp_path_factory.mktemp("silent")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {
        item.callspec.params["name"] for item in items if item.module is request.module and "name" in item.fixturenames
    }
    for number, name in enumerate(NAMES):
        if name not in asked:
            continue
        (folder / f"test_{number:02}_silent.py").write_text(source_of(name))
        (folder / f"test_{number:02}_then_innocent.py").write_text(INNOCENT)
    options = ["-v", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", folder]
    return commands.run("-m", "pytest", folder, "--tier", "sim", "--vet", "off", *options, cwd=folder).stdout


@pytest.mark.parametrize("name", thinned(NAMES, one_in=3))
def test_who_notices(session: str, name: str) -> None:
    file = f"test_{NAMES.index(name):02}_silent.py"
    summary = session.partition(" scripts -----")[2].partition("short test summary")[0]
    noticed = [
        how
        for how, is_it in {
            "refused": f"ERROR {file} - " in session,
            "fails": f"FAILED {file}::test_silent[sim] - " in session,
            "named": f"{file}:" in summary,
        }.items()
        if is_it
    ]
    assert noticed == ([] if SILENT[name][0] == "vet" else [SILENT[name][0]])


@pytest.mark.parametrize("name", thinned(NAMES, one_in=3))
def test_the_next_script_is_not_hurt(session: str, name: str) -> None:
    assert f"PASSED test_{NAMES.index(name):02}_then_innocent.py::test_innocent[sim]" in session


@pytest.mark.parametrize("name", thinned([name for name in NAMES if SILENT[name][0] == "vet"], one_in=3))
def test_what_no_run_shows_vet_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "test_silent.py"
    path.write_text(source_of(name))
    assert not vet(str(path))
    assert "notices only what every script notices" in capsys.readouterr().out


def test_few_need_vet() -> None:
    assert len(SILENT) >= 40
    assert sum(who == "vet" for who, _body in SILENT.values()) <= 6
