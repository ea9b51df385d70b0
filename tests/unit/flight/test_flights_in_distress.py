"""A recorder that is killed, stuck or out of space, and damaged files: servers live, the reader says what it has."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from flights import flown, new_recorder

from scripted.core.adapters import adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight import ending
from scripted.sdk.flight import recorder as recorders
from scripted.sdk.flight.ending import ask_engines, stop_engines
from scripted.sdk.flight.frames import Arrived, FlightHeader, Planned, Result, Start, line_of
from scripted.sdk.flight.packed import Beginning
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, FlightRecorder
from scripted.sdk.flight.replay import replay_flight

ROOT = Path(__file__).resolve().parents[3]
ARRIVED = Arrived(id=1, rid="a", prompt_ids=(1, 2), max_new_tokens=3)
SHORT = "blocks=12; 1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start b prompt=5 new=2"
DAMAGED = 2000
# Of these each n-th is replayed too.
REPLAYED_EVERY = 20
NUMBERS = (-1, 0, 1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**30, 1e308, "x", None, [], True)


def start() -> Beginning:
    return Beginning(Start(plan=1, now=0.0))


def step(recorder: FlightRecorder, number: int, tokens: int = 1) -> None:
    recorder.planned(Planned(plan=number, now=0.0, shape=7, shares=((1, 1),)), 1)
    recorder.event(Result(plan=number, token_ids=((70_000,) * tokens,)))


def in_a_child(work: Callable[[], None]) -> int:
    """Fork, do it, and return the child's process; it exits with 0, or 1 where something was raised."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a test's child never returns to pytest
        os._exit(1)


def test_a_killed_server_leaves_all_steps_up_to_the_last(tmp_path: Path) -> None:
    def serve() -> None:
        recorder = new_recorder(tmp_path, start, all=True)
        recorder.event(ARRIVED)
        for number in range(1, 10**9):
            step(recorder, number)
            if number % 100 == 0:
                recorder.write_out(10)

    child = in_a_child(serve)
    try:
        while not (found := list(tmp_path.glob("*.flight"))) or found[0].stat().st_size < 100_000:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the server writes until it is killed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    flight = read_flight(found[0])
    assert flight.plans > 500
    assert flight.end is None
    assert flight.damage in ("", f"read up to line {len(flight.frames) + 1}: the next line is cut off")


def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a stopped writer: the loop continues, the recording ends at its bound, and so does the server."""
    reader, writer = os.pipe()
    monkeypatch.setattr(recorders, "open_private", lambda path: os.fdopen(writer, "wb", 0))
    monkeypatch.setattr(recorders, "_MOST_BEHIND", 50)
    monkeypatch.setattr(recorders, "_LONGEST_WRITE_S", 0.05)
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.event(ARRIVED)
    for number in range(1, 300):
        step(recorder, number, tokens=1000)
    assert "frames behind" in recorder.failure
    assert recorder.leave("crash") is None
    recorder.close()
    os.close(reader)


def test_an_earlier_file_that_is_not_written_holds_no_crash_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_LONGEST_WRITE_S", 0.01)
    recorder = new_recorder(tmp_path, start)
    recorder.event(ARRIVED)
    taken, leaves = threading.Event(), threading.Event()

    def write() -> None:
        with recorder._writing:
            taken.set()
            leaves.wait(30)

    earlier = threading.Thread(target=write)
    earlier.start()
    taken.wait(30)
    assert recorder.leave("crash") is None
    leaves.set()
    earlier.join()
    assert recorder.leave("crash") is not None


def test_a_crash_is_in_the_file_of_all_steps_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reports its death may be killed before the file's own thread has written anything."""
    write = recorders._line

    def slowly(*given: Any) -> bytes:
        time.sleep(0.05)
        return write(*given)

    monkeypatch.setattr(recorders, "_line", slowly)
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.event(ARRIVED)
    path = recorder.leave("crash", "IndexError: pop from an empty deque")
    assert path is not None
    end = read_flight(path).end
    assert end is not None
    assert end.error == "IndexError: pop from an empty deque"
    recorder.close()


