"""Replay of a flight: every plan is compared, every promise checked; what differs is named, with its likely reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flights import EXAMPLE, FIXED, flown
from typer.testing import CliRunner

from scripted.cli.main import app
from scripted.core.adapters import adapter_named
from scripted.sdk.flight.frames import AnyFrame, End, FlightHeader, Planned, line_of
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.replay import FlightOutcome, replay_flight
from scripted.sdk.flight.standing import Hint
from scripted.sdk.messages import Tokens

ROOT = Path(__file__).resolve().parents[3]
# docs/your_scheduler.md: the bug of the example.
RACE = "blocks=12; 1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start b prompt=5 new=1"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def again(path: Path, adapter: str = FIXED) -> FlightOutcome:
    known: Any = adapter_named(adapter)
    return replay_flight(known, read_flight(path))


def changed(path: Path, change: Any) -> Path:
    """The same flight with some frames changed; None leaves one out."""
    flight = read_flight(path)
    frames: list[AnyFrame] = [flight.header, *flight.frames, *([flight.end] if flight.end else [])]
    kept = [new for new in map(change, frames) if new is not None]
    path.write_bytes(b"".join(map(line_of, kept)))
    return path


@pytest.mark.parametrize("options", [{}, {"redact": True}])
def test_every_plan_is_as_recorded_and_every_promise_kept(options: dict[str, bool], tmp_path: Path) -> None:
    outcome = again(flown(tmp_path, **options))
    assert outcome.differs is None
    assert outcome.breaks is None
    assert len(outcome.records) > 10


def test_a_replay_ends_where_it_was_told_to(tmp_path: Path) -> None:
    known: Any = adapter_named(FIXED)
    assert len(replay_flight(known, read_flight(flown(tmp_path)), until=5).records) == 5


def test_a_promise_that_broke_breaks_again(tmp_path: Path) -> None:
    outcome = again(flown(tmp_path, RACE, adapter=EXAMPLE), EXAMPLE)
    assert outcome.differs is None
    assert "which was written before the cache was flushed" in str(outcome.breaks)


def test_another_scheduler_is_judged_by_its_promises(tmp_path: Path) -> None:
    """The plans differ, because the fixed scheduler does not hit the block; and no promise breaks."""
    outcome = again(flown(tmp_path, RACE, adapter=EXAMPLE), FIXED)
    assert outcome.differs is not None
    assert outcome.breaks is None


def test_the_first_plan_that_differs_is_named_with_the_likely_reason(tmp_path: Path) -> None:
    path = changed(flown(tmp_path), lambda frame: None if frame_is_abort(frame) else frame)
    differs = again(path).differs
    assert differs is not None
    assert "a computes" in differs.text
    assert "no frame has" in differs.likely


def test_other_blocks_are_a_difference(tmp_path: Path) -> None:
    def moved(frame: AnyFrame) -> AnyFrame:
        return msgspec.structs.replace(frame, blocks=frame.blocks + 1) if isinstance(frame, Planned) else frame

    differs = again(changed(flown(tmp_path), moved)).differs
    assert differs is not None
    assert differs.text == "the same shares, but in other blocks"


def test_after_a_difference_requests_go_on_with_their_own_tokens(tmp_path: Path) -> None:
    path = flown(tmp_path)
    recorded = tokens_of(again(path))
    without = tokens_of(again(changed(path, lambda frame: None if frame_is_abort(frame) else frame)))
    assert len(recorded) == 5
    for rid, tokens in recorded.items():
        assert without[rid][: len(tokens)] == tokens, rid


def tokens_of(outcome: FlightOutcome) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for record in outcome.records:
        for reply in () if record.stepped is None else record.stepped.replies:
            if isinstance(reply, Tokens):
                said.setdefault(reply.rid, []).extend(reply.token_ids)
    return said


def frame_is_abort(frame: AnyFrame) -> bool:
    return type(frame).__name__ == "Aborted"


def test_another_release_is_the_likely_reason(tmp_path: Path) -> None:
    def older(frame: AnyFrame) -> AnyFrame | None:
        return msgspec.structs.replace(frame, version="0.1") if isinstance(frame, FlightHeader) else other(frame)

    def other(frame: AnyFrame) -> AnyFrame | None:
        return None if frame_is_abort(frame) else frame

    differs = again(changed(flown(tmp_path), older)).differs
    assert differs is not None
    assert "the release: 0.1 was recorded" in differs.likely


def test_replay_shows_a_flight_and_writes_a_test_of_it(tmp_path: Path) -> None:
    path = flown(tmp_path, RACE, adapter=EXAMPLE)
    test = tmp_path / "test_found.py"
    shown = CliRunner().invoke(app, ["replay", str(path), "--to-script", str(test)])
    assert "BROKEN: " in shown.output, shown.output
    assert "shrunk to 4 events" in shown.output, shown.output
    assert "def test_" in test.read_text()


BISECTED = {
    # As recorded, and judged: the race breaks in one and not in the other.
    EXAMPLE: (1, "BROKEN: "),
    FIXED: (0, "no promise breaks; plans differ from step 3 on"),
    "examples/your_scheduler/none.py": (125, "unknown: "),
}


@pytest.mark.parametrize("adapter", BISECTED)
def test_a_replay_judges_a_checkout(adapter: str, tmp_path: Path) -> None:
    def of_adapter(frame: AnyFrame) -> AnyFrame:
        return msgspec.structs.replace(frame, adapter=adapter) if isinstance(frame, FlightHeader) else frame

    path = changed(flown(tmp_path, RACE, adapter=EXAMPLE), of_adapter)
    shown = CliRunner().invoke(app, ["replay", str(path), "--bisect"])
    status, text = BISECTED[adapter]
    assert (shown.exit_code, text in shown.output) == (status, True), shown.output


def test_git_bisect_finds_a_planted_regression(tmp_path: Path) -> None:
    """Four commits of the example, the bug in the third; the flight is of the last one."""
    repository, flight = tmp_path / "repository", flown(tmp_path / "flights", RACE, adapter=EXAMPLE)
    changed(flight, at_home)
    repository.mkdir()
    source = ROOT / "examples/your_scheduler"
    bad = (source / "scheduler.py").read_text()
    good = bad.replace("            self._remember(request, work)\n            if request.ended", GOOD)
    assert good != bad
    run("git", "init", "-q", cwd=repository)
    for name in ("adapter.py",):
        (repository / name).write_text((source / name).read_text())
    hashes = []
    for number in range(1, 5):
        (repository / "scheduler.py").write_text((good if number < 3 else bad) + f"# {number}\n")
        run("git", "add", "-A", cwd=repository)
        run("git", *AUTHOR, "commit", "-q", "-m", f"commit {number}", cwd=repository)
        hashes.append(run("git", "rev-parse", "HEAD", cwd=repository).strip())
    run("git", "bisect", "start", hashes[-1], hashes[0], cwd=repository)
    said = run(
        "git", "bisect", "run", sys.executable, "-m", "scripted", "replay", str(flight), "--bisect", cwd=repository
    )
    assert f"{hashes[2]} is the first bad commit" in said, said


AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")
GOOD = "            if not request.ended:\n                self._remember(request, work)\n            if request.ended"


def at_home(frame: AnyFrame) -> AnyFrame:
    return msgspec.structs.replace(frame, adapter="adapter.py") if isinstance(frame, FlightHeader) else frame


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORGETFUL = """
from adapter import adapter_of
from fixed import FixedMachine, FixedScheduler

