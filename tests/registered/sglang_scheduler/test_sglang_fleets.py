"""SGLang's schedulers as prefill and decode servers: a fleet under the machine and the oracle of every fleet.

Goal: each output equals a run alone after any failure of servers, links and writes; no page is written after its
release, and none is sent before it is computed. Method: the workloads of the adapter `sglang-fleet`, generated fleets,
schedules of what SGLang does wrong, and sweeps with its old bugs. Origin: the pull requests that the mutants name.
Mutant: all of `fleet_mutants.toml`; without one the same workloads pass.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("sglang") is None:
    pytest.skip("no SGLang is installed; `make sglang` makes an environment with one", allow_module_level=True)

from scripted_sglang.fleet import ADAPTER, MUTANTS, NAME, SglangMember
from scripted_sglang.standalone import SglangStandalone

from scripted import api
from scripted.core.mutant import Mutant
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.sdk.standalone import run_alone
from scripted.search.execution import Prefixes, execute, record
from scripted.search.generated import generated_schedule
from scripted.search.strategies import extras_of
from tests.defect_rows import rows_of

register_cpu_ci(est_time=110, suite="sglang-cpu")

# SGLang and its imports emit warnings.
pytestmark = pytest.mark.filterwarnings("default")

SEVERAL = Schedule.parse(ADAPTER.workloads["several"], of=NAME)
# The workload of the whole sweep that shows each bug.
SHOWN_BY = {
    "an-abort-is-lost-in-the-transfer-queue": "one",
    "an-abort-is-lost-in-the-bootstrap-queue": "one",
    "the-prefill-server-is-not-told": "one",
    "pages-given-back-before-the-write-ends": "one",
    "the-drain-is-never-told": "one",
    "metadata-rows-of-aborted-requests": "pair",
    "a-parked-request-waits-for-ever": "optimistic",
    "cached-prefixes-are-sent-too-early": "one",
    "prefetches-of-failed-requests": "storage",
    "released-over-its-transfers": "asleep",
}
# With a router that tells both servers, none of these fails.
ALONE = (
    ('1 begin on=d0 do="start a prompt=14 new=3"; 3 at on=p0 do="pause mode=abort"', "engine d0: ", "a (waiting)"),
    ('1 begin on=d0 do="start a prompt=14 new=3"; 1 at on=d0 do="abort a"', "engine p0: ", "d0.2001 (waiting)"),
)


def failure_of(line: str) -> str:
    failure = execute(Schedule.parse(line, of=NAME)).failure
    return "" if failure is None else failure.text


@pytest.mark.parametrize("name", ADAPTER.workloads)
def test_a_workload_keeps_every_promise_and_its_kv_comes_from_prefill_servers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    receive = SglangMember.receive
    monkeypatch.setattr(
        SglangMember, "receive", lambda one, by, what: (heard.append(type(what).__name__), receive(one, by, what))
    )
    schedule = Schedule.parse(ADAPTER.workloads[name], of=NAME)
    assert execute(schedule).failure is None
    wanted = sum(placed.action.is_start for placed in schedule.placed)
    assert heard.count("Routed") == wanted
    # Each request has a row for its first token; one that a pause retracted is recomputed, and has another.
    assert heard.count("BufferRow") == wanted + heard.count("Recompute")
    assert heard.count("PageWrite") == heard.count("Written") > 0
    assert ("Recompute" in heard) == (name == "paused")


def test_decode_servers_retract_for_want_of_memory() -> None:
    records = record(Schedule.parse(ADAPTER.workloads["tight"], of=NAME))[1]
    assert any(one.last["d0"].stepped.preempted for one in records if "d0" in one.last)


def test_a_fleet_keeps_every_promise_with_any_event_and_copies_go_on_alike() -> None:
    prefixes = Prefixes(SEVERAL)
    placed = [Placed(step, extra) for step in range(1, prefixes.steps) for extra in extras_of(SEVERAL)][::7]
    for number, one in enumerate(placed):
        outcome = prefixes.execute(one)
        assert outcome.failure is None, one
        assert number % 20 or outcome == execute(SEVERAL.with_placed([one]))
    assert len(placed) > 100


def test_copies_count_the_confirmations_of_an_abort_apart() -> None:
    """SGLang keeps in a struct which prefill servers have confirmed an abort; copies of a run shared it."""
    pairs: list[tuple[Any, Any]] = []

    def watch(run: Any) -> None:
        frozen = ADAPTER.freeze(run)
        copies = [frozen.thaw().machine.engine("d0").role.transfers for _ in range(2)]
        pairs.extend(zip(*[one._deferred_abort_ack_tracker.values() for one in copies], strict=True))

    begun = 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"; 5 hold-link sender=p0 receiver=d0'
    assert record(Schedule.parse(f'{begun}; 6 at on=d0 do="abort a"', of=NAME), watch=watch)[0].failure is None
    assert pairs
    assert all(one == other and one.prefill_ranks is not other.prefill_ranks for one, other in pairs)


@pytest.mark.parametrize("number", range(3, 6))
def test_a_generated_fleet_keeps_every_promise(number: int) -> None:
    assert execute(generated_schedule(number, NAME)).failure is None


@pytest.mark.parametrize(("events", "engine", "who"), ALONE)
def test_an_abort_at_one_server_is_not_told_to_the_other(events: str, engine: str, who: str) -> None:
    """The page on SGLang says so: without a router that does it, the other one waits for a time limit of 300 s."""
    text = failure_of(f"engines=p0,d0 router_tells_both=False; {events}")
    assert text.startswith(engine)
    assert f"waits forever: {who}" in text
    assert failure_of(f"engines=p0,d0; {events}") == ""


@pytest.mark.parametrize("step", range(5, 10))
def test_an_abort_that_is_told_while_a_chunk_is_written_keeps_its_pages(step: int) -> None:
    """With its fix the prefill server tells the decode server, which must not give back what is still written."""
    (told,) = [one for one in rows_of(NAME, version("sglang")) if one.id == "sglang-prefill-abort-not-told"]
    held = '1 begin on=d0 do="start a prompt=30 new=3"; 1 hold-link sender=p0 receiver=d0 pages=True'
    after = f'{step + 1} begin on=d0 do="start b prompt=14 seed=1 new=3"; {step + 5} at on=p0 do=continue'
    schedule = f'engines=p0,d0 router_tells_both=False; {held}; {step} at on=p0 do="pause mode=abort"; {after}'
    assert "waits forever" in failure_of(schedule)
    with told.fixed():
        assert failure_of(schedule) == ""
        with ADAPTER.switched_on("pages-given-back-before-the-write-ends"):
            assert "p0 writes KV into the pages" in failure_of(schedule)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ('14 at on=d0 do="pause mode=abort"', "waits forever: a (decode), call-2"),
        ('14 at on=d0 do="abort a"; 16 at on=d0 do=continue', "a is launched, but it was aborted"),
    ],
)
def test_an_abort_during_a_pause_that_retracts_does_not_reach_a_decode_server(events: str, words: str) -> None:
    """The page of defects says so: what was retracted waits in a list that an abort does not look through."""
    begun = 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=9"; 13 at on=d0 do="pause mode=retract"'
    assert words in failure_of(f"{begun}; {events}")


def test_what_a_pause_retracted_ends_where_its_prefill_server_is_gone() -> None:
    """SGLang tries for some seconds to reach it; the adapter had let it wait forever, as no time passes."""
    begun = 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=9"; 12 kill-engine on=p0'
    assert failure_of(f'{begun}; 13 at on=d0 do="pause mode=retract"; 16 at on=d0 do=continue') == ""


def test_what_a_pause_holds_back_ends_where_its_prefill_server_is_gone() -> None:
    """It was taken for an error that nothing explains, because SGLang's queues did not have it yet."""
    held = '1 at on=d0 do="pause mode=abort"; 1 begin on=d0 do="start r prompt=1 new=1"'
    assert failure_of(f"engines=p0,d0; {held}; 2 cut-link sender=p0 receiver=d0") == ""


