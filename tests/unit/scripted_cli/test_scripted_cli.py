"""The scripted command: outcomes, traces and exit statuses of single runs, and one clear line for every bad command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_lockstep.adapter
from scripted_lockstep.mutants import MUTANTS, mutant_named

from scripted.cli import main, single_run
from scripted.report.trace import read_trace
from scripted.script.loader import find_test

FLUSH = "tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight"
BUG = "flush-ignores-in-flight"
SIGNATURE = "This request holds the node from another tree"

SCRIPTS = """
import pytest
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig(chunked_prefill_size=8))
def test_one(t):
    r = t.start_req(prompt_len=12, max_new_tokens=1)
    yield from t.run_until_finished(r)

@scripted(EngineConfig())
@pytest.mark.parametrize("tokens", [3, 4])
def test_tokens(t, tokens):
    r = t.start_req(prompt_len=5, max_new_tokens=tokens)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3

@scripted(EngineConfig(), tiers=("sim",))
def test_only_sim(t):
    t.smoke()
    yield

@scripted(EngineConfig(), tiers=("sim",))
def test_fails_at_once(t):
    raise RuntimeError("at once")
    yield

@scripted(EngineConfig(), tiers=("sim",))
def test_skips(t):
    yield
    pytest.skip("no such tree")

@scripted(EngineConfig(), tiers=("sim",))
def test_is_expected_to_fail(t):
    yield
    pytest.xfail("a known bug")

def plain(t):
    yield

class TestOfAClass:
    @scripted(EngineConfig(), tiers=("sim",))
    def test_method(self, t):
        r = t.start_req(prompt_len=5)
        yield from t.run_until_finished(r)
        assert r.finished

    @staticmethod
    @scripted(EngineConfig(), tiers=("sim",))
    def test_static(t):
        t.smoke()
        yield
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "scripts_of_a_user.py"
    file.write_text(SCRIPTS)
    return file


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripted", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_run_that_passes_says_how_and_leaves_its_trace(monkeypatch, capsys, tmp_path):
    path = tmp_path / "new folder" / "trace.jsonl"
    assert run_main(monkeypatch, "run", FLUSH, "--tier", "sim", "--trace", str(path)) == 0
    out = capsys.readouterr().out
    trace = read_trace(path)
    assert f"passed: {FLUSH} (sim tier of lockstep), {len(trace.log.steps)} steps" in out
    assert trace.log.steps[-1].digest in out
    assert trace.header.outcome == "passed"
    assert trace.header.config["pp_size"] == 4
    assert [step.in_window for step in trace.log.steps if step.step == trace.notes[0].step] == [True]


def test_a_run_with_the_mutant_fails_with_its_report_and_its_last_step(monkeypatch, capsys, tmp_path):
    """D11: the race's test goes red with the original signature."""
    path = tmp_path / "trace.jsonl"
    assert run_main(monkeypatch, "run", FLUSH, "--mutant", BUG, "--trace", str(path)) == 1
    out = capsys.readouterr().out
    assert SIGNATURE in out
    assert f"scripted run {FLUSH} --tier sim --mutant {BUG}" in out
    trace = read_trace(path)
    assert trace.header.died
    assert trace.header.mutant == BUG
    assert SIGNATURE in (trace.log.steps[-1].error or "")


def test_parameters_are_given_as_json(monkeypatch, capsys, scripts):
    assert run_main(monkeypatch, "run", f"{scripts}::test_tokens", "--arg", "tokens=3") == 0
    assert run_main(monkeypatch, "run", f"{scripts}::test_tokens", "--arg", "tokens=4") == 1
    out = capsys.readouterr().out
    assert "assert 4 == 3" in out
    assert "--arg tokens=4" in out


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [("test_skips", "skipped", "no such tree"), ("test_is_expected_to_fail", "failed as expected", "a known bug")],
)
def test_a_run_that_pytest_ended_says_so(monkeypatch, capsys, scripts, name, how, reason):
    """It neither passed nor has a failure to report."""
    assert run_main(monkeypatch, "run", f"{scripts}::{name}") == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{how}: {scripts}::{name} (sim tier of lockstep), 1 steps in ")
    assert out.endswith(f"because: {reason}\n")


