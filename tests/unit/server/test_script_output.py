"""A script's output and its position, reported across processes."""

# ruff: noqa: T201 - printing is what is tested.

from __future__ import annotations

import os
import signal

import pytest
from scripted_lockstep.tiers.server import runner
from scripted_lockstep.tiers.server.runner import EngineServer

from engine import EngineConfig
from engine.core.frames import decoder_of
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptFailed, ScriptOptions, ServerDied


def prints(t):
    print("before the first step")
    r = t.start_req(prompt_len=5, max_new_tokens=2)
    yield
    print("after it")
    yield from t.run_until_finished(r)
    print("at the end")


def prints_and_fails(t):
    print("shortly before")
    yield
    raise AssertionError("as it was meant to")


def breaks(t):
    yield
    breakpoint()


def is_killed(t):
    t.start_req(prompt_len=5, max_new_tokens=9)
    yield
    print("the last lines")
    yield  # the last line that was seen
    os.kill(os.getpid(), signal.SIGKILL)
    yield


class Scripts:
    """Scripts of a class, and one that needs what the object was made with."""

    def __init__(self) -> None:
        self.made = True

    def method(self, t, number):
        assert not hasattr(self, "made")
        assert number == 3
        yield

    @staticmethod
    def static(t):
        yield


def test_prints_come_back_in_order(capsys: pytest.CaptureFixture[str], parent: PreloadedParent) -> None:
    """D02: also of a script that fails, and of one under which its process is killed, with its line."""
    with EngineServer.start(EngineConfig(), parent=parent) as server:
        server.run(prints)
        assert capsys.readouterr().out == "before the first step\nafter it\nat the end\n"
        with pytest.raises(ScriptFailed):
            server.run(prints_and_fails)
        assert capsys.readouterr().out == "shortly before\n"
        with pytest.raises(ScriptFailed, match=r"needs a terminal.*pytest --tier sim -s"):
            server.run(breaks)
        assert server.run(Scripts().method, 3).steps == 1
        assert server.run(Scripts.static).steps == 1
        with pytest.raises(ServerDied, match="yield  # the last line that was seen"):
            server.run(is_killed)
        assert capsys.readouterr().out == "the last lines\n"


@pytest.mark.parametrize(
    ("name", "damaged", "says"),
    [
        ("encode", lambda message: b"\xc1", "the gate received a frame that is not a command"),
        ("decode_replies", decoder_of(int), "the gate sent a frame that is not a reply"),
    ],
    ids=["command", "reply"],
)
def test_a_frame_that_cannot_be_read_fails_at_once(
    name: str, damaged: object, says: str, parent: PreloadedParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D02: on both sides of the private socket, by its name; it was dropped, and the script timed out."""
    with EngineServer.start(EngineConfig(), parent=parent) as server:
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, damaged)
            with pytest.raises(ScriptFailed, match=f"{says}, a defect of the harness"):
                server.run(prints, options=ScriptOptions(timeout_s=5.0))
        assert not server.usable
