"""Recordings: what a gate let through is replayed to the same steps, redacted or not, up to the step of a crash."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from base_workloads import WORKLOADS
from scripted_lockstep.actions import Flush, StartRequest
from scripted_lockstep.configs import limits_of
from scripted_lockstep.mutants.gallery import switched_on
from scripted_lockstep.step_words import log_of
from scripted_lockstep.tiers.sim.runner import EngineSim
from thinned import thinned
from typer.testing import CliRunner

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.messages import Completion, Event, Generate, SamplingParams, SetPressure, StartProfile
from engine.core.recording import (
    FlightRecorder,
    Header,
    RecordingError,
    RecordingFile,
    RecordingGate,
    Redactor,
    ReplayDiffers,
    ReplayGate,
    Sink,
    read_recording,
)
from engine.core.recording.checkpoint import checkpoint_of, restored
from engine.core.recording.format import frame_bytes, write_frames
from engine.core.recording.replay_gate import NullPorts
from engine.core.scheduler import Scheduler, run_loop
from scripted.cli import app
from scripted.cli.replay import replay
from scripted.core.placed_action import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.report.difference import first_difference
from scripted.report.failure import ScriptError
from scripted.reruns import rerun, rerun_in_fresh_process, schedule_of_recording
from scripted.script.loader import load_test

FLUSH = "flush-ignores-in-flight"
RACE = Schedule.parse("pp_size=4 pp_async_depth=2 chunked_prefill_size=64; 1 start a prompt=125; 4 flush")


def record_to(path: Path, schedule: Schedule, *, redactor: Redactor | None = None, sinks: tuple[Sink, ...] = ()) -> Run:
    inner = Run(schedule, record=True)
    gate = RecordingGate(inner, inner.machine.scheduler, [RecordingFile(path), *sinks], redactor=redactor)
    run_loop(gate, inner.machine.scheduler, inner.device, inner.oracle)
    return inner


@pytest.mark.parametrize("name", thinned(list(WORKLOADS)[::2], one_in=4))
def test_a_recording_replays_step_by_step(name: str, tmp_path: Path) -> None:
    inner = record_to(tmp_path / "run.rec", WORKLOADS[name])
    again = rerun(str(tmp_path / "run.rec"))
    assert again.passed
    assert inner.records is not None
    assert first_difference(log_of(inner.records, inner.machine.limits), again.log, exactly=True) is None


@pytest.mark.parametrize(
    "name", ["warm-prefix", "twins", "full-pages", "failed-chunk", "same-rid-again", "longest-prefix"]
)
def test_a_redacted_recording_replays_and_holds_no_prompt(name: str, tmp_path: Path) -> None:
    """Prefixes are shared, pages given and requests ended exactly as with the originals."""
    inner = record_to(tmp_path / "run.rec", WORKLOADS[name], redactor=Redactor())
    again = rerun(str(tmp_path / "run.rec"))
    assert again.passed
    assert inner.records is not None
    recorded = log_of(inner.records, inner.machine.limits).steps
    sizes = [(one.memory, len(one.running), len(one.waiting)) for one in recorded]
    assert sizes == [(one.memory, len(one.running), len(one.waiting)) for one in again.log.steps]
    events = [event for step in read_recording(tmp_path / "run.rec").steps for event in step.events]
    tokens = [token for event in events if isinstance(event, Generate) for token in event.prompt_ids]
    tokens += [token for event in events if isinstance(event, Completion) for token in event.token_ids]
    assert all(token >= 1 << 32 or token == 0 for token in tokens)


def test_fingerprints_depend_on_the_key(tmp_path: Path) -> None:
    for name, key in (("one", b"k" * 32), ("same", b"k" * 32), ("other", b"q" * 32)):
        record_to(tmp_path / name, WORKLOADS["twins"], redactor=Redactor(key))
    one, same, other = (read_recording(tmp_path / name).steps for name in ("one", "same", "other"))
    assert one == same
    assert one != other


@pytest.mark.parametrize("redacted", [False, True])
def test_a_recorded_crash_replays_to_the_same_assertion(redacted: bool, tmp_path: Path) -> None:
    path = tmp_path / "crash.rec"
    with switched_on("flush-ignores-in-flight"):
        inner = Run(RACE, record=True)
        # Production does not check after each step: there, the crash comes with the result.
        inner.oracle.check_step = lambda *_, **__: None  # type: ignore[method-assign]
        redactor = Redactor() if redacted else None
        gate = RecordingGate(inner, inner.machine.scheduler, [RecordingFile(path)], redactor=redactor)
        with pytest.raises(AssertionError) as crash:
            run_loop(gate, inner.machine.scheduler, inner.device, inner.oracle)
        again = rerun(str(path))
    assert "This request holds the node from another tree" in str(crash.value)
    assert again.error == f"{type(crash.value).__name__}: {crash.value}"
    assert again.passed
    assert again.log.steps[-1].error == again.error
    healthy = rerun(str(path))
    assert not healthy.passed
    assert "step 4 sends replies that differ from the recording" in str(healthy.differs)


def test_a_replay_stops_at_the_first_step_that_differs(tmp_path: Path) -> None:
    record_to(tmp_path / "run.rec", WORKLOADS["full-rows"])
    recording = read_recording(tmp_path / "run.rec")
    gate, ports = ReplayGate(recording), NullPorts()
    with switched_on("decode-runs-twice"):
        scheduler = Scheduler(recording.header.limits)
        with pytest.raises(ReplayDiffers, match="launches a microbatch that differs from the recording"):
            run_loop(gate, scheduler, ports, ports)


def test_a_replay_can_stop_early(tmp_path: Path) -> None:
    record_to(tmp_path / "run.rec", WORKLOADS["full-rows"])
    assert [one.step for one in rerun(str(tmp_path / "run.rec"), until=5).log.steps] == [1, 2, 3, 4, 5]
    kept = rerun(str(tmp_path / "run.rec"), last_steps=3)
    assert kept.passed
    assert len(kept.log.steps) == 3


def test_a_torn_recording_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    record_to(path, WORKLOADS["twins"])
    whole = read_recording(path)
    path.write_bytes(path.read_bytes()[:-90])
    torn = read_recording(path)
    assert torn.end is None
    assert 0 < len(torn.steps) <= len(whole.steps)
    assert rerun(str(path)).passed


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x02hi", b"not a recording at all, but a long text"])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(RecordingError, match="recording"):
        read_recording(tmp_path / "other")


@pytest.mark.parametrize(
    "changed", [{"rows": 10**12}, {"rows": -1}, {"host_pages": 2**40}, {"schedule_policy": "none"}], ids=str
)
def test_limits_that_no_engine_has_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    """46.3: they were tracebacks, or took all memory."""
    limits = msgspec.structs.replace(limits_of(WORKLOADS["full-rows"].config), **changed)
    write_frames(tmp_path / "run.rec", [frame_bytes(Header(limits=limits))])
    with pytest.raises(RecordingError, match=r"run\.rec has limits that no engine has \(.*; give a file of"):
        rerun(str(tmp_path / "run.rec"))


def test_a_recorded_digest_does_not_command_a_terminal(tmp_path: Path) -> None:
    record_to(tmp_path / "run.rec", WORKLOADS["full-rows"])
    whole = read_recording(tmp_path / "run.rec")
    assert whole.end is not None
    frames = [whole.header, *whole.steps, msgspec.structs.replace(whole.end, plan_digest="\x1b[2Jx")]
    write_frames(tmp_path / "run.rec", map(frame_bytes, frames))
    said = CliRunner().invoke(app, ["replay", str(tmp_path / "run.rec")]).output
    assert r", not \x1b[2Jx" in said
    assert "\x1b" not in said


def test_the_flight_recorder_is_bounded_and_says_what_it_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = Header(limits=limits_of(WORKLOADS["full-rows"].config))
    every, all_of_it, last = EveryCheckpoint(), FlightRecorder(header), FlightRecorder(header, limit_steps=6)
    record_to(tmp_path / "run.rec", WORKLOADS["full-rows"], sinks=(every, all_of_it))
    assert rerun(str(all_of_it.dump(tmp_path / "all.rec"))).passed
    for frame in every.frames[:14]:
        last.write(frame)
    path = last.dump(tmp_path / "last.rec")
    held = read_recording(path)
    assert held.header.first_step == last.dropped + 1 == held.steps[0].step == 8
    assert held.steps[-1].step == 13
    with pytest.raises(RecordingError, match="begins with step 8 and has no idle moment"):
        replay(str(path))
    assert "step 13, 0.000 s: " in capsys.readouterr().out


class EveryCheckpoint:
    """Keeps all frames, and every checkpoint with the number of frames before it."""

    wants_checkpoint = True

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.checkpoints: list[tuple[int, Callable[[], bytes]]] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    def mark(self, frame: Callable[[], bytes]) -> None:
        self.checkpoints.append((len(self.frames), frame))

    def close(self, *, failed: bool) -> None:
        pass


# A cache that is shared, split and evicted, priorities, ends of every kind, and moments of rest between them.
RESTING = Schedule.parse(
    "page_size=4 chunked_prefill_size=16 max_total_tokens=96; 1 start a prompt=30 new=3; 2 start b prompt=22 new=6; "
    "40 start c prompt=30 new=2; 42 abort c; 60 pause; 62 start d prompt=33 seed=1 new=8; 64 continue; "
    "100 start e prompt=13 new=4; 101 start f prompt=40 seed=2 new=9; 140 start g prompt=22 new=20; 190 evict pages=3; "
    "200 start h prompt=18 seed=1 new=3; 230 flush; 240 start i prompt=30 new=3; 260 start j prompt=22 new=3"
)


def _guesses_or_keeps(config: EngineConfig) -> bool:
    return config.speculative_algorithm != "off" or config.host_kv_tokens > 0


# Every third workload: each is recorded and replayed above. A redacted text keeps no equal tokens equal, so nothing can
# be guessed from it, nor what is on the host be known by it; a server refuses these together.
MOMENTS = [(name, redacted) for name in ("resting", *list(WORKLOADS)[::5]) for redacted in (False, True)]
MOMENTS = [
    (name, redacted)
    for name, redacted in MOMENTS
    if not (redacted and name in WORKLOADS and _guesses_or_keeps(WORKLOADS[name].config))
]


@pytest.mark.parametrize(("name", "redacted"), thinned(MOMENTS, one_in=4))
def test_a_replay_from_any_moment_of_rest_does_the_same(name: str, redacted: bool, tmp_path: Path) -> None:
    """B17: it does in every step what was recorded, and the next moment of rest finds it the same to the last count."""
    schedule, every = WORKLOADS.get(name, RESTING), EveryCheckpoint()
    inner = record_to(tmp_path / "run.rec", schedule, redactor=Redactor() if redacted else None, sinks=(every,))
    assert every.checkpoints or inner.machine.scheduler.failure is not None
    for (before, checkpoint), (then, next_checkpoint) in itertools.pairwise(every.checkpoints):
        path = tmp_path / "rest.rec"
        header = Header(limits=inner.machine.limits, redacted=redacted, first_step=before)
        path.write_bytes(b"".join([frame_bytes(header), checkpoint(), *every.frames[before:then]]))
        recording = read_recording(path)
        assert recording.checkpoint is not None
        scheduler, ports = restored(inner.machine.limits, recording.checkpoint), NullPorts()
        run_loop(ReplayGate(recording), scheduler, ports, ports)
        after = checkpoint_of(scheduler)
        assert after is not None
        assert frame_bytes(after) == next_checkpoint()


def test_a_flight_record_begins_with_a_moment_of_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins at the oldest held checkpoint; checkpoints are at least a quarter of the limit apart."""
    flight = FlightRecorder(Header(limits=limits_of(RESTING.config)), limit_steps=120)
    inner = record_to(tmp_path / "run.rec", RESTING, sinks=(flight,))
    path = flight.dump(tmp_path / "flight.rec")
    held, first = read_recording(path), flight.dropped + 1
    assert held.checkpoint is not None
    assert first <= held.header.first_step == held.steps[0].step == held.checkpoint.stats.step + 1 < first + 60
    replay(str(path))
    assert f"of those from step {held.header.first_step} on" in capsys.readouterr().out
    assert [one.step for one in rerun(str(path), until=first + 70, last_steps=3).log.steps][-1] == first + 70
    with switched_on("flush-answers-but-does-nothing"):
        assert not rerun(str(path)).passed
    assert inner.records is not None
    assert held.steps[-1].step == len(inner.records)


