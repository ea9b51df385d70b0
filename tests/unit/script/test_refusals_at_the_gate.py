"""A request that is refused before a step sees it is judged like any other: the rule, its words, one answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core.config import EngineConfig
from engine.core.messages import Generate, Refusal, RefusalKind
from engine.core.scheduler.admission import Admission
from scripted import RequestRefused, ScriptedSim, ScriptFailed

CONFIG = EngineConfig(chunked_prefill_size=64, max_total_tokens=1024, max_running_requests=1, max_queued_requests=2)
refusal_of = Admission.refusal_of


def meets_every_refusal(t):
    a = t.start_req(prompt_len=20, max_new_tokens=30, rid="a")
    yield
    for rid in ("b", "c"):
        t.start_req(prompt_len=20, rid=rid)
    refused = []
    for arguments in ({"rid": "d"}, {"rid": "e", "max_new_tokens": 5000}, {"rid": "f", "prompt_len": 9000}):
        with pytest.raises(RequestRefused) as caught:
            t.start_req(**{"prompt_len": 20} | arguments)
        refused.append(caught.value.status)
    assert refused == [429, 400, 400]
    yield
    t.abort("b")
    t.start_req(prompt_len=20, rid="b")
    t.abort_all()
    yield from t.run_until_finished(a)


def starts_one(t):
    t.start_req(prompt_len=20, rid="a")
    yield


def starts_four(t):
    t.start_req(prompt_len=20, max_new_tokens=30, rid="a")
    yield
    for rid in ("b", "c", "d"):
        t.start_req(prompt_len=20, rid=rid)
    yield


def test_refusals_that_are_due_are_no_violations() -> None:
    """A request that was aborted makes room in the queue, and its rid is free, before the next step."""
    ScriptedSim.start(CONFIG).run(meets_every_refusal)


@pytest.mark.parametrize(
    ("script", "changes", "error"),
    [
        (
            starts_one,
            {"kind": RefusalKind.BUSY, "message": "max_queued_requests"},
            "a is refused as busy, but due is None",
        ),
        (starts_four, {"kind": RefusalKind.INVALID}, "d is refused as invalid, but due is busy"),
        (starts_four, {"message": "come back later"}, "the refusal of d must say"),
        (starts_four, {"rid": "a"}, "the refusal of d must say"),
    ],
)
def test_a_wrong_refusal_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, script: Any, changes: dict[str, Any], error: str
) -> None:
    """Without a reason, for another reason, without its rule, of another request."""

    def wrong(admission: Admission, message: Generate, *arguments: Any, **keywords: Any) -> Refusal | None:
        refusal = refusal_of(admission, message, *arguments, **keywords)
        if refusal is None and script is starts_one:
            refusal = Refusal(rid=message.rid, kind=RefusalKind.BUSY, message="")
        return None if refusal is None else msgspec.structs.replace(refusal, **changes)

    monkeypatch.setattr(Admission, "refusal_of", wrong)
    with pytest.raises(ScriptFailed, match=error):
        ScriptedSim.start(CONFIG).run(script)
