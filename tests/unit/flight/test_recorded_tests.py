"""Tests of another project that start an engine: the flights of those that fail are kept, and are replayed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripted.sdk.flight.of_tests import RecordedTests
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]

# An engine of somebody else, with a loop and clients of its own: it records as the environment asks.
ENGINE_TESTS = """
import os
import time

import pytest

from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.sdk.flight.of_machine import RecordedMachine, header_of
from scripted.sdk.flight.recorder import recorder_of
from scripted.search.execution import record

LINE = "blocks=12; 1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start b prompt=5 new=1"


def run(adapter):
    schedule = Schedule.parse(f"adapter={adapter} {LINE}")
    known = adapter_named(adapter)
    words = dict(known.config_words(schedule.config))
    machine = RecordedMachine(
        known.new_parts(schedule.config, record=True)[0],
        lambda snapshot: recorder_of(os.environ, header_of(adapter, words), snapshot),
    )
    for one in record(schedule)[1]:
        machine.step(one.step.events, one.step.now)
    return machine


def test_race():
    run("{example}").recorder.close()
    pytest.fail("tokens are not as expected")


def test_wall_time():
    machine = run("{fixed}")
    begun = time.monotonic()
    assert time.monotonic() - begun > 1e9, "too fast"
    machine.recorder.close()


def test_passes():
    run("{fixed}").recorder.close()
"""


@pytest.mark.usefixtures("restores_signal_handlers")
def test_a_failure_that_replays_is_told_from_one_that_does_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    example = ROOT / "examples" / "your_scheduler"
    text = ENGINE_TESTS.replace("{example}", str(example / "adapter.py")).replace("{fixed}", str(example / "fixed.py"))
    pytester.makepyfile(test_engines=text)
    result = pytester.runpytest_inprocess("-p", "scripted.pytest_plugin", "--record", "kept")
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines([
        "*flight recorder*",
        "it replays without a model, a race of the scheduler: *",
        "scripted replay kept*test_engines.py-test_race.flight --to-script test_race.py",
        "*flight recorder*",
        "it does not replay: * plans as recorded, and no promise breaks. The cause is not the scheduler: *",
        "*recorded failures*",
        "test_engines.py::test_race: it replays *",
        "test_engines.py::test_wall_time: it does not replay: *",
    ])  # fmt: skip
    assert sorted(path.name for path in (pytester.path / "kept").iterdir()) == [
        "test_engines.py-test_race.flight",
        "test_engines.py-test_wall_time.flight",
    ]


def test_an_engine_that_has_only_begun_is_no_error_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (FOLDER_VARIABLE, OPTIONS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    recorded = RecordedTests(tmp_path)
    try:
        recorded.begin()
        running = Path(os.environ[FOLDER_VARIABLE])
        running.mkdir()
        (running / "vllm-1-all.flight").write_bytes(b'{"type":"fli')
        ((path, verdict),) = recorded.failed("test_x.py::test_a[b c]")
        assert path.name == "test_x.py-test_a-b-c.flight"
        assert path.stat().st_mode & 0o777 == 0o600
        assert verdict.replays is None
        assert "is not a flight" in verdict.text
    finally:
        recorded.close()
    assert FOLDER_VARIABLE not in os.environ
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
