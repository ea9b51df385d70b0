"""The check of digests: it passes on the engine's chain, and names the field that a chain leaves out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_lockstep.mutants import mutant_named
from scripted_lockstep.oracle import digests
from scripted_lockstep.oracle.digests import DigestedStep, check_digest, check_digests
from scripted_lockstep.space.workloads import FLAGSHIP

from engine.core.instruments import DigestChain
from engine.core.messages import Abort, CallAnswer, TokenOutput
from scripted.core.violation import Violation
from scripted.search.execution import record
from scripted.search.targets import workload_named

STEP: DigestedStep = ((Abort(rid="a"),), None, (TokenOutput(rid="a", token_ids=(1, 2)),), (1, 0, 3, 0, 2))


@pytest.mark.parametrize("workload", [FLAGSHIP, "weight-update", "profiled", "loras-in-turn"])
def test_the_engine_s_digests_leave_nothing_out(workload: str) -> None:
    """One workload for each type of plan."""
    check_digest(STEP)
    check_digests(record(workload_named(workload))[1])


@pytest.mark.parametrize(
    ("left_out", "named"), [(0, r"events\[0\]\.rid"), (2, r"replies\[0\]\.rid"), (3, r"sizes\[0\]")]
)
def test_a_part_that_the_digest_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch, left_out: int, named: str) -> None:
    class Forgetful(DigestChain):
        def add(self, step: Any) -> None:
            super().add((*step[:left_out], (), *step[left_out + 1 :]))

    monkeypatch.setattr(digests, "DigestChain", Forgetful)
    with pytest.raises(Violation, match=f"the digest leaves out {named}"):
        check_digest(STEP)


def test_a_field_that_the_digest_of_plans_leaves_out_is_named() -> None:
    records = record(workload_named(FLAGSHIP))[1]
    with mutant_named("a-digest-without-pages").switched_on():
        with pytest.raises(Violation, match=r"the digest of plans leaves out microbatch\.segments"):
            check_digests(records)
        check_digest(STEP)  # It has no microbatch, so nothing of it is left out.


def test_a_step_that_is_not_in_the_digest_is_named() -> None:
    records = record(workload_named(FLAGSHIP))[1]
    records[2] = msgspec.structs.replace(records[2], digest=records[1].digest)
    with pytest.raises(Violation, match="step 3 is not in the digest"):
        check_digests(records)


def test_call_ids_that_are_in_the_digest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    records = record(workload_named("deferred-flush"))[1]
    monkeypatch.setattr("engine.core.instruments.digest._CALLS", frozenset())
    with pytest.raises(Violation, match="the digest depends on the ids of calls"):
        check_digests(records)


def test_call_ids_may_be_left_out() -> None:
    """A front end numbers its calls over its whole life."""
    check_digest(((), None, (CallAnswer(call_id="call-1", ok=True, message="done"),), (0, 0, 0, 0, 0)))


def test_the_first_step_of_each_kind_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind is what happens in a step, so that the steps of a long run cost no more than those of a short one."""
    records = record(workload_named(FLAGSHIP))[1]
    checked: list[DigestedStep] = []
    monkeypatch.setattr(digests, "check_digest", lambda step, _: checked.append(step))
    check_digests(records)
    once = len(checked)
    assert 1 < once < len(records)
    check_digests([*records, *records])
    assert len(checked) == 2 * once
    modes = {None if entry.microbatch is None else entry.microbatch.mode for entry in records}
    assert {None if step[1] is None else step[1].mode for step in checked} == modes
