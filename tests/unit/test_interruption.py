"""Ctrl-C: a command ends with one line and status 130, wherever it is, and what it had ordered is not started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.server.launch import parent_process
from engine.server.launch.preload import ServeRequest
from lockstep.interruption import EXIT_INTERRUPTED

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
from lockstep.interruption import interruptible
# A shell starts what it runs in the background with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with interruptible("it"):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("signal.raise_signal(signal.SIGINT)", EXIT_INTERRUPTED, "it: interrupted\n"),
        ("raise SystemExit(130)", EXIT_INTERRUPTED, "it: interrupted\n"),
        ("raise SystemExit(1)", 1, ""),
        ("pass", 0, ""),
    ],
)
def test_an_interrupted_command_says_so_in_one_line(body: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("package", ["engine", "lockstep", "scripted", "ci", "benchmarks"])
def test_a_command_is_interruptible_before_its_costly_imports(package: str) -> None:
    """An interrupt during earlier imports cannot end the command in order, so these must be few."""
    program = f"import {package}, sys; print(sorted({{'pydantic', 'typer', 'rich', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_order_of_a_client_that_left_is_not_carried_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A07: its folders are gone, so a server could only fail, with a traceback on the terminal."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a server was forked for no client"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, news = socket.socketpair()
    request = ServeRequest(
        settings="{}", private_dir=str(tmp_path), log_path=str(tmp_path / "log"), working_dir="/", import_path=()
    )
    with ours, lifeline, news:
        socket.send_fds(theirs, [msgspec.msgpack.encode(request)], [lifeline.fileno(), news.fileno()])
        theirs.close()
        orders = parent_process.ForkingParent(ours)
        orders.take_order()
        assert orders.over
