"""Searches: mutants are found unaided, failures shrink to what matters, and become tests that fail with the mutant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripted_lockstep.actions import KillStage
from scripted_lockstep.gallery_page import gallery_markdown, results_on
from scripted_lockstep.mutants import ESCAPES, RACES, UnknownMutant
from scripted_lockstep.mutants.gallery import switched_on
from scripted_lockstep.space.workloads import FLAGSHIP

from scripted.core.adapters import adapter_named
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import Prefixes, execute
from scripted.search.mutant_search import Found, find_mutant
from scripted.search.shrinking import shrink
from scripted.search.strategies import RandomEvents, StrategyName
from scripted.search.targets import workload_named
from scripted.search.units import SearchPlan

FLUSH = "flush-ignores-in-flight"
# Mutants of each kind of bug, all found early: in the workloads alone or in the sweep of the first.
FOUND_EARLY = [
    FLUSH,
    "abort-waits-for-a-token",
    "pause-abort-keeps-half-a-prompt",
    "abort-ignores-in-flight",
    "disconnect-aborts-nothing",
    "token-after-the-end",
    "retraction-frees-too-late",
    "pause-overlooks-the-dispatched",
    "resume-cuts-the-output",
    "pause-does-not-stop-launches",
    "head-blocks-the-queue",
    "head-is-passed-over-for-ever",
    "queue-has-no-limit",
    "context-length-does-not-clamp",
    "decode-runs-twice",
    "chunk-waits-for-a-free-row",
    "prefix-published-before-its-result",
    "lock-refs-are-not-released",
    "locked-prefix-is-evicted",
    "parts-of-a-prompt-count-as-hits",
    "death-blames-another-stage",
    "deferred-flush-has-no-deadline",
    "flush-refused-by-the-queue",
    "flush-answers-but-does-nothing",
    "update-keeps-the-cache",
    "update-answered-as-launched",
    "stop-token-is-ignored",
    "victim-is-the-earliest",
    "one-big-decode-batch",
    "longest-prefix-is-not-asked",
    "priority-is-upside-down",
]


# Every sixth: `scripted gallery find --all` is all of them, and takes minutes.
@pytest.mark.parametrize("name", FOUND_EARLY[::6])
def test_the_search_finds_a_mutant_unaided(name: str) -> None:
    """A mutant is caught (D11)."""
    found = find_mutant(name)
    assert found.finding is not None


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("lora-waits-for-ever", "lora-passed-over"),
        ("eviction-ignores-a-split-prompt", "loras-in-turn"),
        ("failed-wake-counts", "failed-wake"),
        ("wake-without-weights", "asleep-without-weights"),
        ("wake-ends-the-pause", "asleep-twice"),
        ("guesses-of-the-ended-are-not-counted", "drafts-aborted"),
        ("flush-forgets-a-grammar-in-use", "grammars-flushed"),
    ],
)
def test_a_workload_shows_its_bug_by_itself(name: str, workload: str) -> None:
    """B15: a sweep does not find the bug, or only after tens of thousands of schedules."""
    with switched_on(name):
        assert execute(workload_named(workload)).failure is not None


def test_the_flush_race_is_found_by_the_sweep_of_its_workload() -> None:
    """B15: within a few dozen schedules, without knowing the window, with the incident's own error."""
    report = Campaign(SearchPlan(targets=(FLAGSHIP,), mutant=FLUSH, stop_at_first=True)).run()
    assert report.schedules < 100
    (finding,) = report.findings.values()
    assert "This request holds the node from another tree" in finding.failure.text


def test_no_mutant_no_finding() -> None:
    report = Campaign(SearchPlan(targets=("one-row", "twins"))).run()
    assert report.complete
    assert not report.findings
    assert report.schedules > 200
    assert {cell.kind for cell in report.coverage.counts} >= {"flush", "kill", "hold", "pause-retract", "abort"}


