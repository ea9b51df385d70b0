"""Mutants of LoRA adapters: whose KV is shared, which LoRA makes room, when one is unloaded, who waits for one."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from engine.memory import KVMemory, Lease
from engine.plan import LoraChange
from engine.scheduler import Request
from engine.scheduler.lora import Lora
from engine.scheduler.loras import Loras
from engine.scheduler.planner import Planner
from scripted.core.mutant import Mutant

__all__ = ["LORAS"]

_TESTS = "tests/registered/loras"

_admit = KVMemory.admit
_admissions = Planner._admissions
_load = Loras._load
_finish = Loras.finish
_answer_due = Loras.answer_due


def _admit_with_any_prefix(
    memory: KVMemory, rid: str, ids: Sequence[int], *, lora: int = 0, **details: int
) -> Lease | None:
    lease = _admit(memory, rid, ids, **details)
    if lease is not None:
        lease.lora = lora
    return lease


def _load_by_name(loras: Loras, call: Any, lora: Lora, victim: Lora | None, *, is_kept: bool) -> Any:
    launched = _load(loras, call, lora, victim, is_kept=is_kept)
    version = loras.__dict__.setdefault("versions", {}).setdefault(lora.name, launched.change.version)
    drop = version if launched.change.drop == launched.change.version else launched.change.drop
    change = LoraChange(lora.name, version, lora.path, drop)
    return type(launched)(launched.call, lora, change, victim)


def _users_in_the_queues(loras: Loras, lora: Lora) -> list[Request]:
    books = loras._books
    return [request for request in (*books.waiting, *books.running.values()) if request.lora is lora]


def _place_beside_what_runs(loras: Loras, wanted: Collection[Lora]) -> tuple[bool, Lora | None]:
    if loras.resident < loras._most:
        return True, None
    in_use = {request.lora for request in loras._books.running.values()}
    idle = [one for one in loras.known.values() if one.version and one not in in_use and one not in wanted]
    victim = min(idle, key=lambda one: (one.used, one.version), default=None)
    return victim is not None, victim


def _admissions_past_all_that_lack_one(planner: Planner) -> Iterator[Request]:
    lacking = [request for request in planner._books.waiting if request.lacks_lora]
    counts = [request.overtaken for request in lacking]
    for request in lacking:
        request.overtaken = 0
    yield from _admissions(planner)
    for request, count in zip(lacking, counts, strict=True):
        request.overtaken += count


def _admissions_up_to_one_that_lacks_one(planner: Planner) -> Iterator[Request]:
    order = list(planner.policy.order(planner._books.waiting, planner._memory))
    first = next((place for place, request in enumerate(order) if request.lacks_lora), len(order))
    for request in _admissions(planner):
        if request not in order[:first]:
            return
        yield request


def _finish_whatever_the_stages_say(loras: Loras, error: str | None) -> Any:
    launched = loras._launched
    answer = _finish(loras, error)
    if error is not None and launched is not None:
        if launched.change.path is None:
            loras.known.pop(launched.lora.name, None)
        elif launched.victim is not None:
            launched.victim.version = 0
    return answer


def _answer_without_a_deadline(loras: Loras, now: float) -> Any:
    del now
    return _answer_due(loras, float("-inf"))


LORAS = (
    Mutant(
        name="prefix-shared-between-loras",
        origin="vLLM issue 3264 and pull request 8240",
        bug="a prefix is found by its tokens alone, so a request reads KV that another LoRA has computed",
        signature="it hit KV that the model itself had computed",
        test=f"{_TESTS}/test_loras_and_prefixes.py::test_equal_prompts_of_two_loras_share_nothing",
        owner=KVMemory,
        attribute="admit",
        replacement=_admit_with_any_prefix,
    ),
    Mutant(
        name="lora-known-by-its-name",
        origin="vLLM issues 30931 and 42125",
        bug="a LoRA that is loaded again under its old name is taken for the old one, and finds KV of its weights",
        signature="it hit KV of the weights that were unloaded",
        test=f"{_TESTS}/test_loras_and_prefixes.py::test_a_name_with_other_weights_begins_anew",
        owner=Loras,
        attribute="_load",
        replacement=_load_by_name,
    ),
    Mutant(
        name="unload-ignores-what-is-in-flight",
        origin="SGLang issue 8162 and Dynamo pull request 11520",
        bug="an unload looks at the queues only, and drops a LoRA whose last chunk is in flight",
        signature="the LoRA was unloaded under a request in flight",
        test=f"{_TESTS}/test_loras_unloaded.py::test_an_unload_sees_what_is_in_no_queue",
        owner=Loras,
        attribute="_users_of",
        replacement=_users_in_the_queues,
    ),
    Mutant(
        name="eviction-ignores-a-split-prompt",
        origin="SGLang issue 23141, pull requests 25078 and 25567",
        bug="the LoRAs in use are those of decoding requests, so that of a partly prefilled prompt makes room",
        signature="the LoRA of a split prompt made room",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_split_prompt_keeps_its_lora",
        owner=Loras,
        attribute="_place_for",
        replacement=_place_beside_what_runs,
    ),
    Mutant(
        name="lora-waits-for-ever",
        origin="SGLang pull request 15129",
        bug="requests of resident LoRAs start before one that lacks its LoRA without a bound",
        signature="it starved",
        test=f"{_TESTS}/test_loras_in_turn.py::test_passing_over_a_request_without_lora_has_a_bound",
        owner=Planner,
        attribute="_admissions",
        replacement=_admissions_past_all_that_lack_one,
    ),
    Mutant(
        name="lora-blocks-the-queue",
        origin="vLLM pull request 15422, SGLang pull request 14795",
        bug="a request that waits for a place for its LoRA stops all that come after it",
        signature="it held up a request that needs no LoRA",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_request_without_lora_holds_no_other_up",
        owner=Planner,
        attribute="_admissions",
        replacement=_admissions_up_to_one_that_lacks_one,
    ),
    Mutant(
        name="failed-change-of-loras-is-booked",
        origin="the other side: stages change together or not at all",
        bug="a load that failed, or an unload, is booked: the stages still hold the LoRA that was to be dropped",
        signature="the LoRA that was to make room is lost",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_load_that_fails_changes_nothing",
        owner=Loras,
        attribute="finish",
        replacement=_finish_whatever_the_stages_say,
    ),
    Mutant(
        name="unload-waits-for-ever",
        origin="SGLang issue 36894: an unload that never returns",
        bug="an unload that waits for requests never gives up",
        signature="it waited beyond its time",
        test=f"{_TESTS}/test_loras_unloaded.py::test_an_unload_gives_up_in_time",
        owner=Loras,
        attribute="answer_due",
        replacement=_answer_without_a_deadline,
    ),
)
