"""Carries messages and KV between the real engines of a fleet, in the script's process.

It acts as each prefill engine for a decode engine's front end, and as each side's stages for the other side. Everything
waits here until the fleet's links let it through.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from engine.core.errors import EngineError
from engine.core.frames import LENGTH_BYTES, framed
from engine.core.messages import Abort, Generate, PrefillDropped, PrefillFailed, PrefillWanted, encode
from engine.core.plan import SendPages
from engine.model.page_layout import PageLayout
from engine.pipeline.kv_frames import END, HEADER, KV_PROTOCOL, PAGE, Greeting, Verdict, decode_greeting, decode_verdict
from engine.process.kv_addresses import KVAddress, parse_kv_address
from scripted.core.violation import Violation
from scripted_lockstep.script.fleet import role_of
from scripted_lockstep.script.fleet_traffic import Heard, WiredEngine, Wires
from scripted_lockstep.simulated.transfers import SentPages
from scripted_lockstep.tiers.server.clients import NO_AUTHORITIES
from scripted_lockstep.tiers.server.loop_thread import LoopThread
from scripted_lockstep.tiers.server.remote import RemoteWorld

# The prefill engines that a decode engine of a fleet can ask.
MOST_PREFILLS: Final = 4
_LOOPBACK: Final = "127.0.0.1"
_RUN: Final = "fleet"
_WORK_TIMEOUT_S: Final = 30.0
# Raised in the thread when the peer closes a connection, or when the thread stops.
_OVER: Final = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
_BUSY: Final = (503, b'{"error": {"message": "an engine of a script stands still"}}')

# The sender, the receiver, the receiver's number of the transfer, the index of the first page.
_Order = tuple[str, str, int, int]
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Call:
    """A decode engine's request to a prefill engine for a prompt. ``answer`` is an HTTP status and a body.

    ``is_gone``: the decode engine has closed its end. ``is_left``: the prefill engine has closed its end.
    """

    body: dict[str, Any]
    answer: tuple[int, bytes] | None = None
    is_gone: bool = False
    is_left: bool = False
    rid: str = ""
    asking: asyncio.Task[None] | None = None
    # The answer to the decode engine; None breaks the connection.
    shown: tuple[int, bytes] | None = None
    is_shown: asyncio.Event = field(default_factory=asyncio.Event)


class RealWires(LoopThread, Wires):
    """The wires of all fleets of a script's process, one fleet after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__("fleet-wires")
        self._folder = folder
        self.worlds: dict[str, RemoteWorld] = {}
        self._calls: dict[tuple[str, int], _Call] = {}
        self._ports: dict[str, list[int]] = {}
        self._servers: dict[object, asyncio.Server] = {}
        # Pages that have left a stage, by the stage.
        self._pages: dict[_Order, dict[int, bytes]] = {}
        # Counts scripts. A connection that was opened before this script carries the pages of an earlier one.
        self._script = 0
        self._layouts: dict[tuple[str, str, int], PageLayout] = {}
        self._onward: dict[tuple[str, str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None), trust_env=False, verify=NO_AUTHORITIES)

    # -- for the host --

    def urls_for(self, decode: str) -> list[str]:
        """The URLs of all possible prefill engines for a decode engine of this name."""
        if decode not in self._ports:
            self._ports[decode] = self._do(self._listen_for(decode))
        return [f"http://{_LOOPBACK}:{port}" for port in self._ports[decode]]

    def addresses(self, prefill: str, decode: str) -> tuple[str, ...]:
        """The addresses of a decode engine's stages for the stages of a prefill engine."""
        stages = range(self.worlds[decode].limits.pp_size)
        return tuple(str(KVAddress(self._socket(prefill, decode, stage), _RUN)) for stage in stages)

    def begin(self, worlds: dict[str, RemoteWorld]) -> None:
        """Begin a script with these engines; nothing is in flight between them."""
        self.worlds = worlds
        self._do(self._begin())
        self.drop_pages()
        for world in worlds.values():
            self.introduce(world)

    def drop_pages(self) -> None:
        """Drop the pages of earlier scripts, also those still to come; the engines have closed their connections."""
        self._do(self._drop_pages())

    def introduce(self, world: RemoteWorld) -> None:
        """Tell an engine of a fleet the addresses of the others."""
        self.worlds[world.name] = world
        if world.limits.receives:
            world.urls = dict(zip(self._prefills, self.urls_for(world.name), strict=False))
        elif world.limits.prefills:
            world.addresses = {name: self.addresses(world.name, name) for name in self._decodes}

    @property
    def _prefills(self) -> list[str]:
        return [name for name in self.worlds if role_of(name) == "prefill"]

    @property
    def _decodes(self) -> list[str]:
        return [name for name in self.worlds if role_of(name) == "decode"]

    def take(self, prefill: str, order: SendPages) -> None:
        """Wait until the pages of an order are here."""
        decode = order.to[0]
        stages, key = self.worlds[decode].limits.pp_size, (prefill, decode, order.to_transfer, order.first)
        self._wait(prefill, lambda: len(self._pages.get(key, ())) == stages, f"{order} to leave {prefill}")

    # -- Wires --

    def leave(self, engine: WiredEngine, said: PrefillWanted | PrefillDropped) -> None:
        key = engine.name, said.transfer
        if isinstance(said, PrefillWanted):
            self._wait(engine.name, lambda: key in self._calls, f"{said} to leave {engine.name}")
        elif self._calls[key].shown is None:
            self._wait(engine.name, lambda: self._calls[key].is_gone, f"{said} to leave {engine.name}")

    def answer(self, engine: WiredEngine, receiver: str, transfer: int, *, failed: bool) -> None:
        call = self._calls.get((receiver, transfer))
        if call is None or call.is_left:
            return
        self._wait(engine.name, lambda: call.answer is not None, f"{engine.name} to answer transfer {transfer}")
        assert call.answer is not None
        if (call.answer[0] != httpx.codes.OK) is not failed:
            raise Violation(f"{engine.name} answered {call.answer} for transfer {transfer} of {receiver}")
        call.is_left = True
        if not failed:
            self._show(call, call.answer)

    def bring(self, sender: str, engine: WiredEngine, heard: Heard) -> None:
        world = self.worlds[engine.name]
        if isinstance(heard, Generate):
            assert heard.deliver is not None
            call = self._calls[sender, heard.deliver.transfer]
            call.rid = heard.rid
            body = call.body | {"to": world.addresses[sender], "rid": heard.rid}
            self._loop.call_soon_threadsafe(lambda: self._ask(call, f"{world.base_url}/prefill", body))
            came = world.await_message(
                lambda m: isinstance(m, Generate) and m.rid == heard.rid, unless=lambda: call.answer
            )
            if world.as_real(heard) != came:
                raise Violation(f"the front end of {engine.name} turned the request {heard} into {came}")
        elif isinstance(heard, Abort):
            self.break_off(engine, heard)
        elif isinstance(heard, PrefillFailed):
            call = self._calls[engine.name, heard.transfer]
            self._show(call, call.answer)
            self._await_failure(world, heard)

    def hand_on(self, sender: str, engine: WiredEngine, pages: SentPages, error: str | None) -> None:
        key = sender, engine.name, pages.transfer, pages.first
        verdicts = self._do(self._send_pages(key, self._pages.pop(key)))
        if any((verdict is None) is not (error is None) for verdict in verdicts):
            raise Violation(f"the stages of {engine.name} answered the pages with {verdicts}, expected {error}")

    def break_off(self, engine: WiredEngine, heard: Abort | PrefillFailed) -> None:
        world = self.worlds[engine.name]
        if isinstance(heard, PrefillFailed):
            call = self._calls[engine.name, heard.transfer]
            # A front end that was answered, or has left, gets nothing more.
            if call.shown is None and not call.is_gone:
                self._show(call, None)
                self._await_failure(world, heard)
            return
        for call in self._calls.values():
            if call.rid == heard.rid and not call.is_left:
                call.is_left = True
                assert call.asking is not None
                self._loop.call_soon_threadsafe(call.asking.cancel)
                world.await_message(lambda m: m == heard)

    def kill(self, engine: Any) -> None:
        """Kill an engine. The fleet ends its requests at the other engines."""
        handles = engine.run.handles
        self.worlds[engine.name].kill(
            lambda: all(one.client.closed for one in handles.all) and all(call.done for call in handles.calls)
        )
        self._do(self._forget_onward(engine.name))
        for (decode, number), call in list(self._calls.items()):
            if decode == engine.name:
                call.is_gone = True
                # A new engine of this name numbers its transfers from 1.
                del self._calls[decode, number]
                self._calls[decode, -number] = call

    # -- waiting --

    def _await_failure(self, world: RemoteWorld, failed: PrefillFailed) -> None:
        world.await_message(lambda m: isinstance(m, PrefillFailed) and m.transfer == failed.transfer)

    def _wait(self, name: str, done: Any, what: str) -> None:
        self.worlds[name].wait_until(done, what)

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._spawn(work).result(_WORK_TIMEOUT_S)

    def _show(self, call: _Call, answer: tuple[int, bytes] | None) -> None:
        call.shown = answer
        self._loop.call_soon_threadsafe(call.is_shown.set)

    # -- in the thread: requests for prompts --

    async def _listen_for(self, decode: str) -> list[int]:
        ports = []
        for number in range(MOST_PREFILLS):
            server = await asyncio.start_server(
                lambda reader, writer: self._act_as_prefill_engine(decode, reader, writer), _LOOPBACK, 0
            )
            self._servers[decode, number] = server
            ports.append(server.sockets[0].getsockname()[1])
        return ports

    async def _act_as_prefill_engine(
        self, decode: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Act as a prefill engine on one connection. Refuses every request other than a prompt."""
        with contextlib.suppress(*_OVER), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0].strip()
                body = await reader.readexactly(int(length or b"0"))
                answer: tuple[int, bytes] | None = _BUSY
                if head.startswith(b"post /prefill "):
                    answer = await self._answer_of(decode, json.loads(body), reader)
                if answer is None:
                    return
                status, content = answer
                writer.write(b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\n" % status)
                writer.write(b"content-length: %d\r\n\r\n%s" % (len(content), content))
                await writer.drain()

    async def _answer_of(
        self, decode: str, body: dict[str, Any], reader: asyncio.StreamReader
    ) -> tuple[int, bytes] | None:
        """Wait for the answer to a request; None if its connection broke or must be broken."""
        call = self._calls[decode, body["transfer"]] = _Call(body)
        self._wake()
        left = asyncio.ensure_future(reader.read(1))
        shown = asyncio.ensure_future(call.is_shown.wait())
        await asyncio.wait((left, shown), return_when=asyncio.FIRST_COMPLETED)
        is_left = left.done()
        left.cancel()
        shown.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        if is_left or call.shown is None:
            call.is_gone = True
            self._wake()
            return None
        return call.shown

    def _ask(self, call: _Call, url: str, body: dict[str, Any]) -> None:
        call.asking = self._loop.create_task(self._post(call, url, body))

    async def _post(self, call: _Call, url: str, body: dict[str, Any]) -> None:
        try:
            response = await self._http.post(url, json=body)
            call.answer = response.status_code, response.content
        except httpx.HTTPError as exc:
            call.answer = 0, str(exc).encode()
        finally:
            self._wake()

    # -- in the thread: pages --

    def _socket(self, prefill: str, decode: str, stage: int) -> Path:
        return self._folder / f"{prefill}-{decode}-{stage}"

    async def _begin(self) -> None:
        for name in self.worlds:
            await self._forget_onward(name)
        self._calls.clear()
        for prefill in self._prefills:
            for decode in self._decodes:
                for stage in range(self.worlds[decode].limits.pp_size):
                    path = self._socket(prefill, decode, stage)
                    if path not in self._servers:
                        self._servers[path] = await asyncio.start_unix_server(
                            self._taking(prefill, decode, stage), path
                        )

    async def _drop_pages(self) -> None:
        self._script += 1
        self._pages.clear()

    def _taking(self, prefill: str, decode: str, stage: int) -> Any:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(*_OVER), contextlib.closing(writer):
                await self._act_as_decode_stage(prefill, decode, stage, reader, writer)

        return take

    async def _act_as_decode_stage(
        self, prefill: str, decode: str, stage: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Act as a stage of a decode engine on one connection."""
        script = self._script
        layout = self._layouts[prefill, decode, stage] = decode_greeting(await _frame(reader)).layout
        writer.write(framed(encode(Verdict(None))))
        pages, key = bytearray(), None
        while True:
            header = await reader.readexactly(HEADER.size)
            kind, transfer, place = HEADER.unpack(header)
            if kind == PAGE:
                pages += header + await reader.readexactly(layout.image_bytes)
                key = key or (prefill, decode, transfer, place)
                continue
            if self._script != script:
                return
            if key is not None:
                self._pages.setdefault(key, {})[stage] = bytes(pages)
                self._wake()
                await self._confirm(key)
            writer.write(framed(encode(Verdict(None))))
            pages, key = bytearray(), None

    async def _confirm(self, key: _Order) -> None:
        """Confirm pages at once: the next pages follow the answer. The link decides when they have arrived."""

    async def _send_pages(self, key: _Order, pages: Mapping[int, bytes]) -> list[str | None]:
        """Act as the stages of a prefill engine: send pages to a decode engine's stages, and read their answers."""
        verdicts = []
        for stage, images in sorted(pages.items()):
            way = (*key[:2], stage)
            if way not in self._onward:
                self._onward[way] = await self._greet(way)
            reader, writer = self._onward[way]
            writer.write(images + HEADER.pack(END, key[2], 0))
            await writer.drain()
            verdicts.append(decode_verdict(await _frame(reader)).error)
        return verdicts

    async def _greet(self, way: tuple[str, str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = parse_kv_address(self.worlds[way[1]].kv_addresses()[way[2]])
        assert isinstance(address.place, Path)
        reader, writer = await asyncio.open_unix_connection(address.place)
        writer.write(framed(encode(Greeting(KV_PROTOCOL, address.run, self._layouts[way]))))
        refusal = decode_verdict(await _frame(reader)).error
        if refusal is not None:
            raise EngineError(f"{way[1]} refuses KV from {way[0]}: {refusal}")
        return reader, writer

    async def _forget_onward(self, name: str) -> None:
        for way in [way for way in self._onward if name in way[:2]]:
            self._onward.pop(way)[1].close()

    async def _end(self) -> None:
        for server in self._servers.values():
            server.close()
        await super()._end()
        for name in list(self.worlds):
            await self._forget_onward(name)
        await self._http.aclose()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little"))
