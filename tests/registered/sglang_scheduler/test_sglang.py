"""SGLang's own scheduler under the search: its constructor, its loops, its defects, and old bugs put back into it.

Goal: a schedule or a sweep finds the bugs that SGLang's users saw, and reports nothing else. Method: schedules, and
sweeps of one workload. Origin: the pull requests that benchmarks/tables/defects.md and the mutants name. Mutant: all of
the adapter's; without one the same workloads pass.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.mutant_exports import is_told_apart, runs_of
from ci.register import register_cpu_ci

if find_spec("sglang") is None:
    pytest.skip("no SGLang is installed; `make sglang` makes an environment with one", allow_module_level=True)

import scripted_sglang
from scripted_sglang.adapter import ADAPTER, COPIER, MUTANTS
from scripted_sglang.config import SglangSettings
from scripted_sglang.event_loop import Turns
from scripted_sglang.front import FrontEnd, GenerateReqInput
from scripted_sglang.host import HOST, MHATokenToKVPoolHost
from scripted_sglang.machine import Scheduler, SglangMachine, check_loops
from scripted_sglang.standalone import SglangStandalone

from scripted import api
from scripted.core.adapters import adapter_named
from scripted.core.defects import Defect, read_defects
from scripted.core.forks import Frozen
from scripted.core.mutant import Mutant
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk.messages import Answer, Record
from scripted.sdk.standalone import text_of, write_standalone
from scripted.search.decisions import Decisions
from scripted.search.execution import execute, record
from scripted.search.generated import space_of
from tests.defect_rows import rows_of, unlike

register_cpu_ci(est_time=110, suite="sglang-cpu")

# SGLang and its imports emit warnings.
pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "benchmarks/tables/defects.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\$ scripted replay '(adapter=sglang[ ;].*)'$", PAGE, re.MULTILINE)
WORDS = (
    "ab ends with abort, but nothing aborted it",
    "a is launched, but it was aborted 2 launches ago",
    "b ends with abort, but nothing aborted it",
    "call-2 is refused, although no request owns memory",
    "something waits forever: a (decode since step 2)",
    "a is launched, but it was aborted 2 launches ago",
    "a request waits although all that are open fit together: c (waiting since step 1)",
    "a request waits although all that are open fit together: b (waiting since step 1)",
    "a request waits although all that are open fit together: c (waiting since step 1)",
    "a ends with abort, but nothing aborted it",
    "call-2 is refused, although no request owns memory",
    "RuntimeError: Out of memory",
    "RuntimeError: Out of memory",
    "KeyError: 'kv_cache'",
    "batch 1 is launched while the device sleeps",
    "is out of bounds for dimension 1",
)
# The places of the defects of the host tier, of released memory, and of a least output.
TIERED, RELEASED, LEAST = slice(-8, -3), slice(-3, -1), slice(-1, None)
# The workload of the whole sweep that shows each bug.
SHOWN_BY = {
    "the-tree-outlives-the-release": "sglang-asleep",
    "the-tree-outlives-a-release-of-kv": "sglang-asleep-in-part",
    "flush-in-flight": "twins",
    "split-forgets-the-lock": "sglang-splits-tight",
    "ends-are-told-twice": "stops",
    "retracted-while-in-flight": "sglang-growing",
    "pages-counted-as-tokens": "sglang-tight-pages",
    "pages-by-the-sequence": "sglang-tight-pages",
    "flush-refused-by-the-queue": "sglang-paused",
    "protected-length-of-before": "twins",
    "chunk-waits-for-its-own-row": "sglang-chunks-one-row",
    "abort-misses-the-last-batch": "sglang-splits",
    "pause-forgets-the-last-batch": "twins",
    "pages-without-the-token-in-flight": "sglang-tight-pages-overlap",
    "extra-token-freed-twice": "twins",
    "chunks-without-progress": "sglang-chunks-mixed",
    "aborted-chunk-keeps-its-memory": "sglang-chunks-mixed",
    "rows-of-chunks-counted-twice": "sglang-four-rows",
    "load-without-a-fence": "sglang-host",
    "backup-without-a-fence": "sglang-host",
    "backups-end-with-the-next-request": "sglang-host",
    "demoted-without-a-backup": "sglang-host-write-back",
    "loaded-host-pages-are-reclaimed": "sglang-host-write-back",
    "split-forgets-the-lock-of-the-host": "sglang-storage-pages",
    "prefetches-of-aborted-requests": "sglang-storage-buffer",
    "the-last-output-is-cached": "sglang-turns",
    "a-report-of-the-load-empties-it": "twins",
    "retracted-behind-others": "sglang-growing",
    "a-second-pause-ends-the-first": "sglang-paused-twice",
}
# Three requests that do not fit together, and one behind them.
FULL = "max_total_tokens=24 schedule_conservativeness=0.1; " + "; ".join(
    f"{step} start {rid} prompt=5 new={new} seed={seed}"
    for seed, (step, rid, new) in enumerate([(1, "a", 12), (1, "b", 12), (1, "c", 12), (2, "d", 8)])
)
# The mutants that one promise finds alone, or long before the end of the run: a schedule, the check, and what is found
# without it.
ALONE = {
    "a-report-of-the-load-empties-it": ("default; 1 start a prompt=4 new=12", "check_queries", ""),
    "retracted-behind-others": (FULL, "check_told", "waits forever: b"),
    "the-last-output-is-cached": ("page_size=4; 1 start a prompt=6 new=2", "check_prefixes", ""),
}
PROMISED = {
    "check_queries": "changed something",
    "check_told": "the scheduler has dropped",
    "check_prefixes": "the prefix cache has block",
}


def failure_of(line: str) -> str:
    failure = execute(Schedule.parse(line, of="sglang")).failure
    return "" if failure is None else str(failure)


@pytest.mark.parametrize("name", ALONE)
def test_a_promise_alone_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the load, the end of the run is far, and nothing hits the page."""
    line, check, without = ALONE[name]
    assert failure_of(line) == ""
    with ADAPTER.switched_on(name):
        assert PROMISED[check] in failure_of(line)
        monkeypatch.setattr(f"scripted.core.run.{check}", lambda *_: None)
        failure = failure_of(line)
    assert without in failure
    assert bool(failure) == bool(without)


