"""Whole conversations: comment in; reactions, dispatches and answers out, on the project's branches and on forks."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import pytest
from fake_github import SHA, FakeGitHub, run_payload
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_tree import REPOSITORY, SampleTree

from ci.bot import Bot, CommentEvent, tell_end
from ci.commands import COMMANDS
from ci.errors import GitHubError
from ci.permissions import Permissions
from ci.registry import Registry
from ci.request import RerunRequest, Tier
from ci.results import FileResult, FileStatus, RunResult, TestOutcome, TestResult, write_json
from ci.times import MeasuredTimes

COMMENT = 4242
CUDA = """
from ci.register import register_cuda_ci
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")
def test_wide(): pass
"""
ALL_COMMANDS = [
    "/rerun-test test_flush.py",
    "/rerun-group pipeline",
    "/rerun-stage base-cpu",
    "/rerun-failed-ci",
    "/tag-run-ci-label",
    "/tag-and-rerun-ci",
    "/explore tests/registered/pipeline/test_flush.py::test_flush",
]


def event(body: str, login: str = "maintainer", **changes: object) -> dict[str, object]:
    payload: dict[str, object] = {
        "action": "created",
        "issue": {
            "number": 5,
            "title": "A change",
            "pull_request": {"url": "https://api.github.com/repos/acme/engine/pulls/5"},
        },
        "comment": {
            "id": COMMENT,
            "body": body,
            "user": {"login": login, "id": 3, "type": "User"},
            "author_association": "NONE",
            "created_at": "2026-01-01T12:00:00Z",
        },
        "repository": {"id": 1, "full_name": "acme/engine", "default_branch": "main", "private": False},
        "sender": {"login": login, "id": 3},
    }
    return payload | changes


@pytest.fixture
def tree(tmp_path: Path) -> SampleTree:
    tree = SampleTree(tmp_path)
    tree.good("pipeline/test_flush.py", est_time=6)
    tree.good("pipeline/test_sweep.py", est_time=30)
    tree.write("pipeline/test_wide.py", CUDA)
    return tree


def say(fake: FakeGitHub, tree: SampleTree, body: str, login: str = "maintainer", **changes: object) -> str:
    catalogue, registry = tree.settled
    bot = Bot(
        github=fake.client(),
        catalogue=catalogue,
        permissions=Permissions.load(tree.root),
        times=MeasuredTimes({}),
        read_head=lambda: registry,
        sha=SHA,
    )
    return bot.handle(msgspec.convert(event(body, login, **changes), CommentEvent))


def inputs_of(fake: FakeGitHub) -> dict[str, object]:
    ((_, inputs),) = fake.dispatches
    return inputs


def test_rerun_test(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03); an answer has links, the local command and the result (E06)."""
    fake.runs = [run_payload(1, "rerun-test", "rerun-test c4242-11", "completed", "success")]
    say(fake, tree, "/rerun-test test_flush.py::test_flush --repeat 20 --tier sim\nIs this a flake?")
    inputs = inputs_of(fake)
    assert fake.dispatches[0][0] == "rerun-test.yml"
    assert RerunRequest.from_json(str(inputs["request"])) == RerunRequest(
        ("tests/registered/pipeline/test_flush.py::test_flush",), 20, Tier.SIM
    )
    assert (inputs["sha"], inputs["pull_request"], inputs["ticket"]) == (SHA, "5", "c4242-1")
    assert json.loads(str(inputs["runner"])) == ["ubuntu-24.04"]
    assert 15 < int(str(inputs["timeout_minutes"])) < 60
    assert fake.reactions == ["eyes", "rocket"]
    assert "https://github.com/acme/engine/actions/runs/7001" in fake.answer
    assert "python -m ci rerun-test test_flush.py::test_flush --repeat 20 --tier sim" in fake.answer


