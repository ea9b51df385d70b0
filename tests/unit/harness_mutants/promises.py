"""Quick checks of the harness's own promises, each a function that raises where one is broken.

The mutants of ``mutants.toml`` break one place of the harness each, and name the check that must notice it.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from scripted_lockstep.configs import limits_of
from scripted_lockstep.oracle.tokens_alone import check_tokens, said_alone
from scripted_lockstep.simulated.model import alphabet_of

from engine import EngineConfig
from engine.core.messages import Generate, SamplingParams
from scripted import BadCall, ScriptFailed, ScriptOptions
from scripted.core.account import Account
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.forks import Copier, Frozen
from scripted.core.oracle import Oracle, Paused
from scripted.core.schedule import Schedule
from scripted.core.states import StateReader
from scripted.core.violation import Violation
from scripted.report.difference import first_difference
from scripted.report.step_log import ShownStep, StepLog
from scripted.script.child import ChildDied, run_in_child
from scripted.script.decorator import ScriptedTest, scripted
from scripted.script.isolation import run_isolated
from scripted.script.measure import Measured
from scripted.script.on_adapters import script_runner
from scripted.script.vetting import Vetting
from scripted.search import shrinking
from scripted.search.execution import Failure

__all__: list[str] = []

Pair = collections.namedtuple("Pair", "left right")


def refuses(call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Require that this raises Violation."""
    with pytest.raises(Violation):
        call(*arguments, **named)


# -- forks and states --


class Log(list):
    def __init__(self) -> None:
        super().__init__([[1]])
        self.extra = [1]


class Machine:
    """One of each thing that a copy has to treat in its own way."""

    def __init__(self, *, uniform: bool) -> None:
        self.pages = [[1, 2], [3]]
        self.numbers = [1, 2]
        self.mixed: list[Any] = [[1], [2]] if uniform else [1, [2]]
        self.ids = {3, 1}
        self.queue = collections.deque([1])
        self.table = {"a": [1]}
        self.raw = bytearray(b"ab")
        self.pair = Pair([1], 2)
        self.of_tuples = {(1, Key(5)): 7}
        self.log = Log()
        self.me = self
        self.same = self.mixed
        self.count = self._counter([0])
        self.push = self.numbers.append
        self.bound = self.total
        self.part = functools.partial(len, self.numbers)

    def _counter(self, seen: list[int]) -> Callable[[], int]:
        def count() -> int:
            seen.append(0)
            return len(seen)

        return count

    def total(self) -> int:
        return sum(self.numbers)

    def change(self) -> None:
        self.pages[0].append(9)
        self.push(9)
        self.mixed[1].append(9)
        self.ids.add(9)
        self.queue.append(9)
        self.table["a"].append(9)
        self.table["b"] = [1]
        self.raw += b"c"
        self.pair.left.append(9)
        next(iter(self.of_tuples))[1].items.append(9)
        self.of_tuples[9] = 9
        self.log[0].append(9)
        self.log.extra.append(9)
        self.count()

    def shown(self) -> str:
        """The whole state as text; a counter shows how often it was asked before."""
        keys = [repr(getattr(key[1], "items", key)) if type(key) is tuple else key for key in self.of_tuples]
        parts = [self.pages, self.numbers, self.mixed, sorted(self.ids), list(self.queue), self.table, bytes(self.raw)]
        return repr([*parts, self.pair, keys, list(self.log), self.log.extra, self.bound(), self.part()])


class Key:
    def __init__(self, number: int) -> None:
        self.items = [number]


def forks_share_nothing() -> None:
    for uniform in (False, True):
        machine = Machine(uniform=uniform)
        before = machine.shown()
        frozen = Frozen(machine, Copier(uniform=uniform))
        machine.change()
        first, second = frozen.thaw(), frozen.thaw()
        assert first.shown() == second.shown() == before
        first.change()
        assert second.shown() == before
        assert frozen.thaw().shown() == before
        assert (second.count(), second.count()) == (2, 3)
        assert second.me is second
        assert second.same is second.mixed
        assert second.bound.__self__ is second
        second.push(5)
        assert second.numbers[-1] == 5
        assert second.part() == len(second.numbers)
        assert first.numbers[-1] != 5


