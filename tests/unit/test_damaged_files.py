"""Small files that people keep, copy and merge: the reader of a damaged one says so in a sentence that names it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ci.errors import CiError
from ci.permissions import PERMISSIONS_PATH, Permissions
from ci.suites import CATALOGUE_PATH, Catalogue
from ci.times import TIMES_PATH, MeasuredTimes
from lockstep.errors import LockstepError
from scripted.core.defects import Defect, add_known, read_defects
from scripted.core.mutant import read_mutants
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.step_log import ShownStep, StepLog
from scripted.report.trace import Trace, TraceHeader, read_trace, write_trace
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.recording import read_recording
from scripted.search.failure_database import FailureDatabase

ROOT = Path(__file__).parents[2]
DAMAGES = 60
SAVED = '{"adapter":"lockstep","schedule":"1 start a prompt=1","signature":"s","text":"t","number":3}\n'
FLIGHT = (
    '{"type":"flight","format":"lockstep-flight-1","adapter":"vllm","version":"0","config":{}}\n'
    '{"type":"end","why":"closed","now":1.0}\n'
)
RECORDING = (
    '{"format":"lockstep-steps-1","adapter":"examples/your_scheduler/adapter.py","config":{"blocks":"9"}}\n'
    '{"step":{"events":[],"now":0.0},"stepped":null,"counts":{},"error":"E: x"}\n'
)
MUTANT = '[[mutant]]\nname = "a"\norigin = "b"\nbug = "c"\nsignature = ""\ntest = ""\ntarget = "d:e"\ncut = "f"\n'


class Reader(NamedTuple):
    """A reader by what it reads. ``write`` makes a right file in a folder and returns its path."""

    write: Callable[[Path], Path]
    read: Callable[[Path], object]


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        return file

    return write


def known(folder: Path) -> Path:
    add_known(folder / "known.toml", Defect(id="a", title="b", schedules=("adapter=vllm; 1 flush",), because="c"))
    return folder / "known.toml"


def trace(folder: Path) -> Path:
    header = TraceHeader(title="a", adapter="lockstep", config={}, outcome="passed")
    write_trace(folder / "trace.jsonl", Trace(header, StepLog(1, 1, (ShownStep(step=1, digest="a", now=1.0),))))
    return folder / "trace.jsonl"


READERS = {
    "findings": Reader(text("failures.jsonl", 2 * SAVED), lambda file: FailureDatabase(file).set_damaged_aside()),
    "known defects": Reader(known, read_defects),
    "mutants": Reader(text("mutants.toml", MUTANT), read_mutants),
    "trace": Reader(trace, read_trace),
    "flight": Reader(text("a.flight", FLIGHT), read_flight),
    "recording": Reader(text("steps.rec", RECORDING), read_recording),
    "times": Reader(
        text(str(TIMES_PATH), '{"cpu": {"tests/a.py": 1.5}}\n'), lambda file: MeasuredTimes.load(file.parents[1])
    ),
    "permissions": Reader(
        text(str(PERMISSIONS_PATH), '{"a": ["rerun-test"]}\n'), lambda file: Permissions.load(file.parents[1])
    ),
    "suites": Reader(
        text(str(CATALOGUE_PATH), (ROOT / CATALOGUE_PATH).read_text(encoding="ascii")),
        lambda file: Catalogue.load(file.parents[1]),
    ),
}
ODD = (b"\xff", "\u2028".encode(), b"\x00", b"\n", b'"', b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"1e999", b"")
DEEP = "brackets"
VALUES = (None, True, -1, 1.5, "", "a\u2028b", [], [[]], {}, {"a": 1}, 2**70, DEEP, DEEP)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file that was cut, overwritten, spliced, or holds a value of another type."""
    first, second = sorted(rng.choices(range(len(data) + 1), k=2))
    match rng.randrange(4):
        case 0:
            return data[:first]
        case 1:
            return data[:first] + rng.choice(ODD) + data[second:]
        case 2:
            return data[:first] + rng.choice(ODD) + data[first:]
        case _:
            return b"\n".join(other_type(line, rng) for line in data.split(b"\n"))


def other_type(line: bytes, rng: random.Random) -> bytes:
    """Give one field of a line of JSON another value; of other lines what stands behind an equals sign."""
    value = rng.choice(VALUES)
    try:
        fields = json.loads(line)
    except ValueError:
        name, sign, _ = line.partition(b"=")
        is_hit = sign and rng.random() < 0.2
        return name + b"= " + deepened(json.dumps(value)) if is_hit else line
    fields[rng.choice(list(fields))] = value
    return deepened(json.dumps(fields, ensure_ascii=rng.random() < 0.5))


def deepened(line: str) -> bytes:
    return line.replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000).encode()


def complaints(reader: Reader, folder: Path) -> Iterator[str]:
    file = reader.write(folder)
    right, rng = file.read_bytes(), random.Random(46)
    reader.read(file)
    for _ in range(DAMAGES):
        wrong = damaged(right, rng)
        file.write_bytes(wrong)
        try:
            reader.read(file)
        except (ScriptDefinitionError, LockstepError, CiError) as exc:
            if file.name not in str(exc):
                yield f"{wrong[:80]!r} is not named: {exc}"
        except Exception as exc:  # noqa: BLE001 - each other exception is what is looked for
            yield f"{wrong[:80]!r} raises {type(exc).__name__}: {str(exc)[:80]}"


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_damaged_file_is_named_in_a_sentence(reader: Reader, tmp_path: Path) -> None:
    """46.5: cut, not UTF-8, a line separator of Unicode, brackets without end, other types."""
    found: list[Any] = list(complaints(reader, tmp_path))
    assert not found, "\n".join(found[:5])
