"""Python commands run in forks of one process that has imported what they need.

An interpreter spends a second on the imports of pytest, of ``scripted`` or of ``engine`` before the command begins, and
three on torch. A test takes an interpreter of its own where the start matters: environment variables that are read at
import, packages that hide ours, what is imported at all, or a process that others look for.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER_BYTES = 131_072
# Of an order: the connection for further orders, the news, and stdin, stdout and stderr.
FILES_AN_ORDER = 5
PARENT_MODULE = "engine.server.launch.parent_process"
# Read when an interpreter starts or when a module is imported, so that a fork would not see them.
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LOCKSTEP_", "LD_")
READ_BY_A_FORK = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
# Others are not what is tested, and pytest warns of an imported plugin whose assertions it cannot rewrite.
ONLY_OUR_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "scripted.pytest_plugin"}
# Their names are asked for by pytest, which imports them itself, or they run when they are imported.
NOT_PRELOADED = ("__main__", "pytest_plugin")


class ForkedCommand:
    """A command that runs, with the methods of ``subprocess.Popen`` that its users call."""

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        self.returncode: int | None = None
        self.pid = int(news.recv(64) or b"0")
        assert self.pid, "the process that commands fork from has ended"

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._news.settimeout(timeout)
            try:
                self.returncode = int(self._news.recv(64) or -signal.SIGKILL)
            except TimeoutError as exc:
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from exc
            self._news.close()
        return self.returncode

    def kill(self) -> None:
        """Kill the command and the processes of its session."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class ForkedCommands:
    """The handle of the process that commands fork from, a context manager. That process ends with this one."""

    def __init__(self, orders: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._orders = orders
        self._process = process
        self._environment = dict(os.environ)

    @classmethod
    def begin(cls) -> Self:
        """Start the process and return at once, while it still imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                start_new_session=True,
            )
        return cls(ours, process)

    def run(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",  # noqa: A002 - the name that subprocess.run has for it
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS``, which begin with ``-m MODULE`` or a file, as ``subprocess.run`` with text does.

        Kills the command and raises TimeoutExpired after ``timeout`` seconds.
        """
        with contextlib.ExitStack() as stack:
            stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            stdin.write(input)
            stdin.seek(0)
            command = self.start(*arguments, cwd=cwd, env=env, files=(stdin, stdout, stderr))
            try:
                status = command.wait(timeout)
            finally:
                command.kill()
            said = [file.read() for file in (stdout, stderr) if file.seek(0) == 0]
        return subprocess.CompletedProcess([str(word) for word in arguments], status, *said)

    def pytest(self, pytester: pytest.Pytester, *arguments: str | Path) -> pytest.RunResult:
        """Run pytest in the folder and on the files of this pytester, as its ``runpytest_subprocess`` does."""
        begun = time.monotonic()
        path = os.pathsep.join([str(pytester.path), str(ROOT)])
        words = ("-m", "pytest", f"--basetemp={pytester.path}/basetemp", *arguments)
        done = self.run(*words, env=os.environ | {"PYTHONPATH": path})
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return pytest.RunResult(
            done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), time.monotonic() - begun
        )

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        files: Sequence[IO[Any]],
        pass_fds: Sequence[int] = (),
    ) -> ForkedCommand:
        """Start ``python ARGUMENTS`` with these as stdin, stdout and stderr, as the leader of a session of its own."""
        environment = dict(os.environ if env is None else env) | ONLY_OUR_PLUGIN
        self._require_readable(environment)
        order = {
            "arguments": [str(word) for word in arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": environment,
            "pass_fds": list(pass_fds),
        }
        news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sent = [self._orders.fileno(), theirs.fileno(), *(file.fileno() for file in files), *pass_fds]
            socket.send_fds(self._orders, [json.dumps(order).encode()], sent)
        return ForkedCommand(news)

    def start_parent(self, *modules: str, env: Mapping[str, str] | None = None) -> Any:
        """Fork the preloaded parent of servers; ``PreloadedParent.start(*modules)`` starts an interpreter for it."""
        from engine.server.launch.preload import PreloadedParent

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, Path(os.devnull).open("r+") as nothing:
            words = ("-m", PARENT_MODULE, str(theirs.fileno()), *modules)
            files = (nothing, sys.__stdout__ or nothing, sys.__stderr__ or nothing)
            command = self.start(*words, env=env, files=files, pass_fds=[theirs.fileno()])
        return PreloadedParent(command, ours)

    def _require_readable(self, environment: Mapping[str, str]) -> None:
        for name in {*environment, *self._environment}:
            if name in READ_BY_A_FORK or not name.startswith(READ_AT_START):
                continue
            theirs, ours = environment.get(name), self._environment.get(name)
            assert theirs == ours, f"{name} is read before a fork, so {theirs!r} takes an interpreter of its own"

    def close(self) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class CommandForker:
    """The process that commands fork from. It has one thread and computes nothing."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._news: dict[int, socket.socket] = {}
        # What is found behind the folder of the command and PYTHONPATH.
        self._path = sys.path[1:]

    def run(self) -> None:
        """Fork a command for each order, until its client is gone."""
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ, self._take_order)
            selector.register(woken, selectors.EVENT_READ, functools.partial(self._reap, woken))
            while all(key.data() for key, _ in selector.select()):
                pass

    def _take_order(self) -> bool:
        frame, fds, _, _ = socket.recv_fds(self._orders, ORDER_BYTES, 2 * FILES_AN_ORDER)
        if not frame:
            return False
        forker = os.getpid()
        if not (pid := os.fork()):
            _become(json.loads(frame), fds, self._path, forker)
        news = socket.socket(fileno=fds.pop(1))
        for fd in fds:
            os.close(fd)
        self._news[pid] = news
        _tell(news, pid)
        return True

    def _reap(self, woken: socket.socket) -> bool:
        woken.recv(4096)
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (news := self._news.pop(ended[0], None)) is not None:
                    _tell(news, os.waitstatus_to_exitcode(ended[1]))
                    news.close()
        return True


def _tell(news: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # Whoever started the command has closed its handle.
        news.send(str(number).encode())


def _become(order: dict[str, Any], fds: list[int], path: list[str], forker: int) -> None:
    """Turn the fork into the command; never returns."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        orders_fd = _take_files(fds, order["pass_fds"], forker)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        tempfile.tempdir = None  # it was chosen by another environment
        commands = ForkedCommands(socket.socket(fileno=orders_fd))
        status = _status_of(order["arguments"], path, commands)
    finally:
        os._exit(status)


def _take_files(fds: list[int], pass_fds: list[int], forker: int) -> int:
    """Give the files their numbers and close all others; returns the connection for further orders."""
    from engine.process.inheritance import close_inherited_files
    from lockstep.process_control import die_with_parent

    above = 1000
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    close_inherited_files(moved)
    orders, news, *files = moved
    os.close(news)
    for fd, number in zip(files, [0, 1, 2, *pass_fds], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    die_with_parent(forker, signal.SIGKILL)
    return orders


def _status_of(arguments: list[str], path: list[str], commands: ForkedCommands) -> int:
    """Run the command to its end, and what an interpreter does at its end."""
    from engine.server.launch.preload import PreloadedParent

    PreloadedParent.start = commands.start_parent  # type: ignore[method-assign]
    try:
        _run(arguments, path)
        status = 0
    except SystemExit as exc:
        status = _status_of_exit(exc)
    except BaseException as exc:  # noqa: BLE001 - an interpreter prints whatever ends its program
        sys.excepthook(type(exc), exc, exc.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _status_of_exit(exc: SystemExit) -> int:
    if exc.code is None or isinstance(exc.code, int):
        return (exc.code or 0) & 0xFF
    sys.stderr.write(f"{exc.code}\n")
    return 1


def _run(arguments: list[str], path: list[str]) -> None:
    of_the_environment = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_module = arguments[0] == "-m"
    folder = str(Path.cwd() if is_module else Path(arguments[0]).resolve().parent)
    sys.path[:] = [folder, *of_the_environment, *path]
    importlib.invalidate_caches()
    sys.argv[:] = arguments[1:] if is_module else arguments
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _preload() -> None:
    from engine.server.launch.imports import import_engine

    import_engine("scripted_lockstep.tiers.server.gate", "scripted_lockstep.tiers.server.follower")
    for module in _commands():
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _commands() -> Iterator[str]:
    import _pytest.config

    import scripted

    yield from (f"_pytest.{plugin}" for plugin in _pytest.config.default_plugins)
    yield from ("engine.cli", "scripted_lockstep.adapter", "pdb", "xdist.plugin")
    for found in pkgutil.walk_packages(scripted.__path__, "scripted."):
        if found.name.rpartition(".")[2] not in NOT_PRELOADED:
            yield found.name


def main(orders_fd: int) -> None:
    from lockstep.process_control import die_with_parent

    die_with_parent(os.getppid(), signal.SIGKILL)
    _preload()
    with socket.socket(fileno=orders_fd) as orders:
        CommandForker(orders).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
