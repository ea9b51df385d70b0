"""Plausible scripts that test nothing, each with who notices: the table of ``test_silent_scripts``.

``BEFORE`` stands in every file. A body comes after a request that has ended by its length; ``HOLDS`` is an assertion
that is in order, so that only what stands beside it can be noticed.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BEFORE", "HOLDS", "INNOCENT", "SILENT", "source_of"]

BEFORE: Final = """
import contextlib
import dataclasses
import functools

import pytest

from engine import EngineConfig
from scripted import scripted

CONFIG = EngineConfig(max_loras=1)
EXPECTED = "length"
STRICT = False
HOOKS = []


def check(t, r):
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"


def check_now(r):
    assert r.finish_reason == "stop"


def same(one, other):
    assert one.output_ids == other.output_ids


def expect(condition):
    return condition


def swallow(check):
    try:
        check()
    except AssertionError:
        pass


class Quiet:
    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return True


def assert_if_it_ran(r):
    if r.is_running:
        assert r.output_ids


@dataclasses.dataclass
class Case:
    steps: object


class Checks:
    def __init__(self, r):
        self.r = r

    def ended(self):
        assert self.r.finish_reason == "stop"
"""
SCRIPT: Final = """

@scripted(CONFIG{options})
def test_silent(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    {body}
"""
INNOCENT: Final = """
from engine import EngineConfig
from scripted import scripted


@scripted(EngineConfig(max_loras=1))
def test_innocent(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"
"""
HOLDS: Final = '\n    assert r.finish_reason == "length"'

LONG_REQUEST: Final = """again = t.start_req(prompt_len=40, max_new_tokens=20)
    yield from t.run_until_finished(again)
    assert again.finished and again.status in ("finished", "aborted")"""

# Who notices: "refused" where it is decorated, "fails" when it runs, "named" by pytest's summary, "vet" alone.
SILENT: Final[dict[str, tuple[str, str]]] = {
    "a word that a set can never hold": ("fails", 'assert r.status not in {"done", "over"}'),
    "a word that keys can never hold": ("fails", 'assert r.finish_reason not in {"eos": 1}.keys()'),
    "generators in a dict": ("fails", 'checks = {"first": check(t, r)}' + HOLDS),
    "a generator in a set": ("fails", "checks = {check(t, r)}" + HOLDS),
    "a generator in a dataclass": ("fails", "case = Case(check(t, r))" + HOLDS),
    "a generator that is closed": ("named", "check(t, r).close()" + HOLDS),
    "a generator advanced once": (
        "named",
        "next(check(t, t.start_req(prompt_len=5)))\n    yield from t.run_until_idle()" + HOLDS,
    ),
    "a generator advanced beside a range": (
        "named",
        "for _ in zip(range(2), check(t, t.start_req(prompt_len=5))):\n        yield\n    yield from t.run_until_idle()"
        + HOLDS,
    ),
    "a generator yielded": ("fails", "yield check(t, r)" + HOLDS),
    "a helper in a partial": ("named", "later = functools.partial(check_now, r)" + HOLDS),
    "a helper mapped and kept": ("named", "kept = map(check_now, [r])" + HOLDS),
    "a helper mapped and dropped": ("refused", "map(check_now, [r])" + HOLDS),
    "helpers in an unused generator": ("named", "kept = (check_now(x) for x in [r])" + HOLDS),
    "a callback": ("named", "HOOKS.append(check_now)" + HOLDS),
    "a callback inside": (
        "named",
        'def at_end():\n        assert r.finish_reason == "stop"\n\n    HOOKS.append(at_end)' + HOLDS,
    ),
    "a check of a class": ("named", "checks = Checks(r)" + HOLDS),
    "a method of a check that is kept": ("named", "ended = Checks(r).ended" + HOLDS),
    "a check that is never called": ("named", "later = lambda: check_now(r)" + HOLDS),
    "a check for each of none": ("named", "kept = [x for x in [] if check_now(x) is None]" + HOLDS),
    "a helper that swallows": ("named", "swallow(lambda: check_now(r))" + HOLDS),
    "a block that swallows": ("named", 'with Quiet():\n        assert r.finish_reason == "stop"'),
    "a suppressed assertion": (
        "named",
        'with contextlib.suppress(Exception):\n        assert r.finish_reason == "stop"',
    ),
    "an assertion that is expected to fail": (
        "named",
        'with pytest.raises(AssertionError):\n        assert r.finish_reason == "stop"',
    ),
    "a case that never comes": ("fails", 'match r.finish_reason:\n        case "never":\n            check_now(r)'),
    "a condition with an else": ("refused", "assert True if r.finished else False"),
    "the same on both sides": ("refused", "assert sorted(r.output_ids) == sorted(r.output_ids)"),
    "a part of itself": ("refused", "assert set(r.output_ids) <= set(r.output_ids)"),
    "a condition for a helper": ("refused", 'expect(lambda: r.finish_reason == "stop")' + HOLDS),
    "a condition in an expect": ("refused", 'expect(r.finish_reason == "stop")' + HOLDS),
    "an assertion behind a switch": ("named", 'if STRICT:\n        assert r.finish_reason == "stop"' + HOLDS),
    "an assertion behind a return": ("fails", 'if r.finished:\n        return\n    assert r.finish_reason == "stop"'),
    "an assertion in a loop that is over": (
        "named",
        "while r.is_running:\n        assert r.output_ids\n        yield" + HOLDS,
    ),
    "an assertion beside a short list": (
        "named",
        "for mine, other in zip(r.output_ids, []):\n        assert mine == other" + HOLDS,
    ),
    "an assertion that a finally swallows": (
        "named",
        'try:\n        assert r.finish_reason == "stop"\n    finally:\n        return  # noqa: B012',
    ),
    "two lists that are sorted in place": ("refused", "assert [2, 1].sort() == list(r.output_ids).sort()"),
    "another object": ("refused", "assert r.output_ids is not r.client.token_ids"),
    "a window that is there": ("refused", 't.sometimes("said", r.output_ids is not None)' + HOLDS),
    "what a long request was waited for": ("vet", LONG_REQUEST),
    "a sentence": ("refused", 'assert "the request ended by its length"'),
    "a constant of the file": ("refused", 'assert EXPECTED == "length"'),
    "a request with itself in a helper": ("vet", "same(r, r)"),
    "a kept value with itself": ("vet", "before = r.output_ids\n    assert r.output_ids == before"),
    "an expectation made of the answer": (
        "vet",
        'expected = {"reason": r.finish_reason}\n    assert r.finish_reason == expected["reason"]',
    ),
    "all of none": (
        "named",
        "late = [x for x in [r] if not x.finished]\n    assert all(x.error is None for x in late)",
    ),
    "all of an empty list": ("named", "late = [x.error is None for x in t.list_active_reqs()]\n    assert all(late)"),
    "a thing that is there": ("refused", "assert r.output_ids is not None"),
    "a type": ("refused", "assert isinstance(r.output_ids, (list, tuple))"),
    "what a yield brings": ("refused", "assert (yield) is None"),
    "what a wait brings": ("refused", "done = yield from t.run_until_idle()\n    assert done is None"),
    "raises without a with": ("refused", "pytest.raises(ValueError)" + HOLDS),
    "raises around a name that is wrong": (
        "named",
        "with pytest.raises(AttributeError):\n        t.start_request(prompt_len=5)",
    ),
    "a print": ("fails", 'print(r.finish_reason == "stop")'),
    "a wait for what is": ("named", "yield from t.run_until(lambda: t.state.step >= 0)" + HOLDS),
    "a pool that never gets small": ("named", "t.exhaust_kv(4)\n    yield\n    t.release_exhausted()" + HOLDS),
    "a disconnect too late": ("fails", "t.disconnect(r)\n    yield" + HOLDS),
    "a release of nothing": ("named", "t.release_results()\n    yield" + HOLDS),
    "a window that is always open": ("vet", 't.sometimes("the window", t.state.step > 0)'),
    "a helper that asserts by its name alone": ("fails", "assert_if_it_ran(r)"),
    "a clock for nobody": ("named", "t.clock.advance(60)\n    yield" + HOLDS),
}
OPTIONS: Final = {"a window that is always open": ', must_reach=["the window"]'}


def source_of(name: str) -> str:
    """The file of one of these scripts."""
    return BEFORE + SCRIPT.format(body=SILENT[name][1], options=OPTIONS.get(name, ""))