@pytest.mark.parametrize(("line", "words"), list(zip(LINES, WORDS, strict=True)))
def test_the_page_is_right_about_a_defect(line: str, words: str) -> None:
    assert words in failure_of(line)


@pytest.mark.parametrize(
    ("defect", "adapter"),
    [(defect, adapter) for adapter in ("sglang", "sglang-fleet") for defect in rows_of(adapter, ADAPTER.version())],
    ids=lambda given: given if isinstance(given, str) else given.id,
)
def test_a_defect_is_there_and_its_fix_mends_it(defect: Defect, adapter: str) -> None:
    """One failed only by the end of the run, which took back memory that had not been released."""
    assert unlike(defect, adapter) == []


@pytest.mark.parametrize(("line", "front"), list(zip(LINES[:-8], (0, 0, 0, 0, 1, 1, 0, 0), strict=True)))
def test_a_defect_is_a_file_of_its_own_loop_or_of_its_own_front_end(line: str, front: int) -> None:
    """The benchmark of exports runs the written text."""
    text, _ = text_of(SglangStandalone(), Schedule.parse(line, of="sglang"), "it")
    assert text is not None
    assert ("front.run(new_scheduler(settings))" in text) == bool(front)
    assert ("turns.run(new_scheduler(settings))" in text) != bool(front)
    assert "scripted" not in text.replace("found by search", "")


