"""Typical mistakes of users, as they type them, and the expected errors.

Every answer names the thing, the rule, the value and the remedy, and comes before any process is started and before
anything costly is imported. benchmarks/tables/mistakes.md shows them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import httpx
import typer.main
from fastapi import FastAPI
from tokenizers import Tokenizer

import engine.cli
import scripted.cli
from engine import EngineConfig
from engine.core.errors import EngineError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.frontend.http.app import build_app
from engine.frontend.http.auth import Access
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.forked_work import LongBodies
from engine.frontend.http.routes.information import ServerState
from engine.frontend.sessions.requests import ServedModel
from engine.frontend.text.dialect import PLAIN
from engine.frontend.text.tokenizer import ChatTemplate
from engine.model.embedded import embedded_folder
from engine.process.settings import ServerSettings

KEY = "sesame"
# What belongs to the machine and not to the answer.
FILES = {
    "file": "",
    "closed/note": "",
    "model.gguf": "GGUF",
    "empty/note": "",
    "unfinished/config.json": '{"model_type": "qwen3"}',
    "awkward/config.json": "{",
    "misspelt.toml": "pp_szie = 1",
    "broken.yaml": "a: [",
    "settings.ini": "pp_size = 1",
    "secret": "x" * 64,
    "scripts.py": "def plain(t):\n    yield\n",
}
ROWS, HEAD_LINES = Path(__file__).with_suffix(".txt"), 2
PORT_IN_USE, FOLDER = "$PORT", "$TMP"
COMMANDS = {"engine": engine.cli.main, "scripted": scripted.cli.main}
CHAT = '{"model": "embedded", "messages": [{"role": "user", "content": "hi"}]'


class Mistake(NamedTuple):
    """A mistake as it is typed, and words of its answer: the thing, the rule, the value, the remedy."""

    typed: str
    thing: str
    rule: str
    value: str
    remedy: str


def _read() -> dict[str, list[Mistake]]:
    groups: dict[str, list[Mistake]] = {}
    for line in ROWS.read_text(encoding="utf-8").splitlines()[HEAD_LINES:]:
        if line.startswith("# "):
            mistakes = groups.setdefault(line.removeprefix("# "), [])
        elif line:
            mistakes.append(Mistake(*line.replace("CHAT", CHAT).split(" | ")))
    return groups


MISTAKES = _read()


class _Template:
    """A chat template that nothing here gets as far as."""

    chat_template = "brackets"

    def apply_chat_template(self, conversation: Sequence[object], **_: object) -> str:
        return str(conversation)


def _forbidden(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a mistake must be told before any process is started and before the costly imports")


@contextlib.contextmanager
def _world() -> Iterator[Callable[[str], str]]:
    """A folder of files, a port in use, and nothing that can start; what it yields puts both into what is typed."""
    access, resolve = os.access, socket.getaddrinfo

    def may(path: object, mode: int, **options: Any) -> bool:
        return "closed" not in str(path) and access(path, mode, **options)  # type: ignore[arg-type] # root may all

    def resolved(host: str, *rest: Any, **options: Any) -> Any:
        if host.endswith(".invalid"):  # Without asking the network.
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **options)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name, text in FILES.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text)
            (Path(folder) / name).chmod(0o600)
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(patch("typer.main.get_command", functools.cache(typer.main.get_command)))  # it takes long
        stack.enter_context(patch("os.access", may))
        stack.enter_context(patch("socket.getaddrinfo", resolved))
        for name in (
            "os.fork",
            "os.posix_spawn",
            "subprocess.Popen.__init__",
            "engine.server.launch.supervisor.import_models",
        ):
            stack.enter_context(patch(name, _forbidden))
        for name in ("keep_private", "configure_logging", "limit_imports"):  # They change this process.
            stack.enter_context(patch(f"engine.server.launch.supervisor.{name}"))
        stack.enter_context(patch("engine.server.launch.resolution._has_gpu_driver", lambda: True))
        stack.enter_context(patch("engine.server.launch.resolution._visible_gpus", lambda: 1))
        port = str(taken.getsockname()[1])
        yield lambda typed: typed.replace(FOLDER, folder).replace(PORT_IN_USE, port)


def _of_command(typed: str) -> str:
    """Run a command and return its output. It must exit with 2, or with 1 if a server cannot start."""
    words = shlex.split(typed)
    variables = {"COLUMNS": "500"}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    words += ["--port", "0"] if words[:2] == ["engine", "serve"] and "--port" not in typed else []
    said, status = io.StringIO(), None
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "argv", words),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
    ):
        try:
            COMMANDS[words[0]]()
        except SystemExit as ended:
            status = ended.code
    assert status in (1, 2), f"{typed}: ended with {status}: {said.getvalue()}"
    lines = [line for line in said.getvalue().splitlines() if line and not line.startswith(("Usage: ", "Try '"))]
    return " ".join(lines)


def _of_python(typed: str) -> str:
    try:
        made = eval(typed, {"EngineConfig": EngineConfig, "ServerSettings": ServerSettings})
    except (EngineError, TypeError) as exc:
        return str(exc)
    raise AssertionError(f"{typed}: made {made}")


def _of_request(typed: str, app: FastAPI) -> str:
    method, path, *rest = typed.split(maxsplit=2)
    text, _, key = (
        "".join(rest).rpartition("Authorization: ") if "Authorization: " in typed else ("".join(rest), "", "")
    )
    headers = {"content-type": "application/json", "authorization": key or f"Bearer {KEY}"}

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await asyncio.wait_for(client.request(method, path, content=text.strip(), headers=headers), 10)

    response = asyncio.run(asked())
    assert 400 <= response.status_code < 500, f"{typed}: {response.status_code} {response.text}"
    return f"{response.status_code} {response.json()['error']['message']}"


def _app(folder: Path) -> FastAPI:
    """The front end of the embedded model, over no scheduler."""
    settings = ServerSettings(api_key=KEY)
    limits = Limits.of(settings, EMBEDDED_FACTS)
    tokenizer = Tokenizer.from_file(str(embedded_folder(0) / "tokenizer.json"))
    served = ServedModel(tokenizer, ChatTemplate(_Template()), limits, settings.model_name, PLAIN)
    state, access = ServerState(dict(limits.loras), serving=True), Access(settings, "127.0.0.1")
    return build_app(settings, served, EngineClient(folder), access, LongBodies(_forbidden), state)


@functools.cache
def answers() -> dict[str, str]:
    """Map each mistake, as it is typed, to its answer."""
    with _world() as put:
        app = _app(Path(put(FOLDER)))
        back = {put(FOLDER): FOLDER, put(PORT_IN_USE): PORT_IN_USE, str(Path.cwd()): "$PWD"}
        said = {}
        for typed in [mistake.typed for mistakes in MISTAKES.values() for mistake in mistakes]:
            answer = _answer(put(typed), app)
            said[typed] = functools.reduce(lambda text, one: text.replace(*one), back.items(), answer)
        return said


def _answer(typed: str, app: FastAPI) -> str:
    if typed.startswith(("GET ", "POST ")):
        return _of_request(typed, app)
    return _of_python(typed) if re.match(r"\w+\(", typed) else _of_command(typed)
