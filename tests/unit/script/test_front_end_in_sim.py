"""The sim tier runs the front end's own decisions: what breaks them there shows in a script here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from engine import EngineConfig
from engine.frontend.sessions import sessions
from engine.frontend.text import answer
from scripted import ScriptedSim

CONFIG = EngineConfig(pp_size=2, pp_async_depth=1)


def script(t: Any) -> Generator[None, None, None]:
    """A stream, an answer in one, a stop string, and a rid that is used again in the window of its abort."""
    whole = t.start_req(prompt_len=20, max_new_tokens=8)
    yield from t.run_until_finished(whole)
    one = t.start_req(prompt_len=20, max_new_tokens=8, stream=False, stop=whole.client.text[3:5])
    again = t.start_req(prompt_len=9, max_new_tokens=30, rid="twice")
    yield from t.run_until(lambda: len(again.output_ids) > 2)
    t.abort(again)
    second = t.start_req(prompt_len=9, max_new_tokens=4, rid="twice")
    yield from t.run_until_finished(one)
    yield from t.run_until_finished(second)
    assert one.client.text == whole.client.text[: whole.client.text.index(whole.client.text[3:5])]
    assert (second.client.status, len(second.client.token_ids)) == (200, 4)


def _without_the_end(session: sessions.Session) -> bytes:
    """The part that ends a stream is lost."""
    part = _part(session)
    return b"" if session.is_told else part


def _twice(events: Any) -> bytes:
    part = _written(events)
    return part + part


def _to_the_newest(held: sessions.Sessions, reply: Any) -> None:
    """Every reply goes to the newest request of its rid."""
    held._ending.clear()
    _take(held, reply)


def _shown_whole(scanner: answer.StopScanner, text: str) -> str:
    return text


_part, _written, _take = sessions.Session.part, sessions.written, sessions.Sessions.take
BROKEN: list[tuple[object, str, Callable[..., Any]]] = [
    (sessions.Session, "part", _without_the_end),
    (sessions, "written", _twice),
    (sessions, "is_shown", lambda piece: piece.meta_info.finish_reason is None),
    (sessions, "joined", lambda pieces: pieces[-1]),
    (sessions.Sessions, "take", _to_the_newest),
    (answer.StopScanner, "push", _shown_whole),
]


def run() -> None:
    with ScriptedSim.start(CONFIG) as sim:
        sim.run(script)


def test_the_script_passes() -> None:
    run()


@pytest.mark.parametrize(("owner", "name", "broken"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_broken_part_of_the_front_end_fails_a_script(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: Callable[..., Any]
) -> None:
    """None of these could show while the sim tier had its own front end."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Exception):  # noqa: B017, PT011 - each is found in its own way
        run()
