"""The recorder: a bounded ring, written at a stall, on a signal and on a call; its errors end the recording alone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import signal_handlers
from flights import Clock, new_recorder

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight import live
from scripted.sdk.flight import recorder as recorders
from scripted.sdk.flight.frames import Aborted, Arrived, Held, Planned, Result, Start
from scripted.sdk.flight.live import flight_of
from scripted.sdk.flight.packed import Beginning
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import MOST_FILES, FlightRecorder, read_options

ARRIVED = Arrived(id=1, rid="a", prompt_ids=(1, 2), max_new_tokens=3)


def start() -> Beginning:
    return Beginning(Start(plan=1, now=0.0))


def plan(number: int, *, empty: bool = False) -> Planned:
    return Planned(plan=number, now=float(number), shape=0 if empty else 7, shares=() if empty else ((1, 1),))


def fill(recorder: FlightRecorder, first: int, last: int) -> None:
    for number in range(first, last + 1):
        recorder.planned(plan(number), 1)
        recorder.event(Result(plan=number, token_ids=((5,),)))


@contextlib.contextmanager
def answering(recorder: FlightRecorder) -> Iterator[None]:
    """A recorder that answers the signal to this process."""
    with contextlib.closing(recorder), signal_handlers.restored():
        recorder.watch()
        yield


def test_a_ring_forgets_its_oldest_steps_and_begins_with_a_snapshot(tmp_path: Path) -> None:
    plans = [0]
    recorder = new_recorder(tmp_path, lambda: Beginning(Start(plan=plans[0] + 1, now=0.0)), steps=40)
    recorder.event(Arrived(id=1, rid="a", prompt_ids=(), max_new_tokens=1))
    for number in range(1, 201):
        plans[0] = number
        recorder.planned(Planned(plan=number, now=0.0, shape=0, preempted=(1,)), 1)
    path = recorder.leave("call")
    assert path is not None
    assert sum(part.plans for part in recorder._parts) <= 50
    lines = path.read_bytes().split(b"\n")
    assert b'"type":"start"' in lines[1]


def test_a_ring_of_few_mib_is_bounded_by_bytes(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, start, mib=1, steps=10**9)
    for number in range(1, 200):
        recorder.event(Result(plan=number, token_ids=((70_000,) * 10_000,)))
        recorder.planned(plan(number), 1)
    assert sum(part.bytes for part in recorder._parts) <= 2 << 20


def test_long_texts_do_not_begin_a_part_with_every_plan(tmp_path: Path) -> None:
    """The start of 64 requests with 8,000 tokens each filled a part by itself: a plan took a millisecond."""
    request = msgspec.structs.replace(ARRIVED, prompt_ids=(1,) * 50_000)
    starts = list[Start]()

    def long_start() -> Beginning:
        starts.append(Start(plan=1 + 10 * len(starts), now=0.0, held=(Held(request=request),)))
        return Beginning(starts[-1], [((), 0)])

    recorder = new_recorder(tmp_path, long_start, steps=40, mib=1)
    for number in range(1, 201):
        recorder.planned(plan(number), 1)
    assert len(starts) == 20


class Output(list[int]):
    """The growing output of a request, which notes that it is read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


def test_an_output_is_copied_when_it_is_written_and_as_it_was_then(tmp_path: Path) -> None:
    """A part that begins with 64 outputs of 8,000 tokens held the engine's loop up for 3 ms."""
    output, counts = Output(), list[int]()

    def snapshot() -> Beginning:
        counts.append(len(output))
        held = Held(request=ARRIVED, is_running=True)
        return Beginning(Start(plan=1 + len(output), now=0.0, held=(held,)), [(output, len(output))])

    recorder = new_recorder(tmp_path, snapshot, steps=40)
    recorder.event(ARRIVED)
    for number in range(1, 201):
        recorder.planned(plan(number), 1)
        recorder.event(Result(plan=number, token_ids=((number,),)))
        output.append(number)
    assert (len(counts), output.reads) == (20, 0)
    path = recorder.leave("call")
    assert path is not None
    begun = read_flight(path).start
    assert begun is not None
    assert begun.held[0].said == tuple(range(1, begun.plan))


