"""Real pytest processes over small files: deaths, hangs, rounds."""

import io
import os
import queue
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from sample_tree import SampleTree

from ci.events import Finished, Started, encode
from ci.results import FileResult, FileStatus, TestOutcome
from ci.session import EventsDrained, SessionOptions, read_events, run_session

GONE_CHECKS_MAX, GONE_PAUSE_S = 200, 0.01
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def _find_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(tree: SampleTree, *paths: str, timeout_s: float = 30, repeat: int = 1, args: tuple[str, ...] = (),
        nodes: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, FileResult]:  # fmt: skip
    options = SessionOptions(
        tree.root, timeout_s, repeat=repeat, nodes=nodes or {}, pytest_args=("-q", "-p", "no:cacheprovider", *args)
    )
    return run_session(paths, options)


def test_every_kind_of_end_in_one_process(tree: SampleTree) -> None:
    good = tree.good("test_good.py")
    broken = tree.write("test_broken.py", "import no_such_module\ndef test_x(): pass\n")
    bad = tree.write(
        "test_bad.py",
        """
        import pytest
        @pytest.fixture
        def torn():
            yield
            raise OSError("torn")
        def test_assert(): assert [1] == [2]
        def test_tear_down(torn): pass
        @pytest.mark.skip
        def test_skipped(): pass
        @pytest.mark.xfail
        def test_expected(): assert False
        """,
    )
    apart = tree.write("test_apart.py", "import pytest\npytest.skip('not here', allow_module_level=True)\n")
    results = run(tree, good, broken, bad, apart)
    ended = [results[path].status.value for path in (good, broken, bad, apart)]
    assert ended == ["passed", "failed", "failed", "empty"]
    assert results[apart].note == "Skipped: not here"
    assert results[broken].tests[0].error == "ModuleNotFoundError"
    assert [(test.name, test.outcome.value, test.error) for test in results[bad].tests] == [
        ("test_assert", "failed", "AssertionError"),
        ("test_tear_down", "failed", "OSError"),
        ("test_skipped", "skipped", ""),
        ("test_expected", "skipped", ""),
    ]
    assert "assert [1] == [2]" in results[bad].tests[0].text


LEAVE_A_CHILD = """
import subprocess, sys
CODE = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
def leave_a_child(pid_file, **options):
    child = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    open(pid_file, "w").write(str(child.pid))
    return child
"""


def is_gone(pid_file: Path) -> bool:
    """Whether the process ends within a bound: a kill is carried out a moment after it was sent."""
    pid = int(pid_file.read_text())
    for _ in range(GONE_CHECKS_MAX):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(GONE_PAUSE_S)
    return False


def test_a_hanging_file_is_stopped_with_stacks_and_takes_its_children_along(
    tree: SampleTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E02: also children in sessions of their own, which ignore the request for stacks."""
    monkeypatch.setattr("ci.session.STACKS_TIMEOUT_S", 0.3)
    pid_file = tree.root / "pid"
    hang = tree.write(
        "test_hang.py",
        LEAVE_A_CHILD
        + f"""
import threading
def wait_for_a_reply():
    threading.Event().wait()
def test_hang():
    child = leave_a_child({str(pid_file)!r}, start_new_session=True)
    wait_for_a_reply()
""",
    )
    later = tree.good("test_later.py")
    results = run(tree, hang, later, timeout_s=1)
    assert results[hang].status is FileStatus.TIMEOUT
    assert "in wait_for_a_reply" in results[hang].note
    assert [(test.name, test.error) for test in results[hang].tests] == [("test_hang", "timeout")]
    assert results[later].status is FileStatus.NOT_RUN
    assert is_gone(pid_file)


def test_what_a_test_leaves_behind_ends_with_its_session(tree: SampleTree) -> None:
    pid_file = tree.root / "pid"
    leaves = tree.write(
        "test_leaves.py",
        LEAVE_A_CHILD + f"CHILDREN = []\ndef test_leaves(): CHILDREN.append(leave_a_child({str(pid_file)!r}))\n",
    )
    assert run(tree, leaves)[leaves].status is FileStatus.PASSED
    assert is_gone(pid_file)


def test_a_dying_file_is_blamed_and_the_others_keep_their_results(tree: SampleTree) -> None:
    good = tree.good("test_good.py")
    dying = tree.write("test_dying.py", "import os\ndef test_first(): pass\ndef test_die(): os.kill(os.getpid(), 9)\n")
    later = tree.good("test_later.py")
    results = run(tree, good, dying, later)
    assert [results[path].status.value for path in (good, dying, later)] == ["passed", "crashed", "not run"]
    assert "signal 9" in results[dying].note
    assert [test.outcome for test in results[dying].tests] == [TestOutcome.PASSED, TestOutcome.FAILED]


def test_rounds_show_how_often_a_flake_fails(tree: SampleTree) -> None:
    """An answer has links, the local command and the result (E06)."""
    flaky = tree.write(
        "test_flaky.py",
        """
        import pytest
        runs = []
        @pytest.fixture
        def fresh(): return []
        def test_flaky(fresh):
            assert fresh == []
            fresh.append(1)
            runs.append(1)
            assert len(runs) % 3
        def test_other(): pass
        """,
    )
    (result,) = run(tree, flaky, repeat=6, nodes={flaky: ("test_flaky",)}).values()
    assert [test.outcome.value for test in result.tests] == ["passed", "passed", "failed"] * 2
    assert result.failures == 2


def test_with_xdist_results_and_errors_come_from_the_workers(tree: SampleTree) -> None:
    good = tree.good("test_good.py")
    bad = tree.write("test_bad.py", "def test_bad(): raise LookupError('x')\n")
    results = run(tree, good, bad, args=("-p", "xdist", "-n", "1"))
    assert [results[path].status.value for path in (good, bad)] == ["passed", "failed"]
    assert results[bad].tests[0].error == "LookupError"


def test_no_descriptor_is_left_open(tree: SampleTree) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    run(tree, tree.good("test_good.py"), args=("--no-such-option",))
    assert len(list(DESCRIPTORS.iterdir())) <= before


def test_a_terminated_run_takes_pytest_along(tree: SampleTree) -> None:
    """A cancelled job sends SIGTERM to the run, not to what the run started."""
    fifo = tree.root / "fifo"
    os.mkfifo(fifo)
    tree.write(
        "test_wait.py",
        f"""
        import os, threading
        from ci.register import register_cpu_ci
        register_cpu_ci(est_time=1, suite="base-cpu")
        def test_wait():
            with open({str(fifo)!r}, "w") as pipe:
                pipe.write(str(os.getpid()))
            threading.Event().wait()
        """,
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "ci", "suite", "--root", tree.root], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with fifo.open() as pipe:
        pid = int(pipe.read())
    run.terminate()
    assert run.wait(timeout=30) != 0
    (tree.root / "pid").write_text(str(pid))
    assert is_gone(tree.root / "pid")


@pytest.mark.parametrize(
    "line", [b"\xff" * 9, b"[" * 100_000, b'{"type":"Started"}', b'{"type":"Started","file":"a\xff"']
)
def test_a_damaged_event_is_left_out_with_a_sentence(line: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Later events are read, up to the end event: without one the run would be waited for until its time is over."""
    events = (Started("a", "b"), Finished("a", "b"))
    stream = io.BytesIO(encode(events[0]) + line + b"\n" + encode(events[1]))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read_events(stream, inbox)
    assert [inbox.get_nowait() for _ in range(3)] == [*events, EventsDrained()]
    assert f"left out a line of {len(line) + 1} bytes that is not an event of pytest" in capsys.readouterr().err
