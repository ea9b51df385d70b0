"""``scripted vet``: what it says of a script, and what its exit status is."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
from collections import Counter
from contextlib import closing
from logging import handlers
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine import EngineConfig
from scripted import scripted
from scripted.cli import app
from scripted.cli.new import new_test
from scripted.script.vetting import Findings, Vetting

CONFIG = EngineConfig(pp_size=2, chunked_prefill_size=64)
SOURCE = """
import pytest
from engine import EngineConfig
from scripted import scripted


@scripted(EngineConfig())
def test_weak(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.finished


@pytest.mark.parametrize("tokens", [3, 9])
@scripted(EngineConfig())
def test_of_a_parameter(t, tokens):
    r = t.start_req(prompt_len=5, max_new_tokens=tokens)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3


@scripted(EngineConfig(), tiers=("server",))
def test_elsewhere(t):
    yield
    assert t.state.step == 1
"""


def a_race(t):
    r = t.start_req(prompt_len=125, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes("in flight", not r.output_ids)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert r.output_ids


def a_check_that_holds_both_ways(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert all(one.rid == "x" for one in t.list_active_reqs() if one.rid != r.rid)
    assert len(r.output_ids) == 3


def never_gets_there(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3
    if r.finish_reason == "abort":
        assert r.error


def fails_by_itself(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 4


def ignores_its_parameter(t, tokens):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3


def draws_without_a_seed(t):
    r = t.start_req(prompt_len=20, prompt_seed=random.getrandbits(60), max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3


def ends_its_process(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    os._exit(4)


def counts_reasons(t):
    rs = [t.start_req(prompt_len=n, prompt_seed=n, max_new_tokens=3) for n in (30, 40, 50)]
    yield from t.run_until_all_finished(rs)
    assert Counter(r.finish_reason for r in rs) == {"length": 3}


def raises_instead_of_asserting(t):
    rs = [t.start_req(prompt_len=n, prompt_seed=1, max_new_tokens=3) for n in (200, 200, 40)]
    yield from t.run_until_all_finished(rs)
    if rs[0].output_ids != rs[1].output_ids or len(rs[2].output_ids) != 3:
        raise AssertionError("one prompt has two answers")


def matches_its_end(t):
    r = t.start_req(prompt_len=33, max_new_tokens=3)
    yield from t.run_until_finished(r)
    match r.finish_reason, len(r.output_ids):
        case "length", 3:
            pass
        case other:
            raise AssertionError(other)


def waits_under_pressure(t):
    t.exhaust_kv(leave_pages=2)
    r = t.start_req(prompt_len=100, max_new_tokens=2)
    yield
    yield
    assert r.status == "waiting"
    t.release_exhausted()
    yield from t.run_until_finished(r)


def overlaps(t):
    a = t.start_req(prompt_len=9, max_new_tokens=9)
    b = t.start_req(prompt_len=9, prompt_seed=1, max_new_tokens=9)
    while not (a.finished and b.finished):
        t.sometimes("overlap", len(t.state.running) == 2)
        yield


def moves_time(t):
    before = t.state.now
    t.clock.advance(5)
    yield
    assert t.state.now - before == 5


def compares_stages(t):
    r = t.start_req(prompt_len=20, max_new_tokens=3)
    yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    assert t.stage(0).last_microbatch_id == t.stage(1).last_microbatch_id


def retracts_somebody(t):
    rs = [t.start_req(prompt_len=60, prompt_seed=seed, max_new_tokens=9) for seed in range(2)]
    yield from t.advance_to_decode_step(rs[0], 2)
    t.pause_generation("retract")
    yield from t.run_until(lambda: not t.state.in_flight)
    t.continue_generation()
    yield from t.run_until_all_finished(rs)
    assert sum(r.retractions for r in rs) > 0


def catches_its_assertion(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"
    with pytest.raises(AssertionError):
        assert r.finish_reason == "stop"


def makes_a_generator(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    kept = never_gets_there(t)
    assert r.finish_reason == "length", kept


def holds_nothing_in_a_fleet(t):
    fleet = t.engines("p0", "d0")
    fleet.hold_pages("p0", "d0")
    r = fleet["d0"].start_req(prompt_len=3)
    yield from fleet["d0"].run_until_finished(r)
    assert not fleet.on_its_way("p0", "d0")


def kills_after_the_end(t):
    fleet = t.engines("p0", "d0")
    r = fleet["d0"].start_req(prompt_len=50)
    yield from fleet["d0"].run_until_finished(r)
    fleet.kill("p0")
    yield
    assert r.finished


def aborts_in_a_fleet(t):
    fleet = t.engines("p0", "d0")
    fleet.hold("d0", "p0")
    r = fleet["d0"].start_req(prompt_len=50)
    yield from fleet["d0"].run_until(lambda: bool(fleet["d0"].state.transferring))
    fleet["d0"].abort(r)
    fleet.release("d0", "p0")
    yield from fleet["p0"].run_until_idle()
    assert fleet["p0"].engine_stats().requests_finished == 0


def counts_its_choices(t):
    r = t.start_req(prompt_len=20, n=2, temperature=1, seed=1)
    yield from t.run_until_finished(r)
    assert len(r.choices) == 2


def _vetted(script: Any, arguments: Any = None, **options: Any) -> Any:
    test = scripted(CONFIG, **options)(script).scripted  # type: ignore[attr-defined]
    return Vetting(is_brief=arguments is not None).findings(test, script.__name__, arguments or {})


def test_a_race_notices_what_an_empty_script_does_not() -> None:
    findings = _vetted(a_race, must_reach=["in flight"])
    assert findings.is_a_test
    assert "flush-ignores-in-flight" in findings.own
    assert len(findings.own) < findings.noticed < findings.met
    assert (findings.always, findings.never) == ((), ())


def test_a_script_that_meets_no_known_bug_is_told_so() -> None:
    """For an adapter without mutants it said: notices only what every script notices, 0 of 0 bugs."""
    findings = Findings(name="a script")
    assert "meets no known bug" in "\n".join(findings.lines())
    assert not findings.is_a_test


def test_an_assertion_that_holds_both_ways_is_named() -> None:
    findings = _vetted(a_check_that_holds_both_ways)
    assert not findings.is_a_test
    (always,) = findings.always
    assert "one.rid == 'x'" in always


def test_an_assertion_that_was_never_reached_is_named() -> None:
    (never,) = _vetted(never_gets_there).never
    assert never.endswith("assert r.error")


def test_a_script_that_fails_by_itself_is_told_so() -> None:
    findings = _vetted(fails_by_itself)
    assert "assert" in findings.failure
    assert not findings.is_a_test
    assert list(findings.lines())[1].startswith("  fails without any bug: ")


def test_a_parameter_that_is_never_read_is_named() -> None:
    """46.10."""
    findings = _vetted(ignores_its_parameter, arguments={"tokens": 3})
    assert findings.notices_something
    assert findings.unused == ("tokens",)
    assert not findings.is_a_test


def test_a_script_that_runs_otherwise_each_time_is_told_so() -> None:
    """46.10: two runs are compared by their digests."""
    findings = _vetted(draws_without_a_seed)
    assert findings.notices_something
    assert findings.differs
    assert not findings.is_a_test


@pytest.mark.parametrize(
    "script",
    [
        counts_reasons,
        waits_under_pressure,
        moves_time,
        compares_stages,
        retracts_somebody,
        raises_instead_of_asserting,
        matches_its_end,
    ],
)
def test_a_script_that_depends_on_an_answer_is_a_test(script: Any) -> None:
    """46.10: no mutant concerns it, or the oracle notices each mutant before the script's assertion."""
    findings = _vetted(script, arguments={})
    assert findings.answer
    assert findings.is_a_test, list(findings.lines())


@pytest.mark.parametrize("script", [holds_nothing_in_a_fleet, kills_after_the_end])
def test_a_fleet_that_shows_only_what_its_requests_show_is_no_test(script: Any) -> None:
    """46: the baseline is the same requests in the same fleet; an engine alone, without requests, passes every bug."""
    findings = _vetted(script)
    assert findings.noticed
    assert (findings.own, findings.answer) == ((), "")


def test_a_race_in_a_fleet_is_a_test() -> None:
    assert "receiver-freed-while-kv-comes" in _vetted(aborts_in_a_fleet).own


def test_the_number_of_choices_is_no_answer_of_the_engine() -> None:
    assert not _vetted(counts_its_choices).is_a_test


def test_a_window_that_another_answer_closes_is_a_test() -> None:
    assert _vetted(overlaps, arguments={}, must_reach=["overlap"]).is_a_test


def test_what_a_script_leaves_is_told() -> None:
    findings = _vetted(catches_its_assertion, arguments={})
    assert findings.left == {"assertions that failed and were caught": 1}
    assert "leaves assertions that failed and were caught: 1" in findings.remarks()


def test_a_script_is_vetted_as_pytest_runs_it() -> None:
    """46.10: it did not see a generator that never ran, which fails the same script in pytest."""
    assert "never_gets_there(...) was made there and never ran" in _vetted(makes_a_generator, arguments={}).failure


def test_a_script_that_ends_its_process_ends_no_other() -> None:
    assert _vetted(ends_its_process).failure == "its process left with status 4"


def _command(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["vet", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test_to_vet.py"
    path.write_text(SOURCE)
    return path


def test_the_command_fails_for_what_every_script_notices(file: Path) -> None:
    status, said = _command(f"{file}::test_weak")
    assert status == 1
    assert "notices only what every script notices" in said


def test_a_parameter_has_its_first_value_or_the_one_given(file: Path) -> None:
    assert "fails without" not in _command(f"{file}::test_of_a_parameter")[1]
    status, said = _command(f"{file}::test_of_a_parameter", "--arg", "tokens=9")
    assert status == 1
    assert "fails without any bug" in said


def test_a_script_of_the_server_alone_is_left_out(file: Path) -> None:
    status, said = _command(f"{file}::test_elsewhere")
    assert status == 0
    assert "runs in the server tier only" in said


REFUSED = """
import pytest
from engine import EngineConfig
from scripted import scripted


@scripted(EngineConfig(pp_size=0))
def test_of_no_engine(t):
    yield


class TestOfAClass:
    @scripted(EngineConfig())
    def test_that_never_yields(self, t):
        assert t

    @scripted(EngineConfig(), tiers=("server",))
    def test_beside_it(self, t):
        yield
        assert t.state.step == 1


@scripted(EngineConfig())
def test_of_a_fixture(t, tmp_path):
    yield
    assert t.state.step == 1, tmp_path


@scripted(EngineConfig())
def test_right(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3
"""


def test_a_refused_script_leaves_the_others_their_verdicts(tmp_path: Path) -> None:
    """46.10: one refused script was all that was told of its file."""
    path = tmp_path / "test_some_refused.py"
    path.write_text(REFUSED)
    status, said = _command(path)
    assert status == 1
    told = re.split(rf"^{re.escape(str(path))}::", said, flags=re.MULTILINE)[1:]
    names = ["test_of_no_engine", "TestOfAClass.test_that_never_yields", "TestOfAClass.test_beside_it"]
    assert [one.split(maxsplit=1)[0] for one in told] == [*names, "test_of_a_fixture", "test_right"]
    reasons = ["is refused: .*pp_size", "is refused: .*never yields", "runs in the server tier only"]
    for one, reason in zip(told, [*reasons, "is refused: .*tmp_path; add --arg", "by itself: "], strict=True):
        assert re.search(reason, one), one


@pytest.mark.parametrize("command", ["vet", "run"])
def test_a_script_beside_a_refused_one_is_found_by_its_name(tmp_path: Path, command: str) -> None:
    path = tmp_path / "test_one_refused.py"
    path.write_text(REFUSED)
    assert CliRunner().invoke(app, [command, f"{path}::test_right"]).exit_code == 0
    refused = CliRunner().invoke(app, [command, f"{path}::TestOfAClass.test_that_never_yields"])
    assert refused.exit_code == 1
    assert "never yields" in str(refused.exception)


def test_what_scripted_new_writes_is_a_test(tmp_path: Path) -> None:
    status, said = _command(new_test("race", folder=tmp_path, settings={"pp_size": "2"}))
    assert status == 0, said
    assert "flush-ignores-in-flight" in said, said


def a_talker(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    print("said", r.output_ids)  # noqa: T201 - as a script may
    assert len(r.output_ids) == 3


def test_what_a_script_prints_in_its_hundred_runs_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    assert _vetted(a_talker, {}).notices_something
    assert capfd.readouterr() == ("", "")


class KeptRecords(logging.Handler):
    """Keeps what is logged, as caplog does."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def a_reader_of_its_own_log(t, kept):
    kept.texts.clear()
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    logging.getLogger("vetted").warning("%d tokens", len(r.output_ids))
    assert kept.texts == ["3 tokens"]


def a_sender_of_its_log(t, host, port, path):
    log = logging.getLogger("vetted.sent")
    made = [
        handlers.SysLogHandler((host, port)),
        handlers.DatagramHandler(host, port),
        handlers.MemoryHandler(1, target=handlers.DatagramHandler(host, port)),
        logging.FileHandler(path),
    ]
    for handler in made:
        log.addHandler(handler)
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    log.warning("%d tokens", len(r.output_ids))
    for handler in made:
        log.removeHandler(handler)
        handler.close()
    assert Path(path).read_text().endswith("3 tokens\n")


def test_a_handler_that_the_script_makes_sends_nothing_and_writes_its_file(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.setblocking(False)
        host, port = heard.getsockname()
        found = _vetted(a_sender_of_its_log, {"host": host, "port": port, "path": str(tmp_path / "log")})
        with pytest.raises(BlockingIOError):
            heard.recv(1)
    assert (found.failure, found.notices_something) == ("", True)


def test_a_script_may_assert_on_its_own_log_which_is_written_and_sent_nowhere(tmp_path: Path) -> None:
    log, kept = logging.getLogger("vetted"), KeptRecords()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard, contextlib.ExitStack() as stack:
        heard.bind(("127.0.0.1", 0))
        heard.setblocking(False)
        files = [stack.enter_context(closing(logging.FileHandler(tmp_path / name))) for name in ("log", "late")]
        outside = (
            files[0],
            handlers.MemoryHandler(1, target=files[1]),
            handlers.SysLogHandler(heard.getsockname()),
            handlers.DatagramHandler(*heard.getsockname()),
        )
        for handler in (*outside, kept):
            log.addHandler(handler)
            stack.callback(log.removeHandler, handler)
        found = _vetted(a_reader_of_its_own_log, {"kept": kept})
        with pytest.raises(BlockingIOError):
            heard.recv(1)
        outside[2].close()
    assert (found.failure, found.notices_something) == ("", True)
    assert [(tmp_path / name).read_text() for name in ("log", "late")] == ["", ""]
