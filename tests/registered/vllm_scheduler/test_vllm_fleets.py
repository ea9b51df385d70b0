"""vLLM's schedulers as producers and consumers of KV: a fleet under the machine and the oracle of every fleet.

Goal: each output equals a run alone after any failure of engines, links and transfers, and nothing is kept forever.
Method: the workloads of the adapter `vllm-fleet`, a sweep of one with every event of links and engines, generated
fleets; and two bugs of a connector, which must be found. Origin: vLLM pull requests 25067 and 42568. Mutant: none; the
bugs are put into the connector of the adapter.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.connector import ScheduledConnector
from scripted_vllm.fleet import ADAPTER, NAME, VllmMember

from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search.execution import Prefixes, execute
from scripted.search.generated import generated_schedule
from scripted.search.strategies import extras_of

register_cpu_ci(est_time=30, suite="vllm-cpu")

SEVERAL = Schedule.parse(ADAPTER.workloads["several"], of=NAME)


@pytest.mark.parametrize("name", ADAPTER.workloads)
def test_a_workload_keeps_every_promise_and_its_kv_comes_from_producers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    receive = VllmMember.receive
    monkeypatch.setattr(
        VllmMember, "receive", lambda one, by, what: (heard.append(type(what).__name__), receive(one, by, what))
    )
    schedule = Schedule.parse(ADAPTER.workloads[name], of=NAME)
    assert execute(schedule).failure is None
    wanted = heard.count("Wanted")
    assert wanted == sum(placed.action.is_start for placed in schedule.placed)
    assert heard.count("Blocks") == wanted


def test_a_fleet_keeps_every_promise_with_any_event_at_any_step_and_copies_go_on_alike() -> None:
    prefixes = Prefixes(SEVERAL)
    placed = [Placed(step, extra) for step in range(1, prefixes.steps, 2) for extra in extras_of(SEVERAL)]
    for number, one in enumerate(placed):
        outcome = prefixes.execute(one)
        assert outcome.failure is None, one
        assert number % 20 or outcome == execute(SEVERAL.with_placed([one]))
    assert len(placed) > 200


# Target 4 meets the known defect vllm-threshold-below-guesses.
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5])
def test_a_generated_fleet_keeps_every_promise(number: int) -> None:
    assert execute(generated_schedule(number, NAME)).failure is None


def test_machines_that_went_in_circles_go_on_when_something_is_released() -> None:
    """A consumer computes s17 and preempts it, forever, because held transfers keep its blocks. It is no one's end."""
    circles = (
        "engines=p0,d0 enable_prefix_caching=False scheduler_reserve_full_isl=False; "
        '1 begin on=d0 do="start e prompt=1 new=1"; 1 begin on=d0 do="start d prompt=1 new=1"; '
        '1 begin on=d0 do="start h prompt=5 new=1"; 1 at on=d0 do=hold-transfers; '
        '1 begin on=d0 do="start s8 prompt=5 new=1"; 2 begin on=d0 do="start s17 prompt=8 new=20"; 3 drain-engine on=p0'
    )
    assert execute(Schedule.parse(circles, of=NAME)).failure is None


def test_blocks_that_a_producer_does_not_keep_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives them to the next request, and the consumer reads that one's KV."""
    finished = ScheduledConnector.request_finished

    def forget(one: ScheduledConnector, request: object, block_ids: list[int]) -> tuple[bool, None]:
        finished(one, request, block_ids)
        one.saving.clear()
        return False, None

    monkeypatch.setattr(ScheduledConnector, "request_finished", forget)
    tight = Schedule.parse(f"{ADAPTER.workloads['tight']}; 2 hold-link sender=d0 receiver=p0", of=NAME)
    failure = execute(tight).failure
    assert failure is not None
    assert failure.text.startswith("engine p0: d0 reads blocks ")


def test_blocks_that_are_kept_forever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmMember, "end_save", lambda *_: None)
    failure = execute(Schedule.parse(ADAPTER.workloads["one"], of=NAME)).failure
    assert failure is not None
    assert "everything has ended, but the scheduler is not idle" in failure.text


def test_a_feature_that_needs_a_setting_left_out_is_left_out_too() -> None:
    """It brought windows into fleets, whose producers send whole prompts."""
    features = ADAPTER.space.features
    assert {"sliding_window", "prefix_cache_retention_interval"}.isdisjoint(features)
    assert {"num_speculative_tokens", "max_loras"} <= features.keys()
