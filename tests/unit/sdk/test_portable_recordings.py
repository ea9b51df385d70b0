"""Recordings of portable machines: written while a machine runs, replayed on another, compared step by step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripted.core.named import adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.messages import Abort, Add, BatchResult, Stepped
from scripted.sdk.recording import Recorder, read_portable_recording, replayed

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "examples/your_scheduler/adapter.py"
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


def test_a_recording_is_replayed_with_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    done = recorded(path, {"blocks": 20})
    again = replayed(read_portable_recording(path))
    assert [record.stepped for record in again.records] == done
    assert again.differs is None
    assert again.config.blocks == 20
    assert done[2].replies, "a token was told"


def test_a_difference_names_step_field_and_both_values(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    path.write_text(path.read_text().replace('"start":9', '"start":8'))
    again = replayed(read_portable_recording(path))
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
    again = replayed(read_portable_recording(path))
    assert again.error == again.recorded_error == "KeyError: 5"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_portable_recording(path).records) == 3


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"format":"lockstep-steps-1","adapter":"x","config":{}}\n{}\n'])
def test_anything_else_is_refused_by_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ScriptDefinitionError, match="no recording of steps: line"):
        read_portable_recording(path)


def test_the_command_replays_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    command = [sys.executable, "-m", "scripted", "replay", str(path), "--twice", "--trace", str(tmp_path / "x.trace")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same again here and in a fresh process" in done.stdout
    path.write_text(path.read_text().replace('"start":9', '"start":8'))
    done = subprocess.run(command[:5], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "DIFFERS: step 3, microbatch" in done.stdout