def test_a_run_without_steps_writes_no_trace_and_says_so(monkeypatch, capsys, scripts, tmp_path):
    path = tmp_path / "trace.jsonl"
    assert run_main(monkeypatch, "run", f"{scripts}::test_fails_at_once", "--trace", str(path)) == 1
    assert "no trace" in capsys.readouterr().out
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "{file}::test_tokens[3]"], "--arg NAME=VALUE"),
        (["run", "{file}::test_onne"], "its scripts are test_one, test_tokens, test_only_sim, test_fails_at_once"),
        (["run", "{file}::test_tokens"], "tokens, one of 3, 4; add --arg tokens=VALUE"),
        (["run", "{file}::test_one", "--arg", "chunk=4"], "takes no parameter 'chunk'; it takes none at all"),
        (["run", "{file}::test_one", "--arg", "chunk"], "NAME=VALUE, got 'chunk'"),
        (["run", "{file}::test_only_sim", "--tier", "server"], "runs in sim only"),
        (["run", "{file}::test_one", "--mutant", "flush-ignores"], f"did you mean '{BUG}'"),
        (["stuck", "http://127.0.0.1:1"], "the server at http://127.0.0.1:1 does not answer"),
        (["stuck", "gopher://127.0.0.1:1"], "the server at gopher://127.0.0.1:1 does not answer"),
        (["view", "{recording}"], "is a recording and not a trace; run it again and keep the trace: scripted replay"),
        (["replay", ""], "a schedule must not be empty"),
        (["replay", "default"], "has no actions, so replaying it shows nothing"),
        (["explore", ""], "a schedule must not be empty"),
        (["explore", "no-such-workload"], "there are chunked-alone, one-stage, "),
        (["explore", "chunked-alone", "--minutes", "-1"], "minutes must be more than 0, got -1"),
    ],
)
def test_a_bad_command_is_one_clear_line(monkeypatch, capsys, scripts, arguments, said):
    recording = scripts.with_suffix(".rec")
    recording.write_bytes(b"\0\0\0\x20\x94\xa6header\xb4lockstep-recording-3")
    assert run_main(monkeypatch, *[word.format(file=scripts, recording=recording) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("scripted: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("strategy", ["exhaustive", "random", "swarm", "pct", "surw"])
def test_a_search_runs_as_many_schedules_as_it_is_told(monkeypatch, capsys, strategy):
    """The targets by themselves are among them."""
    words = ["explore", "one-stage", "--strategy", strategy, "--schedules", "30", "--no-coverage"]
    assert run_main(monkeypatch, *words) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("ran    30 schedules of lockstep in ")


def test_the_coverage_of_a_search_fits_100_columns(monkeypatch, capsys):
    assert run_main(monkeypatch, "explore", "full-rows", "--schedules", "200", "--coverage") == 0
    said = capsys.readouterr().out.splitlines()
    table = [line for line in said if not line.startswith(("ran ", "found ", "next ", "open ", "never ", "passed"))]
    assert len(table) > 10
    assert max(map(len, table)) <= 100


def test_a_script_that_fails_by_itself_is_told_so(monkeypatch, capsys, scripts):
    assert run_main(monkeypatch, "explore", f"{scripts}::test_fails_at_once", "--schedules", "5") == 1
    assert "it fails by itself, with nothing added" in capsys.readouterr().out


def test_a_script_of_a_class_is_found_by_both_names(monkeypatch, capsys, scripts):
    for name in ("TestOfAClass.test_method", "TestOfAClass::test_static"):
        assert run_main(monkeypatch, "run", f"{scripts}::{name}") == 0
    assert "loose end" not in capsys.readouterr().err


def test_loose_ends_are_told(monkeypatch, capsys, scripts):
    assert run_main(monkeypatch, "run", f"{scripts}::test_only_sim") == 0
    assert "scripts in which no step had anything to do: 1" in capsys.readouterr().out


def test_a_file_that_cannot_be_imported_says_why(monkeypatch, capsys, scripts):
    scripts.write_text("import a_module_that_is_not_there\n")
    assert run_main(monkeypatch, "run", f"{scripts}::test_one") == 2
    assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


def test_a_script_imports_what_stands_beside_a_conftest_above_it(monkeypatch, capsys, scripts):
    folder = scripts.parent
    (folder / "conftest.py").touch()
    (folder / "beside_the_conftest.py").write_text("BY_HELPER = True\n")
    below = folder / "races" / scripts.name
    below.parent.mkdir()
    below.write_text(f"from beside_the_conftest import BY_HELPER\n{scripts.read_text()}")
    assert run_main(monkeypatch, "run", f"{below}::test_only_sim") == 0, capsys.readouterr().err


def test_traces_become_pages_and_perfetto_traces(monkeypatch, capsys, tmp_path):
    left, right = tmp_path / "left.jsonl", tmp_path / "right.jsonl"
    run_main(monkeypatch, "run", FLUSH, "--trace", str(left))
    run_main(monkeypatch, "run", FLUSH, "--mutant", BUG, "--trace", str(right))
    capsys.readouterr()
    assert run_main(monkeypatch, "view", str(left), str(right)) == 0
    page = left.with_suffix(".html")
    assert str(page) in capsys.readouterr().out
    assert SIGNATURE in page.read_text()
    chrome = tmp_path / "chrome.json"
    assert run_main(monkeypatch, "view", str(left), "--perfetto", str(chrome)) == 0
    assert json.loads(chrome.read_text())["traceEvents"]
    assert run_main(monkeypatch, "view", str(left), str(right), "--perfetto", str(chrome)) == 2
    assert run_main(monkeypatch, "view", str(left), "--step", "4", "-o", str(page)) == 0
    assert 'data-focus="3"' in page.read_text()
    capsys.readouterr()
    assert run_main(monkeypatch, "view", str(left), "--step", "400") == 2
    assert "scripted: --step must be a step of the traces, got 400" in capsys.readouterr().err
    assert run_main(monkeypatch, "view", str(left), "--step", "4", "--perfetto", str(chrome)) == 2


def test_the_gallery_is_listed_with_the_test_of_each_mutant(monkeypatch, capsys):
    assert run_main(monkeypatch, "gallery") == 0
    out = capsys.readouterr().out
    for mutant in MUTANTS:
        assert mutant.name in out
        assert mutant.test in out
        assert find_test(mutant.test).tiers


def test_the_gallery_shows_green_without_and_red_with(monkeypatch, capsys):
    """D11: each registered race has a mutant that it catches."""
    assert run_main(monkeypatch, "gallery", "run", BUG, "--tier", "sim") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("without: passed" in line for line in lines)
    assert any("with:    FAILED" in line and SIGNATURE in line for line in lines)


def test_the_tests_of_the_gallery_are_in_the_repository(monkeypatch, capsys, tmp_path):
    """An installed package does not bring them along."""
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, "gallery", "run", BUG) == 2
    assert "run this in the root of a clone" in capsys.readouterr().err


def test_a_mutant_that_its_test_does_not_catch_is_told(monkeypatch, capsys):
    escaped = replace(MUTANTS[0], signature="something else")
    monkeypatch.setattr(scripted_lockstep.adapter.ADAPTER, "mutants", {escaped.name: escaped})
    assert run_main(monkeypatch, "gallery", "run", "--all", "--tier", "sim") == 1
    assert "NOT CAUGHT: 'something else'" in capsys.readouterr().out


def test_a_mutant_is_caught_where_every_tier_catches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(single_run, "_show_in", lambda _mutant, tier, _arguments: tier == "sim")
    mutant = mutant_named("flush-ignores-in-flight")
    assert single_run.show_mutant(mutant, "sim")
    assert not single_run.show_mutant(mutant, None)