@pytest.mark.parametrize("event", [SetPressure(leave_rows=1), StartProfile(call_id="p", folder="/tmp/p")])
def test_no_checkpoint_while_an_operator_is_at_work(event: Event) -> None:
    scheduler = Scheduler(limits_of(RESTING.config))
    assert checkpoint_of(scheduler) is not None
    result = scheduler.step([event], 0.0)
    if result.microbatch is not None:
        scheduler.step([Completion(microbatch_id=result.microbatch.id)], 0.0)
    assert scheduler.is_fully_idle
    assert checkpoint_of(scheduler) is None


def test_a_damaged_checkpoint_is_refused() -> None:
    """Books that do not balance are found before the first step."""
    inner = Run(Schedule.parse("page_size=4; 1 start a prompt=9"))
    run_loop(inner, inner.machine.scheduler, inner.device, inner.oracle)
    inner.machine.scheduler.step(
        [Generate(rid="b", prompt_ids=tuple(range(9)), sampling=SamplingParams(max_new_tokens=1))], 0.0
    )
    last = inner.machine.scheduler.counters.forward_ct - 1
    inner.machine.scheduler.step([Completion(microbatch_id=last, token_ids=(1,))], 0.0)
    good = checkpoint_of(inner.machine.scheduler)
    assert good is not None
    run = good.tree.runs[0]
    limits = inner.machine.limits
    assert restored(limits, good).stats() == good.stats
    for wrong, why in (
        (msgspec.structs.replace(run, parent=99), "continues node 99"),
        (msgspec.structs.replace(run, tokens=run.tokens[:4]), "4 tokens in 2 pages"),
        (msgspec.structs.replace(run, tokens=run.tokens[:4], pages=run.pages[:1]), "it is damaged"),
    ):
        tree = msgspec.structs.replace(good.tree, runs=(wrong,))
        with pytest.raises(IntegrityError, match=why):
            restored(limits, msgspec.structs.replace(good, tree=tree))


