"""Mutants of the second tier: what a copy in flight protects, what may be hit, what is forgotten with the weights."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.memory import HostPage, HostTier, KVMemory, Lease
from engine.plan import Copies
from engine.scheduler.books import Launched
from engine.scheduler.host_copies import HostCopies
from engine.scheduler.request import Place
from scripted.core.mutant import Mutant

__all__ = ["HOST_TIER"]

_TESTS = "tests/registered/host_tier"

_match = HostTier.match
_land = HostCopies.land
_reset = KVMemory.reset
_launch = HostCopies.launch


def _load_and_protect_afterwards(memory: KVMemory, lease: Lease, found: Sequence[HostPage], host: HostTier) -> None:
    before = len(lease.pages)
    memory.extend(lease, (before + len(found)) * memory._page_size)
    host.protect(found)
    for page in reversed(found):
        if host.kept.pop(page.key, None) is not None:
            host.kept[page.key] = page
    host._due_in += [(page.number, target) for page, target in zip(found, lease.pages[before:], strict=True)]


def _may_go_while_it_is_written(page: HostPage) -> bool:
    return not page.readers


def _match_what_is_on_its_way(host: HostTier, ids: Sequence[int], start: int, lora: int = 0) -> list[HostPage]:
    before = {page: page.is_ready for page in host.kept.values()}
    for page in before:
        page.is_ready = page.is_ready or page.source is None
    found = _match(host, ids, start, lora)
    for page, was_ready in before.items():
        page.is_ready = was_ready
    return found


def _land_as_if_all_went_well(copies: HostCopies, launched: Launched, *, failed: bool) -> None:
    del failed
    _land(copies, launched, failed=False)


def _land_unless_all_have_left(copies: HostCopies, launched: Launched, *, failed: bool) -> None:
    if failed or not all(request.place in (Place.RELEASING, Place.RETRACTING) for request in launched.requests):
        _land(copies, launched, failed=failed)
    elif launched.microbatch.copies is not None and copies._host is not None:
        copies._host.land(launched.microbatch.copies.out, (), failed=False)


def _reset_all_but_the_host(memory: KVMemory) -> None:
    host, memory.host = memory.host, None
    _reset(memory)
    memory.host = host


def _launch_what_was_due_before(copies: HostCopies) -> Copies | None:
    launched = _launch(copies)
    late: Any = copies.__dict__.pop("late", ())
    if launched is None:
        return Copies(late, ()) if late else None
    copies.__dict__["late"] = launched.out
    return Copies(late, launched.into)


HOST_TIER = (
    Mutant(
        name="host-page-evicted-under-a-load",
        origin="SGLang pull requests 27631 and 26728",
        bug="room is made for pages that are loaded before these are protected: what is evicted takes their place",
        signature="was read by more copies than were launched",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_what_is_evicted_for_a_load_does_not_take_its_source",
        owner=KVMemory,
        attribute="_load",
        replacement=_load_and_protect_afterwards,
    ),
    Mutant(
        name="host-page-evicted-under-a-write",
        origin="SGLang pull request 28468",
        bug="a host page that a copy in flight writes is evicted for another one, and taken for it when that is back",
        signature="is CACHED, not HELD",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_a_page_on_its_way_keeps_its_place",
        owner=HostPage,
        attribute="may_go",
        replacement=property(_may_go_while_it_is_written),
    ),
    Mutant(
        name="hit-of-a-copy-in-flight",
        origin="vLLM issue 45704 and pull request 46278",
        bug="a page that is on its way to the host is hit before the copy is known to be done",
        signature="it hit a copy that was still in flight",
        test=f"{_TESTS}/test_host_copies.py::test_a_copy_in_flight_is_no_hit",
        owner=HostTier,
        attribute="match",
        replacement=_match_what_is_on_its_way,
    ),
    Mutant(
        name="failed-copy-is-kept",
        origin="SGLang pull request 38316",
        bug="what a failed microbatch was to write counts as written",
        signature="it hit a copy that was never made",
        test=f"{_TESTS}/test_host_copies.py::test_a_copy_that_failed_is_no_hit",
        owner=HostCopies,
        attribute="land",
        replacement=_land_as_if_all_went_well,
    ),
    Mutant(
        name="load-of-one-that-left-keeps-its-pages",
        origin="SGLang pull requests 9874 and 37103",
        bug="host pages stay protected for ever when the request that loads them is aborted or sent back meanwhile",
        signature="host pages are protected for no copy",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_an_abort_in_the_middle_of_a_load_protects_nothing_for_ever",
        owner=HostCopies,
        attribute="land",
        replacement=_land_unless_all_have_left,
    ),
    Mutant(
        name="update-forgets-the-host",
        origin="SGLang issue 26792 and pull request 29443",
        bug="an update of the weights drops the prefix cache and keeps what is on the host",
        signature="it hit KV of the old weights",
        test=f"{_TESTS}/test_host_copies.py::test_an_update_drops_both_tiers",
        owner=KVMemory,
        attribute="reset",
        replacement=_reset_all_but_the_host,
    ),
    Mutant(
        name="write-back-comes-late",
        origin="vLLM pull request 29870",
        bug="a page that was freed is copied to the host a microbatch later, when others have written into it",
        signature="it says something else after it was loaded",
        test=f"{_TESTS}/test_host_copies.py::test_an_evicted_prompt_comes_back_by_copy",
        owner=HostCopies,
        attribute="launch",
        replacement=_launch_what_was_due_before,
    ),
)