def test_a_request_that_comes_back_to_a_paused_prefill_server_stops_it() -> None:
    """The page of defects says so: its room still has the state of its first transfer."""
    begun = 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=9"; 6 at on=p0 do="pause mode=retract"'
    said = failure_of(f'{begun}; 13 at on=d0 do="pause mode=retract"; 16 at on=d0 do=continue')
    assert said.startswith("Unexpected poll state 4")


def test_the_second_equal_prompt_ends_a_decode_server() -> None:
    """The page of defects says so: the policy matches who has its KV with the tree again, first token included."""
    settings = "enable_priority_scheduling=True disaggregation_decode_enable_radix_cache=True"
    both = '1 begin on=d0 do="start a prompt=3 new=2"; 20 begin on=d0 do="start b prompt=3 new=2"'
    assert "negative dimension" in failure_of(f"engines=p0,d0 schedule_policy=lpm {settings}; {both}")
    assert failure_of(f"engines=p0,d0 schedule_policy=fcfs {settings}; {both}") == ""


@pytest.mark.parametrize(("steps", "words"), [(40, "g ends with abort, but nothing aborted it"), (2, "")])
def test_a_decode_server_aborts_for_memory_that_a_transfer_gives_back(steps: int, words: str) -> None:
    """The page of defects says so: nobody else is in the batch, but a request that waits for its KV has pages."""
    both = '1 begin on=d0 do="start g prompt=7 new=27"; 1 begin on=d0 do="start h prompt=7 new=1"'
    said = failure_of(f"engines=p0,p1,d0; {both}; 1 slow-link sender=d0 receiver=p0 steps={steps}")
    assert words in said
    assert bool(words) == bool(said)