def test_a_disk_that_does_not_take_the_end_holds_the_engine_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(recorders, "_line", lambda *_: goes_on.wait(30) and b"")
    monkeypatch.setattr(recorders, "_LONGEST_WRITE_S", 0.01)
    recorder = new_recorder(tmp_path, start, all=True)
    recorder.leave("crash")
    monkeypatch.setattr(recorders, "_LONGEST_WRITE_S", 30.0)
    closing = threading.Thread(target=recorder.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    goes_on.set()


class Engine(NamedTuple):
    """The process of a recorded engine, as its parent has it."""

    pid: int

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def serving(folder: Path) -> Engine:
    """An engine with an open request, which does what its signals say."""

    def serve() -> None:
        recorder = new_recorder(folder, start)
        recorder.watch()
        recorder.event(ARRIVED)
        for number in range(1, 2000):
            step(recorder, number)
        (folder / "ready").touch()
        while True:
            # A pause() would miss a signal that comes just before it.
            time.sleep(0.01)

    engine = Engine(in_a_child(serve))
    deadline = time.monotonic() + 30
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine


def kill(engine: Engine) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    os.waitpid(engine.pid, 0)


def test_a_parent_that_kills_its_engine_lets_it_write_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's front end does both at once, unless it was told to wait for open requests."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    engine = serving(tmp_path)
    stop_engines([engine])
    kill(engine)
    (path,) = tmp_path.glob("*-exit.flight")
    assert read_flight(path).plans == 1999


def test_an_engine_does_not_wait_for_the_files_of_a_recorder_before_its_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    before = new_recorder(tmp_path, start, all=True)
    before.event(ARRIVED)
    engine = serving(tmp_path / "own")
    stop_engines([engine])
    kill(engine)
    before.close()
    assert list((tmp_path / "own").glob("*-exit.flight"))


def test_an_engine_that_does_not_answer_is_killed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(ending, "_LONGEST_S", 0.1)
    engine = serving(tmp_path)
    os.kill(engine.pid, signal.SIGSTOP)
    stop_engines([engine])
    kill(engine)
    assert not list(tmp_path.glob("*.flight"))


def test_a_parent_asks_the_recorders_of_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of no other process that records there, such as itself."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    engine = serving(tmp_path)
    (tmp_path / f"fixed-{os.getpid()}.live").write_text(f"{os.getpid()} hears {psutil.Process().create_time()}")
    ask_engines()
    deadline = time.monotonic() + 30
    while not (left := list(tmp_path.glob("*.flight"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.is_alive()
    kill(engine)
    assert [path.name.partition("-")[2] for path in left] == [f"{engine.pid}-1-signal.flight"]


@pytest.mark.parametrize("everything", [False, True])
def test_a_full_disk_ends_the_recording_and_not_the_server(everything: bool, tmp_path: Path) -> None:
    def serve() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        recorder = new_recorder(tmp_path, start, all=everything)
        recorder.event(ARRIVED)
        for number in range(1, 200):
            step(recorder, number)
        recorder.write_out(10)
        path = recorder.leave("call")
        step(recorder, 200)
        recorder.close()
        assert not recorder.is_on
        assert everything or path is None
        assert everything or os.strerror(errno.EFBIG) in recorder.failure

    assert os.waitpid(in_a_child(serve), 0)[1] == 0
    left = list(tmp_path.iterdir())
    assert len(left) == everything
    if everything:
        assert read_flight(left[0]).plans > 5


def test_frames_of_a_later_release_end_the_reading_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "later.flight"
    later = b'{"type":"teleported","id":1}\n'
    path.write_bytes(line_of(FlightHeader(adapter="x", version="99.0")) + line_of(ARRIVED) + later)
    flight = read_flight(path)
    assert (flight.header.version, flight.frames) == ("99.0", (ARRIVED,))
    assert "teleported" in flight.damage


def test_damaged_frames_are_refused_or_replayed_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 files with one wrong line each: bytes, numbers, types, orders. Nothing is raised but refusals."""
    monkeypatch.chdir(ROOT)
    header, *lines = flown(tmp_path, SHORT).read_bytes().splitlines(keepends=True)
    adapter: Any = adapter_named(read_flight(next(tmp_path.glob("*.flight"))).header.adapter)
    path, chance, ends = tmp_path / "damaged.flight", random.Random(5), set[str]()
    for number in range(DAMAGED):
        damaged = list(lines)
        at = chance.randrange(len(damaged))
        damaged[at] = chance.choice((of_bytes, of_numbers, of_order))(damaged, at, chance)
        path.write_bytes(header + b"".join(damaged))
        flight = read_flight(path)
        ends.add(flight.damage.partition(":")[0] and "damage")
        if number % REPLAYED_EVERY == 0:
            try:
                ends.add("differs" if replay_flight(adapter, flight).differs else "replayed")
            except ScriptDefinitionError:
                ends.add("refused")
    assert {"", "damage", "differs", "replayed"} <= ends


def of_bytes(lines: list[bytes], at: int, chance: random.Random) -> bytes:
    line = bytearray(lines[at])
    for _ in range(chance.randrange(1, 4)):
        line[chance.randrange(len(line))] = chance.randrange(256)
    return bytes(line)


def of_numbers(lines: list[bytes], at: int, chance: random.Random) -> bytes:
    frame: dict[str, Any] = json.loads(lines[at])
    name = chance.choice(list(frame))
    value = frame[name]
    if isinstance(value, list) and value:
        value[chance.randrange(len(value))] = chance.choice(NUMBERS)
    else:
        frame[name] = chance.choice(NUMBERS)
    return json.dumps(frame).encode() + b"\n"


def of_order(lines: list[bytes], at: int, chance: random.Random) -> bytes:
    return chance.choice(lines) if chance.random() < 0.7 else b""
