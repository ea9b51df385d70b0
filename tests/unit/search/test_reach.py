"""The reach of a failure: who causes it, with which settings, how often; and the bug report that is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from scripted.cli.report import issue_of
from scripted.core.action import Culprit
from scripted.core.adapters import adapter_named
from scripted.core.mutant import switched_on
from scripted.core.schedule import Schedule
from scripted.core.server_description import ServerDescription
from scripted.sdk import standalone
from scripted.search import reach
from scripted.search.execution import execute
from scripted.search.reach import reach_of, server_of
from scripted.search.shrinking import shrink

BROKEN = str(Path(__file__).parents[3] / "examples/your_scheduler/adapter.py")
FLUSH = f"adapter={BROKEN}; 1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start c prompt=5 new=1"
CANCEL = "adapter=transformers use_async_batching=True; 1 start a prompt=4; 1 start b prompt=1 new=1; 2 abort a"


class Config(msgspec.Struct, frozen=True):
    block_size: int = 2
    budget: int = 8
    is_async: bool = False
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        if self.policy == "priority" and self.is_async:
            raise ValueError("priority is synchronous")


class Server(ServerDescription[Config]):
    defaults: ClassVar = {"is_async": True}
    sizes: ClassVar = ("block_size", "budget")
    token_counts: ClassVar = ("block_size", "budget")
    block_size: ClassVar = "block_size"
    switches: ClassVar = ("is_async",)


def test_settings_are_compared_with_those_of_a_server() -> None:
    """Sizes are never unusual, and settings that do not go together are left out."""
    server, config = Server(), Config(block_size=4, policy="priority")
    assert server.unusual(config) == {"is_async": False, "policy": "priority"}
    assert [words for words, _ in server.usual_configs(config)] == ["policy=fcfs (the default)"]
    assert server.scaled(config, 4) == Config(block_size=16, budget=32, policy="priority")
    assert [words for words, _ in server.other_configs(config)] == ["block_size=2", "block_size=8"]


def test_every_adapter_has_settings_to_compare() -> None:
    """Also one that describes no server, and one whose configurations are no structs."""
    for name in ("lockstep", "lockstep-fleet", "lockstep-decode", "lockstep-sessions"):
        schedule = Schedule.parse(next(iter(adapter_named(name).workloads.values())), of=name)
        server, config = server_of(schedule), schedule.config
        usual = list(server.usual_configs(config))
        assert all(type(one) is type(config) and one != config for _, one in (*usual, *server.other_configs(config)))
        assert len(usual) <= len(server.unusual(config))
        assert usual or name == "lockstep-sessions", name


def test_a_schedule_of_this_engine_has_a_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configurations are no structs, and its random work has the kinds of requests of the schedule."""
    monkeypatch.setattr(reach, "_TRIES", 2)
    line = "pp_size=2; 1 start a prompt=9 new=2 priority=1; 2 flush"
    with switched_on(adapter_named("lockstep"), "flush-ignores-in-flight"):
        found = reach_of(Schedule.parse(line), workloads=4)
    assert found.unusual == {"pp_size": 2}
    assert [(one.words, one.fails, one.workloads) for one in found.neighbours] == [("pp_size at its default", False, 2)]
    assert (found.workloads, found.who) == (4, "an operator")


@pytest.mark.parametrize(
    ("of", "line"),
    [
        # A kind of its own by its time limit.
        ("lockstep", "max_loras=1; 1 load-lora name=x; 3 start a prompt=9 lora=x; 4 unload-lora name=x timeout_s=1.0"),
        ("lockstep-decode", "role=decode; 1 start a prompt=30 new=2; 2 flush"),
        ("lockstep-prefill", "role=prefill; 1 start a prompt=40 first_page=0; 2 flush"),
        ("lockstep-fleet", 'engines=p0,d0; 1 begin on=d0 do="start a prompt=50 new=3"; 2 at on=d0 do="flush"'),
    ],
)
def test_roles_and_fleets_have_random_work(of: str, line: str) -> None:
    """Without any, a reach says nothing about other requests."""
    schedule = Schedule.parse(line, of=of)
    drawn = list(reach._random_work(schedule, 12))
    assert len(drawn) >= 8
    assert {one.of for one in drawn} == {of}
    assert all(one.config == schedule.config for one in drawn)
    assert all(execute(one).failure is None for one in drawn[:3])


def test_an_operators_call_is_what_it_takes() -> None:
    found = reach_of(Schedule.parse(FLUSH), workloads=20)
    assert set(found.culprits) == {Culprit.CLIENT, Culprit.OPERATOR}
    assert (found.who, found.ends_engine, found.workloads) == ("an operator", False, 20)


def test_a_client_that_ends_the_engine_is_a_remote_crash() -> None:
    """It needs no setting beyond a server's defaults, and no name chosen by a client."""
    found = reach_of(Schedule.parse(CANCEL), workloads=20)
    assert found.who == "any client (remote crash)"
    assert not found.unusual
    assert 0 < found.failed <= found.workloads
    words = {neighbour.words: neighbour.fails for neighbour in found.neighbours}
    assert words["use_async_batching=False"] is False
    assert words["all sizes 8 times as large"] is True


def test_settings_are_shrunk_to_those_of_a_server() -> None:
    """The least unusual settings are kept, not the adapter's own."""
    longer = CANCEL.replace("use_async_batching=True", "use_async_batching=True scheduler_type=prefill_first")
    assert str(shrink(Schedule.parse(longer)).schedule).startswith("adapter=transformers use_async_batching=True; 1 ")


def test_a_report_has_the_sections_of_the_projects_form(monkeypatch: pytest.MonkeyPatch) -> None:
    # The test of the report is run in an interpreter of its own by the tests of what writes it.
    monkeypatch.setattr(standalone, "what_is_wrong", lambda *_, **__: None)
    found = reach_of(Schedule.parse(CANCEL), workloads=5)
    text = issue_of(found).text(found.schedule.adapter.server.issue_form)
    assert text.startswith("# KeyError")
    for part in (
        "## System Info",
        "transformers 5.",
        "transformers serve MODEL",
        "## Expected behavior",
        "remote crash",
    ):
        assert part in text
    assert "update_batch" in text
