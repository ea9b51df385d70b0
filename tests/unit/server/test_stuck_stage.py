"""A stage whose forward never returns: a deadlock, a loop, and a C call that keeps the interpreter's lock.

The stage is broken from outside, by a module that Python imports at the start of every process; the engine has no
switch for it. Each is told within the script's own limit, with the line that every process stands at.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine import EngineConfig
from engine.launch.preload import PreloadedParent
from scripted import ScriptedServer, ScriptOptions, ScriptTimeout

PP2 = EngineConfig(pp_size=2, chunked_prefill_size=64)
LIMITS = ScriptOptions(result_timeout_s=1.0, timeout_s=30.0)

BREAKS_THE_SECOND_STAGE = """
import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path


def waits_for_itself():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loops():
    while True:
        pass


def keeps_the_interpreter():
    ctypes.PyDLL(None).sleep(3600)


def break_forward(module):
    whole = module.StageRunner.forward
    note = Path(os.environ["STUCK_FORWARD"])

    def forward(self, *args):
        if self.stage == 1 and note.exists():
            globals()[note.read_text()]()
        return whole(self, *args)

    module.StageRunner.forward = forward


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "engine.model.runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_break(module):
            load(module)
            break_forward(module)

        spec.loader.exec_module = load_and_break
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def note(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Once this file is there, the second stage does what it says instead of computing."""
    return tmp_path_factory.mktemp("stuck") / "note"


@pytest.fixture(scope="module")
def parent(note: Path) -> Iterator[PreloadedParent]:
    (note.parent / "sitecustomize.py").write_text(textwrap.dedent(BREAKS_THE_SECOND_STAGE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(note.parent))
        patch.setenv("STUCK_FORWARD", str(note))
        started = PreloadedParent.start()
    with started:
        yield started


def gets_stuck(t, note, how):
    r = t.start_req(prompt_len=100, max_new_tokens=8)
    yield from t.advance_to_decode_step(r, 2)
    Path(note).write_text(how)
    yield from t.run_until_finished(r)


@pytest.mark.parametrize("how", ["waits_for_itself", "loops", "keeps_the_interpreter"])
def test_a_forward_that_never_returns_is_told_with_every_stack(how: str, note: Path, parent: PreloadedParent) -> None:
    """D06, A06: the report tells what waits from what computes; nothing of the server is left."""
    note.unlink(missing_ok=True)
    with ScriptedServer.start(PP2, parent=parent) as server:
        assert server.serving is not None
        pids = list(server.serving.pids.values())
        with pytest.raises(ScriptTimeout) as caught:
            server.run(gets_stuck, str(note), how, options=LIMITS)
        assert not server.usable
    text = str(caught.value)
    assert "did not come back within 1.0 s: a stage hangs" in text
    assert "in gets_stuck" in text
    for process in ("stage-0", "stage-1", "scheduler", "frontend"):
        assert f"--- {process} (pid" in text
    stage = text.partition("--- stage-1 (pid")[2].partition("\n--- ")[0]
    assert f"in {how}" in stage, stage
    assert ("computes" in stage.partition("\n")[0]) == (how == "loops"), stage
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
