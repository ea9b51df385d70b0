"""Schedulers and KV connectors of the user's, beside vLLM's own parts, and two connectors at once.

Goal: a connector loads its tokens' KV or reports a failure; it may be asked twice; its transfers end; a scheduler of
another class is searched like vLLM's. Method: one contract of workloads for a connector of our own, for two of them
behind vLLM's MultiConnector, for two broken ones, and for vLLM's own. Origin: vLLM issues 44100 and 46951, LMCache pull
request 5248. Mutant: none; the broken classes of this file take their place.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm import ADAPTER
from scripted_vllm.config import VllmSettings
from scripted_vllm.versions import installed_version
from vllm.v1.core.sched.scheduler import Scheduler

from scripted.core.adapters import adapter_named, variant_name
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import execute
from scripted.search.units import SearchPlan

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/vllm"))
from store_connector import StoreConnector, name_of

register_cpu_ci(est_time=60, suite="vllm-cpu")

HERE = __name__
STORE = "store_connector:StoreConnector"
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector"


class EarlyConnector(StoreConnector):
    """Saves a prompt when its first part is scheduled: blocks that nothing has computed."""

    def save(self, moves, scheduler_output, req_id, computed):
        size, tokens, table = self.block_size, self.tokens[req_id], self.tables[req_id]
        for position in range(size, min(len(tokens), len(table) * size) + 1, size):
            moves.saves.append((table[position // size - 1], name_of(None, tokens[:position])))


class CountingConnector(StoreConnector):
    """Has nothing left when it is asked again."""

    asked = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked += 1
        return (count if self.asked % 2 else 0), is_async


class DeafScheduler(Scheduler):
    """Ends only requests that run: the abort of a request that waits finds nothing."""

    def finish_requests(self, request_ids, finished_status):
        running = {request.request_id for request in self.running}
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        return super().finish_requests([name for name in names or () if name in running], finished_status)


def named(flag: str, classes: str) -> str:
    return variant_name("vllm", ADAPTER.class_settings[flag](classes))


def broken(name: str) -> dict[str, str]:
    """Return the workloads of the contract that a connector breaks, with their failures."""
    contract = {one: text for one, text in adapter_named(name).workloads.items() if one.startswith("connector-")}
    assert len(contract) >= 14
    outcomes = {one: execute(Schedule.parse(text, of=name)).failure for one, text in contract.items()}
    return {one: str(failure) for one, failure in outcomes.items() if failure is not None}


@pytest.mark.parametrize("classes", [STORE, f"{STORE},{STORE}", f"{STORE},{OFFLOADING}", OFFLOADING])
def test_a_right_connector_keeps_the_contract_alone_and_beside_another(classes: str) -> None:
    name = named("connector", classes)
    assert broken(name) == {}
    report = Campaign(SearchPlan(targets=("connector-longer", "connector-in-chunks"), schedules=40, adapter=name)).run()
    assert not report.findings, report.findings


@pytest.mark.parametrize("classes", [STORE, f"{STORE},{STORE}"])
@pytest.mark.parametrize(
    "text",
    [
        # A longer prefix of the session is stored than the load may bring.
        "default; 1 start a prompt=5 new=4 session=1; 2 more a tokens=4; 6 flush force=True",
        # The ranks share a block.
        "decode_context_parallel_size=2; 1 start a prompt=18 new=2; 8 flush; 9 start b prompt=18 new=3",
    ],
)
def test_a_connector_loads_what_vllm_asked_for(text: str, classes: str) -> None:
    assert execute(Schedule.parse(text, of=named("connector", classes))).failure is None


def test_a_connector_that_waits_for_all_ranks_hears_of_each() -> None:
    """A store of the offloading connector is over when every rank has reported it; until then its readers wait."""
    text = "decode_context_parallel_size=2; 1 start a prompt=18 new=2; 8 flush; 9 start b prompt=18 new=3"
    assert execute(Schedule.parse(text, of=named("connector", OFFLOADING))).failure is None


def test_a_second_turn_is_stored_from_the_blocks_of_the_first() -> None:
    """A session comes back as a new request with all of its blocks, and 0.32.0 adds them to those of its first turn."""
    if installed_version() != "0.32.0":
        pytest.skip("tried with 0.32.0 alone")
    text = "default; 1 start a prompt=5 new=4 session=1; 2 more a tokens=4; 6 flush force=True"
    failure = execute(Schedule.parse(text, of=named("connector", OFFLOADING))).failure
    assert "block 6 does not hold its position 8" in str(failure)


def test_a_connector_that_saves_what_is_not_computed_is_found() -> None:
    found = broken(named("connector", f"{HERE}:EarlyConnector"))
    assert "does not hold its position" in found["connector-aborted"]


def test_a_connector_that_counts_its_questions_is_found() -> None:
    found = broken(named("connector", f"{HERE}:CountingConnector"))
    assert "asked twice for the tokens of" in found["connector-again"]


def test_the_example_connector_of_vllm_breaks_the_contract() -> None:
    """It names a file after a whole prompt but saves only the prompt's first part."""
    assert "shape mismatch" in broken(named("connector", EXAMPLE))["connector-aborted"]


def test_two_offloading_connectors_read_what_the_other_overwrites() -> None:
    """vLLM issue 46951: one that has nothing to load never hears of the blocks that the other loads into."""
    found = broken(named("connector", f"{OFFLOADING},{OFFLOADING}"))
    assert "was written while a store of the offloading connector still reads it" in found["connector-over-a-store"]


def test_a_forced_flush_under_a_request_that_is_loaded_again_ends_the_engine() -> None:
    """Preempted and loaded in one step: the offloading connector of 0.32.0 takes its load for a store."""
    if installed_version() != "0.32.0":
        pytest.skip("tried with 0.32.0 alone")
    text = "default; 1 start a prompt=4 new=1; 3 start b prompt=4; 9 flush force=True"
    failure = execute(Schedule.parse(text, of=named("connector", OFFLOADING))).failure
    assert failure is not None
    assert failure.type == "AssertionError"
    assert "in build_connector_meta" in failure.place


def test_a_scheduler_of_the_users_is_searched() -> None:
    name = named("scheduler", f"{HERE}:DeafScheduler")
    report = Campaign(SearchPlan(targets=("aborted", "many"), schedules=60, adapter=name)).run()
    assert any("it was aborted" in str(one.failure) for one in report.findings.values()), report.findings


def test_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ScriptDefinitionError, match=r"the class 'no_such:Class' cannot be imported: .*; write MODULE:CLASS"
    ):
        named("connector", "no_such:Class")


def test_no_file_of_vllms_own_classes_is_written_for_a_connector_of_the_users():
    """Its worker's side is the adapter's; a file without it failed with an AttributeError of the recording."""
    machine = SimpleNamespace(settings=VllmSettings(connector_cls=OFFLOADING), scheduler=None)
    with pytest.raises(NotImplementedError, match="the adapter is the worker"):
        ADAPTER.standalone.watched(machine)