def test_a_prefill_server_never_forgets_the_room_of_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on SGLang says so: four tables of its manager keep something of each abort after the handshake."""
    servers: list[SglangMember] = []
    begin = SglangMember._begin
    monkeypatch.setattr(SglangMember, "_begin", lambda one, by, what: (servers.append(one), begin(one, by, what)))
    line = 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"; 3 at on=p0 do="pause mode=abort"'
    assert failure_of(line) == ""
    manager = servers[0].role.transfers
    left = manager.request_status, manager.failure_records, manager.transfer_infos
    assert [list(table) for table in left] == [[2001], [2001], [2001]]


def test_its_own_classes_show_all_four_without_the_harness() -> None:
    """Two schedulers over their own sockets; each test of the file is of one defect, and fails."""
    path = Path(__file__).parents[3] / "examples/sglang/test_transfers.py"
    status, said = run_alone(path, sys.executable, prepare=SglangStandalone.prepare)
    assert status == 1, said
    assert "4 failed" in said, said


def test_every_bug_is_searched_for() -> None:
    assert set(SHOWN_BY) == set(ADAPTER.mutant_names)
    assert all("sglang" in mutant.origin for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds(mutant: Mutant) -> None:
    """The failure is caused by the bug, not any failure."""
    report = api.explore(SHOWN_BY[mutant.name], adapter=NAME, mutant=mutant.name, stop_at_first=True)
    assert any(mutant.signature in f"{one.failure.signature} {one.failure.text}" for one in report.findings.values())


def test_a_request_that_arrives_with_its_abort_may_end_with_an_error() -> None:
    """A link that is held delivers both at once, so the prefill server's request fails in its first step.

    What is left is a known defect of the decode server: of two pauses one is never answered.
    """
    text = failure_of(
        'engines=p0,d0,d1; 1 begin on=d0 do="start g prompt=1 new=1"; 1 hold-link sender=d0 receiver=p0; '
        '2 at on=d0 do="pause mode=in_place"; 2 at on=d0 do="pause mode=abort"'
    )
    assert text.startswith("engine d0: ")
    assert "call-2 (Pause, never answered)" in text


@pytest.mark.parametrize("event", ["3 cut-link sender=p0 receiver=d0", "4 kill-engine on=d0"])
def test_a_request_that_a_pause_held_back_ends_although_its_decode_server_is_gone(event: str) -> None:
    """It begins to wait for that server only after the pause, and SGLang's time limit ends it."""
    outcome = execute(
        Schedule.parse(
            f'adapter={NAME} engines=p0,d0; 1 at on=p0 do="pause mode=abort"; 1 at on=d0 do="pause mode=retract"; '
            f'1 begin on=d0 do="start a prompt=1 new=1"; {event}'
        )
    )
    assert outcome.failure is None
    assert "p continue" in {one.action.kind for one in outcome.implied}
