"""A script that leaves its process changed fails by name, and the process is as it was for the next one."""

from __future__ import annotations

import atexit
import builtins
import codecs
import contextlib
import decimal
import faulthandler
import gc
import json
import logging
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import typing
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _pytest.runner
import msgspec
import numpy as np
import psutil
import pytest
import torch

from engine import EngineConfig
from engine.launch.preload import PreloadedParent
from engine.messages import FinishReason
from engine.scheduler import Books, Scheduler, policy
from scripted import ScriptedServer, ScriptedSim, ScriptError, ScriptFailed, ScriptOptions, ServerDied
from scripted.adapters.lockstep.server.pool import ServerPool
from scripted.script.process_state import ProcessState

OPTIONS = ScriptOptions(must_assert=True)
STOP = threading.Event()


def _patches_a_method(t):
    Books.is_quiescent = property(lambda books: True)


def _adds_a_method(t):
    Scheduler.helps = lambda scheduler: None


def _sets_a_variable(t):
    os.environ["LEFT_BEHIND"] = "1"


def _moves(t):
    os.chdir("/")


def _stops_the_collector(t):
    gc.disable()


def _stops_the_clock(t):
    time.monotonic = lambda: 0.0


def _ignores_interrupts(t):
    signal.signal(signal.SIGINT, lambda *_: None)


def _allows_recursion(t):
    sys.setrecursionlimit(5000)


def _ignores_warnings(t):
    warnings.simplefilter("ignore")


def _closes_a_descriptor(t):
    os.close(0)


def _leaves_a_thread(t):
    threading.Thread(target=STOP.wait, daemon=True).start()


def _changes_limits(t):
    limits = t.scheduler.limits
    msgspec.structs.force_setattr(limits, limits.__struct_fields__[-1], "changed")


def _loses_a_module(t):
    del sys.modules["engine.scheduler"]
    sys.modules["json"] = None


def _runs_at_exit(t):
    atexit.register(_leaves_a_thread)


def _ends_all_at_exit(t):
    atexit.register(os._exit, 7)


def _raises_for_zero(t):
    np.seterr(divide="raise")


def _silences_logging(t):
    logging.disable(logging.CRITICAL)
    logging.getLogger().handlers.clear()


def _patches_a_builtin(t):
    builtins.len = lambda value: 0


def _patches_a_library(t):
    json.loads = lambda text: {}


def _closes_the_output(t):
    sys.stdout = None


def _traces(t):
    sys.setprofile(lambda frame, event, argument: None)


def _stops_imports(t):
    sys.meta_path.clear()


def _leaves_a_process(t):
    if not os.fork():
        signal.pause()


def _leaves_an_orphan(t):
    """Of a session of its own, whose parent has ended."""
    if not (child := os.fork()):
        os.setsid()
        if not os.fork():
            signal.pause()
        os._exit(0)
    os.waitpid(child, 0)


def _sets_an_alarm(t):
    signal.setitimer(signal.ITIMER_REAL, 1000)


def _leaves_descriptors(t):
    DESCRIPTORS.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(100))


def _hides_a_query(t):
    type(t).state = None


def _blocks_signals(t):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _takes_one_core(t):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _hears_the_collector(t):
    gc.callbacks.append(lambda phase, info: None)


def _silences_threads(t):
    threading.excepthook = None


def _patches_a_class_of_a_library(t):
    json.JSONEncoder.default = lambda encoder, value: None


def _leaves_a_timer(t):
    threading.Timer(60, print).start()


def _takes_threads(t):
    torch.set_num_threads(torch.get_num_threads() + 6)


def _reads_long_integers(t):
    sys.set_int_max_str_digits(0)


def _rounds(t):
    decimal.getcontext().prec = 3


def _closes_the_stream(t):
    sys.stdout.close()


def _moves_temporary_files(t):
    tempfile.tempdir = "/nonexistent"


def _empties_a_module(t):
    vars(sys.modules["engine.memory.kv"]).clear()


def _patches_msgspec(t):
    msgspec.structs.replace = lambda value, **changes: value


def _patches_pytest(t):
    pytest.fail = lambda *arguments, **options: None


def _empties_a_table(t):
    policy._POLICIES.clear()


def _patches_the_runner(t):
    _pytest.runner.call_and_report = None