def test_processes_find_what_one_finds() -> None:
    one, two = (Campaign(SearchPlan(targets=("one-row",), jobs=jobs, mutant=FLUSH)).run() for jobs in (1, 2))
    assert two.complete
    assert two.schedules == one.schedules
    assert two.findings.keys() == one.findings.keys()
    assert two.coverage.counts == one.coverage.counts


@pytest.mark.parametrize("strategy", [StrategyName.RANDOM, StrategyName.PCT])
def test_endless_strategies_stop_by_count(strategy: StrategyName) -> None:
    report = Campaign(SearchPlan(targets=("one-row",), strategy=strategy, schedules=150)).run()
    assert 150 <= report.schedules <= 401
    assert not report.complete
    assert not report.findings


def test_a_failure_of_thirty_events_shrinks_to_the_few_that_matter() -> None:
    base = workload_named("full-rows")
    prefixes = Prefixes(base)
    additions = RandomEvents(3, most_events=30).additions("full-rows", base, 20)
    with switched_on(FLUSH):
        long = next(
            base.with_placed(drawn.placed)
            for drawn in additions
            if len(drawn.steps) >= 26 and prefixes.execute_drawn(drawn).failure and len(drawn.placed) >= 26
        )
        shrunk = shrink(long)
        failure = execute(shrunk.schedule).failure
        signature = execute(long).failure
    assert len(long.placed) >= 30
    assert len(shrunk.schedule.placed) <= 4
    assert shrunk.runs < 400
    assert failure is not None
    assert signature is not None
    assert failure.signature == signature.signature


def test_what_does_not_fail_is_not_shrunk() -> None:
    schedule = workload_named("twins")
    assert shrink(schedule).schedule == schedule


def test_failures_of_one_invariant_have_one_signature() -> None:
    with switched_on("abort-waits-for-a-token"):
        one, other = (
            execute(Schedule.parse(f"pp_size=2; 1 start {rid} prompt={size}; {step} abort {rid}")).failure
            for rid, size, step in (("a", 5, 3), ("some-request", 70, 3))
        )
    assert one is not None
    assert other is not None
    assert one.signature == other.signature
    assert one.text != other.text


@pytest.mark.parametrize(("mutant", "role"), [("sent-twice", "prefill"), ("load-counts-what-others-compute", "decode")])
def test_a_mutant_of_a_role_is_searched_for_in_its_targets(mutant: str, role: str) -> None:
    finding = find_mutant(mutant).finding
    assert finding is not None
    assert (finding.adapter, finding.mutant) == (f"lockstep-{role}", mutant)
    assert mutant in adapter_named("lockstep-decode").mutant_names


def test_the_page_of_the_gallery_has_an_entry_for_each_mutant() -> None:
    found = find_mutant("decode-runs-twice")
    table = gallery_markdown({one.mutant: one.result for one in (found, Found(FLUSH, None, 12, 0.5))})
    assert re.findall("^### (.*)$", table, re.MULTILINE) == [mutant.name for mutant in (*RACES, *ESCAPES)]
    assert re.findall("^## (.*)$", table, re.MULTILINE) == [
        "Races of real engines", "Found by review of this project's own suites",
    ]  # fmt: skip
    assert f"schedule {found.schedules:,}, " in table
    assert "not by a sweep (12 schedules)" in table
    with pytest.raises(UnknownMutant):
        find_mutant("flush-ignores-flight")


def test_the_page_of_the_gallery_is_what_its_generator_writes() -> None:
    """F: a mutant without an entry, or an entry whose bug or test has changed since, makes the page stale."""
    page = (Path(__file__).parents[3] / "benchmarks" / "tables" / "gallery.md").read_text(encoding="utf-8")
    results = results_on(page)
    assert list(results) == [mutant.name for mutant in (*RACES, *ESCAPES)]
    assert page.endswith(gallery_markdown(results))


def test_a_dead_stage_ends_every_run() -> None:
    """A06, A07: for anything in flight when a stage dies, every client gets one error with the process's name."""
    base = workload_named("chunked-beside-decodes")
    for step in range(1, 12):
        assert execute(base.with_placed([Placed(step, KillStage(stage=1))])).failure is None
