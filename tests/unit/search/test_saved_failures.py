"""Saved failures replay: a hundred schedules, written as lines, fail the same way in a process of their own."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from base_workloads import WORKLOADS
from scripted_lockstep.mutants import mutant_named

from scripted.core.schedule import Schedule
from scripted.search.execution import Prefixes, record
from scripted.search.strategies import Exhaustive

FAILURES = 100
EACH = 10
TIMEOUT_S = 120.0
# Mutants that fail in different ways, and a workload that shows each.
SOURCES = {
    "flush-ignores-in-flight": "chunked-alone",
    "abort-ignores-in-flight": "chunked-alone",
    "dropped-result-leaks-its-slot": "warm-prefix",
    "token-after-the-end": "chunked-alone",
    "prefix-published-before-its-result": "failed-chunk",
    "disconnect-aborts-nothing": "mixed-chunk",
    "retraction-ignores-in-flight": "chunked-beside-decodes",
    "abort-and-finish-free-twice": "full-rows",
    "death-blames-another-stage": "chunked-alone",
    "update-keeps-the-cache": "weight-update",
}


class Saved(msgspec.Struct, frozen=True):
    """A failure as it is kept: the line that repeats it, and what it was."""

    mutant: str
    schedule: str
    failure: str
    steps: str


def failed(mutant: str, line: str) -> Saved:
    """Run a line with a mutant on, and say how it failed; ``steps`` is a digest of every step of the run."""
    with mutant_named(mutant).switched_on():
        outcome, records = record(Schedule.parse(line))
    steps = hashlib.sha256(msgspec.json.encode(records)).hexdigest()
    return Saved(mutant, line, str(outcome.failure), steps)


def failing_lines(mutant: str, workload: str) -> Iterator[str]:
    """Lines of the sweep of a workload that fail with a mutant on."""
    with mutant_named(mutant).switched_on():
        prefixes = Prefixes(WORKLOADS[workload])
        for extra in Exhaustive().additions(workload, prefixes.base, prefixes.steps):
            if prefixes.execute(*extra).failure is not None:
                yield str(prefixes.base.with_placed(extra))


def in_a_process(verb: str, data: bytes, *, hash_seed: int) -> list[Saved]:
    """Run this file. Not here: pytest adds to the texts of assertions."""
    done = subprocess.run(
        [sys.executable, __file__, verb],
        input=data,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return msgspec.json.decode(done.stdout, type=list[Saved])


@pytest.mark.nightly
def test_a_hundred_saved_failures_fail_the_same_way_again() -> None:
    """D10: in another process, with another hash seed: the same exception in the same step, after the same steps."""
    saved = in_a_process("find", b"", hash_seed=1)
    assert len({(one.mutant, one.schedule) for one in saved}) == FAILURES
    assert len({one.failure for one in saved}) >= len(SOURCES)
    assert "None" not in {one.failure for one in saved}
    assert in_a_process("replay", msgspec.json.encode(saved), hash_seed=4711) == saved


def main(verb: str) -> None:
    """Find failures, or replay those on standard input; either way they go to standard output."""
    if verb == "find":
        found = [
            (mutant, line)
            for mutant, workload in SOURCES.items()
            for line in itertools.islice(failing_lines(mutant, workload), EACH)
        ]
    else:
        found = [(one.mutant, one.schedule) for one in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Saved])]
    sys.stdout.buffer.write(msgspec.json.encode([failed(mutant, line) for mutant, line in found]))


if __name__ == "__main__":
    main(sys.argv[1])