def test_the_end_of_a_stream_leaves_the_next_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client hung up, the fix still aborts its request."""
    front = FrontEnd(Turns())
    mine, next_one = SimpleNamespace(abort_sent=False), SimpleNamespace(abort_sent=False)
    asked = GenerateReqInput(input_ids=[1], rid="a")
    asked.normalize_batch_and_arguments()

    def aborted_after(later: SimpleNamespace) -> int:
        async def sleep(_: float) -> None:
            front.rid_to_state["a"] = later

        monkeypatch.setattr(asyncio, "sleep", sleep)
        front.sent, later.abort_sent = [], False
        front.loop.run_until_complete(front.create_abort_task(asked)())
        return len(front.sent)

    table = read_defects(Path(scripted_sglang.__path__[0]) / "defects.toml").defect
    (defect,) = [one for one in table if one.id == "sglang-end-of-stream-aborts-next"]
    assert aborted_after(next_one) == 1
    with defect.fixed():
        front.rid_to_state.clear()
        assert aborted_after(next_one) == 0
        front.rid_to_state["a"] = mine
        assert aborted_after(mine) == 1


@pytest.mark.parametrize("name", ["sglang-pause-never-ends", "sglang-abort-during-pause-lost"])
def test_a_fix_of_the_front_end_mends_its_own_code(name: str) -> None:
    """The search runs the adapter's front end, and these files SGLang's own, here over a scheduler of the adapter."""
    (defect,) = [one for one in rows_of("sglang", ADAPTER.version()) if one.id == name]
    text, _ = text_of(SglangStandalone(), Schedule.parse(defect.schedules[0]), "it")
    assert text is not None
    names: dict[str, Callable[..., object]] = {}
    exec(text, names)

    def run() -> None:
        machine = SglangMachine(SglangSettings())
        names["new_scheduler"] = lambda _: machine.scheduler
        with machine.inside():
            names["test_it"]()

    with pytest.raises(AssertionError, match="something waits forever" if "never" in name else "aborted"):
        run()
    with defect.fixed():
        run()


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        *((line, "enable_hierarchical_cache") for line in LINES[TIERED]),
        *((line, "min_new_tokens") for line in LINES[LEAST]),
    ],
)
def test_a_defect_of_what_turns_lack_is_no_file(line: str, setting: str) -> None:
    """Also where the scheduler raises: its turns have no host tier and know no least output."""
    text, why = text_of(SglangStandalone(), Schedule.parse(line, of="sglang"), "it")
    assert text is None
    assert f"the turns do not support {setting}" in str(why)


@pytest.mark.parametrize("line", LINES[RELEASED])
def test_a_defect_of_released_memory_is_a_file_that_fails_alone(line: str) -> None:
    """One of them is an error of the scheduler: the file must run its turns to get it."""
    assert write_standalone(SglangStandalone(), [Schedule.parse(line, of="sglang")], name="it").text is not None


def test_a_file_of_kv_that_outlives_its_release_is_red_with_it_alone() -> None:
    """A whole prompt that is in the tree is computed again, and reads the tree's block afterwards."""
    asleep = "3 sleep part=cuda_graph; 3 sleep part=kv_cache; 3 wake part=kv_cache; 3 wake part=cuda_graph"
    line = f"enable_memory_saver=True; 1 start a prompt=1 new=1; {asleep}; 3 start b prompt=1 new=3"
    mutant = "the-tree-outlives-a-release-of-kv"
    with ADAPTER.switched_on(mutant):
        text, why = text_of(SglangStandalone(), Schedule.parse(line, of="sglang"), "it")
    assert text is not None, why
    assert is_told_apart(text, why, *runs_of(ADAPTER, mutant)) is None


@pytest.mark.parametrize("part", ["weights", "kv_cache", "cuda_graph"])
def test_a_run_takes_back_only_the_memory_that_was_released(part: str) -> None:
    """The end of the run took back all of it, which ends the scheduler: a false alarm for each release of a part."""
    assert failure_of(f"enable_memory_saver=True; 1 sleep part={part}") == ""
    assert failure_of(f"enable_memory_saver=True; 1 start a prompt=4 new=1; 9 sleep; 10 wake part={part}") == ""
    assert "KeyError" in failure_of(f"enable_memory_saver=True; 1 sleep part={part}; 2 wake")


@pytest.mark.parametrize("workload", sorted(adapter_named("sglang").workloads))
def test_a_workload_alone_is_right(workload: str) -> None:
    """No false alarm without an added event, with tokens compared with those of each request alone."""
    assert failure_of(adapter_named("sglang").workloads[workload]) == ""


@pytest.mark.parametrize("of", ["sglang", "sglang-fleet"])
def test_generated_targets_have_priorities(of: str) -> None:
    """With the switch without which the scheduler does not read them."""
    target = str(space_of(of).draw({"priorities": "some", "requests": "many"}, random.Random(1)))
    assert "enable_priority_scheduling=True" in target
    assert "priority=5" in target


def records_of(line: str) -> list[Record]:
    return record(Schedule.parse(line, of="sglang"))[1]


def test_retraction_for_want_of_memory_is_reached() -> None:
    assert any(one.stepped.preempted for one in records_of(adapter_named("sglang").workloads["sglang-growing"]))


def test_a_reversed_branch_has_no_effect_on_later_runs() -> None:
    """The search for a wrong decision left a request in the queue for grammars, which all later runs shared."""
    schedule = Schedule.parse(LINES[1])
    before = record(schedule)[1]
    decisions = Decisions(schedule)
    queueing = [one for one in decisions._decided if "if add_to_grammar_queue" in str(one[1])]
    assert queueing
    for step, branch in queueing:
        decisions._makes_pass(branch, step)
    assert record(schedule)[1] == before