def _keeps_all_garbage(t):
    gc.set_debug(gc.DEBUG_SAVEALL)


def _limits_files(t):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _limits_sockets(t):
    socket.setdefaulttimeout(0.001)


def _closes_all_descriptors(t):
    os.closerange(3, 65536)


def _traces_threads(t):
    threading.settrace(lambda *_: None)


def _computes_nowhere(t):
    torch.set_default_device("meta")


def _becomes_another(t):
    kind = type(t.scheduler)
    t.scheduler.__class__ = type("Another", (kind,), {"__slots__": ()} if not hasattr(t.scheduler, "__dict__") else {})


def _names_all_alike(t):
    uuid.uuid4 = lambda: 1


def _changes_a_member(t):
    FinishReason.LENGTH._value_ = "long"


def _makes_all_alike(t):
    EngineConfig.__eq__ = lambda one, other: True


def _checks_types(t):
    typing.TYPE_CHECKING = True


def _forgives_all_codecs(t):
    codecs.register_error("strict", codecs.ignore_errors)


DESCRIPTORS: list[int] = []
DAMAGES = {
    _names_all_alike: "uuid.uuid4",
    _changes_a_member: "engine.messages.*length._value_",
    _makes_all_alike: "EngineConfig.__eq__, which is new",
    _checks_types: "typing.TYPE_CHECKING",
    _forgives_all_codecs: r"the codecs' error handlers \(strict\)",
    _empties_a_table: "engine.scheduler.policy._POLICIES",
    _patches_the_runner: "_pytest.runner.call_and_report",
    _keeps_all_garbage: "the garbage collector",
    _limits_files: "limits of the process",
    _limits_sockets: "the time limit of sockets",
    _closes_all_descriptors: "descriptor [0-9]+ was closed",
    _traces_threads: "trace functions",
    _computes_nowhere: "torch's settings",
    _becomes_another: "the class of t.scheduler",
    _closes_the_stream: "sys.stdout was closed",
    _moves_temporary_files: r"the folder of temporary files \(/nonexistent\)",
    _empties_a_module: r"engine.memory.kv \(.*deleted\)",
    _patches_msgspec: "msgspec.structs.replace",
    _patches_pytest: "pytest.fail",
    _silences_threads: "threading.excepthook",
    _patches_a_class_of_a_library: "json.JSONEncoder.default",
    _leaves_a_timer: "a timer, Thread-[0-9]+, was still to come",
    _takes_threads: "torch's settings",
    _reads_long_integers: "the digits of an integer",
    _rounds: "the precision of decimals",
    _raises_for_zero: "numpy's settings",
    _ends_all_at_exit: "an exit handler, _exit",
    _loses_a_module: r"sys.modules \(json\).*sys.modules \(engine.scheduler\)|engine.scheduler.*json",
    _runs_at_exit: "an exit handler, _leaves_a_thread",
    _silences_logging: "logging",
    _patches_a_builtin: "builtins.len",
    _patches_a_library: "json.loads",
    _closes_the_output: "sys.stdout and its like",
    _traces: "trace functions",
    _stops_imports: "hooks of imports",
    _leaves_a_process: "a process, [0-9]+, still runs",
    _leaves_descriptors: "100 descriptors are open that were not",
    _hides_a_query: "ScriptContext.state, which is new",
    _blocks_signals: "blocked signals",
    _hears_the_collector: "callbacks of the collector",
    _patches_a_method: "Books.is_quiescent",
    _adds_a_method: "Scheduler.helps, which is new",
    _sets_a_variable: r"os.environ \(LEFT_BEHIND\)",
    _moves: r"the working folder \(/\)",
    _stops_the_collector: "the garbage collector",
    _stops_the_clock: "time.monotonic",
    _ignores_interrupts: "signal handlers",
    _allows_recursion: "the recursion limit",
    _ignores_warnings: "the filters of warnings",
    _closes_a_descriptor: "descriptor 0",
    _leaves_a_thread: "a thread, .*, still runs",
    _changes_limits: r"the engine's limits \(t.scheduler.limits\)",
}