def test_a_full_disk_ends_the_recording_not_the_engine(tmp_path: Path) -> None:
    class FullDisk:
        wants_checkpoint = True

        def mark(self, frame: Callable[[], bytes]) -> None:
            raise AssertionError("it was given up")

        def write(self, frame: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self, *, failed: bool) -> None:
            raise AssertionError("it was given up")

    inner = record_to(tmp_path / "run.rec", WORKLOADS["twins"], sinks=(FullDisk(),))
    assert inner.machine.scheduler.is_fully_idle
    assert rerun(str(tmp_path / "run.rec")).passed


def test_the_same_in_a_fresh_process_with_another_hash_seed() -> None:
    """The same script has the same digest in any process (D10)."""
    line = str(RACE)
    here, there = rerun(line), rerun_in_fresh_process(line)
    assert first_difference(here.log, there.log, exactly=True) is None
    moved = rerun(line.replace("4 flush", "5 flush"))
    difference = first_difference(here.log, moved.log)
    assert difference is not None
    assert (difference.index, difference.field) == (3, "arrived")


def test_a_hundred_saved_failures_fail_the_same_again() -> None:
    lines = [
        f"pp_size={1 + number % 4} pp_async_depth=1 max_total_tokens=512; 1 start a prompt={1 + number}; 2 flush"
        for number in range(100)
    ]
    with switched_on("flush-ignores-in-flight"):
        first = [rerun(line).error for line in lines]
        assert [rerun(line).error for line in lines] == first
    assert all(error is not None and "from another tree" in error for error in first)
    assert [rerun(line).error for line in lines[:10]] == [None] * 10


