"""The format of a flight: what is written is read, wherever the file is cut, and a hostile file ends nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from flights import BUSY, flown

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight.frames import Arrived, End, FlightFrame, FlightHeader, Planned, Result, line_of
from scripted.sdk.flight.reader import Flight, is_flight, read_flight
from scripted.sdk.flight.recorder import write_frames

ROOT = Path(__file__).resolve().parents[3]
CUTS = 200


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def written(path: Path, *frames: FlightFrame) -> Path:
    path.write_bytes(b"".join(map(line_of, (FlightHeader(adapter="x"), *frames))))  # type: ignore[arg-type]
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = flown(tmp_path)
    flight = read_flight(path)
    assert is_flight(path)
    assert not flight.damage
    assert flight.end is not None
    assert flight.plans > 10
    assert {frame.rid for frame in flight.frames if isinstance(frame, Arrived)} == set("abcde")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_cut_anywhere_is_read_up_to_the_cut(tmp_path: Path) -> None:
    """At each of 200 random bytes: the frames before the cut, and no others."""
    data = flown(tmp_path).read_bytes()
    whole, header = read_flight(flown(tmp_path)), data.index(b"\n") + 1
    cut, chance = tmp_path / "cut.flight", random.Random(0)
    for at in chance.sample(range(header, len(data)), CUTS):
        cut.write_bytes(data[:at])
        flight = read_flight(cut)
        lines = data[header:at].count(b"\n")
        assert flight.frames == whole.frames[:lines]
        assert bool(flight.damage) == (not data[:at].endswith(b"\n"))


def test_a_cut_header_is_no_flight(tmp_path: Path) -> None:
    path = flown(tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ScriptDefinitionError, match="is not a flight: its first line must be the header"):
        read_flight(path)


def test_another_format_says_who_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "next.flight"
    path.write_bytes(line_of(FlightHeader(adapter="x", format="lockstep-flight-9")))
    with pytest.raises(ScriptDefinitionError, match="has the format 'lockstep-flight-9', this release reads"):
        read_flight(path)


ARRIVED = Arrived(id=1, rid="a", prompt_ids=(1, 2), max_new_tokens=3)
PLANNED = Planned(plan=1, now=0.0, shape=7, shares=((1, 2),))
WRONG = {
    "request 4 has not arrived": Planned(plan=2, now=0.0, shape=7, shares=((4, 1),)),
    "plan 5, 1 times, follows plan 1": Planned(plan=5, now=0.0, shape=7, shares=((1, 1),)),
    "plan 2, 9 times": Planned(plan=2, now=0.0, shape=7, shares=((1, 1),), times=9),
    "request 1 arrives twice": ARRIVED,
    "the result of plan 3, which is not in flight": Result(plan=3),
    "the result of plan 1 has 2 shares, the plan 1": Result(plan=1, token_ids=((), ())),
    "a second header": FlightHeader(adapter="y"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_frame_that_cannot_follow_ends_the_reading(why: str, tmp_path: Path) -> None:
    flight = read_flight(written(tmp_path / "wrong.flight", ARRIVED, PLANNED, WRONG[why], End(why="call", now=1.0)))
    assert why in flight.damage
    assert flight.frames == (ARRIVED, PLANNED)


def test_nothing_is_read_behind_the_end(tmp_path: Path) -> None:
    flight = read_flight(written(tmp_path / "on.flight", ARRIVED, End(why="call", now=1.0), PLANNED))
    assert "a frame behind the end" in flight.damage
    assert flight.frames == (ARRIVED,)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "large.flight", ARRIVED, PLANNED)
    monkeypatch.setattr("scripted.sdk.flight.reader._LARGEST_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(ScriptDefinitionError, match=r"large.flight is larger than .* record fewer steps"):
        read_flight(path)


def test_the_result_of_an_empty_plan_may_be_of_any_in_a_row(tmp_path: Path) -> None:
    """An engine that waits for a transfer plans nothing many times, and one of the results says that it is over."""
    empty = Planned(plan=1, now=0.0, shape=0, times=9)
    frames = (ARRIVED, empty, Result(plan=7, received=(1,)), Planned(plan=10, now=0.0, shape=7, shares=((1, 2),)))
    assert read_flight(written(tmp_path / "empty.flight", *frames)).frames == frames


def test_a_hostile_file_is_refused_or_read_up_to_its_first_wrong_line(tmp_path: Path) -> None:
    """Nests, numbers, types and bytes that no recorder writes: nothing is raised but a refusal of the header."""
    header = line_of(FlightHeader(adapter="x"))
    path = tmp_path / "hostile.flight"
    for line in (
        b"[" * 100_000,
        b'{"type":"end","unknown":' + b"[" * 100_000,
        b'{"type":"arrived","id":1,"rid":"a","prompt_ids":' + b"[" * 50_000,
        b'{"type":"planned","plan":1e999,"now":0,"shape":0}',
        b'{"type":"planned","plan":' + b"9" * 5000 + b',"now":0,"shape":0}',
        b'{"type":"arrived","id":1,"rid":"a","prompt_ids":[1' + b"0" * 30 + b'],"max_new_tokens":1}',
        b'{"type":"called","name":"flush","arguments":{"force":-9223372036854775809}}',
        b'{"type":"os.system"}',
        b"\xff\xfe\x00",
        b"null",
    ):
        path.write_bytes(header + line + b"\n")
        flight = read_flight(path)
        assert flight.frames == ()
        assert flight.damage
        path.write_bytes(line + b"\n" + header)
        with pytest.raises(ScriptDefinitionError):
            read_flight(path)


def test_redaction_keeps_prefixes_and_ends_and_no_token(tmp_path: Path) -> None:
    line = BUSY.replace("blocks=9", "blocks=20")
    plain, redacted = read_flight(flown(tmp_path, line)), read_flight(flown(tmp_path / "r", line, redact=True))
    assert redacted.header.redacted
    prompts = [dict(prompts_of(flight)) for flight in (plain, redacted)]
    for one, other in [(a, b) for a in prompts[0] for b in prompts[0]]:
        assert shared(prompts[0][one], prompts[0][other]) == shared(prompts[1][one], prompts[1][other])
    assert not {token for prompt in prompts[0].values() for token in prompt}.intersection(
        *map(set, prompts[1].values())
    )


def prompts_of(flight: Flight) -> list[tuple[int, tuple[int, ...]]]:
    return [(frame.id, frame.prompt_ids) for frame in flight.frames if isinstance(frame, Arrived)]


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="closed"):
        write_frames(folder / "x.flight", [FlightHeader(adapter="x")])
    assert list(tmp_path.iterdir()) == [folder]