def states_differ_where_machines_do() -> None:
    reader = StateReader()

    class Holder:
        def __init__(self, **parts: Any) -> None:
            vars(self).update(parts)

        def method(self) -> None:
            """One that remembers its object."""

    def closing(value: Any) -> Callable[[], Any]:
        return lambda: value

    pairs = [
        (Holder(a=1), Holder(a=2)),
        (Holder(a=[1, [2]]), Holder(a=[1, [3]])),
        (Holder(a=[Holder(b=1)]), Holder(a=[Holder(b=2)])),
        (Holder(a={1, 2}), Holder(a={1, 3})),
        (Holder(a={Key: [1]}), Holder(a={Key: [2]})),
        (Holder(a=closing(1)), Holder(a=closing(2))),
        (Holder(a=functools.partial(len, [1])), Holder(a=functools.partial(len, [2]))),
        (Holder(a=Holder(b=1).method), Holder(a=Holder(b=2).method)),
        (Holder(a=collections.deque([1])), Holder(a=collections.deque([2]))),
        (Holder(a=Log()), Holder(a=Log())),
        (Holder(a=bytearray(b"a")), Holder(a=bytearray(b"b"))),
    ]
    pairs[9][1].a.append(3)
    for one, other in pairs:
        assert reader.digest(one) != reader.digest(other), vars(one)
        assert reader.digest(one) == reader.digest(one)
    shared = [1]
    assert reader.digest(Holder(a={5, 1})) == reader.digest(Holder(a={1, 5}))
    one = Holder(b=1)
    assert reader.digest(Holder(a=one, c=one)) != reader.digest(Holder(a=one, c=Holder(b=1)))
    assert reader.digest(shared) == reader.digest([1])
    assert StateReader({Holder: ["b"]}).digest(Holder(b=1)) == StateReader({Holder: ["b"]}).digest(Holder(b=2))


# -- replay --


def differences_are_found() -> None:
    def log(*steps: ShownStep) -> StepLog:
        return StepLog(1, 1, steps)

    first = ShownStep(step=1, digest="a", now=1.0, waiting=("r",))
    assert first_difference(log(first), log(first)) is None
    assert first_difference(log(first), log(ShownStep(step=1, digest="b", now=1.0, waiting=("r",)))) is None
    exactly = first_difference(log(first), log(ShownStep(step=1, digest="b", now=1.0, waiting=("r",))), exactly=True)
    assert exactly is not None
    assert exactly.field == "digest"
    other = first_difference(log(first), log(ShownStep(step=1, digest="a", now=1.0)))
    assert other is not None
    assert (other.index, other.field, other.left, other.right) == (0, "waiting", "r", "nothing")
    longer = first_difference(log(first, first), log(first))
    assert longer is not None
    assert (longer.index, longer.field, longer.left, longer.right) == (1, "length", "goes on", "ends")


# -- the account and the oracle --


class Asked(SimpleNamespace):
    """A request of which it is known what it says alone."""

    rid = "a"
    prompt_ids = (1, 2)
    max_new_tokens = 3
    stop_token_ids = (9,)
    says = (5, 6, 7)

    def alone(self, most: int) -> tuple[int, ...]:
        return self.says[:most]


def begun(**fields: Any) -> Account:
    account = Account(context_tokens=100)
    account.begin(Asked(**fields))
    account.compute("a", 0, 2, 2)
    return account


