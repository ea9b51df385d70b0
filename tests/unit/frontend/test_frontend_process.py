"""The front end's process, run in this one: ready when it listens, obeys the supervisor, and ends cleanly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from engine.core.errors import ProcessDiedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.frontend.http import process
from engine.frontend.http.forked_work import ForkedWork
from engine.frontend.sessions import requests
from engine.frontend.sessions.requests import ServedModel
from engine.frontend.text.tokenizer import ChatTemplate
from engine.process.control import (
    SUPERVISOR,
    Control,
    Drain,
    Drained,
    ProcessDied,
    Ready,
    Serving,
    Shutdown,
    decode_child_message,
)
from engine.process.death import read_death_report
from engine.process.private_dir import PrivateDir
from engine.process.settings import ServerSettings

PATIENCE_S = 30.0


# What it tells its supervisor: no parser is chosen for a tokenizer without a chat template.
READY = Ready(about={"tool_call_parser": "none", "reasoning_parser": "none"})


class Tokens:
    """A tokenizer of one token a byte."""

    def get_vocab(self) -> dict[str, int]:
        return {f"<0x{token_id:02X}>": token_id for token_id in range(256)}

    def id_to_token(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"

    def get_added_tokens_decoder(self) -> dict[int, object]:
        return {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class Source:
    """A tokenizer without a chat template."""

    chat_template: str | None = None


class Reading:
    """Stand in for ``ForkedWork``, with the part that the front end watches."""

    why_lost = "it closed its socket"

    def __init__(self) -> None:
        self._ours, self.other = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    async def run(self, *parts: bytes, is_check: bool) -> bytes:
        return b"".join(parts)

    def look_at_parent(self) -> None:
        """There is none."""

    def close(self) -> None:
        self._ours.close()
        self.other.close()


class Process:
    """The front end in this event loop, with the supervisor's end of its pipe."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.supervisor, child = Pipe()
        self.reading = Reading()
        self.settings = ServerSettings(**settings)
        self.limits = Limits.of(self.settings, EMBEDDED_FACTS)
        self.served = ServedModel(cast(Any, Tokens()), ChatTemplate(cast(Any, Source())), self.limits, "model")
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.http = httpx.AsyncClient(base_url=self.url)
        self.ending: asyncio.Task[None] = asyncio.create_task(
            process._serve(
                Control(child),
                self.settings,
                self.served,
                cast(ForkedWork, self.reading),
                self.listener,
                PrivateDir(folder),
            )
        )

    def say(self, message: msgspec.Struct) -> None:
        self.supervisor.send_bytes(msgspec.msgpack.encode(message))

    async def hear(self) -> object:
        """Return the front end's next message to the supervisor."""
        assert await asyncio.to_thread(self.supervisor.poll, PATIENCE_S), self.ending
        return decode_child_message(self.supervisor.recv_bytes())

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def holds_a_request(self) -> None:
        """Wait until the front end has a request that is not answered."""
        while not (await self.http.get("/server_info?timeout=0")).json()["open_requests"]:
            await asyncio.sleep(0.01)

    async def serve(self) -> None:
        """Told that every process is ready."""
        assert await self.hear() == READY
        self.say(Serving(base_url=self.url, pids={"frontend": 7}))
        while await self.status("/health") != 200:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _started(folder: Path, **settings: Any) -> AsyncIterator[Process]:
    one = Process(folder, **settings)
    try:
        yield one
    finally:
        one.ending.cancel()
        await asyncio.gather(one.ending, return_exceptions=True)
        await one.http.aclose()
        one.reading.close()
        one.supervisor.close()
        one.listener.close()


def _play(folder: Path, scene: Callable[[Process], Awaitable[None]], **settings: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S), _started(folder, **settings) as one:
            await scene(one)

    asyncio.run(bounded())


def test_it_is_ready_when_it_listens_and_serves_when_it_is_told(tmp_path: Path) -> None:
    async def scene(one: Process) -> None:
        assert await one.hear() == READY
        assert await one.status("/health") == 503
        one.supervisor.send_bytes(b"no message")
        one.say(Serving(base_url=one.url, pids={"frontend": 7, "stage-0": 8}))
        while await one.status("/health") != 200:
            await asyncio.sleep(0.01)
        answer = await one.http.get("/server_info")
        assert answer.json()["processes"] == {"frontend": 7, "stage-0": 8}
        assert {"date", "server"}.isdisjoint(answer.headers)
        one.say(Shutdown())
        await one.ending

    _play(tmp_path, scene)