if len(os.sched_getaffinity(0)) > 1:
    DAMAGES[_takes_one_core] = "the CPUs of the process"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_the_guilty_script_fails_and_the_next_one_finds_nothing(damage: Any) -> None:
    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"
        damage(t)

    def innocent(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"

    before = ProcessState(standard_files=True)
    try:
        with ScriptedSim.start(EngineConfig()) as sim:
            with pytest.raises(ScriptFailed, match=f"the script left its process changed: .*{DAMAGES[damage]}"):
                sim.run(script, options=OPTIONS)
            STOP.set()
            sim.run(innocent, options=OPTIONS)
        assert before.put_back() == []
    finally:
        before.put_back()
        STOP.clear()
        while DESCRIPTORS:
            os.close(DESCRIPTORS.pop())


def _replaces_builtins(t):
    # None that a thread of pytest's workers needs meanwhile.
    builtins.sorted = builtins.zip = builtins.enumerate = None


def _fills_descriptors(t):
    for number in range(3, 100):
        os.dup2(0, number)


@pytest.mark.parametrize("damage", [_replaces_builtins, _fills_descriptors])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_failure_is_reported_from_a_process_that_is_put_back(damage: Any, steps: int) -> None:
    """What a report is made with, and the copies that all is put back from, may be what the script has replaced."""

    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield
        with contextlib.suppress(OSError):
            damage(t)
        for _ in range(steps):
            yield
        assert r.finish_reason == "stop"

    before = ProcessState(standard_files=True)
    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptError) as failed:
        sim.run(script, options=OPTIONS)
    assert "damage(t)" in str(failed.value) or "yield" in str(failed.value) or "assert r" in str(failed.value)
    assert before.put_back() == []


SHARED = EngineConfig()


class _Raises:
    def __del__(self):
        raise ValueError


def _changes_a_configuration(t):
    object.__setattr__(SHARED, "page_size", 7)


def _raises_at_its_end(t):
    _Raises()


# One of each way to be noticed, with what the report says.
IN_SERVERS = {
    damage: f"the script left its process changed: .*{DAMAGES[damage]}"
    for damage in (
        *(_loses_a_module, _stops_the_clock, _patches_a_method, _ignores_interrupts, _leaves_a_thread),
        *(_stops_imports, _closes_a_descriptor, _leaves_a_process, _empties_a_table, _becomes_another),
    )
}
IN_SERVERS |= {
    _leaves_descriptors: "it has grown: scheduler has [0-9]+ open descriptors",
    _sets_an_alarm: "the script left its process changed: timers",  # in the sim tier the watchdog's own is in its place
    _closes_the_output: "the script left its process changed: sys.stdout",
    _changes_a_configuration: r"its configuration \(page_size\)",
    _raises_at_its_end: "_Raises.__del__ raised ValueError where nothing can catch it",
    _leaves_an_orphan: "a process, [0-9]+, still runs",
}


def damages(t, name):
    yield from finds_a_whole_engine(t)
    globals()[name](t)


def finds_a_whole_engine(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


@pytest.fixture(scope="module")
def pool(parent: PreloadedParent) -> Iterator[ServerPool]:
    with contextlib.closing(ServerPool(parent)) as started:
        yield started


@pytest.mark.parametrize("damage", IN_SERVERS, ids=lambda damage: damage.__name__.strip("_"))
def test_in_a_server_too_the_guilty_script_fails_and_the_next_one_finds_nothing(damage: Any, pool: ServerPool) -> None:
    """The next one may get another server."""
    with pytest.raises(ScriptError, match=IN_SERVERS[damage]), pool.lend(EngineConfig(), None) as server:
        server.run(damages, damage.__name__, options=OPTIONS)
    with pool.lend(EngineConfig(), None) as server:
        server.run(finds_a_whole_engine, options=OPTIONS)


def leaves_a_daemon_and_kills_its_server(t, pid_file):
    yield
    supervisor = os.getppid()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.setsid()
            if not (os.fork()):
                os.setsid()
                Path(f"{pid_file}.part").write_text(str(os.getpid()))
                Path(f"{pid_file}.part").rename(pid_file)
                signal.pause()
            os._exit(0)
        os._exit(0)
    while not Path(pid_file).exists():
        time.sleep(0.01)
    os.kill(supervisor, signal.SIGKILL)
    while psutil.pid_exists(supervisor):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_daemon_three_levels_deep_ends_with_a_server_that_was_started_by_hand(tmp_path: Path) -> None:
    """The script kills the supervisor first, so that nobody is left whose child it is."""
    pid_file = tmp_path / "pid"
    with ScriptedServer.start(EngineConfig()) as server, pytest.raises(ServerDied):
        server.run(leaves_a_daemon_and_kills_its_server, str(pid_file), options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=5)
    assert not psutil.pid_exists(pid)


def dies_and_leaves_a_process(t, pid_file, leads):
    yield
    if not (child := os.fork()):
        if leads:
            os.setsid()
        signal.pause()
    Path(pid_file).write_text(str(child))
    os._exit(1)


@pytest.mark.parametrize("leads", [False, True], ids=["of the server's session", "of its own session"])
def test_a_process_that_a_script_leaves_ends_with_its_server(pool: ServerPool, tmp_path: Path, leads: bool) -> None:
    """However that ends."""
    pid_file = tmp_path / "pid"
    with (
        pytest.raises(ServerDied, match="dies_and_leaves_a_process"),
        pool.lend(EngineConfig(), None) as server,
    ):
        server.run(dies_and_leaves_a_process, str(pid_file), leads, options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=5)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("call", [(sys, "addaudithook"), (os, "register_at_fork")], ids=lambda call: call[1])
def test_what_nobody_can_take_back_is_refused(call: tuple[Any, str]) -> None:
    def script(t):
        yield
        getattr(*call)(lambda *_: None)

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match=f"{call[1]} cannot be taken back"):
        sim.run(script, options=OPTIONS)


