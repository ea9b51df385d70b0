"""Scripts that test nothing: each is refused where it is decorated, fails at its end, or leaves a loose end."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from thinned import thinned

from scripted import ScriptDefinitionError, ScriptedSim, ScriptFailed

HEAD = """
import contextlib
import pytest
from engine import EngineConfig
from scripted import scripted
import {helpers} as helpers

CONFIG = EngineConfig(max_loras=1)


def check(t, r):
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"


def holds(r):
    return r.finish_reason == "stop"


def compares(r):
    r.finish_reason == "stop"


def weak(r):
    assert len(r.output_ids) >= 0


class Base:
    def check(self, t, r):
        yield from t.run_until_finished(r)
        assert r.finish_reason == "stop"
"""
HELPERS = """
def check(t, r):
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"
"""
SCRIPT = """

@scripted(CONFIG)
def test_wrong(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    {body}
"""
AND_ASSERTS = "\n    assert r.finish_reason == 'length'"
# Bodies of scripts. Those that end with an assertion do something else that is wrong.
WRONG = {
    "nothing at all": "pass",
    "a helper in a name": "_ = check(t, r)" + AND_ASSERTS,
    "a helper of a module": "helpers.check(t, r)" + AND_ASSERTS,
    "helpers in a list": "[check(t, x) for x in [r]]" + AND_ASSERTS,
    "helpers in a kept list": "kept = [helpers.check(t, x) for x in [r]]" + AND_ASSERTS,
    "helpers by map": "kept = list(map(lambda x: check(t, x), [r]))" + AND_ASSERTS,
    "a helper that is asserted": "assert check(t, r)",
    "a helper that is a condition": "if check(t, r):\n        assert r.finish_reason == 'length'",
    "a comparison in a helper": "compares(r)" + AND_ASSERTS,
    "an answer of a helper": "holds(r)" + AND_ASSERTS,
    "a weak helper": "weak(r)",
    "a list": "assert [r.finish_reason == 'stop']",
    "a list of all": "assert [x.finish_reason == 'stop' for x in [r]]",
    "a dict": "assert {'reason': r.finish_reason == 'stop'}",
    "a length": "assert len(r.output_ids) >= 0",
    "a length from the left": "assert 0 <= len(r.output_ids)",
    "the same on both sides": "assert r.output_ids == r.output_ids",
    "or a word": "assert r.finish_reason == 'stop' or 'abort'",
    "or a list": "assert r.finish_reason == 'stop' or [1]",
    "and a length": "assert r.finished and len(r.output_ids) >= 0",
    "a side that always holds": "assert r.finish_reason == 'stop' if r.output_ids else True",
    "a stored comparison": "good = r.finish_reason == 'stop'" + AND_ASSERTS,
    "a returned comparison": "return r.finish_reason == 'stop'",
    "an assertion in an empty loop": "for x in t.list_active_reqs():\n        assert x.rid == 'a'",
    "an assertion beside an empty loop": "for x in t.list_active_reqs():\n        assert x.rid == 'a'" + AND_ASSERTS,
    "an assertion under a false condition": "if r.finish_reason == 'stop':\n        assert len(r.output_ids) == 9",
    "an assertion that is caught": (
        "try:\n        assert r.finish_reason == 'stop'\n    except AssertionError:\n        pass" + AND_ASSERTS
    ),
    "an assertion that is suppressed": (
        "with contextlib.suppress(AssertionError):\n        assert r.finish_reason == 'stop'" + AND_ASSERTS
    ),
    "an inner function": "def inner():\n        assert r.finish_reason == 'stop'",
    "a refusal that never comes": (
        "try:\n        t.start_req(prompt_len=5)\n    except ValueError as e:\n        assert e"
    ),
    "an abort too late": "t.abort(r)\n    yield" + AND_ASSERTS,
    "a pause of nobody": "t.pause_generation()\n    yield\n    t.continue_generation()\n    yield" + AND_ASSERTS,
    "a hold of nothing": "t.hold_results()\n    yield\n    t.release_results()" + AND_ASSERTS,
    "an eviction of nothing": "t.evict()\n    t.evict()" + AND_ASSERTS,
    "a limit that never comes": (
        "r = t.start_req(prompt_len=5, timeout_s=9)\n    yield from t.run_until_finished(r)" + AND_ASSERTS
    ),
    "a LoRA that nobody uses": "t.load_lora('a', 'embedded-lora:1')\n    yield\n    yield\n    yield" + AND_ASSERTS,
}
RIGHT = {
    "an assertion": "assert r.finish_reason == 'length'",
    "in a helper of a module": (
        "yield from helpers.check(t, t.start_req(prompt_len=5, stop_token_ids=r.output_ids[:1]))"
    ),
    "expected errors": "with pytest.raises(Exception, match='is refused|takes'):\n        t.start_req(prompt_len=-1)",
    "a condition that raises": "if r.finish_reason != 'length':\n        raise AssertionError(r.finish_reason)",
    "a condition that fails": "if r.finish_reason != 'length':\n        pytest.fail('it ended otherwise')",
    "a smoke test": "t.smoke()",
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Runs the decorated script of a body as pytest's plugin does; returns what it leaves, without zeros."""
    names = [f"wrong_{tmp_path.name}", f"helpers_{tmp_path.name}"]

    def make(name: str, source: str) -> types.ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def ran(body: str) -> dict[str, int]:
        make(names[1], HELPERS)
        test = make(names[0], HEAD.format(helpers=names[1]) + SCRIPT.format(body=body)).test_wrong.scripted
        with ScriptedSim.start(test.config) as sim:
            ended = sim.run(test.script, options=test.options)
        never = sum(not count for count in ended.asked.values())
        return ended.loose_ends | ({"assertions that were never reached": never} if never else {})

    yield ran
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("wrong", thinned(WRONG, one_in=3))
def test_a_script_that_tests_nothing_is_noticed(run: Any, wrong: str) -> None:
    try:
        loose_ends = run(WRONG[wrong])
    except (ScriptDefinitionError, ScriptFailed) as exc:
        assert "test_wrong" in str(exc), exc  # noqa: PT017 - one of two ways to be noticed
    else:
        assert loose_ends


@pytest.mark.parametrize("right", thinned(RIGHT, one_in=2))
def test_what_asks_something_passes(run: Any, right: str) -> None:
    loose_ends = run(RIGHT[right])
    loose_ends.pop("bad calls that the script caught", None)
    assert not loose_ends


def test_assertions_in_helpers_are_introspected(run: Any) -> None:
    with pytest.raises(ScriptFailed, match="assert 'length' == 'stop'"):
        run("yield from helpers.check(t, t.start_req(prompt_len=5))")
