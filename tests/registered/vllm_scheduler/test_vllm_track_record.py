"""Bugs that vLLM's scheduler really had, put back into the installed version: the search finds each of them.

Goal: the checks of the search find the bugs that vLLM's users saw. Method: each bug is switched on, and one workload is
swept with one event more at every place. Origin: the closed issues and pull requests that each mutant names. Mutant:
all of the adapter's; without one the same workloads pass.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.adapter import CONTRACT, MUTANTS, TRIED_VERSIONS
from scripted_vllm.versions import installed_version

from scripted.core.adapters import adapter_named
from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import Mutant
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.execution import execute
from scripted.search.units import SearchPlan

register_cpu_ci(est_time=25, suite="vllm-cpu")

# The workload of the whole sweep that shows each bug first.
SHOWN_BY = {
    "preempted-stays-in-the-plan": "vllm-priority-together",
    "guesses-of-the-preempted": "vllm-priority-guesses",
    "preempted-while-in-flight": "vllm-guesses-async-stages",
    "flush-forgets-older-frames": "vllm-stages-async-deep",
    "flush-drops-the-next-token": "vllm-async",
    "touched-before-it-fits": "beside-decodes",
    "whole-prompt-hit": "twins",
    "stopped-while-it-waits": "vllm-priority-async",
    "equals-cannot-be-compared": "vllm-priority-together",
    "noted-blocks-are-never-forgotten": "alone",
    "stopped-requests-are-kept": "alone",
    "resumed-without-its-tokens": "vllm-async-first-runner",
    "resumed-with-its-first-tokens": "vllm-async-chunks-first-runner",
    "aborted-while-it-loads": "vllm-loads",
    "loaded-up-to-the-block": "vllm-loads-ragged",
    "aborted-before-its-first-block": "vllm-loads",
    "a-grammar-that-does-not-compile": "vllm-grammars-late",
    "masked-before-the-token-is-known": "vllm-grammars-async",
    "late-guesses-are-left-out": "vllm-grammars-guesses-async",
    "a-prefix-of-another-lora": "vllm-loras",
    "more-loras-than-fit": "vllm-loras",
    "loaded-behind-who-cannot-start": "vllm-loads-tight",
    "as-long-as-the-first-answer": "vllm-sessions",
    "images-of-who-cannot-start": "vllm-images-async",
    "images-are-counted-one-by-one": "vllm-images",
    "images-look-alike": "vllm-images",
    "an-image-at-the-start-is-cut": "vllm-images-whole",
    "a-state-of-the-same-step": "vllm-mamba",
    "past-the-block-that-was-hit": "vllm-mamba-parts-grown",
    "aligned-after-the-images": "vllm-mamba-images-large",
    "the-next-answer-gets-the-last-ones-tokens": "vllm-sessions-guesses-async",
    "loads-take-what-prefills-need": "vllm-loads-tight",
    "asked-again-after-the-load": "vllm-loads",
    "kept-up-to-what-was-computed": "vllm-sessions-preempted",
    "the-hash-of-a-discarded-token": "vllm-sessions-alike",
    "queued-before-it-has-left": "vllm-sessions-preempted",
    "the-last-output-is-cached": "vllm-turns",
    "fewer-are-on-their-way-than-come": "vllm-async-chunks",
    "cut-within-a-block-for-a-load": "vllm-loads-now-mamba-grown",
    "the-lookup-of-an-aborted-request-stays": "vllm-loads-tight",
    "each-question-moves-the-cursor": "connector-partly-here",
    "each-lookup-is-counted": "vllm-counted",
    "dropped-with-the-aborted": "vllm-growing",
    "the-first-pause-counts": "vllm-paused-twice",
    "half-awake-goes-on": "vllm-asleep",
    "asleep-over-its-batches": "vllm-asleep",
    "the-cache-outlives-the-sleep": "vllm-asleep",
    "a-pause-releases-the-memory": "vllm-asleep-in-part",
    "kv-memory-released-over-batches": "vllm-asleep-in-part",
    "the-cache-outlives-its-memory": "vllm-asleep-in-part",
}

# The mutants that one promise finds alone, or long before the end of the run: a schedule, the check and its text, and
# what is found without it.
WAITING = "max_num_seqs=1; 1 start a prompt=5 new=9; 1 start b prompt=5 seed=1; 1 start c prompt=5 seed=2; 3 abort b"
ALONE = {
    "each-lookup-is-counted": (
        "log_stats=True max_num_seqs=1; 1 start a prompt=5 new=9; 1 start b prompt=5 seed=1",
        "check_queries",
        "the query statistics changed something",
        "",
    ),
    "dropped-with-the-aborted": (WAITING, "check_told", "the scheduler has dropped c", "waits forever: c"),
    "the-last-output-is-cached": (
        "default; 1 start a prompt=5 new=3",
        "check_prefixes",
        "the prefix cache has block",
        "",
    ),
}

MISFITS = {
    ("flush-drops-the-next-token", "0.33.0"),
    ("a-grammar-that-does-not-compile", "0.33.0"),
    # 0.32.0 has these itself.
    ("kept-up-to-what-was-computed", "0.32.0"),
    ("queued-before-it-has-left", "0.32.0"),
    ("an-image-at-the-start-is-cut", "0.32.0"),
}


# The releases' own on the page: "A failed load waits for itself", "A resume lets requests run on a sleeping device";
# "A forced flush under a request that is loaded again ends the engine", "A preempted session is lost" and "An image at
# the start of a chunk is cut" of 0.32.0.
OWN_DEFECT = {"vllm-loads-tight": "fail-load", "vllm-asleep": "continue", "vllm-asleep-in-part": "continue"}
if installed_version() == "0.32.0":
    OWN_DEFECT |= {"vllm-sessions-preempted": "session=1", "connector-partly-here": "flush force=True"}
    OWN_DEFECT |= {"vllm-images-whole": "start extra"}

OFFLOADING = "vllm+connector_cls=vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"


def search(workload: str, mutant: str | None) -> SearchReport:
    # The contract of connectors is of adapters with one. A defect of the release may come before a mutant's bug.
    adapter = OFFLOADING if workload in CONTRACT else "vllm"
    plan = SearchPlan(targets=(workload,), mutant=mutant, stop_at_first=workload not in OWN_DEFECT, adapter=adapter)
    return Campaign(plan).run()


def test_every_bug_is_searched_for() -> None:
    assert set(SHOWN_BY) == set(adapter_named("vllm").mutant_names)
    assert len(MUTANTS) >= 8
    assert all("vllm" in mutant.origin or "LMCache" in mutant.origin for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds(mutant: Mutant) -> None:
    """The failure is caused by the bug, not any failure."""
    try:
        with mutant.switched_on():
            pass
    except EditDoesNotFit as exc:
        # Their places moved in 0.33.
        if installed_version() in TRIED_VERSIONS and (mutant.name, installed_version()) not in MISFITS:
            raise
        pytest.skip(str(exc))
    findings = search(SHOWN_BY[mutant.name], mutant.name).findings.values()
    texts = [f"{one.failure.signature} {one.failure.text}" for one in findings]
    assert mutant.signature
    assert any(mutant.signature in text for text in texts), texts


@pytest.mark.parametrize("name", ALONE)
def test_a_promise_alone_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the statistics, the end of the run is far, and nothing hits the block."""
    line, check, text, without = ALONE[name]
    adapter, schedule = adapter_named("vllm"), Schedule.parse(line, of="vllm")
    assert execute(schedule).failure is None
    with adapter.mutant_named(name).switched_on():
        assert text in str(execute(schedule).failure)
        monkeypatch.setattr(f"scripted.core.run.{check}", lambda *_: None)
        failure = execute(schedule).failure
    assert (failure is None) is not bool(without)
    assert without in str(failure)


@pytest.mark.parametrize("workload", sorted(set(SHOWN_BY.values())))
def test_without_a_bug_the_same_sweep_passes(workload: str) -> None:
    report = search(workload, None)
    own = OWN_DEFECT.get(workload, "no event")
    assert [str(found.failure) for found in report.findings.values() if own not in str(found.schedule)] == []
    assert report.complete or workload in OWN_DEFECT
