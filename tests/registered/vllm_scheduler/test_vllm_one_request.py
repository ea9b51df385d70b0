"""The forms of vLLM's connector actions for one request: an offer, a failed load or a release reaches it alone.

Goal: a recording's transfers end as they did, each for its own request. Method: two requests that load side by side,
and the step and place of their first share. Origin: issue 49. Mutant: each condition of the adapter, by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm import ADAPTER

from scripted import scripted
from scripted.api import run_script
from scripted.core.mutant import Mutant
from scripted.core.schedule import Schedule
from scripted.sdk.as_schedule import schedule_of
from scripted.sdk.messages import Record
from scripted.search.execution import record

register_cpu_ci(est_time=10, suite="vllm-cpu")

LOADS: Final = "kv_connector=async kv_load_failure_policy=recompute num_gpu_blocks=30"
BOTH: Final = "1 start a prompt=12 new=2; 1 start b prompt=12 seed=1 new=2"
HELD: Final = f"{LOADS}; 1 hold-transfers"
# By form: events, and by request the step and the position of its first computed token. Offered are 8 tokens.
FORMS: Final = {
    "one load fails": (f"{LOADS}; {BOTH}; 1 fail-load block=1 rid=b", [(4, 8), (4, 4)]),
    "one is offered less": (f"{LOADS}; {BOTH}; 1 offer tokens=4 rid=b", [(4, 8), (4, 4)]),
    "an offer to all ends it": (f"{LOADS}; {BOTH}; 1 offer tokens=4 rid=b; 1 offer tokens=8", [(4, 8), (4, 8)]),
    "one does not know yet": (f"{LOADS}; {BOTH}; 1 offer tokens=-1 rid=b; 5 offer tokens=4 rid=b", [(4, 8), (8, 4)]),
    # A run that would stand still ends with an offer to all.
    "one never knows": (f"{LOADS}; {BOTH}; 1 offer tokens=-1 rid=b", [(4, 8), (12, 8)]),
    "one is released": (f"{HELD}; {BOTH}; 5 release-transfers rid=b; 9 release-transfers", [(10, 8), (6, 8)]),
    "one is released at once": (f"{HELD}; {BOTH}; 1 release-transfers rid=b; 9 release-transfers", [(10, 8), (2, 8)]),
    "its next load is held": (
        f"{HELD}; 1 start b prompt=12; 1 release-transfers rid=b; 8 start b prompt=12 seed=2; 20 release-transfers",
        [(2, 8), (21, 8)],
    ),
}
TRANSFERS: Final = "scripted_vllm.transfers:Transfers"
CONNECTOR: Final = "scripted_vllm.connector:ScheduledConnector"
TAKES: Final = f"{TRANSFERS}.take"
IS_OVER: Final = f"{TRANSFERS}._is_over"
ACTION: Final = "scripted.sdk.signals:SignalAction"
# A form, and a condition that is off: the code, its text, and what it becomes.
CUTS: Final = (
    ("one load fails", TAKES, "signal.name == FAIL and signal.rid", "False"),
    ("one load fails", f"{TRANSFERS}._arrival", "self._failing_of.pop(rid_of(load.request_id), None)", "None"),
    ("one load fails", f"{ACTION}.apply", 'rid_of(self) or ""', '""'),
    ("one is offered less", TAKES, "(signal.rid,) if signal.rid else ()", "()"),
    ("one is offered less", f"{CONNECTOR}.offer", "if rid:", "if False:"),
    (
        "one is offered less",
        f"{CONNECTOR}.get_num_new_matched_tokens",
        'self.offered_to.get(request.request_id.rpartition("@")[0], self.offered)',
        "self.offered",
    ),
    ("an offer to all ends it", f"{CONNECTOR}.offer", "self.offered, self.offered_to = tokens, {}", "self.offered = 8"),
    ("one does not know yet", TAKES, "None if signal.value == UNKNOWN else signal.value", "signal.value"),
    ("one never knows", f"{CONNECTOR}.is_unknown", "*self.offered_to.values()", ""),
    ("one is released", TAKES, "signal.name == RELEASE and signal.rid", "False"),
    ("one is released", IS_OVER, "self._let_go and rid_of(one.request_id) in self._let_go", "False"),
    ("one is released", IS_OVER, "self._let_go and rid_of(one.request_id) in self._let_go", "self._let_go"),
    ("one is released at once", f"{TRANSFERS}.run", "rid_of(one.request_id) in self._let_go", "False"),
    ("its next load is held", f"{TRANSFERS}.run", "self._let_go -= {rid_of(one.request_id) for one in over}", "pass"),
)


def firsts_of(records: Iterable[Record]) -> list[tuple[int, int]]:
    """By request, the steps that launch a share of its prompt, and the position of each."""
    found: dict[str, list[tuple[int, int]]] = {}
    for step, one in enumerate(records, 1):
        batch = one.stepped.microbatch if one.stepped is not None else None
        for share in batch.shares if batch is not None else ():
            if share.start < 12:
                found.setdefault(share.rid, []).append((step, share.start))
    return [one for rid in sorted(found) for one in found[rid]]


def ran(form: str) -> tuple[Schedule, list[Record]]:
    schedule = Schedule.parse(FORMS[form][0], of="vllm")
    return schedule, list(record(schedule)[1])


def bug(target: str, cut: str, becomes: str) -> Mutant:
    return Mutant(name="off", origin="", bug="", signature="", test="", target=target, cut=cut, becomes=becomes)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_for_one_request_reaches_it_alone(form: str) -> None:
    """And a recording of it is the same schedule again."""
    schedule, records = ran(form)
    assert firsts_of(records) == FORMS[form][1]
    again = schedule_of(ADAPTER, schedule.config, records).schedule
    assert firsts_of(record(again)[1]) == FORMS[form][1]


@pytest.mark.parametrize(("form", "target", "cut", "becomes"), CUTS)
def test_without_its_condition_another_request_is_reached(form: str, target: str, cut: str, becomes: str) -> None:
    with bug(target, cut, becomes).switched_on():
        assert firsts_of(ran(form)[1]) != FORMS[form][1]


@pytest.mark.parametrize("form", ["one load fails", "one is offered less", "one is released"])
def test_a_recording_that_forgets_the_request_is_another_schedule(form: str) -> None:
    schedule, records = ran(form)
    with bug(f"{ACTION}.read_back", 'event.rid and "rid" in cls.__struct_fields__', "False").switched_on():
        again = schedule_of(ADAPTER, schedule.config, records).schedule
    assert firsts_of(record(again)[1]) != FORMS[form][1]


@scripted(
    adapter="vllm", kv_connector="async", kv_load_failure_policy="recompute", kv_offered_tokens=8, num_gpu_blocks=30
)
def test_a_verb_with_a_request_reaches_it_alone(t):
    """Each verb with a request: ``c`` is offered less, the load of ``b`` fails, and is released before the others."""
    t.hold_transfers()
    a, b, c = [
        t.start_req(rid=rid, prompt_len=12, prompt_seed=seed, max_new_tokens=2) for seed, rid in enumerate("abc")
    ]
    t.offer_prefixes(0, rid=c)
    t.fail_load(block=1, rid=b)
    yield from t.run_until_finished(c)
    assert [a.output_ids, b.output_ids] == [[], []], "c alone loads nothing"
    t.release_transfers(rid=b)
    yield from t.run_until_finished(b)
    assert not a.output_ids, "b alone is released"
    t.release_transfers()
    yield from t.run_until_finished(a)


@pytest.mark.parametrize("call", ["offer_prefixes", "release_transfers"])
def test_a_verb_without_its_request_reaches_all(call: str) -> None:
    assert run_script(test_a_verb_with_a_request_reaches_it_alone).passed
    kinds = {"offer_prefixes": "OfferPrefixes", "release_transfers": "ReleaseConnector"}
    target = f"scripted_vllm.actions:{kinds[call]}.{call}"
    with bug(target, f'_named(t, "{call}()", rid)', "None").switched_on():
        assert not run_script(test_a_verb_with_a_request_reaches_it_alone).passed
