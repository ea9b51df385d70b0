"""Recordings of portable machines: written while a machine runs, replayed on another, compared step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_commands import ForkedCommands

from scripted.core.adapters import adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.report.rerun import Rerun
from scripted.reruns import schedule_of_recording
from scripted.script.loader import load_test
from scripted.sdk.messages import Abort, Add, BatchResult, Stepped
from scripted.sdk.recording import Recorder, read_recording, replayed
from scripted.search.execution import record as record_run

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "examples/your_scheduler/adapter.py"
FIXED = "examples/your_scheduler/fixed.py"
PROMPT = tuple(range(1, 10))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recorded(path: Path, config: dict[str, Any] | None = None) -> list[Stepped]:
    """Some steps of the example, as a server would make them: with the tokens of a model that is not simulated."""
    adapter: Any = adapter_named(EXAMPLE)
    machine = adapter.new_parts(adapter.read_config({k: str(v) for k, v in (config or {}).items()}), record=True)[0]
    recorder = Recorder(machine, path, adapter=EXAMPLE, config=config)
    done = [recorder.step([Add(rid="a", prompt_ids=PROMPT, max_new_tokens=2)], 0.0)]
    done.append(recorder.step([], 0.5))
    done.append(recorder.step([BatchResult(batch_id=1, token_ids=((7,),))], 1.0))
    done.append(recorder.step([Abort(rid="a")], 1.5))
    recorder.close()
    return done


def again_of(path: Path) -> Rerun:
    return replayed(adapter_named(EXAMPLE), read_recording(path))[0]


def test_a_recording_is_replayed_with_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    done = recorded(path, {"blocks": 20})
    again, records = replayed(adapter_named(EXAMPLE), read_recording(path))
    assert [record.stepped for record in records] == done
    assert again.differs is None
    assert again.config == {"blocks": 20}
    assert done[2].replies, "a token was told"


SCHEDULES = {
    "parts, a prefix and an abort": (
        "1 start a prompt=20 new=4; 2 start b prompt=20 shared=12 tail=3 new=3; 4 abort a; 9 flush; "
        "12 start c prompt=20 new=2"
    ),
    "preemption in a small pool": "1 start a prompt=6 new=8; 1 start b prompt=6 seed=1 new=8",
    "held results and a rid again": "1 hold; 1 start a prompt=5; 6 release; 14 start a prompt=5 new=3",
    "what is refused": "1 start a prompt=47 new=40; 2 start b prompt=3; 3 abort nobody",
}


def record_schedule(path: Path, line: str) -> None:
    """The steps of a schedule's run, done by a machine that is recorded."""
    schedule = Schedule.parse(line)
    adapter: Any = schedule.adapter
    machine = adapter.new_parts(schedule.config, record=True)[0]
    recorder = Recorder(machine, path, adapter=adapter.name, config=adapter.config_words(schedule.config))
    for record in record_run(schedule)[1]:
        recorder.step(record.step.events, record.step.now)
    recorder.close()


@pytest.mark.parametrize("line", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_recording_as_a_schedule_launches_the_same(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    blocks = "blocks=5 " if "seed=1" in line else ""
    record_schedule(path, f"adapter={FIXED} {blocks}; {line}")
    translation = schedule_of_recording(path)
    assert translation.schedule.of == FIXED
    assert translation.same_steps == len(translation.steps) == len(read_recording(path).records)
    assert not translation.notes
    assert len(schedule_of_recording(path, until=3).steps) == 3


def test_the_command_makes_a_test_of_a_recording(tmp_path: Path, commands: ForkedCommands) -> None:
    """From a recording with a broken promise, shrunk."""
    path, test = tmp_path / "run.jsonl", tmp_path / "test_run.py"
    line = "1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start c prompt=5 new=1; 9 start d prompt=7 seed=2"
    record_schedule(path, f"adapter={FIXED}; {line}")
    # The recording is of the scheduler as it was before its bug was fixed.
    path.write_text(path.read_text().replace("fixed.py", "adapter.py"))
    done = commands.run("-m", "scripted", "replay", path, "--to-script", test, cwd=ROOT)
    assert "it fails; shrunk to 4 events" in done.stdout, done.stdout + done.stderr
    assert "fails on the scheduler as it is" in done.stdout
    assert load_test(str(test), "test_run").adapter == "examples/your_scheduler/adapter.py"


def test_a_difference_names_step_field_and_both_values(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    path.write_text(path.read_text().replace('"start":9', '"start":8'))
    again = again_of(path)
    assert again.differs is not None
    assert again.differs.startswith("step 3, microbatch: ")
    assert "start=8" in again.differs
    assert "start=9" in again.differs


def test_the_step_that_a_machine_dies_in_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    adapter: Any = adapter_named(EXAMPLE)
    recorder = Recorder(adapter.new_parts(adapter.read_config({}), record=True)[0], path, adapter=EXAMPLE)
    with pytest.raises(KeyError):
        recorder.step([BatchResult(batch_id=5, token_ids=())], 0.0)
    recorder.close()
    again = again_of(path)
    assert again.error == again.recorded_error == "KeyError: 5"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_recording(path).records) == 3


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"format":"lockstep-steps-1","adapter":"x","config":{}}\n{}\n'])
def test_anything_else_is_refused_by_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ScriptDefinitionError, match="no recording of steps: line"):
        read_recording(path)


def test_the_command_replays_it(tmp_path: Path, commands: ForkedCommands) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    replay = ("-m", "scripted", "replay", path)
    done = commands.run(*replay, "--twice", "--trace", tmp_path / "x.trace", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same again here and in a fresh process" in done.stdout
    path.write_text(path.read_text().replace('"start":9', '"start":8'))
    done = commands.run(*replay, cwd=ROOT)
    assert done.returncode == 1
    assert "DIFFERS: step 3, microbatch" in done.stdout
