"""The live tier of other engines: a loop that stops at the gate, a judge of real tokens, a server that leaves nothing.

Goal: what a live script says is true of an engine that runs, and a failure of it says why. Method: a loop of ten lines
in the place of an engine's, and a command that fails in the place of a server. Mutant: none.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from ci.register import register_cpu_ci
from scripted import scripted
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.violation import Violation
from scripted.errors import NoAnswer
from scripted.sdk import Capabilities, Limits
from scripted.sdk.live.gate import HeldQueue, LoopGate
from scripted.sdk.live.launch import ServerCommand
from scripted.sdk.live.parts import LiveOracle
from scripted.sdk.live.server import LiveServer
from scripted.sdk.messages import Add

register_cpu_ci(est_time=2, suite="unit")

END = "end"


class _Loop:
    """What an engine's loop does: takes what there is, and works on it."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.gate = LoopGate(timeout_s)
        self.gate.is_open = False
        self.inbox = HeldQueue(self.gate, lambda item: item == END)
        self.taken: list[str] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.inbox.get()) != END:
            if item == "hang":
                threading.Event().wait()
            self.taken.append(item)

    def wait(self) -> None:
        self.gate.wait(lambda: bool(self.gate.where), "the loop")


def test_what_arrives_is_held_until_it_is_let_in():
    loop = _Loop()
    loop.wait()
    loop.inbox.put_nowait("a")
    loop.gate.go_on()
    assert (loop.taken, loop.inbox.held, loop.gate.where) == ([], ["a"], "messages")
    loop.inbox.let_in()
    assert loop.taken == []  # until the script's next step
    loop.gate.go_on()
    assert (loop.taken, loop.inbox.held) == (["a"], [])
    loop.inbox.put_nowait(END)
    loop.thread.join(5)
    assert not loop.thread.is_alive()


def test_a_loop_that_does_not_come_back_is_told():
    loop = _Loop(timeout_s=0.1)
    loop.wait()
    loop.inbox.put_nowait("hang")
    loop.inbox.let_in()
    with pytest.raises(NoAnswer, match="in vain for the engine's loop to come back to the gate"):
        loop.gate.go_on()


def _judged(said: tuple[int, ...], reason: str) -> LiveOracle:
    limits = Limits(block_size=4, blocks=8, batch_tokens=8, batch_requests=2, context_tokens=16, depth=1)
    oracle = LiveOracle(limits, Capabilities(flush=True))
    message = Add(rid="a", prompt_ids=(1, 2), max_new_tokens=3)
    oracle.account.begin(message)
    oracle.account.compute("a", 0, 2, 2)
    if reason == "abort":
        oracle.account.abort("a")
    oracle.account.tell("a", said, None)
    oracle.account.tell("a", (), reason)
    return oracle


def _machine(**changed: object) -> SimpleNamespace:
    blocks = {"blocks_free": 8}
    return SimpleNamespace(is_idle=True, counts=lambda: blocks, say_alone=lambda _: (7, 8, 9), **changed)


@pytest.mark.parametrize(("said", "reason"), [((7, 8, 9), "length"), ((7,), "abort")])
def test_tokens_are_those_of_the_request_alone(said, reason):
    _judged(said, reason).at_end(_machine())


@pytest.mark.parametrize(("said", "reason"), [((7, 8, 1), "length"), ((7, 8), "length"), ((8,), "abort")])
def test_other_tokens_than_alone_are_a_violation(said, reason):
    with pytest.raises(Violation, match=r"a says .*, but alone it says \[7, 8, 9\]"):
        _judged(said, reason).at_end(_machine())


def test_a_block_that_is_not_given_back_is_a_violation():
    machine = _machine()
    machine.counts = lambda: {"blocks_free": 7}
    with pytest.raises(Violation, match="only 7 of 8 blocks are free"):
        _judged((7, 8, 9), "length").at_end(machine)


def test_a_server_that_does_not_come_up_says_why():
    command = [sys.executable, "-c", "raise SystemExit('there is no such model')"]
    with pytest.raises(HarnessError, match="ended with status 1: there is no such model"):
        LiveServer(lambda config, folder, port: ServerCommand(command, {}), None)


def _nothing(t):
    yield


def test_an_adapter_without_a_live_server_refuses_the_tier():
    with pytest.raises(ScriptDefinitionError, match="has no live server, so its scripts run in the sim tier"):
        scripted(adapter="tests/registered/sdk/example_adapter.py", tiers=("sim", "server"))(_nothing)
