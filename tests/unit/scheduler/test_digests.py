"""The digest chain: the same events, the same digest; one event moved, another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from every_case import every_case
from simulated_engine import SimulatedEngine, generate, limits_of, prompt

from engine.core.instruments import DigestChain, digest
from engine.core.messages import Abort, Event, Reply, StartProfile, StopProfile, encode
from engine.core.plan import Microbatch
from engine.core.scheduler import Scheduler


def digest_of(moved: int = 5, salt: int = 0, asks: int = 0) -> tuple[str, str]:
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=32)
    engine.step(generate("a", prompt(70, salt)), generate("b", prompt(70, 1)))
    for step in range(20):
        messages = [Abort(rid="b")] if step == moved else []
        engine.step(*messages, completions=1)
        if asks and step % asks == 0:
            engine.scheduler.digests.digest  # noqa: B018 - asking must not change it
    return engine.scheduler.digests.digest, engine.scheduler.digests.plan_digest


def test_same_events_same_digest() -> None:
    assert digest_of() == digest_of()


def test_one_event_moved_is_another_digest() -> None:
    assert digest_of(moved=5)[0] != digest_of(moved=6)[0]


@every_case("kind", [k for k in get_args(Event) + get_args(Reply) if "call_id" in k.__struct_fields__])
def test_call_ids_are_in_no_digest(kind: type[msgspec.Struct]) -> None:
    """D10: a front end numbers its calls over its whole life; each message with such a number is found by its field."""
    values = {
        "rid": "r",
        "folder": "f",
        "name": "n",
        "path": "p",
        "ok": True,
        "message": "m",
        "stats": Scheduler(limits_of()).stats(),
    }
    given = {name: values[name] for name in kind.__struct_fields__ if name in values}
    chains = DigestChain(), DigestChain()
    for chain, call in zip(chains, ("1", "2"), strict=True):
        chain.add(((kind(call_id=call, **given),), None, (), ()))
    assert chains[0].digest == chains[1].digest != DigestChain().digest


def test_the_folder_of_a_profile_is_in_no_digest() -> None:
    """D10: a front end names it by date and by chance; where a profile begins and ends is in the digest."""

    def digest_with(folder: str, end: str = "e") -> str:
        engine = SimulatedEngine()
        engine.step(StartProfile(call_id="b", folder=folder), completions=1)
        for call in (StartProfile(call_id="c", folder=f"{folder}-2"), StopProfile(call_id=end)):
            engine.step(completions=1)
            engine.step(call, completions=1)
        answers = [reply.message for reply in engine.step(completions=1).replies]
        assert answers == [f"wrote the profile into {folder}"]
        return engine.scheduler.digests.digest

    assert digest_with("/tmp/profile-a") == digest_with("/tmp/profile-other", end="f")


def test_no_step_hashes_many_large_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in 256 hashed the plans of all 256, which with 512 streams is a gap for each of them."""
    hashed: list[int] = []

    def note(entries: list[tuple[object, ...]]) -> bytes:
        plans = [entry[1] for entry in entries if len(entry) == 4]
        hashed.append(sum(len(plan.segments) for plan in plans if isinstance(plan, Microbatch)))
        return encode(entries)

    monkeypatch.setattr(digest, "encode", note)
    engine = SimulatedEngine(max_running_requests=128, chunked_prefill_size=2048, max_total_tokens=65_536)
    engine.step(*(generate(str(n), prompt(8, n), max_new_tokens=100) for n in range(128)))
    for _ in range(80):
        engine.step(completions=1)
    assert 2048 <= max(hashed) < 2048 + 128, "a batch ends with the plan that fills it"


@every_case("kind", get_args(Event))
def test_every_event_has_a_handler(kind: type[msgspec.Struct]) -> None:
    """A new message that the scheduler cannot take fails here by its name."""
    assert kind in Scheduler(limits_of())._handlers


def test_asking_changes_nothing() -> None:
    assert digest_of(asks=1) == digest_of(asks=3) == digest_of()


def test_plan_digest_leaves_out_token_values() -> None:
    first, second = digest_of(moved=99, salt=0), digest_of(moved=99, salt=7)
    assert first[0] != second[0]
    assert first[1] == second[1]


@pytest.mark.parametrize("entries", [1, 15, 16, 300])
def test_digest_does_not_depend_on_when_it_is_folded(entries: int) -> None:
    often, seldom = DigestChain(), DigestChain()
    for number in range(entries):
        for chain in (often, seldom):
            chain.add(((Abort(rid=str(number)),), None, (), (number,)))
        assert often.digest
    assert often.digest == seldom.digest
    assert often.plan_digest == seldom.plan_digest


def test_events_that_are_changed_after_the_step_change_no_digest() -> None:
    engine = SimulatedEngine()
    events = [generate("r", prompt(20))]
    engine.scheduler.step(events, 0.0)
    events.clear()
    again = SimulatedEngine()
    again.scheduler.step((generate("r", prompt(20)),), 0.0)
    assert engine.scheduler.digests.digest == again.scheduler.digests.digest


def test_digest_is_the_same_at_any_hash_seed() -> None:
    """In a process of its own, because the seed of hashes is chosen at its start."""
    here = Path(__file__).parent
    path = [str(here), str(here.parent), str(here.parents[2])]
    code = f"import sys; sys.path[:0] = {path}; import test_digests as t; print(t.digest_of())"
    command, seed = [sys.executable, "-c", code], {"PYTHONHASHSEED": "4711"}
    done = subprocess.run(command, env=seed, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(digest_of())
