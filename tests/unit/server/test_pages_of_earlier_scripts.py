"""Pages that an earlier script's prefill engine still had under way never reach a later script.

Both scripts number their transfers from 1, so nothing but the connection tells their pages apart.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_lockstep.actions.client_requests import DECODE_ENGINE, PREFILL_ENGINE
from scripted_lockstep.tiers.server.loop_thread import poll
from scripted_lockstep.tiers.server.role_world import RolePeer

from engine.core.messages import Delivery, Generate, SamplingParams
from engine.core.plan import SendPages
from engine.model.page_layout import PageLayout
from engine.pipeline.kv_frames import END, HEADER, KV_PROTOCOL, PAGE, Greeting, decode_verdict, read_frame, send_frame
from engine.process.kv_addresses import parse_kv_address

WAIT_S = 10.0
PAGE_TOKENS = 4
# Tokens and positions; the sanitizer's fingerprints are off.
IMAGE_BYTES = 2 * PAGE_TOKENS * 4
LAYOUT = PageLayout(0, 1, PAGE_TOKENS, None, (), None, IMAGE_BYTES)
ORDER = SendPages(1, (0,), (DECODE_ENGINE,), 1, 0)
TOKENS, EARLIER_TOKENS = (1, 2, 3, 4), (5, 6, 7, 8)


class _Stage:
    """A stage of the prefill engine under test."""

    def __init__(self, address: str) -> None:
        to = parse_kv_address(address)
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(WAIT_S)
        self.connection.connect(str(to.place))
        send_frame(self.connection, Greeting(KV_PROTOCOL, to.run, LAYOUT))
        assert decode_verdict(read_frame(self.connection)).error is None

    def send(self, tokens: tuple[int, ...]) -> None:
        image = struct.pack(f"={2 * PAGE_TOKENS}i", *tokens, *range(PAGE_TOKENS))
        self.connection.sendall(HEADER.pack(PAGE, 1, 0) + image + HEADER.pack(END, 1, 0))

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[RolePeer]:
    with contextlib.closing(RolePeer(tmp_path, "embedded")) as peer:
        yield peer


def _world(peer: RolePeer, name: str) -> Any:
    def wait_until(done: Any, what: str) -> None:
        while not done():
            assert poll({peer.fileno(): peer.clear}, WAIT_S), what

    limits = SimpleNamespace(pp_size=1, prefills=name == PREFILL_ENGINE, receives=name == DECODE_ENGINE)
    return SimpleNamespace(name=name, limits=limits, wait_until=wait_until)


def test_late_pages_of_an_earlier_script_are_dropped(peer: RolePeer) -> None:
    peer.begin({name: _world(peer, name) for name in (PREFILL_ENGINE, DECODE_ENGINE)})
    (address,) = peer.addresses(PREFILL_ENGINE, DECODE_ENGINE)
    with contextlib.closing(_Stage(address)) as earlier:
        peer.drop_pages()
        with contextlib.closing(_Stage(address)) as later:
            earlier.send(EARLIER_TOKENS)
            assert earlier.connection.recv(1) == b"", "the connection of an earlier script stays open"
            later.send(TOKENS)
            assert not list(peer.receive(ORDER, _prompt()))


def _prompt() -> Generate:
    delivery = Delivery(to=(DECODE_ENGINE,), transfer=1, first_page=0, weights="")
    return Generate(rid="a", prompt_ids=TOKENS, sampling=SamplingParams(max_new_tokens=0), deliver=delivery)
