"""Asks a running server of this engine for its last steps: ``/server_info`` names its folder and its process.

The process is asked by a signal and writes a file, so it must run on this machine.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit

import msgspec
import psutil

from engine.server.scheduler_process.main import flight_path
from scripted.core.refusals import ScriptDefinitionError

_KEY_VARIABLE: Final = "ENGINE_API_KEY"
_HTTP_TIMEOUT_S: Final = 10.0
_LONGEST_S: Final = 20.0
_LOOK_S: Final = 0.05
_MOST_BYTES: Final = 1 << 20


class _Settings(msgspec.Struct):
    flight_dir: str


class _Processes(msgspec.Struct):
    scheduler: int
    frontend: int


class _ServerInfo(msgspec.Struct):
    settings: _Settings
    processes: _Processes


def recording_of_server(url: str) -> Path:
    """Have the server write its last steps, and return the file.

    Raises ScriptDefinitionError if there is no such server of this user on this machine, or if it keeps no steps.
    """
    info = _info_of(url)
    pid = info.processes.scheduler
    if not _listens(info.processes.frontend, url):
        _refuse(url, "is not on this machine, or belongs to another user; run the command there, as that user")
    if not info.settings.flight_dir:
        _refuse(url, "keeps no steps; start it with --flight-dir FOLDER")
    try:
        path = flight_path(str(Path(psutil.Process(pid).cwd()) / info.settings.flight_dir), pid)
        before = _time_of(path)
        os.kill(pid, signal.SIGUSR2)
    except (psutil.Error, OSError, ValueError, OverflowError) as exc:
        _refuse_unasked(url, exc)
    deadline = time.monotonic() + _LONGEST_S
    while _time_of(path) == before:
        if not psutil.pid_exists(pid):
            _refuse_unasked(url, psutil.NoSuchProcess(pid))
        if time.monotonic() > deadline:
            _refuse(url, f"has not written {path} within {_LONGEST_S:g} s; `py-spy dump --pid {pid}` shows why")
        time.sleep(_LOOK_S)
    return path


def _info_of(url: str) -> _ServerInfo:
    try:
        import httpx
    except ImportError:
        _refuse(url, "needs httpx to be asked; install lockstep-engine[serve]")
    key = os.environ.get(_KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}/server_info?timeout=0"
    try:
        with httpx.stream("GET", address, headers=headers, timeout=_HTTP_TIMEOUT_S) as answer:
            body = b""
            for part in answer.iter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        _refuse(url, f"does not answer ({exc}); check the URL, or give a recording")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        _refuse(url, f"wants a key; set {_KEY_VARIABLE}")
    try:
        return msgspec.json.decode(body, type=_ServerInfo)
    except (msgspec.DecodeError, RecursionError):
        _refuse(
            url,
            f"is no server of this engine: GET /server_info gave {answer.status_code}; of a vLLM or SGLang server give "
            "the folder that LOCKSTEP_RECORD names",
        )


def _listens(pid: int, url: str) -> bool:
    """Whether this process of this machine listens at the URL: the number may be a stranger's here."""
    split = urlsplit(url)
    port = split.port or {"http": 80, "https": 443}.get(split.scheme)
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, ValueError, OverflowError):
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def _time_of(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _refuse_unasked(url: str, exc: Exception) -> NoReturn:
    _refuse(url, f"has no scheduler that can be asked ({exc}); its log says whether it died, and why")


def _refuse(url: str, why: str) -> NoReturn:
    raise ScriptDefinitionError(f"the server at {url} {why}")