def clients_are_told_what_was_promised() -> None:
    begun().tell("a", (5, 6, 7), "length")
    begun(says=(5, 9)).tell("a", (5, 9), "stop")
    refuses(begun().tell, "a", (4,), None)
    refuses(begun().tell, "a", (5, 6), "length")
    refuses(begun(says=(5, 9)).tell, "a", (5, 9), "length")
    refuses(begun().tell, "a", (5,), "abort")
    refuses(begun().tell, "a", (5,), "error")
    refuses(begun().tell, "a", (5,), "bored")
    refuses(begun().tell, "b", (5,), None)
    waiting = Account(context_tokens=100)
    waiting.begin(Asked())
    refuses(waiting.tell, "a", (5,), None)
    failed = begun()
    failed.fail(["a"])
    failed.tell("a", (5,), "error")
    aborted = begun()
    aborted.abort_all()
    aborted.tell("a", (5,), "abort")
    refuses(aborted.tell, "a", (6,), None)
    refuses(begun().refuse, "a", "full")


def positions_come_once_and_in_order() -> None:
    account = begun()
    refuses(account.compute, "a", 1, 1, 2)
    refuses(account.compute, "a", 3, 1, 4)
    account.compute("a", 2, 1, 3)
    account.lose_blocks(["a"])
    account.compute("a", 0, 3, 3)
    account.goes_on("a", 2)
    account.compute("a", 2, 1, 3)
    refuses(begun().compute, "a", 2, 0, 2)
    refuses(begun().compute, "b", 0, 1, 1)
    account.abort("a")
    refuses(account.compute, "a", 3, 1, 4)
    account.end("a", "abort")
    refuses(account.compute, "a", 3, 1, 4)
    failed = begun()
    failed.fail(["a"])
    failed.compute("a", 0, 2, 2)


def calls_and_names_are_looked_at() -> None:
    account = begun()
    account.ask("flush", "FlushCache")
    refuses(account.check_end)
    account.tell("a", (5, 6, 7), "length")
    assert not account.is_settled
    refuses(account.check_end)
    account.answer("flush", "done")
    account.check_end()
    assert account.is_settled
    refuses(account.answer, "flush", "again")
    refuses(account.answer, "other", "never asked")
    twice = begun()
    twice.begin(Asked())
    refuses(twice.check_names)
    follows = begun()
    follows.begin(Asked(), follows=True)
    follows.check_names()


def launches_keep_their_limits() -> None:
    def oracle() -> Oracle[Any, Any, Any, Any]:
        return Oracle(depth=2, batch_requests=2, batch_tokens=8)

    one = oracle()
    one.launch(1, ["a"], 4)
    assert one.has_room
    refuses(one.launch, 1, ["a"], 4)
    one = oracle()
    one.launch(1, ["a"], 8)
    assert not one.has_room
    one.launch(2, ["a"], 4)
    refuses(one.launch, 3, ["a"], 4)
    one = oracle()
    one.launch(1, [], 0)
    one.land(1)
    one.launch(1, ["a", "b"], 8)
    refuses(oracle().launch, 1, ["a", "a"], 4)
    refuses(oracle().launch, 1, ["a", "b", "c"], 4)
    refuses(oracle().launch, 1, ["a"], 9)


def pauses_and_failures_are_followed() -> None:
    one: Oracle[Any, Any, Any, Any] = Oracle(depth=2, batch_requests=2, batch_tokens=8)
    one.account.begin(Asked())
    one.pause(Paused("all"))
    refuses(one.launch, 1, ["a"], 4)
    one.land(1)
    one.pause(Paused("new", stops_running=False))
    refuses(one.launch, 1, ["a"], 4)
    one.land(1)
    assert not list(one.could_go_on)
    one.resume()
    assert list(one.could_go_on)
    one.launch(1, ["a"], 4)
    one.land(1, failed=True)
    assert one.account.live["a"].failed
    one.pause(Paused("ends", aborts=True))
    assert one.account.live["a"].aborted


# -- an output alone --


