"""A stage whose forward never returns: a deadlock, a loop, and a C call that keeps the interpreter's lock.

The stage is broken from outside. Each is told within the script's own limit, with the line that every process stands
at.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptOptions, ScriptTimeout

PP2 = EngineConfig(pp_size=2, chunked_prefill_size=64)
LIMITS = ScriptOptions(result_timeout_s=1.0, timeout_s=30.0)

# Run by every process of the server. Once there is a file of this name in its folder, the second stage does what that
# says instead of computing.
NOTE = "note"
BREAKS_THE_SECOND_STAGE = f"""
import ctypes
import threading
from pathlib import Path

from engine.model.runner import StageRunner

NOTE = Path("{NOTE}").absolute()
whole = StageRunner.forward


def waits_for_itself():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loops():
    while True:
        pass


def keeps_the_interpreter():
    ctypes.PyDLL(None).sleep(3600)


def forward(self, *args):
    if self.stage == 1 and NOTE.exists():
        globals()[NOTE.read_text()]()
    return whole(self, *args)


StageRunner.forward = forward
"""


def gets_stuck(t, note, how):
    r = t.start_req(prompt_len=100, max_new_tokens=8)
    yield from t.advance_to_decode_step(r, 2)
    # The stage looks for it all the time: it appears whole.
    Path(f"{note}.part").write_text(how)
    Path(f"{note}.part").rename(note)
    yield from t.run_until_finished(r)


@pytest.mark.parametrize("how", thinned(["waits_for_itself", "loops", "keeps_the_interpreter"], one_in=3))
def test_a_forward_that_never_returns_is_told_with_every_stack(
    how: str, parent: PreloadedParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D06, A06: the report tells what waits from what computes; nothing of the server is left."""
    (tmp_path / "spoil.py").write_text(BREAKS_THE_SECOND_STAGE)
    monkeypatch.chdir(tmp_path)
    with EngineServer.start(PP2, parent=parent) as server:
        assert server.serving is not None
        pids = list(server.serving.pids.values())
        with pytest.raises(ScriptTimeout) as caught:
            server.run(gets_stuck, str(tmp_path / NOTE), how, options=LIMITS)
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