def test_another_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose loop makes other calls is not searched."""

    def event_loop_normal(self: Scheduler) -> None:
        self.ingest_requests()
        self.flush_cache()

    monkeypatch.setattr(Scheduler, "event_loop_normal", event_loop_normal)
    with pytest.raises(ScriptDefinitionError, match="event_loop_normal calls flush_cache, event_loop_normal does not"):
        check_loops()


def test_a_name_that_begins_like_no_other_is_safe() -> None:
    """With ids of their own an abort meets one request."""
    events = "1 start a prompt=2 new=6; 1 start ab prompt=2 seed=1 new=6; 3 abort a"
    assert "nothing aborted it" in failure_of(f"default; {events}")
    assert failure_of(f"client_rids=False; {events}") == ""


@pytest.mark.parametrize(
    "line",
    [
        "max_queued_requests=1; 1 start a prompt=4 new=2; 1 start b prompt=4 seed=1 new=2",
        "default; 1 start a prompt=4 new=6; 3 pause mode=abort; 4 continue; 5 start b prompt=3 new=2",
        "default; 1 start a prompt=1; 2 pause mode=abort; 2 pause mode=in_place; 6 continue",
        "default; 1 start a prompt=1; 2 pause mode=abort; 2 pause mode=abort; 2 pause mode=retract; 2 continue",
        "disable_overlap_schedule=True; 1 start a prompt=1; 2 pause mode=abort; 2 pause mode=abort; 3 start b prompt=1",
        "default; 1 pause mode=in_place; 2 start b prompt=1; 3 pause mode=abort; 7 continue",
    ],
)
def test_what_the_front_end_knows_is_no_defect(line: str) -> None:
    """A full queue refuses arrivals; arrivals after an aborting pause wait until no request is left."""
    assert failure_of(line) == ""


def copied_in(name: str) -> list[tuple[int, int]]:
    return [pair for one in records_of(adapter_named("sglang").workloads[name]) for pair in one.stepped.copies]


@pytest.mark.parametrize("name", ["sglang-host", "sglang-host-write-back", "sglang-storage-waits"])
def test_pages_go_to_the_host_and_come_back(name: str) -> None:
    """And to the storage, if there is one: the window of every rule about them is reached."""
    copied = copied_in(name)
    tiers = {(_tier_of(source), _tier_of(target)) for source, target in copied}
    assert {("device", "host"), ("host", "device")} <= tiers
    assert {("host", "storage"), ("storage", "host")} <= tiers or "storage" not in name


def _tier_of(block: int) -> str:
    return "storage" if block < 0 else "host" if block >= HOST else "device"


def test_what_the_host_has_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaked slot is reported."""
    monkeypatch.setattr(MHATokenToKVPoolHost, "free", lambda *_: 0)
    assert "tokens of the host are in use, but its tree holds" in failure_of(
        adapter_named("sglang").workloads["sglang-host-small"]
    )


def test_a_flush_drops_the_host_and_not_the_storage() -> None:
    """After a flush a prompt is computed again, unless a storage has it."""
    events = "1 start a prompt=20 new=1; 9 flush; 10 start b prompt=20 new=1"
    tiered = "enable_hierarchical_cache=True"
    storage = f"{tiered} hicache_storage_backend=dynamic hicache_storage_prefetch_policy=wait_complete"
    for settings, computed in ((tiered, 20), (storage, 1)):
        shares = [
            share
            for one in records_of(f"{settings}; {events}")
            for share in (one.stepped.microbatch.shares if one.stepped.microbatch else ())
            if share.rid == "b"
        ]
        assert sum(share.count for share in shares) == computed


def test_a_paused_scheduler_may_refuse_a_flush_while_a_prefetch_fills_the_host() -> None:
    tiered = "enable_hierarchical_cache=True hicache_storage_backend=dynamic"
    for step in (1, 3):
        schedule = f"{tiered}; 1 start a prompt=5 new=1; 1 pause mode=in_place; {step} flush"
        assert execute(Schedule.parse(schedule, of="sglang")).failure is None


def test_a_flush_is_judged_from_the_first_turn_of_a_pause_on() -> None:
    """One that comes with the pause finds a request that has just ended, which a running loop would refuse as well."""
    (busy,) = [one for one in rows_of("sglang", ADAPTER.version()) if one.id == "sglang-finished-request-keeps-busy"]
    ended = "disable_overlap_schedule=True; 1 start a prompt=1 new=1; 2 pause mode=in_place"
    unpaused = records_of("disable_overlap_schedule=True; 1 start a prompt=1 new=1; 2 flush")
    assert [one.ok for record in unpaused for one in record.stepped.replies if isinstance(one, Answer)] == [False, True]
    assert "is refused, although no request owns memory" in failure_of(f"{ended}; 3 flush")
    with busy.fixed():
        assert failure_of(f"{ended}; 2 flush") == failure_of(f"{ended}; 3 flush") == ""


