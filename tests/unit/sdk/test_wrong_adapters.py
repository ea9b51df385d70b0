"""Adapters that are wrong: each is refused with what is wrong, and nothing of it counts as a finding."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from thinned import thinned

from scripted.cli import main
from scripted.search import execution
from scripted.search.campaign import Campaign
from scripted.search.shrinking import shrink
from scripted.search.targets import target_named
from scripted.search.units import SearchPlan

BASE = """
import itertools
import msgspec
from scripted.sdk import Add, Batch, Capabilities, Copier, Limits, SchedulerAdapter, Refused, Share, Stepped

class Config(msgspec.Struct, frozen=True):
    blocks: int = 8

class Machine:
    depth = 1
    is_idle = True
    def __init__(self, config): ...
    def step(self, events, now): return Stepped()
    def counts(self): return {}

LIMITS = dict(block_size=4, blocks=8, batch_tokens=8, batch_requests=2, context_tokens=32)

def adapter(machine=Machine, config=Config, limits=LIMITS, **more):
    return SchedulerAdapter("wrong", config=config, machine=machine, limits=lambda _: Limits(**limits),
                           can=lambda _: Capabilities(flush=False), **more)
"""
WRONG = {
    "a step that returns nothing": (
        "class Wrong(Machine):\n    def step(self, events, now): return None\nADAPTER = adapter(Wrong)",
        "returns a Stepped, got None",
    ),
    "a machine without its parts": (
        "class Wrong:\n    def __init__(self, config): ...\nADAPTER = adapter(Wrong)",
        "has no step, counts, is_idle, depth",
    ),
    "a configuration that can change": (
        "class Wrong(msgspec.Struct):\n    blocks: int = 8\nADAPTER = adapter(config=Wrong)",
        "is a frozen msgspec.Struct whose fields all have defaults",
    ),
    "a setting without a default": (
        "class Wrong(msgspec.Struct, frozen=True):\n    blocks: int\nADAPTER = adapter(config=Wrong)",
        "is a frozen msgspec.Struct whose fields all have defaults",
    ),
    "a limit of nothing": (
        "ADAPTER = adapter(limits=LIMITS | {'block_size': 0})",
        "the limit block_size is at least 1, a whole number, got 0",
    ),
    "a workload that cannot be read": (
        "ADAPTER = adapter(workloads={'mine': 'default; 1 strt a'})",
        "the workload 'mine' of",
    ),
    "a machine that is not deterministic": (
        (
            "N = itertools.count()\nclass Wrong(Machine):\n    def step(self, events, now):\n"
            "        refused = [Refused(rid=e.rid, reason='no') for e in events if isinstance(e, Add)]\n"
            "        return Stepped(again=next(N) % 3 != 0, replies=tuple(refused))\nADAPTER = adapter(Wrong)"
        ),
        "its machine is not deterministic",
    ),
    "a machine that cannot be made": (
        "class Wrong(Machine):\n    def __init__(self, config): raise SystemExit('no GPU')\nADAPTER = adapter(Wrong)",
        "cannot be made of Config(blocks=8): SystemExit: no GPU",
    ),
    "a property that is a method": (
        "class Wrong(Machine):\n    def is_idle(self): return True\nADAPTER = adapter(Wrong)",
        "has is_idle as a method, which would always be true",
    ),
    "counts that raise": (
        "class Wrong(Machine):\n    def counts(self): return {}['none']\nADAPTER = adapter(Wrong)",
        "has counts that cannot be asked: KeyError: 'none'",
    ),
    "a property that raises": (
        (
            "class Wrong(Machine):\n    @property\n    def is_idle(self): return self.no_such_thing\n"
            "ADAPTER = adapter(Wrong)"
        ),
        "has is_idle that cannot be asked: AttributeError: 'Wrong' object has no attribute 'no_such_thing'",
    ),
    "a step without the time": (
        "class Wrong(Machine):\n    def step(self, events): return Stepped()\nADAPTER = adapter(Wrong)",
        "it takes the events and the time: step(events, now)",
    ),
    "replies that can be read once": (
        (
            "class Wrong(Machine):\n    def step(self, events, now): return Stepped(replies=(r for r in ()))\n"
            "ADAPTER = adapter(Wrong)"
        ),
        "returns replies as a tuple, got <generator object",
    ),
    "a share of nothing": (
        (
            "class Wrong(Machine):\n    def step(self, events, now):\n"
            "        return Stepped(microbatch=Batch(id=1, shares=(Share(rid=5, start=0, count=1, block_ids=()),)))\n"
            "ADAPTER = adapter(Wrong)"
        ),
        "returns a Share with the rid of a request, a text, got 5",
    ),
    "a machine that cannot be copied": (
        (
            "import threading\nfrom scripted.sdk import Copier\n"
            "class Wrong(Machine):\n    def __init__(self, config): self.lock = threading.Lock()\n"
            "ADAPTER = adapter(Wrong, copier=Copier())"
        ),
        "the machine holds a _thread.lock, which cannot be copied",
    ),
    "threads that nobody ends": (
        (
            "from scripted.sdk.cooperative import Threads\n"
            "class Wrong(Machine):\n    def __init__(self, config): self.threads = Threads()\n"
            "ADAPTER = adapter(Wrong)"
        ),
        "has threads or an event loop, and no close() that ends them",
    ),
    "a limit that is no number": (
        "ADAPTER = adapter(limits=LIMITS | {'depth': '2'})",
        "the limit depth is at least 1, a whole number, got '2'",
    ),
    "a configuration that is no struct": (
        "class Wrong:\n    blocks: int = 8\nADAPTER = adapter(config=Wrong)",
        "is a frozen msgspec.Struct whose fields all have defaults, got <class",
    ),
    "capabilities that are no function": (
        (
            "ADAPTER = SchedulerAdapter('wrong', config=Config, machine=Machine, limits=lambda _: Limits(**LIMITS),\n"
            "                           can=Capabilities())"
        ),
        "can= of wrong is a function that returns the Capabilities of a configuration",
    ),
    "limits of nothing": (
        (
            "ADAPTER = SchedulerAdapter('wrong', config=Config, machine=Machine, limits=lambda _: None,\n"
            "                           can=lambda _: Capabilities())"
        ),
        "limits= of wrong is a function that returns the Limits of a configuration",
    ),
    "counts that are no numbers": (
        "class Wrong(Machine):\n    def counts(self): return {'waiting': float('nan')}\nADAPTER = adapter(Wrong)",
        "has counts() that return {'waiting': nan}; they are a dict of whole numbers by name",
    ),
    "again that is a word": (
        "class Wrong(Machine):\n    def step(self, events, now): return Stepped(again='no')\nADAPTER = adapter(Wrong)",
        "returns True or False as again, got 'no'",
    ),
    "a block table that can be read once": (
        (
            "class Wrong(Machine):\n    def step(self, events, now):\n        share = Share(rid='a', start=0, count=1, "
            "block_ids=(b for b in (0,)))\n        return Stepped(microbatch=Batch(id=1, shares=(share,)))\n"
            "ADAPTER = adapter(Wrong)"
        ),
        "returns a Share with its block table as a tuple, got <generator object",
    ),
    "an import that fails": ("import no_such_module\nADAPTER = adapter()", "cannot be loaded: ModuleNotFoundError"),
    "no adapter": ("", "has no ADAPTER"),
}


ENDLESS = {
    "a step that never ends": (
        "while True: pass",
        "does not return from Wrong.step: it was there after 0.4 s, in a step (wrong_adapter.py:25, in step)",
    ),
    "a step that catches what ends it": (
        "while True:\n            try: len(())\n            except Exception: pass",
        "in a step (wrong_adapter.py:2",
    ),
    "a step that ends the process": ("raise SystemExit(3)", "Violation: a step ends the process, by SystemExit('3')"),
    "a step that raises what has no text": ("raise Odd", "Odd: (its text raises ZeroDivisionError)"),
    "a step that raises": ("raise KeyError(3)", "wrong_adapter.py:25, in step)"),
}


@pytest.mark.parametrize("name", thinned(ENDLESS, one_in=2))
def test_a_step_that_does_not_end_well_is_a_finding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: and the search goes on, or stops; it never waits forever, and never dies of it."""
    statement, words = ENDLESS[name]
    path = tmp_path / "wrong_adapter.py"
    path.write_text(
        BASE + "class Odd(Exception):\n    def __str__(self): return 1 / 0\n"
        f"class Wrong(Machine):\n    def step(self, events, now):\n        {statement}\nADAPTER = adapter(Wrong)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execution, "RUN_TIMEOUT_S", 0.4)
    report = Campaign(SearchPlan(targets=("alone", "twins"), schedules=20, adapter=str(path))).run()
    (finding,) = report.findings.values()
    assert words in str(finding.failure)
    assert (report.schedules == 1) is finding.failure.hangs
    shrunk = shrink(target_named(finding.target, str(path)).base, budget_s=0.5)
    assert shrunk.fails
    assert not shrunk.schedule.placed


LOOPS = {
    "counts": (
        "judging a step",
        "    @property\n    def is_idle(self):\n        while self.steps: pass\n        return True",
    ),
    "a look that asks again and again": (
        "judging a step",
        "    def counts(self):\n        if not self.steps: return {}\n        return Endless()",
    ),
    "a copy": ("composing a step", "    def __init__(self, config): self.steps, self.copied = 0, Odd()"),
    "a new machine": ("making or copying a run", "    def __init__(self, config):\n        while True: pass"),
}


@pytest.mark.parametrize("name", thinned(LOOPS, one_in=2))
def test_a_scheduler_that_loops_outside_of_its_step_is_a_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A06: for any caller; the error names the file and the line."""
    doing, method = LOOPS[name]
    path = tmp_path / "wrong_adapter.py"
    path.write_text(
        BASE + "class Odd:\n    def __copy__(self):\n        while True: pass\n"
        "class Endless:\n    def keys(self):\n        while True: yield 0\n    def __getitem__(self, key): return 0\n"
        "class Wrong(Machine):\n    def __init__(self, config): self.steps = 0\n"
        "    def step(self, events, now):\n        self.steps += 1\n"
        "        return Stepped(replies=tuple(Refused(rid=e.rid, reason='no') for e in events if isinstance(e, Add)))\n"
        f"{method}\n"
        "ADAPTER = adapter(Wrong, copier=Copier(copied={Odd: Odd.__copy__}), packages=('wrong_adapter',))"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execution, "RUN_TIMEOUT_S", 0.4)
    report = Campaign(SearchPlan(targets=("alone", "twins"), schedules=20, adapter=str(path))).run()
    (finding,) = report.findings.values()
    assert finding.failure.text.startswith("does not return from ")
    assert finding.failure.text.endswith(f"it was there after 0.4 s, {doing}")
    assert re.fullmatch(r"wrong_adapter\.py:\d+, in \w+", finding.failure.place)


@pytest.fixture
def explore(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command in this process: its exit status, and what it said on stdout and on stderr."""

    def run(path: Path) -> tuple[int, str, str]:
        words = ["explore", "--adapter", str(path), "--corpus", "--no-keep", "--schedules", "20"]
        monkeypatch.setattr(sys, "argv", ["scripted", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", thinned(WRONG, one_in=3))
def test_a_wrong_adapter_is_refused_in_one_line(name: str, tmp_path: Path, explore) -> None:
    source, words = WRONG[name]
    path = tmp_path / "wrong_adapter.py"
    path.write_text(BASE + source)
    status, said, refused = explore(path)
    assert status == 2, said + refused
    assert words in refused
    assert len(refused.splitlines()) == 1


def test_a_batch_in_more_blocks_than_there_are_is_a_finding(tmp_path: Path, explore) -> None:
    path = tmp_path / "wrong_adapter.py"
    path.write_text(
        BASE
        + "class Wrong(Machine):\n    def step(self, events, now):\n"
        + "        shares = [Share(rid=e.rid, start=0, count=1, block_ids=tuple(range(90, 99))) for e in events\n"
        + "                  if isinstance(e, Add)][:1]\n"
        + "        return Stepped(microbatch=Batch(id=1, shares=tuple(shares)) if shares else None)\n"
        + "ADAPTER = adapter(Wrong)"
    )
    status, said, _ = explore(path)
    assert status == 1
    assert "batch 1 is computed in 9 blocks, of 8" in said
