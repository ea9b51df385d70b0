"""Stages on machines with networks of their own: a link goes down, and no packet says so.

Goal: load loses nothing; a machine that is cut off ends every stream after the bound on its silence. Method:
tests/load/cluster.py in network namespaces joined by a bridge, whose links go down; the relay of the other tests closes
nothing either, but its connections are acknowledged by the machine itself. Origin: stages on several machines; A06,
B11. Mutants: none, the scripts on placed stages name theirs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

register_cpu_ci(est_time=120, suite="ray-cpu")

LOAD = Path(__file__).parents[2] / "load"
sys.path.insert(0, str(LOAD))

from machines import why_no_namespace  # noqa: E402 - found by now

TIMEOUT_S = 900


def test_a_machine_that_is_cut_off_ends_every_stream(pytestconfig):
    """A06: with stages that joined by hand, on four machines."""
    if pytestconfig.getoption("scripted_placement") != "ray":
        pytest.skip("each of its stages imports everything by itself; make ray, or --placement ray")
    if why := why_no_namespace():
        pytest.skip(f"it needs network namespaces of a user, and {why}")
    command = [sys.executable, str(LOAD / "cluster.py"), "--placement", "join", "--machines"]
    command += ["--clients", "16", "--seconds", "4", "--fault-seconds", "3", "--death-bound", "30"]
    command += ["--scenes", "calm", "cut"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", 0 complaints") == 2, done.stdout
