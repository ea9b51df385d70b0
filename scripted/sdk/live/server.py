"""A live server, as the test's process sees it: starts it, gives it scripts, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import zmq

from scripted.core.refusals import HarnessError
from scripted.report.failure import error_of
from scripted.script.execution import ScriptOutcome
from scripted.script.harness import ScriptedServer
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.script.wire import HookReady, ScriptFailedReply, command_to_run
from scripted.sdk.live.launch import FOLDER_VARIABLE, OWNER_VARIABLE, SOCKET, Broken, Launcher, Passed, Reply

# For an engine with all its imports, on two cores that others use as well.
_BOOT_TIMEOUT_S: Final = 600.0
_END_TIMEOUT_S: Final = 5.0
# Longer than the gate's own timeouts, whose errors say more. Requests are computed alone after the script's time.
_PATIENCE_S: Final = 30.0
_POLL_MS: Final = 500
_LOG_TAIL: Final = 3000


class LiveServer(ScriptedServer[object, ScriptOutcome]):
    """One server of one configuration; ``usable`` until a script fails on it or it ends."""

    def __init__(self, launcher: Launcher, config: object, *, mutant: str | None = None) -> None:
        super().__init__(config, mutant=mutant)
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="scripted-live-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            launch = launcher(config, folder, _free_port())
            self._log = folder / "server.log"
            # Sockets and other files without their own place are removed with the folder.
            own = {FOLDER_VARIABLE: str(folder), OWNER_VARIABLE: str(os.getpid()), "TMPDIR": str(folder)}
            environment = own | dict(launch.environment)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the adapter's own command
                    launch.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | environment,
                    start_new_session=True,
                )
            stack.callback(self._end)
            context = stack.enter_context(zmq.Context())
            self._socket = stack.enter_context(context.socket(zmq.PAIR))
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(f"ipc://{folder / SOCKET}")
            reply = self._next_reply(_BOOT_TIMEOUT_S, "it did not come up")
            assert isinstance(reply, HookReady), f"the gate began with {reply}"
            self._stack = stack.pop_all()

    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> ScriptOutcome:
        """Run a script. Raises ScriptFailed, ScriptTimeout, or HarnessError with the output of the engine's process."""
        if not self.usable:
            raise HarnessError("this live server is shut down or not usable any more; start another one")
        command = command_to_run(script, args, kwargs, options, self.mutant)
        self.usable = False
        self._socket.send(msgspec.msgpack.encode(command))
        reply = self._next_reply(options.timeout_s + _PATIENCE_S, f"{command.name} did not end")
        if isinstance(reply, Passed):
            self.usable = True
            return reply.outcome
        if isinstance(reply, Broken):
            raise HarnessError(f"a live script failed, which says nothing about the engine: {reply.text}")
        assert isinstance(reply, ScriptFailedReply), f"the gate answered a script with {reply}"
        raise error_of(reply.report)

    @property
    def pid(self) -> int:
        """The started process, from which all of the engine's processes descend."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def shutdown(self) -> None:
        self.usable = False
        self._stack.close()

    def _next_reply(self, within_s: float, what: str) -> Reply:
        deadline = time.monotonic() + within_s
        while not self._socket.poll(_POLL_MS):
            if self._process.poll() is not None:
                raise HarnessError(f"the live server ended with status {self._process.returncode}: {self._tail()}")
            if time.monotonic() > deadline:
                raise HarnessError(f"the live server was given {within_s:g} s, and {what}: {self._tail()}")
        reply: Reply = msgspec.msgpack.decode(self._socket.recv(), type=Reply)
        return reply

    def _tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")

    def _end(self) -> None:
        """Kill the process session, which contains every process."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)


class LiveServers:
    """The live servers of one adapter: one at a time, shared by scripts of the same configuration."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._server: LiveServer | None = None

    @contextlib.contextmanager
    def lend(
        self, config: object, *, mutant: str | None = None, placement: str = "local", device: str | None = None
    ) -> Iterator[LiveServer]:
        """Lend a server of this configuration. Its command determines the device, so nobody can ask for another."""
        del placement, device
        if self._server is None or not self._server.usable or self._server.config != config:
            self.close()
            self._server = LiveServer(self._launcher, config)
        self._server.mutant = mutant
        yield self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