def test_rerun_group_is_grouped_by_runner(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    say(fake, tree, "/rerun-group pipeline")
    assert [(json.loads(str(inputs["runner"])), inputs["ticket"]) for _, inputs in fake.dispatches] == [
        (["self-hosted", "4-gpu"], "c4242-1"),
        (["ubuntu-24.04"], "c4242-2"),
    ]
    assert fake.answer.count("actions/runs/") == 2
    assert "python -m ci rerun-test tests/registered/pipeline" in fake.answer


def test_rerun_stage(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    say(fake, tree, "/rerun-stage base-cpu")
    assert fake.dispatches[0][0] == "rerun-stage.yml"
    assert {name: inputs_of(fake)[name] for name in ("hw", "suite", "stage", "runner_config")} == {
        "hw": "cpu",
        "suite": "base-cpu",
        "stage": "",
        "runner_config": "",
    }
    assert "python -m ci suite --hw cpu --suite base-cpu" in fake.answer


def test_rerun_stage_on_a_runner(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    say(fake, tree, "/rerun-stage extra-b 4-gpu")
    inputs = inputs_of(fake)
    assert (inputs["hw"], inputs["stage"], inputs["runner_config"]) == ("cuda", "extra-b", "4-gpu")
    assert json.loads(str(inputs["runner"])) == ["self-hosted", "4-gpu"]


def test_rerun_failed_ci(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    fake.runs = [
        run_payload(1, "pull-request", "A change", "completed", "failure"),
        run_payload(2, "pull-request", "A change", "completed", "success"),
        run_payload(3, "nightly", "A change", "in_progress", None),
    ]
    say(fake, tree, "/rerun-failed-ci")
    assert fake.rerun == [1]
    assert "[`pull-request`](https://github.com/acme/engine/actions/runs/1)" in fake.answer


def test_rerun_failed_ci_with_nothing_to_do_says_so(fake: FakeGitHub, tree: SampleTree) -> None:
    say(fake, tree, "/rerun-failed-ci")
    assert "Nothing to run again" in fake.answer


def test_labels(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    say(fake, tree, "/tag-run-ci-label")
    assert (fake.labels, fake.rerun) == (["run-ci"], [])


def test_label_and_rerun(fake: FakeGitHub, tree: SampleTree) -> None:
    """A command runs for those who may give it (E03)."""
    fake.runs = [run_payload(1, "pull-request", "A change", "completed", "failure")]
    say(fake, tree, "/tag-and-rerun-ci")
    assert (fake.labels, fake.rerun) == (["run-ci"], [1])
    assert "label `run-ci`" in fake.answer


def test_explore(fake: FakeGitHub, tree: SampleTree) -> None:
    say(fake, tree, "/explore tests/registered/pipeline/test_flush.py::test_flush --minutes 30")
    assert fake.dispatches[0][0] == "explore.yml"
    assert (inputs_of(fake)["minutes"], inputs_of(fake)["timeout_minutes"]) == ("30", "45")
    assert "scripted explore tests/registered/pipeline/test_flush.py::test_flush --minutes 30" in fake.answer


def test_explore_finds_a_file_by_its_name_and_a_schedule_in_it(fake: FakeGitHub, tree: SampleTree) -> None:
    path = tree.write(
        "race/test_race.py",
        """
        from ci.register import register_cpu_ci
        register_cpu_ci(est_time=5, suite="base-cpu")
        RACE = "1 start a prompt=9"
        def test_race():
            pass
        """,
    )
    say(fake, tree, "/explore test_race.py::RACE")
    assert inputs_of(fake)["scenario"] == f"{path}::RACE"


@pytest.mark.parametrize("body", ALL_COMMANDS)
@pytest.mark.parametrize("is_fork", [False, True])
@pytest.mark.parametrize("login", ["maintainer", "writer", "author", "reader", "stranger"])
def test_each_command_allowed_and_refused(
    fake: FakeGitHub, tree: SampleTree, body: str, is_fork: bool, login: str
) -> None:
    """E03, E04: every user, on own pull requests and forks, gets an answer; only some start anything."""
    fake.runs = [run_payload(1, "pull-request", "A change", "completed", "failure")]
    fake.head_repository = "author/engine" if is_fork else "acme/engine"
    may = login in ("maintainer", "writer") or (login == "author" and not is_fork and not body.startswith("/tag"))
    say(fake, tree, body, login)
    assert bool(fake.changes) == may
    assert fake.reactions == ["eyes", "rocket" if may else "-1"]
    assert may or (fake.answer.startswith("Not done: ") and "write permission" in fake.answer)


def test_a_deleted_fork_is_a_fork(fake: FakeGitHub, tree: SampleTree) -> None:
    fake.head_repository = None
    say(fake, tree, ALL_COMMANDS[0], "author")
    assert "from a fork" in fake.answer
    assert fake.changes == []


def test_a_closed_pull_request_is_refused(fake: FakeGitHub, tree: SampleTree) -> None:
    fake.state = "closed"
    say(fake, tree, ALL_COMMANDS[0])
    assert "is closed; open it again" in fake.answer


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("/rerun-test test_flsh.py", "did you mean `tests/registered/pipeline/test_flush.py`"),
        ("/rerun-test test_flush.py --hw cuda", "is not registered for cuda; it is for cpu"),
        ("/rerun-group memory", "there are tests/registered/pipeline"),
        ("/rerun-group ../..", "without .."),
        (
            "/rerun-stage base-cpp",
            "suites: base-cpu, extra-cpu, nightly-cpu, ray-cpu, sglang-cpu, vllm-cpu; stages: base-a, base-b, extra-b",
        ),
        ("/rerun-stage extra-b", "no stage with a runner"),
        ("/rerun-stage vllm-cpu", "`vllm-cpu` has an environment of its own; run it with `make vllm`"),
        ("/rerun-stage extra-cpu", "no test is registered for `extra-cpu` on `cpu`"),
        ("/rerun-stage extra-b 1-gpu", "no test is registered for `extra-b` on `1-gpu`"),
        ("/explore test_flush", "is no scenario"),
        ("/explore tests/registered/pipeline", "is no scenario"),
        ("/explore tests/registered/pipeline/test_flush.py", "is no scenario"),
        ("/explore tests/registered/pipeline::test_flush", "is no scenario"),
        (
            "/explore tests/registered/pipeline/test_flsh.py::test_flush",
            "is no registered test file; did you mean `tests/registered/pipeline/test_flush.py`",
        ),
        ("/explore ci/nothing.py::test_flush", "`ci/nothing.py` is no registered test file"),
        ("/explore /etc/a.py::b", "not absolute"),
        ("/explore test_flush.py::test_flsh", "defines no `test_flsh`; did you mean `test_flush`?"),
        ("/explore test_flush.py::test_`id`", "has characters that no command needs"),
        ("/rerun-test tests/registered/nowhere", "names no registered test"),
        ("/rerun-test /etc/passwd", "not absolute"),
        ("/rerun-test test_flush.py::test_flsh", "defines no `test_flsh`; did you mean `test_flush`?"),
        ("/explore --x=y a.py::b", "has no option `--x`"),
        ("/explore -x y a.py::b", "has no option `-x`"),
        ("/explore ../../a.py::b", "without .."),
        ("/rerun-tests x", "did you mean `/rerun-test`"),
    ],
)
def test_wrong_commands_are_answered(fake: FakeGitHub, tree: SampleTree, body: str, text: str) -> None:
    """Every command is answered, refusals too (E04)."""
    say(fake, tree, body)
    assert text in fake.answer
    assert fake.changes == []
    assert fake.reactions[-1] == "-1"


@pytest.mark.parametrize(
    "changes",
    [
        {"action": "edited"},
        {"action": "deleted"},
        {"issue": {"number": 5}},
        {
            "comment": {
                "id": 1,
                "body": "/rerun-failed-ci",
                "user": {"login": "ci[bot]", "type": "Bot"},
                "created_at": "",
            }
        },
        {"comment": {"id": 1, "body": "thanks\n/rerun-failed-ci", "user": {"login": "maintainer", "type": "User"}}},
    ],
)
def test_what_is_no_command_is_left_alone(fake: FakeGitHub, tree: SampleTree, changes: dict[str, object]) -> None:
    assert say(fake, tree, "/rerun-failed-ci", **changes).startswith("ignored")
    assert fake.requests == []


def test_trouble_on_the_way_is_answered_too(fake: FakeGitHub, tree: SampleTree) -> None:
    """E04: an outage that lasts ends in an answer, not in silence."""
    for _ in range(4):
        fake.fail("POST .*/dispatches", (503, {"message": "unavailable"}, {}))
    say(fake, tree, "/rerun-test test_flush.py")
    assert "`/rerun-test` did not get through" in fake.answer
    assert "503" in fake.answer
    assert fake.reactions == ["eyes", "confused"]


def test_a_reaction_that_is_not_allowed_does_not_cost_the_answer(fake: FakeGitHub, tree: SampleTree) -> None:
    for _ in range(2):
        fake.fail("reactions", (403, {"message": "Resource not accessible by integration"}, {}))
    say(fake, tree, "/rerun-test test_flush.py")
    assert len(fake.dispatches) == 1
    assert fake.answer.startswith("Running on")


def test_short_trouble_does_not_show(fake: FakeGitHub, tree: SampleTree) -> None:
    fake.fail("permission", (502, None, {}))
    fake.fail("GET .*/pulls/5", httpx.ReadTimeout("slow"))
    fake.fail("dispatches", httpx.ReadTimeout("slow"), carried_out=True)
    fake.fail("POST .*/issues/5/comments", (500, None, {}), carried_out=True)
    fake.fail("reactions", (403, {"message": "wait"}, {"retry-after": "3"}))
    say(fake, tree, "/rerun-test test_flush.py")
    assert len(fake.dispatches) == 1
    assert fake.answer.count("c4242-1") == 1
    assert fake.reactions == ["eyes", "rocket"]


EVIL_WORDS = [
    "$(touch pwned)",
    "`touch pwned`",
    ";touch pwned",
    "|| touch pwned",
    "../../../etc/passwd",
    "/etc/passwd",
    "tests/registered/../../secret.py",
    "${{ github.token }}",
    "${{ secrets.X }}",
    "test_flush.py\u202e",
    "test_flu\u0455h.py",
    "\uff0e\uff0e/\uff0f",
    "--request",
    "-p",
    "--rootdir=/",
    "@everyone",
    "](javascript:alert(1))",
    "<!-- ci:c4242 -->",
    "%0Aset-output",
    "::set-output name=x::y",
    "test_flush.py::test_flush[$(id)]",
    "x" * 9000,
    "a.py " * 3000,
    "\x00",
    "\x1b[31m",
]
hostile_text = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from([*EVIL_WORDS, "test_flush.py", "--repeat", "20", "--tier"]), max_size=8).map(" ".join),
    st.text(alphabet="./:[]-=,+ab_$`\n\r\t ", max_size=100),
    st.binary(max_size=100).map(lambda data: data.decode("utf-16", "replace")),
)


@given(
    name=st.sampled_from([*COMMANDS, "/rerun", ""]), text=hostile_text, padding=st.sampled_from([0, 65_536, 200_000])
)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_hostile_comments_start_nothing_that_was_not_registered(
    tree: SampleTree, name: str, text: str, padding: int
) -> None:
    """E05: for any comment, by people with any permission, only validated words of our own reach a workflow."""
    fake = FakeGitHub()
    say(fake, tree, f"{name} {text}{'x' * padding}" if padding else f"{name} {text}")
    for workflow, inputs in fake.dispatches:
        check_inputs(tree, workflow, {name: str(value) for name, value in inputs.items()})
    assert len(fake.comments) == bool(fake.reactions), "answered if and only if it was a command"
    for comment in fake.comments:
        assert str(comment["body"]).isascii()
        assert str(comment["body"]).count("<!--") == 1
    if fake.reactions[-1:] == ["-1"]:
        assert fake.changes == []


def check_inputs(tree: SampleTree, workflow: str, inputs: dict[str, str]) -> None:
    if workflow == "rerun-test.yml":
        known = {file.path for file in tree.settled[1].files}
        specs = RerunRequest.from_json(inputs.pop("request")).specs
        assert {spec.partition("::")[0] for spec in specs} <= known
    json.loads(inputs.pop("runner"))
    for value in inputs.values():
        assert not set(value) & set("$`;&|<>(){}'\"\\ \n\r\t*?!#@~^%"), value


@pytest.mark.parametrize("word", EVIL_WORDS)
def test_each_evil_word_is_refused(fake: FakeGitHub, tree: SampleTree, word: str) -> None:
    """A comment is hostile input (E05)."""
    say(fake, tree, f"/rerun-test {word}")
    assert fake.changes == []
    assert fake.answer.startswith("Not done: ")


def test_a_newline_ends_the_command(fake: FakeGitHub, tree: SampleTree) -> None:
    """A comment is hostile input (E05)."""
    say(fake, tree, "/rerun-test test_flush.py\n$(touch pwned)\n" + "y" * 60_000)
    assert RerunRequest.from_json(str(inputs_of(fake)["request"])).specs == ("tests/registered/pipeline/test_flush.py",)


# The result, when the run is done.


def end(fake: FakeGitHub, path: Path, conclusion: str = "failure") -> None:
    url = "https://github.com/acme/engine/actions/runs/7000"
    tell_end(fake.client(), ticket="c4242-1", pull_request=5, conclusion=conclusion, url=url, results=path)


def test_the_result_of_a_flake_hunt(fake: FakeGitHub, tmp_path: Path) -> None:
    """An answer has links, the local command and the result (E06)."""
    runs = [TestResult("test_flush", TestOutcome.PASSED, 0.1)] * 18
    runs += [TestResult("test_flush", TestOutcome.FAILED, 0.1, "AssertionError", "text")] * 2
    files = (
        FileResult("tests/registered/a.py", FileStatus.FAILED, 2.0, tuple(runs)),
        FileResult("tests/registered/b.py", FileStatus.CRASHED, 2.0),
    )
    write_json(RunResult(files), tmp_path / "results.json")
    end(fake, tmp_path / "results.json")
    assert "`c4242-1` ended with **failure**: [run](https://github.com/acme/engine/actions/runs/7000)" in fake.answer
    assert "18 passed, 3 failed" in fake.answer
    assert "| `tests/registered/a.py::test_flush` | 2 | 20 | `AssertionError` |" in fake.answer
    assert "| `tests/registered/b.py` | | | `crashed` |" in fake.answer


def test_a_run_without_results_is_told_too(fake: FakeGitHub, tmp_path: Path) -> None:
    end(fake, tmp_path / "missing.json", "cancelled")
    assert "**cancelled**" in fake.answer
    assert "no results" in fake.answer


@given(name=st.text(max_size=300), error=st.text(max_size=300))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_results_of_hostile_code_are_only_quoted(tmp_path: Path, name: str, error: str) -> None:
    """E05: a fork's code writes what it likes into its results."""
    name, error = (text.encode("utf-8", "replace").decode() for text in (name, error))
    result = RunResult((FileResult(name, FileStatus.FAILED, 1.0, (TestResult(name, TestOutcome.FAILED, 1.0, error),)),))
    fake = FakeGitHub()
    write_json(result, tmp_path / "results.json")
    end(fake, tmp_path / "results.json", "**evil**")
    assert fake.answer.isascii()
    assert "**unknown**" in fake.answer
    assert fake.answer.splitlines()[-3].count("|") == 5
    assert fake.answer.count("`") % 2 == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"files": [{"path": 1}]}', b"\xff\xfe", b'{"files": [{"path": "\xff"}]}']
)
def test_broken_results_count_as_none(fake: FakeGitHub, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.json").write_bytes(content)
    end(fake, tmp_path / "results.json")
    assert "no results" in fake.answer


@pytest.mark.parametrize("days", [0, 3])
def test_the_same_event_twice_is_carried_out_once(fake: FakeGitHub, tree: SampleTree, days: int) -> None:
    """E05: a job that is run again, or an event that GitHub delivers twice, starts nothing and answers nothing."""
    fake.now_s = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
    say(fake, tree, "/rerun-test test_flush.py")
    before = fake.changes
    fake.now_s += days * 86400
    assert say(fake, tree, "/rerun-test test_flush.py") == "ignored: this comment is answered already"
    assert fake.changes == before
    assert len(fake.dispatches) == 1


def test_a_dispatch_whose_answer_failed_is_not_sent_again(fake: FakeGitHub, tree: SampleTree) -> None:
    """E05: the first job died between dispatch and answer; the ticket says that the run is there."""
    fake.fail("POST .*/comments$", (422, {"message": "no"}, {}))
    with pytest.raises(GitHubError):
        say(fake, tree, "/rerun-test test_flush.py")
    say(fake, tree, "/rerun-test test_flush.py")
    assert len(fake.dispatches) == 1


@pytest.mark.parametrize("changes", [{"head_sha": "e" * 40}, {"pushed_at": "2026-01-01T12:00:01Z"}])
def test_a_push_after_the_command_is_refused(fake: FakeGitHub, tree: SampleTree, changes: dict[str, str]) -> None:
    """E05: a maintainer allows the fork's code that they have seen, and no other."""
    fake.head_repository = "stranger/engine"
    for name, value in changes.items():
        setattr(fake, name, value)
    say(fake, tree, "/rerun-test test_flush.py")
    assert fake.dispatches == []
    assert "something was pushed after the command" in fake.answer


def test_the_head_is_read_for_people_with_permission_only(fake: FakeGitHub, tree: SampleTree) -> None:
    """E05: reading a pull request's files takes time, which a stranger may not spend."""
    read: list[str] = []

    def read_head() -> Registry:
        read.append("read")
        return tree.registry

    catalogue, _ = tree.settled
    bot = Bot(fake.client(), catalogue, Permissions({}), MeasuredTimes({}), read_head, SHA)
    for login in ("passer-by", "maintainer"):
        comment = msgspec.convert(event("/rerun-test test_flush.py", login), CommentEvent)
        bot.handle(msgspec.structs.replace(comment, comment=msgspec.structs.replace(comment.comment, id=len(login))))
        assert read == ([] if login == "passer-by" else ["read"])


# The command line, against a real server.


def run_ci(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "GITHUB_TOKEN": "token"}
    command = [sys.executable, "-m", "ci", *words, *(("--root", str(root)) if words[0] == "comment" else ())]
    return subprocess.run(command, env=clean | environment, cwd=root, capture_output=True, text=True, timeout=60)


def test_the_command_line_over_a_socket(fake: FakeGitHub, tree: SampleTree, tmp_path: Path) -> None:
    """E03 to E06, end to end: event file, head checkout, answer; then the result."""
    (tree.root / ".git").mkdir()
    (tree.root / ".git" / "HEAD").write_text(f"{SHA}\n")
    (tmp_path / "event.json").write_text(json.dumps(event("/rerun-test test_flush.py test_wide.py")))
    with fake.serve() as url:
        done = run_ci(
            tree.root,
            "comment",
            "--tree",
            str(tree.root),
            GITHUB_API_URL=url,
            GITHUB_EVENT_PATH=str(tmp_path / "event.json"),
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert [inputs["sha"] for _, inputs in fake.dispatches] == [SHA, SHA]
        assert "actions/runs/7000" in fake.comments[0]["body"]  # type: ignore[operator]
        done = run_ci(
            tree.root,
            "answer",
            GITHUB_API_URL=url,
            GITHUB_REPOSITORY="acme/engine",
            GITHUB_SERVER_URL="https://github.com",
            GITHUB_RUN_ID="7000",
            PULL_REQUEST="5",
            RUN_RESULT="success",
            TICKET="c4242-1",
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert "**success**" in str(fake.comments[1]["body"])


@pytest.mark.parametrize(
    ("head", "event_text", "text"),
    [
        ("ref: refs/heads/main", "{}", "is no issue_comment event"),
        ("ref: refs/heads/main", None, "must hold a commit"),
        (None, None, "check the pull request's head out"),
    ],
)
def test_a_wrong_workflow_is_told_in_a_line(
    tree: SampleTree, tmp_path: Path, head: str | None, event_text: str | None, text: str
) -> None:
    if head is not None:
        (tree.root / ".git").mkdir()
        (tree.root / ".git" / "HEAD").write_text(head)
    (tmp_path / "event.json").write_text(event_text or json.dumps(event("/rerun-failed-ci")))
    done = run_ci(tree.root, "comment", "--tree", str(tree.root), GITHUB_EVENT_PATH=str(tmp_path / "event.json"))
    assert done.returncode == 2
    assert done.stderr.startswith("ci: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
