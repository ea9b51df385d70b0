"""Reports about stages on other machines: their stacks, and a cluster that accepts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_lockstep.tiers.server import ray_cluster
from scripted_lockstep.tiers.server.stacks import dump_stacks

from engine.process.signals import STACK_SIGNAL

# A process that hangs, as a stage does; the second passes on what its child says, as the actor of an agent does.
HANGS = f"""
import faulthandler, threading
faulthandler.register({STACK_SIGNAL.value})
def stuck(): print(__import__("os").getpid(), flush=True); threading.Event().wait()
stuck()
"""
PASSES_ON = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HANGS!r}], stderr=subprocess.PIPE)
for line in child.stderr:
    sys.stderr.buffer.write(line)
    sys.stderr.flush()
"""


@pytest.mark.parametrize("program", [HANGS, PASSES_ON], ids=["file", "pipe of a parent"])
def test_the_stack_of_a_process_is_found_where_it_writes(program: str, tmp_path: Path) -> None:
    """A placed stage does not write into the server's log: its stack was missing in the report of a hang."""
    server_log = tmp_path / "server.log"
    server_log.touch()
    with (tmp_path / "agents.log").open("wb") as theirs:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=theirs)
    try:
        pid = int(process.stdout.readline())
        (stack,) = dump_stacks({"stage-1": pid}, server_log)
        assert "in stuck" in stack.text
        assert stack.process == f"stage-1 (pid {pid})"
    finally:
        os.kill(pid, 9)
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_cluster_of_the_harness_asks_for_the_token_that_drivers_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `~/.ray/auth_token` the driver spoke to nodes that asked for none, and no actor ever started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("t")
    with ray_cluster._environment(str(tmp_path)):
        assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in os.environ


LATE = """
import ray
import sys
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from scripted_lockstep.tiers.server import ray_cluster

assert not is_token_auth_enabled()
with ray_cluster._environment(sys.argv[1]):
    ray_cluster._new_cluster()
assert is_token_auth_enabled()
"""


def test_a_cluster_asks_for_the_token_also_where_ray_was_imported_before(tmp_path: Path) -> None:
    """A test file that asks whether Ray is there imports it without the mode, and no node came up after that."""
    pytest.importorskip("ray", reason="Ray is an optional extra")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("t" * 64)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE, tmp_path], env=plain | {"HOME": str(tmp_path)}, capture_output=True
    )
    assert said.returncode == 0, said.stderr.decode()
