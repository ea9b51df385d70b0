"""A script's request with a wrong grammar is refused as on a server, before anything is queued."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig
from scripted import RequestRefused, ScriptedSim


def script(t: Any) -> Any:
    schema = {"type": "object", "properties": {"a": {"items": {"type": "strng"}}}}
    for wrong, message in (
        ({"json_schema": schema}, r"400.*json_schema.*/properties/a/items.*strng"),
        ({"regex": "(a"}, r"400.*regex.*unclosed group"),
        ({"regex": "a", "ebnf": "start: /a/"}, r"400.*at most one field.*regex and ebnf"),
    ):
        with pytest.raises(RequestRefused, match=f"(?s){message}"):
            t.start_req(prompt_len=20, **wrong)
    yield
    assert t.is_fully_idle


def test_a_wrong_grammar_is_refused() -> None:
    with ScriptedSim.start(EngineConfig()) as engine:
        engine.run(script)
