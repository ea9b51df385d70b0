"""26.14: assertions that hold whatever the engine answers are named, and no others."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from types import SimpleNamespace
from typing import Any

import pytest

from engine import EngineConfig
from scripted import scripted
from scripted.script.vetting import Findings, Vetting

CONFIG = EngineConfig(pp_size=2, chunked_prefill_size=64)
LIMIT = 64
HELD: dict[str, Any] = {}


def _statuses(values: Any) -> bool:
    return all(value in ("waiting", "running", "finished", "aborted", "unknown") for value in values)


def _has(r: Any, tokens: int) -> bool:
    return len(r.output_ids) == tokens


def _held_is_finished() -> bool:
    return bool(HELD["r"].finished)


def holds_whatever_is_answered(t):
    def is_sized(values):
        return len(values) >= 0

    r = t.start_req(prompt_len=125, max_new_tokens=2)
    other = t.start_req(prompt_len=20, max_new_tokens=2)
    count = 1 + 1
    never = lambda: False  # noqa: E731
    early = r.status
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    flush = t.flush_cache()
    yield from t.run_until_all_finished([r, other])
    steps, seen = 0, []
    for _ in range(3):
        yield
        steps += 1
        seen.append(r.finished)
    yield from t.run_until(lambda: flush.done)
    assert r.status == early or r.status != early
    assert any([r.finished, not r.finished])
    assert flush.status in (200, 400, 503, None)
    assert re.compile(flush.text or "") is not None
    assert "r" not in t.state.in_flight
    assert t.state.now >= 0
    assert t.forward_ct > -1
    assert functools.partial(operator.eq, r.finish_reason, "abort")
    assert SimpleNamespace(ok=r.finish_reason == "stop")
    assert r.status in ("waiting", "running", "finished", "aborted", "unknown")
    assert _statuses([r.status])
    assert list(r.output_ids) == [token for token in r.output_ids]  # noqa: C416
    assert is_sized(r.output_ids)
    assert r.rid != other.rid
    assert count == 2
    assert len(seen) == steps
    assert SimpleNamespace(status=flush.status).__class__ is SimpleNamespace
    assert never


def may_fail(t):
    r = t.start_req(prompt_len=20, max_new_tokens=3)
    HELD["r"] = r

    def done(tokens):
        return len(r.output_ids) == tokens

    steps, seen = 0, []
    assert len(r.output_ids) <= steps + 1
    while not r.finished:
        yield
        steps += 1
        seen.append(r.status)
    with pytest.raises(Exception, match="rid") as info:
        t.start_req(prompt_len=20, max_new_tokens=3, rid=5)
    again = t.start_req(prompt_len=20, max_new_tokens=3, prompt_seed=1)
    yield from t.run_until_finished(again)
    assert done(3)
    assert all(map(done, [3]))
    assert _has(r, 3)
    assert _held_is_finished()
    assert steps >= 3
    assert seen[-1] == "finished"
    assert "rid" in info.value.body
    kv = t.state.kv
    assert kv.free + kv.cached + kv.held == kv.total
    assert [one.rid for one in t.list_active_reqs()] == []
    assert t.history[-1].step == t.state.step
    assert not t.state.waiting
    assert r.client.text.strip() != "" or r.client.token_ids
    assert f"{r.finish_reason}" == "length"
    first, *others = r.output_ids
    assert first < LIMIT * 1000
    assert len(others) == 2
    assert r.cached_tokens <= LIMIT
    assert again.output_ids != r.output_ids
    assert not set(seen) & {"aborted"}
    assert r.client.error is None
    assert t.find_req_by_rid("never") is None


def says_what_it_waited_for(t):
    r = t.start_req(prompt_len=125, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    yield from t.run_until_finished(r)
    ended = [one for one in [r] if one.finished]
    assert r.finished
    assert r.status in ("finished", "aborted")
    assert len(ended) == 1
    yield from t.run_until_idle()
    assert t.is_fully_idle
    assert t.state.is_fully_idle


def waits_for_one_and_asks_another(t):
    rs = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=2 - seed) for seed in range(2)]
    yield from t.run_until_finished(rs[0])
    assert rs[0].finished
    assert rs[1].finished


def _assertions(script: Any) -> list[str]:
    return re.findall(r"^    assert (.*?)(?:  #.*)?$", inspect.getsource(script), re.MULTILINE)


def _findings(script: Any) -> Findings:
    test = scripted(CONFIG)(script).scripted  # type: ignore[attr-defined]
    findings = Vetting(is_brief=True).findings(test, script.__name__, {})
    assert not findings.failure
    return findings


def _named(script: Any) -> list[str]:
    findings = _findings(script)
    return [assertion.partition(": assert ")[2].replace("'", '"') for assertion in findings.always]


def test_an_assertion_that_no_answer_makes_fail_is_named() -> None:
    named = _named(holds_whatever_is_answered)
    assert [one for one in _assertions(holds_whatever_is_answered) if one not in named] == []


def test_one_that_another_answer_makes_fail_is_not() -> None:
    assert _named(may_fail) == []


def test_a_script_that_only_repeats_its_waits_is_told_so() -> None:
    findings = _findings(says_what_it_waited_for)
    assert findings.repeats_waits
    assert "  asserts only what it has waited for" in findings.lines()


@pytest.mark.parametrize("script", [waits_for_one_and_asks_another, may_fail], ids=lambda script: script.__name__)
def test_one_that_asks_more_does_not_repeat_them(script: Any) -> None:
    assert not _findings(script).repeats_waits
