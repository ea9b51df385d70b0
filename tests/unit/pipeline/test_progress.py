"""The marks of the stages: from any state that a pipeline can be stuck in, the stage that keeps it is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.pipeline.progress import Phase, StageProgress

STAGES = 3


@pytest.fixture
def progress(private_dir: Path) -> Iterator[StageProgress]:
    shared = StageProgress(private_dir, STAGES)
    yield shared
    shared.close()


@pytest.mark.parametrize(
    ("marks", "stuck"),
    [
        ([(6, Phase.DONE), (6, Phase.DONE), (6, Phase.DONE)], (0, "it has not begun it")),
        ([(7, Phase.COMPUTING), (7, Phase.WAITING), (7, Phase.WAITING)], (0, "it computes it")),
        ([(7, Phase.DONE), (7, Phase.COMPUTING), (7, Phase.WAITING)], (1, "it computes it")),
        ([(9, Phase.COMPUTING), (8, Phase.DONE), (7, Phase.COMPUTING)], (2, "it computes it")),
        ([(8, Phase.HANDING_ON), (7, Phase.DONE), (6, Phase.DONE)], (2, "it has not begun it")),
        ([(7, Phase.HANDING_ON), (6, Phase.COMPUTING), (6, Phase.WAITING)], (1, "it has not begun it")),
        ([(7, Phase.HANDING_ON), (7, Phase.WAITING), (7, Phase.WAITING)], (0, "it hands on its hidden states")),
        ([(7, Phase.DONE), (7, Phase.DONE), (7, Phase.HANDING_ON)], (2, "it hands on its hidden states")),
        ([(7, Phase.DONE), (7, Phase.WAITING), (7, Phase.WAITING)], (1, "it waits for the hidden states")),
        ([(7, Phase.DONE), (7, Phase.DONE), (7, Phase.DONE)], (2, "every stage is done with it")),
    ],
)
def test_the_stage_that_keeps_a_microbatch_is_named(
    progress: StageProgress, marks: list[tuple[int, Phase]], stuck: tuple[int, str]
) -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    for stage, (number, phase) in enumerate(marks):
        progress.note(stage, number, phase)
    found, doing = progress.stuck(7, ())
    assert (found, doing[: len(stuck[1])]) == stuck


def test_marks_are_seen_by_whoever_has_the_folder(progress: StageProgress, private_dir: Path) -> None:
    other = StageProgress(private_dir, STAGES)
    assert other.of(1) == (-1, Phase.DONE)
    progress.note(1, 0, Phase.COMPUTING)
    assert other.of(1) == (0, Phase.COMPUTING)
    assert other.of(0) == other.of(2) == (-1, Phase.DONE)
    other.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only there the state of a process is asked for")
def test_a_stage_that_is_stopped_is_named_before_those_that_wait_for_it(progress: StageProgress) -> None:
    """A06: a stage that hands on much waits for the next one to read, which may be the one that is stopped."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        for stage, mark in enumerate([(7, Phase.HANDING_ON), (7, Phase.WAITING), (7, Phase.WAITING)]):
            progress.note(stage, *mark)
        found = progress.stuck(7, (os.getpid(), stopped.pid, os.getpid()))
        os.kill(stopped.pid, signal.SIGKILL)
    assert found == (1, "it is stopped by a signal")
