"""Stuck requests in a recording of this engine, in the same words as for other engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from scripted_lockstep.configs import limits_of
from typer.testing import CliRunner

from engine.core.config import EngineConfig
from engine.core.messages import Generate, SamplingParams
from engine.core.recording import RecordingFile, RecordingGate
from engine.core.recording.replay_gate import NullPorts
from engine.core.scheduler import Scheduler, Step, StepResult, run_loop
from scripted.cli import app

IDLE_STEPS = 30


class Steps:
    """A gate of given steps."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def next_step(self, previous: StepResult | None) -> Step | None:
        return next(self._steps, None)


def steps() -> Iterator[Step]:
    """One request is launched and its result never comes; the other waits for the first one's row."""
    for rid in "ab":
        sampling = SamplingParams(max_new_tokens=4)
        yield Step((Generate(rid=rid, prompt_ids=(1, 2, 3, 4), sampling=sampling),), 0.0)
    for now in range(IDLE_STEPS):
        yield Step((), float(now))


def test_a_result_that_never_comes_is_the_root_of_all_that_waits(tmp_path: Path) -> None:
    limits = limits_of(EngineConfig(pp_size=1, max_running_requests=1))
    scheduler, ports = Scheduler(limits), NullPorts()
    gate = RecordingGate(Steps(steps()), scheduler, [RecordingFile(tmp_path / "run.rec")])
    run_loop(gate, scheduler, ports, ports)
    shown = CliRunner().invoke(app, ["stuck", str(tmp_path / "run.rec")])
    assert shown.exit_code == 1, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == "2 requests stand still (a, b): a waits for the result of batch 0, launched in step 1"
    assert lines[2].startswith("  b: waiting since step 2, waits for a seat, of 1 held by a"), shown.output
