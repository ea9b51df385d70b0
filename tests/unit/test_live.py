"""The live tier of other engines: a loop that stops at the gate, a judge of real tokens, a server that leaves nothing.

Goal: what a live script says is true of an engine that runs, and a failure of it says why. Method: a loop of ten lines
in the place of an engine's, and a command that fails in the place of a server. Mutant: none.
"""

from __future__ import annotations

import sys
import threading
from importlib.metadata import distributions
from types import SimpleNamespace

import msgspec
import pytest

from ci.register import register_cpu_ci
from scripted import scripted
from scripted.core.errors import NoAnswer
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.violation import Violation
from scripted.sdk import Capabilities, Limits
from scripted.sdk.live.launch import SETTINGS_VARIABLE, Plugin, ServerCommand, check_simulated, server_command
from scripted.sdk.live.server import LiveServer
from scripted.sdk.live.stand_ins import LiveDevice, LiveOracle
from scripted.sdk.live.stops import HeldQueue, LoopGate, LoopStops
from scripted.sdk.live.weights import WEIGHTS
from scripted.sdk.messages import Add, Signal, Stepped

register_cpu_ci(est_time=2, suite="unit")

END = "end"


class _Loop:
    """Stands in for an engine's loop: takes the items that are there, and works on them."""

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
    loop.thread.join(30)
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
    oracle.after_step((_asked("a"),), Stepped(), None, LiveDevice())
    oracle.account.compute("a", 0, 2, 2)
    if reason == "abort":
        oracle.account.abort("a")
    oracle.account.tell("a", said, None)
    if reason:
        oracle.account.tell("a", (), reason)
    return oracle


def _asked(rid: str) -> Add:
    return Add(rid=rid, prompt_ids=(1, 2), max_new_tokens=3)


def _machine(**changed: object) -> SimpleNamespace:
    blocks = {"blocks_free": 8}
    return SimpleNamespace(**{"is_idle": True, "counts": lambda: blocks, "say_alone": lambda *_: (7, 8, 9)} | changed)


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


def test_a_request_alone_gets_other_weights_where_it_got_them():
    """Requests after the update have the new weights from their beginning; recomputed ones are compared up to it."""
    oracle, asked = _judged((7,), ""), []
    oracle.after_step((Signal(name=WEIGHTS, value=1), _asked("b")), Stepped(), None, LiveDevice())
    for rid, at, said in (("a", 2, (8, 9)), ("b", 0, (7, 8, 9))):
        oracle.account.compute(rid, at, 2, at + 2)
        oracle.account.tell(rid, said, "length")
    oracle.at_end(_machine(say_alone=lambda message, history: asked.append((message.rid, history)) or (7, 8, 9)))
    assert asked == [("a", ((0, 0), (2, 1))), ("b", ((0, 1),))]


def test_a_request_that_lost_its_blocks_between_weights_is_compared_up_to_there():
    oracle = _judged((7,), "")
    oracle.after_step((Signal(name=WEIGHTS, value=1),), Stepped(preempted=("a",)), None, LiveDevice())
    oracle.account.compute("a", 0, 3, 3)
    oracle.account.tell("a", (1, 2), "length")
    oracle.at_end(_machine())
    oracle.account.lives[0].said[0] = 6
    with pytest.raises(Violation, match="but alone it says"):
        oracle.at_end(_machine())


def test_a_loop_waits_for_results_that_are_not_let_through():
    stops = LoopStops(lambda item: item == END)
    stops.gate.is_open = False
    loop = threading.Thread(target=lambda: [stops.await_release(number) for number in (1, 2)], daemon=True)
    loop.start()
    stops.gate.wait(lambda: stops.gate.where == "result", "the loop")
    assert stops.waits_for_result
    stops.released = 1
    assert not stops.waits_for_result
    stops.gate.go_on()
    assert stops.waits_for_result
    stops.gate.open()
    loop.join(30)
    assert not loop.is_alive()


class _Settings(msgspec.Struct, frozen=True):
    blocks: int = 4


def test_an_engine_finds_the_hook_as_a_plugin(tmp_path):
    plugin = Plugin("some.plugins", "some.hook:install")
    command = server_command(_Settings(), tmp_path, 80, plugin, ["some.server"], {})
    paths = command.environment["PYTHONPATH"].split(":")
    [found] = [one for at in distributions(path=paths[:1]) for one in at.entry_points]
    assert (found.group, found.value) == plugin
    assert command.environment[SETTINGS_VARIABLE] == '{"blocks":4}'


def test_a_setting_that_only_the_simulated_device_knows_is_refused_by_name():
    with pytest.raises(ScriptDefinitionError, match="it has one stage, and this script sets blocks; run it with"):
        check_simulated(_Settings(blocks=5), ["blocks"], "it has one stage")


def test_a_server_that_does_not_come_up_says_why():
    command = [sys.executable, "-c", "raise SystemExit('there is no such model')"]
    with pytest.raises(HarnessError, match="ended with status 1: there is no such model"):
        LiveServer(lambda config, folder, port: ServerCommand(command, {}), None)


def _nothing(t):
    yield


def test_an_adapter_without_a_live_server_refuses_the_tier():
    with pytest.raises(ScriptDefinitionError, match="has no live server, so its scripts run in the sim tier"):
        scripted(adapter="tests/registered/sdk/example_adapter.py", tiers=("sim", "server"))(_nothing)
