"""Where a server lives: its listening socket, its private folder, its report of a death."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, StartupError
from engine.process.death import DeathReport, describe_status, read_death_report
from engine.process.links.listener import base_url, bind_server
from engine.process.private_dir import MAX_PATH_BYTES, PrivateDir
from engine.server.scheduler_process.gate_context import load_attribute


def test_free_port_is_found_and_named() -> None:
    with bind_server("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert base_url(listener) == f"http://127.0.0.1:{port}"


def test_port_in_use_names_host_port_and_remedy() -> None:
    with bind_server("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"--port must .* got 127\.0\.0\.1:{port}.*port 0"):
            bind_server("127.0.0.1", port)


def test_unknown_host_is_named() -> None:
    with pytest.raises(StartupError, match="got not an address"):
        bind_server("not an address", 0)


def test_wildcard_is_reached_by_loopback() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        assert base_url(listener).startswith("http://127.0.0.1:")


def test_own_folder_is_private_and_removed() -> None:
    """Loopback by default, and no key is shown (C08)."""
    folder = PrivateDir()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "requests").touch()
    folder.remove()
    assert not folder.path.exists()


def test_lent_folder_loses_its_sockets_only(tmp_path: Path) -> None:
    folder = PrivateDir(tmp_path)
    (tmp_path / "log").touch()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "requests"))
    folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"at most {MAX_PATH_BYTES} bytes.*TMPDIR"):
        PrivateDir(tmp_path / ("x" * MAX_PATH_BYTES))


def test_death_report_survives_its_file(tmp_path: Path) -> None:
    assert read_death_report(tmp_path) is None
    report = DeathReport(process="stage-1", pid=5, cause="killed", when=1.5, signal=9)
    report.write(tmp_path)
    assert read_death_report(tmp_path) == report
    assert [path.name for path in tmp_path.iterdir()] == ["death.json"]


@pytest.mark.parametrize(("status", "text"), [(-9, "signal 9 (SIGKILL)"), (3, "status 3"), (-77, "an unknown signal")])
def test_statuses_are_sentences(status: int, text: str) -> None:
    assert text in describe_status(status)


@pytest.mark.parametrize("path", ["no.such.module:Gate", "engine.server.scheduler_process.live_gate:NoSuchGate"])
def test_gate_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_attribute(path)
