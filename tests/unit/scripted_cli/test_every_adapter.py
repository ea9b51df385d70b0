"""Every command that looks at one run takes any adapter: run, its trace, the page, replay, the shell, tests that are
written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripted.cli import app
from scripted.cli.main import main
from scripted.report.trace import read_trace

ADAPTERS = {
    "lockstep": "pp_size=2 chunked_prefill_size=16",
    "examples/your_scheduler/fixed.py": "blocks=20",
    "examples/lockstep/outside.py": "pp_size=2",
}
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
{head}
def test_a_flush_meets_a_prefill(t):
    r = t.start_req(rid="a", prompt_len=20, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert r.finish_reason == "length"
"""

pytestmark = pytest.mark.parametrize("adapter", ADAPTERS)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*words: str, typed: str = "") -> str:
    """Run a command that must succeed and return its output."""
    done = CliRunner().invoke(app, list(words), input=typed)
    assert done.exit_code == 0, done.output
    return done.output


def script_of(adapter: str, folder: Path) -> str:
    words = [word.partition("=") for word in ADAPTERS[adapter].split()]
    arguments = ", ".join(f"{name}={value}" for name, _, value in words)
    head = (
        f"from engine import EngineConfig\nfrom scripted import scripted\n\n\n@scripted(EngineConfig({arguments}))"
        if adapter == "lockstep"
        else f'from scripted import scripted\n\n\n@scripted(adapter="{adapter}", {arguments})'
    )
    (folder / "test_it.py").write_text(SCRIPT.format(head=head))
    return f"{folder / 'test_it.py'}::test_a_flush_meets_a_prefill"


def test_a_script_is_run_and_its_trace_is_viewed(adapter: str, tmp_path: Path) -> None:
    trace, page, perfetto = tmp_path / "run.jsonl", tmp_path / "run.html", tmp_path / "run.json"
    assert "passed: " in run("run", script_of(adapter, tmp_path), "--tier", "sim", "--trace", str(trace))
    header = read_trace(trace).header
    assert (header.adapter, header.outcome) == (adapter, "passed")
    assert "test_a_flush_meets_a_prefill" in run("view", str(trace), "-o", str(page))
    text = page.read_text()
    assert "start a (20" in text or "generate a (20" in text
    assert adapter in text
    run("view", str(trace), "--perfetto", str(perfetto))
    assert json.loads(perfetto.read_text())["traceEvents"]


def test_a_schedule_is_replayed_viewed_and_written_as_a_test(adapter: str, tmp_path: Path) -> None:
    trace, test = tmp_path / "schedule.jsonl", tmp_path / "test_schedule.py"
    line = f"{ADAPTERS[adapter]}; 1 start a prompt=20 new=2; 2 flush; 3 abort a"
    said = run("replay", line, "--adapter", adapter, "--trace", str(trace), "--to-script", str(test), "--twice")
    assert "the same again here and in a fresh process" in said
    assert read_trace(trace).header.adapter == adapter
    run("view", str(trace))
    assert "passed: " in run("run", f"{test}::test_schedule", "--tier", "sim")


def test_a_session_of_the_shell_is_a_test(adapter: str, tmp_path: Path) -> None:
    test = tmp_path / "test_typed.py"
    settings = [word for pair in ADAPTERS[adapter].split() for word in ("--set", pair)]
    typed = f"start prompt_len=20\nuntil state.in_flight\nflush\nuntil r1.finished\nhistory 60\nsave {test}\nquit\n"
    said = run("shell", "--adapter", adapter, *settings, typed=typed)
    assert "call_1 /flush_cache -> 400" in said
    assert "#0 prefill" in said
    assert "passed: " in run("run", f"{test}::test_typed", "--tier", "sim")


def test_what_it_does_not_know_is_refused_by_name(
    adapter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["shell", "--set", "no_such=1"], ["replay", "no_such=1; 1 start a prompt=3"]):
        monkeypatch.setattr("sys.argv", ["scripted", *words, "--adapter", adapter])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        assert "no_such" in capsys.readouterr().err