class ForgetfulScheduler(FixedScheduler):
    def _preempt(self):
        done = super()._preempt()
        if done:
            self.waiting.popleft()
        return done

class ForgetfulMachine(FixedMachine):
    def __init__(self, config):
        super().__init__(config)
        sizes = config.blocks, config.block_size, config.batch_tokens, config.batch_requests
        self.scheduler = ForgetfulScheduler(*sizes)

ADAPTER = adapter_of("forgetful", ForgetfulMachine)
"""
CROWDED = "blocks=5; 1 start a prompt=6 new=8; 1 start b prompt=6 seed=1 new=8"


def test_a_request_that_nothing_wakes_stands_still_and_breaks_a_promise(tmp_path: Path) -> None:
    """A scheduler that forgets whom it preempts: the replay goes on behind the stall, and the request never does."""
    adapter_named(FIXED)
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL)
    path = flown(tmp_path, CROWDED, adapter=str(file), why="stall")
    outcome = again(path, str(file))
    assert outcome.differs is None
    assert str(outcome.breaks) == "nothing happens any more, but b wait forever"
    shown = CliRunner().invoke(app, ["stuck", str(path)])
    assert shown.exit_code == 1
    first, second, *_ = shown.output.splitlines()
    assert first.startswith("1 request stands still (b): b waits for nothing: "), shown.output
    assert second.startswith("  b: preempted since step "), shown.output
    assert again(path, FIXED).breaks is None


class Replaying:
    """An adapter whose machines of flights have other attributes."""

    def __init__(self, adapter: str, **other: Any) -> None:
        self._adapter: Any = adapter_named(adapter)
        self._other = other

    def flight_machine(self, header: FlightHeader) -> Any:
        machine = self._adapter.flight_machine(header)
        for name, value in self._other.items():
            setattr(machine, name, value)
        return machine

    def version(self) -> str:
        return ""


def test_who_waits_for_something_outside_does_not_hang(tmp_path: Path) -> None:
    adapter_named(FIXED)
    file = tmp_path / "waiting.py"
    file.write_text(FORGETFUL)
    flight = read_flight(flown(tmp_path, CROWDED, adapter=str(file), why="stall"))
    assert replay_flight(Replaying(str(file)), flight).hangs == ("b",)
    waits = Replaying(str(file), hints=lambda: {"b": Hint("load", "a load from outside")})
    assert replay_flight(waits, flight).hangs == ()


def test_reads_of_unknown_content_are_not_judged(tmp_path: Path) -> None:
    flight = read_flight(flown(tmp_path, RACE, adapter=EXAMPLE))
    assert replay_flight(Replaying(EXAMPLE), flight).breaks is not None
    assert replay_flight(Replaying(EXAMPLE, knows_contents=False), flight).breaks is None


def test_a_scheduler_that_dies_in_a_replay_is_told(tmp_path: Path) -> None:
    def dies(*_: object) -> None:
        raise IndexError("pop from an empty deque")

    # The last frame of the traceback must not be the harness's: an error there is the adapter's.
    outcome = replay_flight(Replaying(FIXED, plan=dies), read_flight(flown(tmp_path)))
    assert outcome.breaks == "the scheduler dies of IndexError: pop from an empty deque"


@pytest.mark.parametrize(("silent_s", "stands"), [(1.0, []), (60.0, ["a"])])
def test_a_request_stands_whose_result_does_not_come(silent_s: float, stands: list[str], tmp_path: Path) -> None:
    """A worker that hangs ends the steps at once, so no number of them shows it; the time since the last plan does."""
    flight = read_flight(flown(tmp_path, "default; 1 start a prompt=5 new=4"))
    launched = [number for number, frame in enumerate(flight.frames, 1) if isinstance(frame, Planned) and frame.shares]
    frames = flight.frames[: launched[1]]
    last = frames[-1]
    assert isinstance(last, Planned)
    cut = msgspec.structs.replace(flight, frames=frames, end=End(why="signal", now=last.now + silent_s))
    outcome = replay_flight(Replaying(FIXED), cut)
    assert [one.rid for one in outcome.stands] == stands
    assert all(one.kind == "result" for one in outcome.stands)


def test_nobody_stands_where_every_request_ends(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["stuck", str(flown(tmp_path))])
    assert shown.exit_code == 0
    assert "no request is stuck" in shown.output


def test_the_report_on_a_dead_engine_begins_with_its_exception(tmp_path: Path) -> None:
    path = flown(tmp_path, why="crash", error="outside the scheduler: RuntimeError: a worker failed")
    shown = CliRunner().invoke(app, ["stuck", str(path)])
    first, second, *_ = shown.output.splitlines()
    assert first == "the engine died: outside the scheduler: RuntimeError: a worker failed"
    assert second.startswith("until then no request was stuck")
