"""Damage that a script may do to its process: statements, with the summary's words about each in a server's session.

The tables of ``test_damaged_processes`` and ``test_damaged_servers``.
"""

# ruff: noqa: F401 - the statements use what is imported

from __future__ import annotations

import atexit
import builtins
import codecs
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
from typing import Any, Final

import _pytest.runner
import msgspec
import numpy as np
import pytest
import torch

from engine import EngineConfig
from engine.core.messages import FinishReason
from engine.core.scheduler import Books, Scheduler, policy
from scripted import ScriptOptions
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.script.isolation import run_isolated
from scripted.script.on_adapters import script_runner
from scripted.script.scripted_test import ScriptedTest

__all__ = ["DAMAGES", "DESCRIPTORS", "IN_SERVERS", "OPTIONS", "STOP", "do", "finds_a_whole_engine", "isolated"]

OPTIONS: Final = ScriptOptions(must_assert=True)
STOP: Final = threading.Event()
DESCRIPTORS: Final[list[int]] = []


class Raises:
    def __del__(self) -> None:
        raise ValueError


def leave_a_process() -> None:
    if not os.fork():
        signal.pause()


def leave_an_orphan() -> None:
    """Leave a process in a session of its own, whose parent has ended."""
    if not (child := os.fork()):
        os.setsid()
        if not os.fork():
            signal.pause()
        os._exit(0)
    os.waitpid(child, 0)


DAMAGES: Final = {
    "Books.is_quiescent = property(lambda books: True)": "Books.is_quiescent",
    "Scheduler.helps = lambda scheduler: None": "Scheduler.helps",
    "EngineConfig.__eq__ = lambda one, other: True": "EngineConfig.__eq__, which is new",
    "FinishReason.LENGTH._value_ = 'long'": "engine.core.messages.*length._value_",
    "policy._POLICIES.clear()": "engine.core.scheduler.policy._POLICIES",
    "policy._POLICIES.pop('lpm')": "engine.core.scheduler.policy._POLICIES",
    "vars(sys.modules['engine.core.memory.kv']).clear()": r"engine.core.memory.kv \(.*deleted\)",
    "msgspec.structs.force_setattr(t.scheduler.limits, t.scheduler.limits.__struct_fields__[-1], 'changed')": (
        r"the engine's limits \(t.scheduler.limits\)"
    ),
    "t.scheduler.__class__ = type('Another', (type(t.scheduler),), {})": "the class of t.scheduler",
    "type(t).state = None": "ScriptContext.state, which is new",
    "os.environ['LEFT_BEHIND'] = '1'": "os.environ",
    "os.chdir('/')": r"the working folder \(/\)",
    "tempfile.tempdir = '/nonexistent'": r"the folder of temporary files \(/nonexistent\)",
    "gc.disable()": "the garbage collector",
    "gc.set_debug(gc.DEBUG_SAVEALL)": "the garbage collector",
    "gc.callbacks.append(lambda phase, info: None)": "callbacks of the collector",
    "time.monotonic = lambda: 0.0": "time.monotonic",
    "uuid.uuid4 = lambda: 1": "uuid.uuid4",
    "json.loads = lambda text: {}": "json.loads",
    "json.JSONEncoder.default = lambda encoder, value: None": "json.JSONEncoder.default",
    "msgspec.structs.replace = lambda value, **changes: value": "msgspec.structs.replace",
    "typing.TYPE_CHECKING = True": "typing.TYPE_CHECKING",
    "pytest.fail = lambda *arguments, **options: None": "pytest.fail",
    "_pytest.runner.call_and_report = None": "_pytest.runner.call_and_report",
    "builtins.len = lambda value: 0": "builtins.len",
    "del sys.modules['engine.core.scheduler']; sys.modules['json'] = None": (
        r"sys.modules \(json\).*sys.modules \(engine.core.scheduler\)|engine.core.scheduler.*json"
    ),
    "sys.meta_path.clear()": "hooks of imports",
    "sys.setrecursionlimit(5000)": "the recursion limit",
    "sys.set_int_max_str_digits(0)": "the digits of an integer",
    "sys.setprofile(lambda frame, event, argument: None)": "trace functions",
    "threading.settrace(lambda *_: None)": "trace functions",
    "threading.excepthook = None": "threading.excepthook",
    "threading.Thread(target=STOP.wait, daemon=True).start()": "a thread, .*, still runs",
    "threading.Timer(60, print).start()": "a timer, Thread-[0-9]+, was still to come",
    "leave_a_process()": "a process, [0-9]+, still runs",
    "atexit.register(leave_a_process)": "an exit handler, leave_a_process",
    "atexit.register(os._exit, 7)": "an exit handler, _exit",
    "signal.signal(signal.SIGINT, lambda *_: None)": "signal handlers",
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})": "blocked signals",
    "sys.stdout = None": "sys.stdout and its like",
    "sys.stdout.close()": "sys.stdout was closed",
    "faulthandler.dump_traceback_later(0.1, exit=True)": "",
    "random.seed(1); np.random.seed(1)": "",
    "sys.addaudithook(lambda *_: None)": "",
    "os.register_at_fork(before=lambda: os._exit(9))": "",
    "builtins.sorted = builtins.zip = builtins.enumerate = None": "builtins",
    "[os.dup2(0, number) for number in range(3, 100)]": "",
    "os.close(0)": "the standard files",
    "os.closerange(3, 65536)": "descriptor [0-9]+ was closed",
    "DESCRIPTORS.extend(os.open(os.devnull, 0) for _ in range(100))": "100 descriptors are open that were not",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))": (
        "limits of the process"
    ),
    "socket.setdefaulttimeout(0.001)": "the time limit of sockets",
    "warnings.simplefilter('ignore')": "the filters of warnings",
    "logging.disable(logging.CRITICAL); logging.getLogger().handlers.clear()": "logging",
    "codecs.register_error('strict', codecs.ignore_errors)": r"the codecs' error handlers \(strict\)",
    "decimal.getcontext().prec = 3": "the precision of decimals",
    "np.seterr(divide='raise')": "numpy's settings",
    "torch.set_num_threads(torch.get_num_threads() + 6)": "torch's settings",
    "torch.set_default_device('meta')": "torch's settings",
}
if len(os.sched_getaffinity(0)) > 1:
    DAMAGES["os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"] = "the CPUs of the process"