def outputs_are_compared_with_those_alone() -> None:
    limits = limits_of(EngineConfig())
    message = Generate(rid="a", prompt_ids=(5, 6, 7), sampling=SamplingParams(max_new_tokens=3, temperature=0.0))
    alone, _ = said_alone(message.prompt_ids, message.sampling, -1, 0, None, limits, alphabet_of(limits))

    def request(said: tuple[int, ...], **fields: Any) -> Any:
        given = {"versions": [0], "lora": None, "prompt_logprobs": (), "end": "length"} | fields
        return SimpleNamespace(message=message, rid="a", ids=(5, 6, 7, *said), **given)

    assert len(alone) == 3
    check_tokens(request(alone), [None], limits)
    check_tokens(request(alone[:2]), [None], limits)
    check_tokens(request((0, 0), versions=[0, 1]), [None, None], limits)
    refuses(check_tokens, request((*alone[:2], alone[2] + 1)), [None], limits)
    refuses(check_tokens, request((alone[0] + 1,)), [None], limits)


# -- shrinking --


def failing(needs: Callable[[str], str]) -> Callable[..., Any]:
    """A run that fails as ``needs`` says of the schedule's text: by a signature, or not at all where that is empty."""

    def execute(schedule: Schedule, **_options: Any) -> Any:
        signature = needs(str(schedule))
        failure = Failure("Violation", signature, 1, signature) if signature else None
        return SimpleNamespace(failure=failure)

    return execute


@contextmanager
def runs_that(needs: Callable[[str], str]) -> Iterator[None]:
    with mock.patch.object(shrinking, "execute", failing(needs)):
        yield


LINE = "default; 1 start x prompt=8 new=6; 3 start y prompt=40 new=6; 9 abort y; 12 flush"


def shrinking_keeps_the_failure_and_nothing_else() -> None:
    schedule = Schedule.parse(LINE)

    def needs(text: str) -> str:
        if "start" not in text:
            return ""
        return "found" if "abort" in text else "another"

    with runs_that(needs):
        shrunk = shrinking.shrink(schedule, budget_s=60)
    text = str(shrunk.schedule)
    assert shrunk.fails
    assert shrunk.is_minimal
    assert shrunk.runs > 1
    assert len(shrunk.schedule.placed) == 2
    assert needs(text) == "found"
    assert {one.step for one in shrunk.schedule.placed} == {1}
    assert " y" not in text
    assert "40" not in text
    with runs_that(needs):
        assert not shrinking.shrink(schedule, budget_s=0.0).is_minimal
    with runs_that(lambda _text: ""):
        sound = shrinking.shrink(schedule)
    assert not sound.fails
    assert sound.schedule == schedule


def shrinking_finds_the_least_numbers() -> None:
    """Those of a request, which says what is smaller than it, and those of an action that does not."""
    schedule = Schedule.parse("default; 1 start x prompt=40 new=6; 3 pressure pages=40")

    def needs(text: str) -> str:
        prompt, pages = re.search(r"prompt=(\d+)", text), re.search(r"pages=(\d+)", text)
        return "found" if prompt and pages and int(prompt[1]) >= 5 and int(pages[1]) >= 3 else ""

    with runs_that(needs):
        text = str(shrinking.shrink(schedule, budget_s=60).schedule)
    assert "prompt=5 " in text
    assert "pages=3" in text
    assert "new=1" in text


# -- isolation --


def isolated(script: Any) -> dict[str, int]:
    options = ScriptOptions(must_assert=True, timeout_s=20.0)
    test = ScriptedTest(config=EngineConfig(), adapter=DEFAULT_ADAPTER, tiers=("sim",), options=options, script=script)

    def run() -> Any:
        return script_runner(DEFAULT_ADAPTER).run_script(script, {}, config=test.config, options=options, mutant=None)

    return run_isolated(test, options, run)


def passing(t: Any) -> Iterator[None]:
    yield
    assert t.state.step == 1


def red(t: Any) -> Iterator[None]:
    yield
    assert t.state.step == 7