def test_drained_is_said_when_the_last_request_has_ended(tmp_path: Path) -> None:
    async def scene(one: Process) -> None:
        await one.serve()
        generating = asyncio.create_task(one.http.post("/generate", json={"input_ids": [1, 2]}))
        await one.holds_a_request()
        one.say(Drain())
        while (refused := await one.http.post("/generate", json={"input_ids": [1]})).status_code != 503:
            await asyncio.sleep(0.01)
        assert "the server is draining; use another one" in refused.text
        assert not one.supervisor.poll(0.1), "a request is alive"
        one.say(Shutdown())
        assert "shutting down; the request was cut off" in (await generating).text
        await one.ending

    _play(tmp_path, scene)


def test_an_idle_front_end_is_drained_at_once(tmp_path: Path) -> None:
    async def scene(one: Process) -> None:
        await one.serve()
        one.say(Drain())
        assert await one.hear() == Drained()
        one.say(Shutdown())
        await one.ending

    _play(tmp_path, scene)


def _kill_stage(one: Process) -> None:
    one.say(ProcessDied(process="stage-1", cause="it was killed by signal 9 (SIGKILL)"))


def _kill_supervisor(one: Process) -> None:
    one.supervisor.close()


def _kill_reader(one: Process) -> None:
    one.reading.other.close()


@pytest.mark.parametrize(
    ("kill", "died"), [(_kill_stage, "stage-1"), (_kill_supervisor, SUPERVISOR), (_kill_reader, process.READER)]
)
def test_a_death_is_told_to_clients_and_ends_it(tmp_path: Path, kill: Callable[[Process], None], died: str) -> None:
    async def scene(one: Process) -> None:
        await one.serve()
        generating = asyncio.create_task(one.http.post("/generate", json={"input_ids": [1, 2]}))
        await one.holds_a_request()
        kill(one)
        answer = await generating
        assert answer.status_code == 503
        assert "the server is going down because" in answer.text
        assert died in answer.text
        assert await one.status("/health") == 503, "a probe sees it before the end"
        with pytest.raises(ProcessDiedError) as caught:
            await one.ending
        assert caught.value.process == died

    _play(tmp_path, scene)


def test_the_first_death_is_the_one_that_is_told(tmp_path: Path) -> None:
    async def scene(one: Process) -> None:
        await one.serve()
        _kill_stage(one)
        _kill_reader(one)
        with pytest.raises(ProcessDiedError) as caught:
            await one.ending
        assert caught.value.process == "stage-1"

    _play(tmp_path, scene)


@pytest.mark.parametrize(("lent", "log_format"), [(True, "text"), (False, "json")])
def test_a_killed_supervisor_s_work_is_done_by_the_front_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lent: bool, log_format: str
) -> None:
    folder = PrivateDir(tmp_path if lent else None)
    (folder.path / "progress").write_text("x")
    death = ProcessDiedError(SUPERVISOR, "its control pipe closed")
    process._clear_up(ServerSettings(log_format=log_format), folder, death)
    said = capsys.readouterr().err
    assert "the supervisor process died and the server with it: its control pipe closed" in said
    assert (log_format == "json") == (said.startswith("{") and json.loads(said)["level"] == "error")
    assert folder.path.exists() == lent
    report = read_death_report(tmp_path)
    assert (report is not None) == lent
    if report is not None:
        assert (report.process, report.pid) == (SUPERVISOR, 0)
        assert not (tmp_path / "progress").exists()


class _Forked:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("died", [SUPERVISOR, None])
def test_a_run_ends_with_its_reader_and_clears_up_after_the_supervisor_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, died: str | None, cut: bool
) -> None:
    reading, clearing = _Forked(), []
    control = SimpleNamespace(is_cut=cut)

    async def serve(*_: object) -> None:
        if died is not None:
            raise ProcessDiedError(died, "so it is")

    monkeypatch.setattr(requests, "load_tokenizer", lambda _: (Tokens(), ChatTemplate(cast(Any, Source()))))
    monkeypatch.setattr(ForkedWork, "start", lambda *_, **__: reading)
    monkeypatch.setattr(process, "_serve", serve)
    monkeypatch.setattr(process, "_clear_up", lambda *_: clearing.append(1))
    settings = ServerSettings()
    arguments = cast(Control, control), settings, Limits.of(settings, EMBEDDED_FACTS), cast(socket.socket, None)
    if died is None:
        process.run_frontend(*arguments, PrivateDir(tmp_path))
    else:
        with pytest.raises(ProcessDiedError):
            process.run_frontend(*arguments, PrivateDir(tmp_path))
    assert reading.is_closed
    assert bool(clearing) is (cut and died is not None), "a supervisor that says why it ends clears up itself"
