"""The gate's side of a live tier: takes scripts from the test process and runs them while the engine's loop waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq

from scripted.core.machine import ConfigT
from scripted.core.protocol import Adapter
from scripted.report.failure import ScriptError
from scripted.script.arguments import unpacked
from scripted.script.loader import load_script
from scripted.script.wire import HookReady, RunScript, ScriptFailedReply
from scripted.sdk.live.launch import (
    FOLDER_VARIABLE,
    OWNER_VARIABLE,
    PORT_VARIABLE,
    SETTINGS_VARIABLE,
    SOCKET,
    Broken,
    Passed,
    Reply,
)
from scripted.sdk.live.machine import LiveEngine
from scripted.sdk.live.stand_ins import LiveDevice, LiveOracle, LiveRun
from scripted.sdk.live.stops import LoopStops
from scripted.sdk.script.runner import run_script

_EngineT = TypeVar("_EngineT")
_StopsT = TypeVar("_StopsT", bound=LoopStops)
_OWNER_INTERVAL_S: Final = 1.0
_FRONT_END_INTERVAL_S: Final = 0.2


def hook_loop(
    kind: type,
    loop: str,
    *,
    adapter: Adapter,
    config: type[msgspec.Struct],
    stops: Callable[[_EngineT], _StopsT],
    machine: Callable[[_EngineT, _StopsT, int], LiveEngine],
) -> None:
    """Stop the ``loop`` of an engine's class at the gate in a live server. Hooking twice is harmless.

    ``stops`` are made from the engine; each script's machine from the engine, its stops and the port of its front end.
    Scripts run in their own thread.
    """
    own_loop = getattr(kind, loop)
    if own_loop.__module__ == __name__ or PORT_VARIABLE not in os.environ:
        return

    def hooked_loop(engine: _EngineT) -> None:
        at = stops(engine)
        settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=config)
        port = int(os.environ[PORT_VARIABLE])
        _start(_end_with_owner)
        _start(lambda: _serve(at, port, adapter, settings, lambda: machine(engine, at, port)))
        own_loop(engine)

    setattr(kind, loop, hooked_loop)


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="scripted-gate", daemon=True).start()


def _end_with_owner() -> None:
    """End this process together with the test process that started it."""
    owner = int(os.environ[OWNER_VARIABLE])
    while True:
        time.sleep(_OWNER_INTERVAL_S)
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os.killpg(os.getpgid(0), signal.SIGKILL)


def _serve(
    stops: LoopStops, port: int, adapter: Adapter[ConfigT], config: ConfigT, new_machine: Callable[[], LiveEngine]
) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.bind(f"ipc://{Path(os.environ[FOLDER_VARIABLE]) / SOCKET}")
        while not _listens(port):
            time.sleep(_FRONT_END_INTERVAL_S)
        stops.close()
        pair.send(msgspec.msgpack.encode(HookReady()))
        while not stops.gate.is_open:
            command = msgspec.msgpack.decode(pair.recv(), type=RunScript)
            pair.send(msgspec.msgpack.encode(_reply_to(command, adapter, config, new_machine)))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _reply_to(
    command: RunScript, adapter: Adapter[ConfigT], config: ConfigT, new_machine: Callable[[], LiveEngine]
) -> Reply:
    try:
        script = load_script(command.file, command.name, command.import_paths)
        limits, can = adapter.limits_of(config)
        with contextlib.closing(new_machine()) as machine:
            outcome = run_script(
                adapter,
                script,
                unpacked(command.kwargs),
                config=config,
                options=command.options,
                mutant=command.mutant,
                run_type=LiveRun,
                parts=(machine, LiveDevice(), LiveOracle(limits, can)),
            )
    except ScriptError as exc:
        return ScriptFailedReply(report=exc.report)
    except Exception:  # noqa: BLE001 - the test process shows any error
        return Broken(text=traceback.format_exc())
    return Passed(outcome=outcome)