def test_a_changed_configuration_is_named_and_put_back() -> None:
    config = EngineConfig()

    def script(t):
        yield
        assert t.state.step == 1
        object.__setattr__(config, "page_size", 7)

    with ScriptedSim.start(config) as sim, pytest.raises(ScriptFailed, match=r"its configuration \(page_size\)"):
        sim.run(script, options=OPTIONS)
    assert config == EngineConfig()


def test_what_a_destructor_raises_is_named() -> None:
    class Raises:
        def __del__(self) -> None:
            raise ValueError

    def script(t):
        yield
        assert t.state.step == 1
        Raises()

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match=r"Raises.__del__ raised Val"):
        sim.run(script, options=OPTIONS)


def test_what_a_script_puts_back_is_no_damage() -> None:
    def script(t):
        os.environ["LEFT_BEHIND"] = "1"
        try:
            yield
        finally:
            del os.environ["LEFT_BEHIND"]
        assert "LEFT_BEHIND" not in os.environ

    with ScriptedSim.start(EngineConfig()) as sim:
        assert sim.run(script, options=OPTIONS).steps == 1


def test_a_thread_that_spins_is_ended() -> None:
    def script(t):
        yield
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], name="spins", daemon=True).start()
        assert t.state.step == 1

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match="a thread, spins, still runs"):
        sim.run(script, options=OPTIONS)
    for thread in threading.enumerate():
        if thread.name == "spins":
            thread.join(10)
            assert not thread.is_alive()


def test_what_one_script_left_open_is_not_closed_by_the_next() -> None:
    """The collector closes it, whenever that is."""
    left = []

    def leaves(t):
        left.append(socket.create_server(("127.0.0.1", 0)))
        yield
        assert t.state.step == 1

    def innocent(t):
        yield
        left.pop().close()
        assert t.state.step == 1

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(leaves, options=OPTIONS)
        sim.run(innocent, options=OPTIONS)
        assert not left


def test_a_failing_script_is_put_back_as_well() -> None:
    def script(t):
        yield
        os.environ["LEFT_BEHIND"] = "1"
        assert t.state.step == 7

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match="7"):
        sim.run(script, options=OPTIONS)
    assert "LEFT_BEHIND" not in os.environ


def test_a_dump_that_ends_the_process_is_called_off() -> None:
    """It cannot be seen, so nobody is told."""

    def script(t):
        t.smoke()
        faulthandler.dump_traceback_later(0.3, exit=True)
        yield

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script, options=OPTIONS)
    time.sleep(0.6)


def test_the_next_script_draws_what_it_would_have_drawn() -> None:
    def seeds(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"
        random.seed(1)
        np.random.seed(1)

    random.seed(7)
    np.random.seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).random()
    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(seeds, options=OPTIONS)
    assert (random.random(), np.random.random()) == expected
