"""The preloaded parent: a process that has done the costly imports once and forks servers on request.

This is the client's side, for harnesses and tools; importing it costs nothing. The parent dies with its client, and its
servers with it. Never runs the client's main module again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from engine.core.errors import StartupError
from engine.core.frames import decoder_of
from engine.process.control import Gathering, Serving
from engine.process.death import read_death_report
from engine.process.settings import REVEAL_KEYS, ServerSettings
from engine.server.placement.messages import StageOrder

PARENT_MODULE = "engine.server.launch.parent_process"
CLOSE_TIMEOUT_S = 5.0
FRAME_BYTES = 65_536


class ServeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a server. ``settings`` is JSON of ServerSettings. Two sockets come with it: lifeline and news.

    With ``remove_private_dir`` the parent removes the folder when it ends, even if its client was killed.
    """

    settings: str
    private_dir: str
    log_path: str
    working_dir: str
    import_path: tuple[str, ...]
    remove_private_dir: bool = False


class StageRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a stage that joins a server. The secret is in a file. The same two sockets come with it."""

    order: StageOrder
    secret_file: str
    log_path: str
    temp_dir: str = ""


Order = ServeRequest | StageRequest


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor's pid: the first thing that comes on a server's news socket."""

    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor ended; negative is a signal, as subprocess counts it. The last thing on the news socket."""

    status: int


News = Forked | Gathering | Serving | Exited

decode_order: Callable[[bytes], Order] = decoder_of(Order)
_news_of: Callable[[bytes], News] = decoder_of(News)
_Early = TypeVar("_Early", Gathering, Serving)


class ServerProcess:
    """One server forked by the parent. ``fileno()`` is readable from the moment when its supervisor is gone."""

    def __init__(self, lifeline: socket.socket, news: socket.socket, private_dir: Path) -> None:
        self._lifeline = lifeline
        self._news = news
        self._private_dir = private_dir
        self._told: dict[type[msgspec.Struct], News] = {}
        self._status: int | None = None
        # The server may speak before its parent does.
        while not isinstance(said := self._next_news(None), Forked):
            if isinstance(said, Exited):
                raise StartupError(f"it must say which process it forked, got {said}")
            self._take(said)
        self.pid = said.pid

    def fileno(self) -> int:
        """The lifeline: end of file when the supervisor is gone, and nothing before."""
        return self._lifeline.fileno()

    def wait_ready(self, timeout_s: float) -> Serving:
        """Wait until the server is ready: its URL and its processes' pids by name.

        Raises StartupError, which carries the cause, when it ended first, TimeoutError when the time is up.
        """
        return self._first(Serving, timeout_s)

    def wait_gathering(self, timeout_s: float) -> Gathering:
        """Wait until the server waits for stages to join: where, and the file with the secret.

        Raises StartupError when it ended first, TimeoutError when the time is up.
        """
        return self._first(Gathering, timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end: the exit status. Raises TimeoutError when it lives on for ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            self._take(self._next_news(max(0.0, deadline - time.monotonic())))
        return self._status

    def drain(self) -> None:
        """Ask it to take no more requests, to finish the live ones, and to stop. Harmless when it is gone."""
        self._signal(signal.SIGTERM)

    def terminate(self) -> None:
        """Ask it to stop in order, without waiting for requests. Harmless when it is gone."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the supervisor; its processes follow it. Harmless when it is gone."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the sockets of this handle; does not end the server."""
        self._lifeline.close()
        self._news.close()

    def _first(self, kind: type[_Early], timeout_s: float) -> _Early:
        while (news := self._told.get(kind)) is None and self._status is None:
            self._take(self._next_news(timeout_s))
        if isinstance(news, kind):
            return news
        report = read_death_report(self._private_dir)
        cause = report.cause if report is not None else "it left no report; see its log"
        who = report.process if report is not None else "server"
        raise StartupError(f"the server ended with status {self._status} before it was ready; {who}: {cause}")

    def _signal(self, number: signal.Signals) -> None:
        # A pid may belong to another process once its own is gone.
        if self._status is None and self._alive():
            os.kill(self.pid, number)

    def _alive(self) -> bool:
        """False when the lifeline is at its end: the supervisor is gone."""
        self._lifeline.setblocking(False)
        try:
            return bool(self._lifeline.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _take(self, news: News) -> None:
        self._told[type(news)] = news
        if isinstance(news, Exited):
            self._status = news.status

    def _next_news(self, timeout_s: float | None) -> News:
        self._news.settimeout(timeout_s or (None if timeout_s is None else 0.001))
        frame = self._news.recv(FRAME_BYTES)
        if not frame:
            # The parent is gone, and its servers with it.
            return Exited(status=-signal.SIGKILL)
        return _news_of(frame)


class PreloadedParent:
    """The client's handle. A context manager; ``close()`` ends the parent and every server of it."""

    def __init__(self, process: subprocess.Popen[bytes], orders: socket.socket) -> None:
        self._process = process
        self._orders = orders
        self._has_forked = False

    @classmethod
    def start(cls, *modules: str) -> Self:
        """Start the parent. Returns at once: the imports go on while the caller does other things.

        ``modules`` are what its servers import beside the engine, such as a gate of the caller's; it imports them too.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", PARENT_MODULE, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Of its own session: a terminal's Ctrl-C is for the client, which closes the parent in order.
                start_new_session=True,
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def serve(
        self, settings: ServerSettings, private_dir: Path, log_path: Path, *, remove_private_dir: bool = False
    ) -> ServerProcess:
        """Fork a server. Returns when it is forked, not when it is ready.

        ``private_dir`` stays the caller's; with ``remove_private_dir`` it is gone when the parent is, at the latest.
        The server's stdout and stderr are appended to ``log_path``. It imports from the caller's
        ``sys.path``. Raises StartupError when the parent is gone.
        """
        request = ServeRequest(
            settings=settings.model_dump_json(context=REVEAL_KEYS),
            private_dir=str(private_dir.absolute()),
            log_path=str(log_path.absolute()),
            working_dir=str(Path.cwd()),
            import_path=tuple(sys.path),
            remove_private_dir=remove_private_dir,
        )
        return self._fork(request, private_dir)

    def join(self, order: StageOrder, secret_file: str, log_path: Path, *, temp_dir: str = "") -> ServerProcess:
        """Fork the agent of a stage that joins a server, as `engine stage --join` does. Otherwise as ``serve``.

        The agent's files are in ``temp_dir``, so that one that is killed leaves none elsewhere.
        """
        log = str(log_path.absolute())
        request = StageRequest(order=order, secret_file=secret_file, log_path=log, temp_dir=temp_dir)
        return self._fork(request, log_path.parent)

    def _fork(self, request: Order, private_dir: Path) -> ServerProcess:
        lifeline, their_lifeline = socket.socketpair()
        news, their_news = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with their_lifeline, their_news:
                sent = [their_lifeline.fileno(), their_news.fileno()]
                socket.send_fds(self._orders, [msgspec.msgpack.encode(request)], sent)
            server = ServerProcess(lifeline, news, private_dir)
        except BaseException as exc:
            lifeline.close()
            news.close()
            if not isinstance(exc, OSError | StartupError):
                raise
            raise StartupError(
                f"the preloaded parent (pid {self.pid}) must live to fork a server, but: {exc}; start another one"
            ) from exc
        self._has_forked = True
        return server

    def close(self) -> None:
        """End the parent and its servers, with a bound. Idempotent.

        One that has no server yet has nothing to end in order, and may be in its imports for seconds.
        """
        self._orders.close()
        if not self._has_forked:
            self._process.kill()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
