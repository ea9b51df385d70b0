"""Adapters that are wrong: each is refused with what is wrong, and nothing of it counts as a finding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BASE = """
import itertools
import msgspec
from scripted.portable import Add, Batch, Capabilities, Limits, PortableSubject, Refused, Share, Stepped

class Config(msgspec.Struct, frozen=True):
    blocks: int = 8

class Machine:
    depth = 1
    is_idle = True
    def __init__(self, config): ...
    def step(self, events, now): return Stepped()
    def counts(self): return {}

LIMITS = dict(block_size=4, blocks=8, batch_tokens=8, batch_requests=2, context_tokens=32)

def subject(machine=Machine, config=Config, limits=LIMITS, **more):
    return PortableSubject("wrong", config=config, machine=machine, limits=lambda _: Limits(**limits),
                           can=lambda _: Capabilities(flush=False), **more)
"""
WRONG = {
    "a step that returns nothing": (
        "class Wrong(Machine):\n    def step(self, events, now): return None\nSUBJECT = subject(Wrong)",
        "returns a Stepped, got None",
    ),
    "a machine without its parts": (
        "class Wrong:\n    def __init__(self, config): ...\nSUBJECT = subject(Wrong)",
        "has no step, counts, is_idle, depth",
    ),
    "a configuration that can change": (
        "class Wrong(msgspec.Struct):\n    blocks: int = 8\nSUBJECT = subject(config=Wrong)",
        "is a frozen msgspec.Struct whose fields all have defaults",
    ),
    "a setting without a default": (
        "class Wrong(msgspec.Struct, frozen=True):\n    blocks: int\nSUBJECT = subject(config=Wrong)",
        "is a frozen msgspec.Struct whose fields all have defaults",
    ),
    "a limit of nothing": (
        "SUBJECT = subject(limits=LIMITS | {'block_size': 0})",
        "the limit block_size is at least 1, got 0",
    ),
    "a workload that cannot be read": (
        "SUBJECT = subject(workloads={'mine': 'default; 1 strt a'})",
        "the workload 'mine' of",
    ),
    "a machine that is not deterministic": (
        (
            "N = itertools.count()\nclass Wrong(Machine):\n    def step(self, events, now):\n"
            "        refused = [Refused(rid=e.rid, reason='no') for e in events if isinstance(e, Add)]\n"
            "        return Stepped(again=next(N) % 3 != 0, replies=tuple(refused))\nSUBJECT = subject(Wrong)"
        ),
        "its machine is not deterministic",
    ),
    "an import that fails": ("import no_such_module\nSUBJECT = subject()", "cannot be loaded: ModuleNotFoundError"),
    "no subject": ("", "has no SUBJECT"),
}


def explore(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripted", "explore", "--subject", str(path), "--schedules", "20"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    source, words = WRONG[name]
    path = tmp_path / "wrong_adapter.py"
    path.write_text(BASE + source)
    done = explore(path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_batch_in_more_blocks_than_there_are_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "wrong_adapter.py"
    path.write_text(
        BASE
        + "class Wrong(Machine):\n    def step(self, events, now):\n"
        + "        shares = [Share(rid=e.rid, start=0, count=1, block_ids=tuple(range(90, 99))) for e in events\n"
        + "                  if isinstance(e, Add)][:1]\n"
        + "        return Stepped(microbatch=Batch(id=1, shares=tuple(shares)) if shares else None)\n"
        + "SUBJECT = subject(Wrong)"
    )
    done = explore(path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "batch 1 is computed in 9 blocks, of 8" in done.stdout