def test_empty_plans_are_counted_and_do_not_fill_the_ring(tmp_path: Path) -> None:
    """An engine that can plan nothing goes round a thousand times a second: what led there is not forgotten."""
    recorder = new_recorder(tmp_path, start, steps=8)
    recorder.event(ARRIVED)
    recorder.planned(plan(1), 1)
    for number in range(2, 5002):
        recorder.planned(plan(number, empty=True), 1)
    path = recorder.leave("call")
    assert path is not None
    assert read_flight(path).frames == (ARRIVED, plan(1), Planned(plan=2, now=2.0, shape=0, times=5000))


def test_a_stall_is_written_once(tmp_path: Path) -> None:
    clock = Clock()
    recorder = new_recorder(tmp_path, start, clock=clock, stall_s=10)
    recorder.event(ARRIVED)
    recorder.planned(plan(1), 1)
    for _ in range(3):
        clock.now += 6
        recorder.planned(plan(2, empty=True), 1)
        recorder.look()
    assert [path.name.split("-")[-1] for path in recorder.written] == ["stall.flight"]
    clock.now += 100
    recorder.planned(plan(3), 0)
    recorder.look()
    assert len(recorder.written) == 1


def test_an_idle_engine_does_not_stall(tmp_path: Path) -> None:
    clock = Clock()
    recorder = new_recorder(tmp_path, start, clock=clock, stall_s=10)
    recorder.planned(plan(1), 0)
    clock.now += 1000
    recorder.look()
    recorder.planned(plan(2), 1)
    recorder.look()
    assert recorder.written == []


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("a file where the folder should be")
    recorder = new_recorder(tmp_path / "closed", start)
    recorder.event(ARRIVED)
    recorder.planned(plan(1), 1)
    assert recorder.leave("call") is None
    assert not recorder.is_on
    assert recorder.failure


def test_an_object_that_cannot_be_encoded_ends_the_recording(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, start)
    recorder.event(Arrived(id=1, rid="a", prompt_ids=(object(),), max_new_tokens=3))  # type: ignore[arg-type]
    assert "object" in recorder.failure
    recorder.planned(plan(1), 1)
    assert recorder.leave("call") is None
    assert list(tmp_path.iterdir()) == []