# One of each way to be noticed, with the change that is named.
IN_SERVERS: Final = {
    damage: said
    for damage, said in DAMAGES.items()
    if damage.startswith(
        (
            *("del sys.modules", "time.monotonic", "Books.", "signal.signal", "threading.Thread(", "sys.meta_path"),
            *("os.close(", "leave_a_process", "policy._POLICIES.pop", "os.environ"),
        )
    )
} | {
    # In the sim tier the watchdog's own is in its place.
    "signal.setitimer(signal.ITIMER_REAL, 1000)": "timers",
    "object.__setattr__(SHARED, 'page_size', 7)": "its configuration",
    "leave_an_orphan()": "a process, [0-9]+, still runs",
}


def do(damage: str, **names: Any) -> None:
    exec(damage, globals(), names)


def finds_a_whole_engine(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


def isolated(script: Any, config: Any = None, **options: Any) -> dict[str, int]:
    """Run a script in sim as the pytest plugin does, and return the counts of its end."""
    given = ScriptOptions(**({"must_assert": True, "timeout_s": 10.0} | options))
    test = ScriptedTest(
        config=config or EngineConfig(), adapter="lockstep", tiers=("sim",), options=given, script=script
    )

    runner = script_runner(DEFAULT_ADAPTER)  # imported here, as by the plugin, and not in the script's time

    def run() -> Any:
        return runner.run_script(script, {}, config=test.config, options=given, mutant=None)

    return run_isolated(test, given, run)
