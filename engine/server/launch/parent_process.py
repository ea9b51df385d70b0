"""The process of the preloaded parent: ``python -m engine.server.launch.parent_process FD``, run by PreloadedParent.

Imports the engine, then forks and reaps a supervisor for each order on its socket. Stays single-threaded, computes
nothing, and ends when its client is gone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from engine.core.frames import BadFrameError
from engine.process.death import EXIT_FAILED
from engine.process.inheritance import close_inherited_files
from engine.process.links.secret import read_secret
from engine.process.settings import ServerSettings
from engine.process.signals import SignalWatch
from engine.server.launch.agent import run_agent
from engine.server.launch.imports import import_engine
from engine.server.launch.preload import (
    FRAME_BYTES,
    Exited,
    Forked,
    News,
    Order,
    ServeRequest,
    StageRequest,
    decode_order,
)
from engine.server.launch.supervisor import supervise
from lockstep.interruption import EXIT_INTERRUPTED
from lockstep.process_control import adopt_orphans, die_with_parent

# Time for a supervisor to end its own processes.
SERVERS_GRACE_S = 3.0
REAP_INTERVAL_S = 0.01
# Each order comes with the lifeline and the news socket.
SOCKETS_AN_ORDER = 2

logger = logging.getLogger(__name__)


def main(orders_fd: int, *modules: str) -> None:
    """Serve orders until the client is gone, then end the remaining servers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    import_engine(*modules)
    with socket.socket(fileno=orders_fd) as orders:
        parent = ForkingParent(orders)
        parent.run()
        parent.end_servers()
        parent.end_descendants()
        parent.remove_folders()


class ForkingParent:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self.servers: dict[int, socket.socket] = {}
        # A server's processes share its supervisor's session, even those that outlive it.
        self._sessions: set[int] = {os.getsid(0)}
        self._folders: list[str] = []
        self._selector = selectors.DefaultSelector()
        self.over = False

    def run(self) -> None:
        self._selector.register(self._orders, selectors.EVENT_READ, self.take_order)
        with SignalWatch(end=()) as signals:
            self._selector.register(signals, selectors.EVENT_READ, functools.partial(self._reap, signals))
            while not self.over:
                for key, _ in self._selector.select():
                    key.data()

    def end_servers(self) -> None:
        """Tell the supervisors to stop, wait within a bound, then kill them."""
        for pid in self.servers:
            os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + SERVERS_GRACE_S
        while self.servers and time.monotonic() < deadline:
            self._reap_ended()
            time.sleep(REAP_INTERVAL_S)
        for pid in self.servers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def end_descendants(self) -> None:
        """Kill every process that servers left behind, at any depth: the children of a killed process are adopted."""
        deadline = time.monotonic() + SERVERS_GRACE_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._reap_ended()
            time.sleep(REAP_INTERVAL_S)

    def remove_folders(self) -> None:
        """Remove the folders of a client that was killed; an orderly client has removed them before."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def take_order(self) -> None:
        frame, fds, _, _ = socket.recv_fds(self._orders, FRAME_BYTES, SOCKETS_AN_ORDER)
        if not frame:
            self.over = True
            return
        try:
            request = decode_order(frame)
        except BadFrameError as exc:
            _refuse(fds, f"dropped an undecodable order of {len(frame)} bytes: {exc}")
            return
        if isinstance(request, ServeRequest) and request.remove_private_dir:
            self._folders.append(request.private_dir)
        if _is_hung_up(self._orders):
            # Nobody is left to use this server, but the client's folder must still be removed.
            for fd in fds:
                os.close(fd)
            self.over = True
            return
        if len(fds) != SOCKETS_AN_ORDER:
            _refuse(fds, f"dropped an order, which must come with {SOCKETS_AN_ORDER} sockets, got {len(fds)}")
            return
        lifeline_fd, news_fd = fds
        news = socket.socket(fileno=news_fd)
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(request, lifeline_fd, news, parent_pid)
        os.close(lifeline_fd)
        self.servers[pid] = news
        self._sessions.add(pid)
        _tell(news, Forked(pid=pid))

    def _reap(self, signals: SignalWatch) -> None:
        signals.take()
        self._reap_ended()

    def _reap_ended(self) -> None:
        reaped = False
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                reaped = True
                if (news := self.servers.pop(ended[0], None)) is not None:
                    _tell(news, Exited(status=os.waitstatus_to_exitcode(ended[1])))
                    news.close()
        if reaped:
            # After the end of any process, because a killed supervisor may end before its own children.
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill adopted processes that left every server's session: nothing else would end them."""
        for child in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):
                if child.pid not in self.servers and os.getsid(child.pid) not in self._sessions:
                    os.kill(child.pid, signal.SIGKILL)


def _is_hung_up(link: socket.socket) -> bool:
    """Return whether the other end is closed, even if bytes are left to read."""
    poller = select.poll()
    poller.register(link, 0)
    return bool(poller.poll(0))


def _refuse(fds: list[int], why: str) -> None:
    """Drop an order; its client sees its sockets close."""
    logger.warning("%s", why)
    for fd in fds:
        os.close(fd)


def _become(request: Order, lifeline_fd: int, news: socket.socket, parent_pid: int) -> None:
    """Turn the forked child into the supervisor of one server, or the agent of one stage; never returns."""
    status, has_log = EXIT_FAILED, False
    try:
        # Until the supervisor handles signals itself, a stop signal, or the parent's death, interrupts it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The engine's processes close the lifeline, so only this process holds it, and it closes when this process
        # ends.
        close_inherited_files([lifeline_fd, news.fileno()])
        die_with_parent(parent_pid, signal.SIGINT)
        os.setsid()
        _redirect_output(Path(request.log_path))
        has_log = True
        status = _serve(request, news) if isinstance(request, ServeRequest) else _join(request)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BaseException as exc:  # noqa: BLE001 - only the log can show this
        # A client that has left has removed the log's folder.
        if has_log or not _is_hung_up(news):
            sys.excepthook(type(exc), exc, exc.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(request: ServeRequest, news: socket.socket) -> int:
    os.chdir(request.working_dir)
    sys.path[:] = request.import_path
    settings = ServerSettings.model_validate_json(request.settings)
    return supervise(settings, Path(request.private_dir), announce=functools.partial(_tell, news))


def _join(request: StageRequest) -> int:
    tempfile.tempdir = request.temp_dir or None
    return run_agent(request.order, read_secret(Path(request.secret_file)))


def _redirect_output(log_path: Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)


def _tell(news: socket.socket, message: News) -> None:
    """Send the client news, unless it has closed its handle."""
    try:
        news.send(msgspec.msgpack.encode(message))
    except OSError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