def test_all_steps_go_to_a_file_that_its_user_alone_can_read(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.event(ARRIVED)
    fill(recorder, 1, 300)
    path = recorder.leave("call")
    recorder.close()
    assert path is not None
    flight = read_flight(path)
    assert (flight.plans, flight.damage) == (300, "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_signal_has_the_ring_of_a_running_server_written(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, start)
    with answering(recorder):
        recorder.event(ARRIVED)
        recorder.planned(plan(1), 1)
        path = flight_of(tmp_path)
    assert read_flight(path).frames == (ARRIVED, plan(1))
    assert [one.suffix for one in tmp_path.iterdir()] == [".flight"]
    assert flight_of(tmp_path) == path
    assert f"-{os.getpid()}-" in path.name


def test_an_engine_that_dies_leaves_its_crash_as_the_newest_flight(tmp_path: Path) -> None:
    """A later file would not have the exception: the replay would stop before the fatal step, and none is stuck."""
    recorder = new_recorder(tmp_path, start)
    recorder.event(ARRIVED)
    stalled, crashed = recorder.leave("stall"), recorder.leave("crash", "KeyError: 'a'")
    assert stalled is not None
    stalled.touch()
    with answering(recorder):
        assert flight_of(tmp_path) == crashed
        assert recorder.leave("exit") == crashed
        # An exception that an operator's call raised does not end the engine.
        recorder.planned(plan(1), 1)
        later = flight_of(tmp_path)
    assert later != crashed
    assert read_flight(later).plans == 1


@pytest.mark.parametrize("ends", ["before it is asked", "while it is asked"])
def test_a_server_that_ends_before_it_answers_has_left_its_crash(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(tmp_path, start)
    recorder.event(ARRIVED)
    crashed = recorder.leave("crash", "KeyError: 'a'")
    (tmp_path / "fixed-1.live").write_text(str(os.getpid()))
    ended: list[int] = []

    def kill(pid: int, number: int) -> None:
        if number:
            ended.append(pid)
            if ends == "before it is asked":
                raise ProcessLookupError(pid)

    monkeypatch.setattr(live.os, "kill", kill)
    monkeypatch.setattr(live, "_runs", lambda pid, *_: pid not in ended, raising=False)
    monkeypatch.setattr(live, "_LONGEST_S", 0.2)
    assert flight_of(tmp_path) == crashed
    assert ended == [os.getpid()]


@pytest.mark.parametrize("started", ["", " hears 12.5"])
def test_a_process_with_the_number_of_a_killed_server_gets_no_signal(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR2 would end it: it began after the file, or at another time than the server of another container."""
    recorder = new_recorder(tmp_path, start)
    recorder.event(ARRIVED)
    left = recorder.leave("stall")
    killed = tmp_path / "fixed-1.live"
    killed.write_text(f"{os.getpid()}{started}")
    if not started:
        os.utime(killed, (1.0, 1.0))
    signals: list[int] = []
    monkeypatch.setattr(live, "_LONGEST_S", 0.2)
    monkeypatch.setattr(live.os, "kill", lambda _, number: signals.append(number))
    assert flight_of(tmp_path) == left
    assert not any(signals)


@pytest.mark.parametrize("has_requests", [True, False])
def test_an_engine_that_is_told_to_stop_leaves_its_open_requests(has_requests: bool, tmp_path: Path) -> None:
    """As they were before the engine aborts them; a later end of it writes no second file."""
    recorder = new_recorder(tmp_path, start)
    told: list[int] = []

    def stop(number: int, _: object) -> None:
        told.append(number)
        recorder.event(Aborted(ids=(1,)))

    own = signal.signal(signal.SIGTERM, stop)
    try:
        with answering(recorder):
            recorder.event(ARRIVED)
            recorder.planned(plan(1), int(has_requests))
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is stop
            left = recorder.leave("exit")
    finally:
        signal.signal(signal.SIGTERM, own)
    assert told == [signal.SIGTERM]
    assert left is not None
    assert read_flight(left).frames == ((ARRIVED, plan(1)) if has_requests else (ARRIVED, plan(1), Aborted(ids=(1,))))
    assert list(tmp_path.glob("*.flight")) == [left]


def test_a_file_of_all_steps_goes_on_while_the_engine_completes_its_requests(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.event(ARRIVED)
    recorder.planned(plan(1), 1)
    recorder.stop()
    recorder.planned(plan(2), 1)
    recorder.close()
    (path,) = tmp_path.iterdir()
    assert read_flight(path).frames == (ARRIVED, plan(1), plan(2))


@pytest.mark.parametrize("own", [signal.SIG_IGN, signal.default_int_handler])
def test_a_signal_that_stops_no_engine_keeps_its_handler(own: Any, tmp_path: Path) -> None:
    """A KeyboardInterrupt passes the engine's loop, which leaves a flight itself."""
    before = signal.signal(signal.SIGINT, own)
    try:
        with answering(new_recorder(tmp_path, start)):
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_has_left_its_most_flights_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the remedy: a flight that is moved away makes room. The last place is for its end."""
    recorder = new_recorder(tmp_path, start)
    monkeypatch.setattr(live, "_LONGEST_S", 0.5)
    with answering(recorder):
        recorder.event(ARRIVED)
        left = [path for _ in range(MOST_FILES) if (path := recorder.leave("call")) is not None]
        assert len(left) == MOST_FILES - 1
        with pytest.raises(
            ScriptDefinitionError, match=r"has left 15 flights in .*at most 16; move some away; the newest"
        ):
            flight_of(tmp_path)
        left[0].rename(tmp_path / "moved")
        assert flight_of(tmp_path).name.endswith("-16-signal.flight")
        assert recorder.leave("stall") is None
        assert recorder.leave("crash") is not None


def test_the_announcement_of_a_server_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sends SIGUSR2 to the process that it names, and the first digits of a number are another process."""
    recorder = new_recorder(tmp_path, start)
    seen: list[list[str]] = []
    process = recorders.psutil.Process

    def looking() -> psutil.Process:
        seen.append([one.name for one in tmp_path.glob("*.live")])
        return process()

    monkeypatch.setattr(recorders.psutil, "Process", looking)
    with answering(recorder):
        (announced,) = tmp_path.iterdir()
        assert announced.read_text().startswith(f"{os.getpid()} hears ")
        assert announced.stat().st_mode & 0o777 == 0o600
    assert seen == [[]]


def test_a_stopped_server_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no signal until it continues; after 20 s the text was to look into its log, which has nothing."""
    recorder = new_recorder(tmp_path, start)
    with answering(recorder):
        monkeypatch.setattr(live.psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
        with pytest.raises(ScriptDefinitionError, match="is stopped, by SIGSTOP or a debugger; continue it"):
            flight_of(tmp_path)


def test_an_engine_outside_of_the_main_thread_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the engine: Python handles signals for the main thread alone."""
    recorder = new_recorder(tmp_path, start)
    watching = threading.Thread(target=recorder.watch)
    watching.start()
    watching.join()
    signals: list[int] = []
    monkeypatch.setattr(live, "_LONGEST_S", 0.2)
    monkeypatch.setattr(live.os, "kill", lambda _, number: signals.append(number))
    with pytest.raises(
        ScriptDefinitionError, match="takes no SIGUSR2, because its scheduler was made outside of the main"
    ):
        flight_of(tmp_path)
    recorder.close()
    assert not any(signals)


def test_a_process_with_the_number_of_an_earlier_one_keeps_its_flights(tmp_path: Path) -> None:
    """In a container each start of a server may have the same number."""
    recorder = new_recorder(tmp_path, start)
    recorder.event(ARRIVED)
    earlier = recorder.leave("stall")
    recorder.written.clear()
    assert recorder.leave("stall") != earlier


def test_two_engines_of_a_process_write_files_of_their_own(tmp_path: Path) -> None:
    one, other = new_recorder(tmp_path, start), new_recorder(tmp_path, start)
    for recorder in (one, other):
        recorder.event(ARRIVED)
        recorder.leave("call")
    assert len({*one.written, *other.written}) == 2


@pytest.mark.usefixtures("restores_signal_handlers")
def test_the_recorder_of_a_dropped_engine_ends(tmp_path: Path) -> None:
    """An engine that nobody shuts down does not stay in memory with its recorder's threads."""
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.watch()
    recorder.event(ARRIVED)
    path = recorder.leave("call")
    threads = [thread for thread in threading.enumerate() if thread.name in ("flight-recorder", "flight-file")]
    del recorder
    gc.collect()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert path is not None
    assert read_flight(path).frames == (ARRIVED,)


def test_a_folder_without_flights_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ScriptDefinitionError, match=f"start it with LOCKSTEP_RECORD={tmp_path}"):
        flight_of(tmp_path)


@pytest.mark.parametrize("words", ["steps=1", "steps=x", "colour=red", "stall_s=-1", "mib=0"])
def test_wrong_options_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"steps|colour|stall_s|mib|int"):
        read_options(words)
    assert read_options("steps=8 redact=true").redact