def asserts_nothing(t: Any) -> Iterator[None]:
    yield
    t.state.queues_clear  # noqa: B018


def a_red_script_is_red() -> None:
    assert isolated(passing)["steps"] == 1
    with pytest.raises(ScriptFailed, match="assert 1 == 7"):
        isolated(red)


def a_child_speaks_for_itself() -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger("child").addHandler(handler)

    def script(t: Any) -> Iterator[None]:
        logging.getLogger("child").warning("logged")
        warnings.warn("warned", stacklevel=1)
        yield
        assert t.state.step == 1

    try:
        with pytest.warns(UserWarning, match="warned"):
            isolated(script)
        assert [record.getMessage() for record in heard] == ["logged"]
    finally:
        logging.getLogger("child").removeHandler(handler)


def a_child_ends_alone_and_whole() -> None:
    original = os.getpid()

    def work() -> bytes:
        child = os.getpid()
        if not (left := os.fork()):
            os.setsid()
            signal.pause()
        return f"{child} {left}".encode()

    child, left = map(int, run_in_child(work, 20.0).split())
    assert child != original
    assert not psutil.pid_exists(child)
    if psutil.pid_exists(left):
        os.kill(left, signal.SIGKILL)
        raise AssertionError("what the child has started goes on")
    with pytest.raises(ChildDied, match="left with status 3"):
        run_in_child(lambda: os._exit(3), 20.0)  # type: ignore[arg-type, func-returns-value]

    def silent() -> bytes:
        sys.stderr = None
        raise LookupError("the seventh page")

    with pytest.raises(ChildDied, match="raised LookupError: the seventh page") as caught:
        run_in_child(silent, 20.0)
    assert "in silent" in caught.value.traceback


# -- what a script asked, and vetting --


def scripts_that_ask_nothing_are_told() -> None:
    asked = Measured(asserts_nothing)
    with asked:
        pass
    with pytest.raises(BadCall, match="without one assertion"):
        asked.check_asked()
    made = Measured(passing)
    with made:
        made.made(passing(None))
    with pytest.raises(BadCall, match="never ran"):
        made.check_made()
    options = ScriptOptions(must_assert=True, must_step=True)
    test = ScriptedTest(
        config=EngineConfig(), adapter=DEFAULT_ADAPTER, tiers=("sim",), options=options, script=asserts_nothing
    )
    with pytest.raises(ScriptFailed, match="without one assertion"):
        script_runner(DEFAULT_ADAPTER).run_script(asserts_nothing, {}, config=test.config, options=options, mutant=None)


def weak(t: Any, tokens: int) -> Iterator[None]:
    r = t.start_req(prompt_len=40, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.finished
    if r.finish_reason == "abort":
        assert r.error


def strong(t: Any) -> Iterator[None]:
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3
    assert all(one.rid == "x" for one in t.list_active_reqs())


def vetting_tells_weak_from_strong() -> None:
    vetting = Vetting()

    def vetted(script: Any, **arguments: Any) -> Any:
        test = scripted(EngineConfig())(script).scripted  # type: ignore[attr-defined]
        return vetting.findings(test, script.__name__, arguments)

    bugs = mock.Mock(return_value=("one-token-late",))
    with mock.patch("scripted_lockstep.adapter.LockstepAdapter.bugs_met", bugs):
        found = vetted(strong)
    assert found.own == ("one-token-late",)
    (always,) = found.always
    assert "one.rid" in always
    assert not found.is_a_test
    bugs = mock.Mock(return_value=("finished-requests-stay-registered",))
    with mock.patch("scripted_lockstep.adapter.LockstepAdapter.bugs_met", bugs):
        found = vetted(weak, tokens=3)
    assert found.noticed == 1
    assert not found.own
    assert found.met == 1
    assert found.unused == ("tokens",)
    assert not found.differs
    (never,) = found.never
    assert "r.error" in never
