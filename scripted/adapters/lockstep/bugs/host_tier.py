"""Mutants of the second tier: what a copy in flight protects, what may be hit, what is forgotten with the weights."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.memory import HostPage, HostTier, KVMemory, Lease
from scripted.core.mutant import Mutant

__all__ = ["HOST_TIER"]

_TESTS: Final = "tests/registered/host_tier"


def _load_and_protect_afterwards(memory: KVMemory, lease: Lease, found: Sequence[HostPage], host: HostTier) -> None:
    before = len(lease.pages)
    memory.extend(lease, (before + len(found)) * memory._page_size)
    host.protect(found)
    for page in reversed(found):
        if host.kept.pop(page.key, None) is not None:
            host.kept[page.key] = page
    host._due_in += [(page.number, target) for page, target in zip(found, lease.pages[before:], strict=True)]


HOST_TIER: Final = (
    Mutant(
        name="host-page-evicted-under-a-load",
        origin="SGLang pull requests 27631 and 26728",
        bug="room is made for pages that are loaded before these are protected: what is evicted takes their place",
        signature="was read by more copies than were launched",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_what_is_evicted_for_a_load_does_not_take_its_source",
        target="engine.memory.kv:KVMemory._load",
        replacement=_load_and_protect_afterwards,
    ),
    Mutant(
        name="host-page-evicted-under-a-write",
        origin="SGLang pull request 28468",
        bug="a host page that a copy in flight writes is evicted for another one, and taken for it when that is back",
        signature="is CACHED, not HELD",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_a_page_on_its_way_keeps_its_place",
        target="engine.memory.host_tier:HostPage.may_go",
        cut=" and (self.is_ready or self.source is not None)",
    ),
    Mutant(
        name="hit-of-a-copy-in-flight",
        origin="vLLM issue 45704 and pull request 46278",
        bug="a page that is on its way to the host is hit before the copy is known to be done",
        signature="it hit a copy that was still in flight",
        test=f"{_TESTS}/test_host_copies.py::test_a_copy_in_flight_is_no_hit",
        target="engine.memory.host_tier:HostTier.match",
        cut="or not page.is_ready",
        becomes="or not (page.is_ready or page.source is None)",
    ),
    Mutant(
        name="failed-copy-is-kept",
        origin="SGLang pull request 38316",
        bug="what a failed microbatch was to write counts as written",
        signature="it hit a copy that was never made",
        test=f"{_TESTS}/test_host_copies.py::test_a_copy_that_failed_is_no_hit",
        target="engine.scheduler.host_copies:HostCopies.land",
        cut="failed=failed",
        becomes="failed=False",
    ),
    Mutant(
        name="load-of-one-that-left-keeps-its-pages",
        origin="SGLang pull requests 9874 and 37103",
        bug="host pages stay protected for ever when the request that loads them is aborted or sent back meanwhile",
        signature="host pages are protected for no copy",
        test=f"{_TESTS}/test_host_pages_in_use.py::test_an_abort_in_the_middle_of_a_load_protects_nothing_for_ever",
        target="engine.scheduler.host_copies:HostCopies.land",
        cut="self._host.land(copies.out, copies.into, failed=failed)",
        becomes=(
            'left = all(one.place in ("releasing", "retracting") for one in launched.requests)\n'
            "        self._host.land(copies.out, () if left and not failed else copies.into, failed=failed)"
        ),
    ),
    Mutant(
        name="update-forgets-the-host",
        origin="SGLang issue 26792 and pull request 29443",
        bug="an update of the weights drops the prefix cache and keeps what is on the host",
        signature="it hit KV of the old weights",
        test=f"{_TESTS}/test_host_copies.py::test_an_update_drops_both_tiers",
        target="engine.memory.kv:KVMemory.reset",
        cut="if self.host is not None:",
        becomes="if False:",
    ),
    Mutant(
        name="write-back-comes-late",
        origin="vLLM pull request 29870",
        bug="a page that was freed is copied to the host a microbatch later, when others have written into it",
        signature="it says something else after it was loaded",
        test=f"{_TESTS}/test_host_copies.py::test_an_evicted_prompt_comes_back_by_copy",
        target="engine.scheduler.host_copies:HostCopies.launch",
        cut=(
            "if self._host is None or not self._host.has_due:\n"
            "        return None\n"
            "    copies = Copies(*self._host.launch())"
        ),
        becomes=(
            'late = self.__dict__.pop("late", ())\n'
            "    if self._host is None or not (late or self._host.has_due):\n"
            "        return None\n"
            '    self.__dict__["late"], into = self._host.launch()\n'
            "    copies = Copies(late, into)"
        ),
    ),
)