def test_a_flush_that_a_pause_alone_refuses_is_seen_beside_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Scheduler.is_fully_idle
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda self, **how: not self._engine_paused and idle(self, **how))
    schedule = "enable_hierarchical_cache=True hicache_storage_backend=dynamic; 1 pause mode=in_place; 3 flush"
    failure = execute(Schedule.parse(schedule, of="sglang")).failure
    assert failure is not None
    assert "is refused, although no request owns memory" in str(failure)


def test_what_a_tier_is_held_for_is_waited_for() -> None:
    """A prompt that the storage has waits for it; with a read that fails it is computed."""
    settings = (
        "enable_hierarchical_cache=True hicache_storage_backend=dynamic hicache_storage_prefetch_policy=wait_complete"
    )
    began = []
    for events in ("", "; 10 hold-tier tier=storage; 18 release-tiers", "; 10 fail-storage", "; 9 forget-stored"):
        records = records_of(f"{settings}; 1 start a prompt=20 new=1; 9 flush; 10 start b prompt=20 new=1{events}")
        launched = [
            (number, share.start)
            for number, one in enumerate(records, 1)
            for share in (one.stepped.microbatch.shares if one.stepped.microbatch else ())
            if share.rid == "b"
        ]
        began.append(launched[0])
    assert [start for _, start in began] == [19, 19, 0, 0]
    assert began[1][0] >= 18 > began[0][0]


@pytest.mark.parametrize(
    "name",
    [
        *("sglang-growing-mixed", "sglang-chunks-normal", "sglang-splits-tight"),
        *("sglang-host-write-back", "sglang-storage-pages", "sglang-storage-buffer"),
    ],
)
def test_copies_go_on_like_the_original(name: str) -> None:
    """A copy made before each step does this step and the next one, and the original continues undisturbed."""
    adapter = adapter_named("sglang")
    steps = [(one.step.events, one.stepped) for one in records_of(adapter.workloads[name])]
    machine = adapter.new_parts(Schedule.parse(adapter.workloads[name], of="sglang").config, record=False)[0]
    for (events, stepped), (next_events, next_stepped) in itertools.pairwise(steps):
        copied = Frozen(machine, COPIER).thaw()
        assert machine.step(events, 0.0) == stepped
        assert copied.step(events, 0.0) == stepped
        assert copied.step(next_events, 0.0) == next_stepped


def test_every_bug_is_searched_for() -> None:
    assert set(SHOWN_BY) == set(adapter_named("sglang").mutant_names)
    assert all("sglang" in mutant.origin for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds(mutant: Mutant) -> None:
    """The failure is caused by the bug, not any failure."""
    report = api.explore(SHOWN_BY[mutant.name], adapter="sglang", mutant=mutant.name, stop_at_first=True)
    assert any(mutant.signature in f"{one.failure.signature} {one.failure.text}" for one in report.findings.values())


def test_a_scheduler_leaves_no_thread() -> None:
    """An endless thread kept each scheduler alive: after thousands of settings a garbage collection took seconds."""
    SglangMachine(SglangSettings())
    before = threading.active_count()
    SglangMachine(SglangSettings(max_total_tokens=57))
    assert threading.active_count() == before


# Runs the command, and prints which files of SGLang's shared memory it opens. Others' come and go beside it.
WATCHED = """
import runpy, sys
def tell(event, args):
    if event == "open" and str(args[0]).startswith("/dev/shm/sglang_"):
        print("opened", args[0], file=sys.stderr)
sys.addaudithook(tell)
runpy.run_module("scripted", run_name="__main__", alter_sys=True)
"""


def test_a_replay_leaves_no_file(tmp_path: Path) -> None:
    """C03: no socket among the temporary files, and no shared memory, where SGLang keeps what it says of its load."""
    schedule = "adapter=sglang; 1 start a prompt=4 new=2"
    command = [sys.executable, "-W", "ignore", "-c", WATCHED, "replay", schedule]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "opened /dev/shm/" not in done.stderr


def test_the_command_of_a_server_has_what_is_not_its_default() -> None:
    command = ADAPTER.server.command(SglangSettings(page_size=4, enable_mixed_chunk=True))
    assert command is not None
    assert command.line.startswith("python -m sglang.launch_server --model-path MODEL --page-size 4 ")
    assert command.line.endswith(" --enable-mixed-chunk")
    assert "enable_mixed_chunk=True (default False)" in command.changed


def test_a_request_may_wait_for_the_page_that_the_scheduler_keeps_free() -> None:
    """Both need exactly all pages; ``PrefillBudget.reserve`` counts one more."""
    line = "page_size=4 max_total_tokens=32 context_length=28; 1 start g prompt=8 new=12; 1 start h prompt=4 new=8"
    assert failure_of(line) == ""
