"""The preloaded parent: a process that has run the expensive imports once and forks servers on request.

This is the client's side, for harnesses and tools; importing it is cheap. The parent dies with its client, and its
servers die with the parent. Never runs the client's main module again.
"""

from __future__ import annotations

import contextlib
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
    """Order a server. ``settings`` is JSON of ServerSettings. Two sockets travel with the order: lifeline and news.

    With ``remove_private_dir`` the parent removes the folder when it ends, even if its client was killed.
    """

    settings: str
    private_dir: str
    log_path: str
    working_dir: str
    import_path: tuple[str, ...]
    remove_private_dir: bool = False


class StageRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order a stage that joins a server, with the same two sockets. ``secret_file`` holds the server's secret."""

    order: StageOrder
    secret_file: str
    log_path: str
    temp_dir: str = ""


Order = ServeRequest | StageRequest


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor's pid, which the parent sends on a server's news socket."""

    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor's exit status, negative for a signal as in subprocess; the last news on the socket."""

    status: int


News = Forked | Gathering | Serving | Exited

decode_order: Callable[[bytes], Order] = decoder_of(Order)
_news_of: Callable[[bytes], News] = decoder_of(News)
_Early = TypeVar("_Early", Gathering, Serving)


class ServerProcess:
    """One server forked by the parent. ``fileno()`` becomes readable when its supervisor is gone."""

    def __init__(self, lifeline: socket.socket, news: socket.socket, private_dir: Path) -> None:
        self._lifeline = lifeline
        self._news = news
        self._private_dir = private_dir
        self._received: dict[type[msgspec.Struct], News] = {}
        self._status: int | None = None
        # The server may send a message before its parent does.
        while not isinstance(said := self._next_news(None), Forked):
            if isinstance(said, Exited):
                raise StartupError(f"the preloaded parent must send the pid of the server that it forked, got {said}")
            self._take(said)
        self.pid = said.pid

    def fileno(self) -> int:
        """Return the lifeline, which carries no data and is at end of file once the supervisor is gone."""
        return self._lifeline.fileno()

    def wait_ready(self, timeout_s: float) -> Serving:
        """Wait until the server is ready. Returns its URL and the pids of its processes by name.

        Raises StartupError with the cause when the server ended first, TimeoutError after ``timeout_s`` seconds.
        """
        return self._first(Serving, timeout_s)

    def wait_gathering(self, timeout_s: float) -> Gathering:
        """Wait until stages can join the server. Returns the endpoint and the file with the secret.

        Raises StartupError when the server ended first, TimeoutError after ``timeout_s`` seconds.
        """
        return self._first(Gathering, timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit status. Raises TimeoutError when the server still lives after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            self._take(self._next_news(max(0.0, deadline - time.monotonic())))
        return self._status

    def drain(self) -> None:
        """Ask the server to refuse new requests, finish the live ones, and stop. Harmless when it is gone."""
        self._signal(signal.SIGTERM)

    def terminate(self) -> None:
        """Ask the server to stop without waiting for its requests. Harmless when it is gone."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the supervisor; its processes die with it. Harmless when it is gone."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the sockets of this handle; does not end the server."""
        self._lifeline.close()
        self._news.close()

    def _first(self, kind: type[_Early], timeout_s: float) -> _Early:
        while (news := self._received.get(kind)) is None and self._status is None:
            self._take(self._next_news(timeout_s))
        if isinstance(news, kind):
            return news
        report = read_death_report(self._private_dir)
        cause = report.cause if report is not None else "it left no report; see its log"
        who = report.process if report is not None else "server"
        raise StartupError(f"the server ended with status {self._status} before it was ready; {who}: {cause}")

    def _signal(self, number: signal.Signals) -> None:
        # Once the supervisor is gone, its pid may belong to another process.
        if self._status is None and self._alive():
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.kill(self.pid, number)

    def _alive(self) -> bool:
        """Return whether the lifeline is open, and so whether the supervisor lives."""
        self._lifeline.setblocking(False)
        try:
            return bool(self._lifeline.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _take(self, news: News) -> None:
        self._received[type(news)] = news
        if isinstance(news, Exited):
            self._status = news.status

    def _next_news(self, timeout_s: float | None) -> News:
        self._news.settimeout(timeout_s or (None if timeout_s is None else 0.001))
        frame = self._news.recv(FRAME_BYTES)
        if not frame:
            # The parent is gone, and its servers died with it.
            return Exited(status=-signal.SIGKILL)
        return _news_of(frame)


class PreloadedParent:
    """The client's handle of the parent, a context manager. ``close()`` ends the parent and its servers."""

    def __init__(self, process: subprocess.Popen[bytes], orders: socket.socket) -> None:
        self._process = process
        self._orders = orders
        self._has_forked = False

    @classmethod
    def start(cls, *modules: str) -> Self:
        """Start the parent and return at once, while it still imports.

        ``modules`` are the modules that its servers import beside the engine, such as the caller's gate; the parent
        imports them too.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", PARENT_MODULE, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A terminal's Ctrl-C must reach only the client, which then closes the parent cleanly.
                start_new_session=True,
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def serve(
        self, settings: ServerSettings, private_dir: Path, log_path: Path, *, remove_private_dir: bool = False
    ) -> ServerProcess:
        """Fork a server. Returns once it is forked, before it is ready.

        The caller owns ``private_dir``; with ``remove_private_dir`` the parent removes it at its own end, at the
        latest. The server appends its stdout and stderr to ``log_path`` and imports from the caller's ``sys.path``.
        Raises StartupError when the parent is gone.
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
        """Fork the agent of a stage that joins a server, as `engine stage --join` does; see ``serve``.

        The agent keeps its files in ``temp_dir``, so that a killed agent leaves none elsewhere.
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
        """End the parent and its servers within a bound. Idempotent.

        Kills a parent without servers at once: it has nothing to clean up, and may be importing for seconds.
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