@pytest.mark.parametrize(
    "name",
    thinned(
        (name for name in list(WORKLOADS)[1::2] if not name.startswith("drafts") and name != "ahead-of-a-stop"),
        one_in=4,
    ),
)
def test_a_recording_as_a_schedule_launches_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    record_to(path, WORKLOADS[name])
    recording = read_recording(path)
    translation = schedule_of_recording(path)
    assert translation.same_steps == len(translation.steps) == len(recording.steps)
    assert not translation.notes


def test_a_recording_with_guesses_says_that_its_schedule_guesses_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    record_to(path, WORKLOADS["drafts"])
    translation = schedule_of_recording(path)
    assert translation.schedule.config.speculative_algorithm == "ngram"
    assert translation.same_steps < len(translation.steps)
    assert any("guesses depend on the text" in note for note in translation.notes)


def test_a_recording_of_stops_with_a_decode_ahead_says_what_its_schedule_knows_in_advance(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    record_to(path, WORKLOADS["ahead-of-a-stop"])
    translation = schedule_of_recording(path)
    assert translation.schedule.config.async_scheduling
    assert translation.same_steps < len(translation.steps)
    assert any(note.startswith("2 requests stopped, with a decode planned ahead") for note in translation.notes)


def test_prompts_that_share_their_beginning_share_it_in_a_schedule(tmp_path: Path) -> None:
    """Three prompts in two families: one goes on where another one ends, one leaves it in the middle."""
    line = (
        "page_size=4 max_total_tokens=256; 1 start a prompt=20; 6 start b prompt=32 new=3; "
        "12 start c prompt=30 shared=12 tail=5; 18 start d prompt=9 seed=3"
    )
    path = tmp_path / "run.rec"
    record_to(path, Schedule.parse(line))
    translation = schedule_of_recording(path)
    starts = [one.action for one in translation.schedule.placed if isinstance(one.action, StartRequest)]
    assert [start.seed for start in starts] == [1, 1, 1, 3]
    assert [start.shared for start in starts] == [0, 0, 12, 0]
    assert translation.same_steps == len(translation.steps)


def test_blocks_behind_different_beginnings_are_equal_in_a_schedule_too(tmp_path: Path) -> None:
    """Documents in any order behind any beginning: equal blocks stay equal, whatever precedes them."""
    line = (
        "page_size=4 max_total_tokens=256; 1 start a prompt=20; 6 start b prompt=20 parts=7:8 seed=3; "
        "12 start c prompt=22 parts=9:4,7:4:4,0:8:12; 18 start d prompt=10 seed=9"
    )
    path, schedule = tmp_path / "run.rec", Schedule.parse(line)
    record_to(path, schedule)
    translation = schedule_of_recording(path)
    assert translation.same_steps == len(translation.steps)
    assert not translation.notes
    assert equal_blocks(translation.schedule) == equal_blocks(schedule) != set()


def equal_blocks(schedule: Schedule) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Which blocks of four tokens of the prompts are equal: each by its request and place."""
    prompts = [one.action.prompt_ids for one in schedule.placed if isinstance(one.action, StartRequest)]
    blocks = [
        ((number, place), prompt[place : place + 4])
        for number, prompt in enumerate(prompts)
        for place in range(0, len(prompt) - 3, 4)
    ]
    return {(one, other) for one, block in blocks for other, same in blocks if block == same and one < other}


@pytest.mark.parametrize("redacted", [False, True])
def test_a_recorded_crash_becomes_a_small_test(
    redacted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test fails with the bug and passes without; a redacted recording works as well."""
    path, script = tmp_path / "crash.rec", tmp_path / "test_crash.py"
    busy = RACE.with_placed(Placed(1, StartRequest(rid=f"b{number}", prompt=9, seed=number)) for number in range(4))
    with switched_on(FLUSH):
        inner = Run(busy.with_placed([Placed(step, Flush()) for step in range(2, 30)]), record=True)
        inner.oracle.check_step = lambda *_, **__: None  # type: ignore[method-assign]
        redactor = Redactor() if redacted else None
        gate = RecordingGate(inner, inner.machine.scheduler, [RecordingFile(path)], redactor=redactor)
        with pytest.raises(AssertionError):
            run_loop(gate, inner.machine.scheduler, inner.device, inner.oracle)
    replay(str(path), mutant=FLUSH, to_script=script)
    # In the default settings, where a result is in flight at the flush only if it is held.
    out = " ".join(capsys.readouterr().out.split())
    assert "it fails; shrunk to 3 events in " in out
    assert " s: default; 1 hold; 1 start a " in out
    test = load_test(str(script), "test_crash")
    EngineSim(test.config).run(test.script, options=test.options)
    with pytest.raises(ScriptError):
        EngineSim(test.config, mutant=FLUSH).run(test.script, options=test.options)


def test_a_replay_says_how_long_the_recorded_run_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.rec"
    record_to(path, Schedule.parse("page_size=4; 1 start a prompt=9; 2 advance seconds=600; 9 advance seconds=200"))
    replay(str(path))
    replay(str(path), until=5)
    assert [line.split(" again")[0] for line in capsys.readouterr().out.splitlines() if "again" in line] == [
        "800.0 s of an engine's life",
        "600.0 s of an engine's life",
    ]


def test_a_long_recording_without_a_failure_is_no_test(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    starts = [Placed(1 + number, StartRequest(rid=f"r{number}", prompt=4, new=1)) for number in range(420)]
    record_to(path, Schedule(RACE.config, tuple(starts)))
    with pytest.raises(ScriptDefinitionError, match=r"at most 400 events.*give --until STEP"):
        replay(str(path), to_script=tmp_path / "test_it.py")
    replay(str(path), to_script=tmp_path / "test_it.py", until=40)
    test = load_test(str(tmp_path / "test_it.py"), "test_run")
    EngineSim(test.config).run(test.script, options=test.options)
    assert "Goal: every promise is kept" in (tmp_path / "test_it.py").read_text()


def test_a_recording_without_its_beginning_is_no_schedule(tmp_path: Path) -> None:
    header = Header(limits=limits_of(WORKLOADS["full-rows"].config))
    last = FlightRecorder(header, limit_steps=6)
    record_to(tmp_path / "run.rec", WORKLOADS["full-rows"], sinks=(last,))
    with pytest.raises(RecordingError, match="a schedule begins with the first step"):
        schedule_of_recording(last.dump(tmp_path / "last.rec"))


def test_a_recording_from_before_loras_were_read_beside_the_computation_is_read_if_it_has_none(tmp_path: Path) -> None:
    record_to(tmp_path / "now.rec", RACE)
    frames = (tmp_path / "now.rec").read_bytes()
    before, with_loras = tmp_path / "before.rec", tmp_path / "loras.rec"
    before.write_bytes(frames.replace(b"lockstep-recording-4", b"lockstep-recording-3", 1))
    assert rerun(str(before)).passed
    limits = limits_of(EngineConfig(max_loras=2))
    with_loras.write_bytes(frame_bytes(Header(format="lockstep-recording-3", limits=limits)))
    with pytest.raises(RecordingError, match=r"max_loras=2, which loaded LoRAs in other steps"):
        read_recording(with_loras)
