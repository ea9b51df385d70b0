"""A verb bounds what it builds from its arguments: an excess is refused at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from engine import EngineConfig
from scripted import BadCall, ScriptedSim
from scripted.core.prompts import MOST_ITEMS


class Endless:
    """An iterable without an end, which counts the items that were taken of it."""

    def __init__(self, item: object) -> None:
        self._item = item
        self.taken = 0

    def __iter__(self) -> Iterator[object]:
        for self.taken in itertools.count(1):
            assert self.taken <= MOST_ITEMS + 1, "one beyond the bound is enough"
            yield self._item


ARGUMENTS: dict[str, dict[str, Any]] = {
    "prompt_len": {"prompt_len": 10_000_000_000},
    "prompt_ids": {"prompt_ids": Endless(1)},
    "stop_token_ids": {"prompt_len": 4, "stop_token_ids": Endless(1)},
    "stop": {"prompt_len": 4, "stop": Endless("a")},
}


def _refused(call: Any) -> str:
    with pytest.raises(BadCall) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_without_an_end_is_refused(name: str) -> None:
    said = []

    def script(t):
        said.append(_refused(lambda: t.start_req(**ARGUMENTS[name])))
        yield

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script)
    assert name in said[0]
    assert str(MOST_ITEMS) in said[0]


def test_a_wait_for_one_request_names_the_wait_for_several() -> None:
    said = []

    def script(t):
        both = [t.start_req(prompt_len=4, max_new_tokens=2) for _ in range(2)]
        said.append(_refused(lambda: t.run_until_finished(*both)))
        yield from t.run_until_all_finished(both)

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script)
    assert "run_until_all_finished([r, s])" in said[0]


def test_an_argument_that_start_req_does_not_have_is_named() -> None:
    said = []

    def script(t):
        said.append(_refused(lambda: t.start_req(prompt_len=4, max_tokens=2)))
        yield from t.run_until_finished(t.start_req(prompt_len=4, max_new_tokens=2))

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script)
    assert "(did you mean 'max_new_tokens'?); it takes prompt_len, prompt_ids, " in said[0]


def test_handles_and_prefixes_without_an_end_are_refused() -> None:
    said = []

    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        said.append(_refused(lambda: t.run_until_all_finished(Endless(r))))
        said.append(_refused(lambda: next(iter(t.warmup_radix(Endless(1))))))
        yield from t.run_until_finished(r)

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script)
    assert "its handles" in said[0]
    assert "prompt_ids" in said[1]
