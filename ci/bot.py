"""Answers comments on a pull request: reacts, dispatches a run, answers, and later comments its result.

Runs only the default branch's code. The pull request's head is a folder that is read; its code runs in other jobs.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from ci import answers
from ci.batches import Batch, cut_batches
from ci.commands import (
    Command,
    Explore,
    RerunFailedCi,
    RerunGroup,
    RerunStage,
    RerunTest,
    TagAndRerunCi,
    TagRunCiLabel,
    name_of,
    parse_comment,
)
from ci.errors import CiError, CommandRefusedError, GitHubError
from ci.github import API_URL, Account, GitHub, PullRequest
from ci.permissions import Asker, Permissions
from ci.quoting import quoted
from ci.registry import Registry, read_registry
from ci.request import RerunRequest
from ci.results import RunResult
from ci.specs import check_spelling, resolve_scenario, resolve_specs
from ci.suites import Catalogue, Hardware
from ci.times import MeasuredTimes
from lockstep.documents import DocumentError, document

RUN_CI_LABEL = "run-ci"
RERUN_WORKFLOW = "rerun-test.yml"
STAGE_WORKFLOW = "rerun-stage.yml"
EXPLORE_WORKFLOW = "explore.yml"
STAGE_TIMEOUT_MINUTES = 120
EXPLORE_INSTALL_MINUTES = 15
GROUPS_SHOWN_MAX = 20
RESULTS_SIZE_MAX_BYTES = 20_000_000
EVENT_SIZE_MAX_BYTES = 2_000_000
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")
CONCLUSIONS = frozenset({"success", "failure", "cancelled", "skipped"})


class _Comment(msgspec.Struct, frozen=True):
    id: int
    body: str
    user: Account
    created_at: str = ""  # A comment without a time is older than every push.


class _PullRequestMark(msgspec.Struct, frozen=True):
    url: str = ""


class _Issue(msgspec.Struct, frozen=True):
    number: int
    pull_request: _PullRequestMark | None = None


class _Repository(msgspec.Struct, frozen=True):
    full_name: str
    default_branch: str


class CommentEvent(msgspec.Struct, frozen=True):
    """The fields of GitHub's `issue_comment` event that are needed."""

    action: str
    comment: _Comment
    issue: _Issue
    repository: _Repository


@dataclass(frozen=True)
class Bot:
    """The inputs of an answer. `read_head` and `sha` are the pull request's head; all else is the default branch's."""

    github: GitHub
    catalogue: Catalogue
    permissions: Permissions
    times: MeasuredTimes
    read_head: Callable[[], Registry]
    sha: str

    @cached_property
    def registry(self) -> Registry:
        """The head's tests. Reading takes time, so they are read once, and only for a permitted command."""
        return self.read_head()

    def handle(self, event: CommentEvent) -> str:
        """Answer one comment and return a line for the log. Raises `GitHubError` if even the answer fails."""
        if event.action != "created" or event.issue.pull_request is None or event.comment.user.type == "Bot":
            return "ignored: not a new comment of a person on a pull request"
        name, marker = "command", f"ci:c{event.comment.id}"
        try:
            command = parse_comment(event.comment.body)
            if command is None:
                return "ignored: no command on the first line"
            name = name_of(command)
            # A job may be run again days later.
            if self.github.find_comment(event.issue.number, marker, event.comment.created_at) is not None:
                return "ignored: this comment is answered already"
            self._react(event, "eyes")
            pull = self.github.pull_request(event.issue.number)
            self._check(command, event, pull)
            text, reaction = self._carry_out(command, event), "rocket"
        except GitHubError as exc:
            text, reaction = answers.failed(name, str(exc)), "confused"
        except CiError as exc:
            text, reaction = answers.refused(str(exc)), "-1"
        self.github.comment(event.issue.number, text, marker)
        self._react(event, reaction)
        return text

    def _react(self, event: CommentEvent, content: str) -> None:
        """React if GitHub permits; a failed reaction must not cost the answer."""
        with contextlib.suppress(GitHubError):
            self.github.react(event.comment.id, content)

    def _check(self, command: Command, event: CommentEvent, pull: PullRequest) -> None:
        if pull.state != "open":
            raise CommandRefusedError(f"the pull request is {pull.state}; open it again first")
        login = event.comment.user.login
        asker = Asker(login, self.github.role(login), pull.user.login, pull.is_fork)
        reason = self.permissions.refusal(command, asker)
        if reason is not None:
            raise CommandRefusedError(reason)
        if pull.head.sha != self.sha or pull.was_pushed_after(event.comment.created_at):
            raise CommandRefusedError(
                f"something was pushed after the command, so {self.sha[:12]} may not be the commit that it is about; "
                "look at the pull request and give the command again"
            )

    def _carry_out(self, command: Command, event: CommentEvent) -> str:
        match command:
            case RerunTest():
                return self._rerun_test(command, event)
            case RerunGroup():
                return self._rerun_test(RerunTest((self._folder(command.group),)), event)
            case RerunStage():
                return self._rerun_stage(command, event)
            case Explore():
                return self._explore(command, event)
            case RerunFailedCi():
                return self._rerun_failed()
            case TagRunCiLabel():
                return self._tag(event)
            case TagAndRerunCi():
                return f"{self._tag(event)}\n\n{self._rerun_failed()}"

    def _rerun_test(self, command: RerunTest, event: CommentEvent) -> str:
        targets = resolve_specs(command.specs, self.registry)
        cut = cut_batches(
            targets, self.times, repeat=command.repeat, hardware=command.hardware, apart=self.catalogue.own_environments
        )
        links = [self._dispatch_batch(command, event, batch, index) for index, batch in enumerate(cut.batches, 1)]
        return answers.rerun_tests(command, cut, links, self.sha)

    def _dispatch_batch(self, command: RerunTest, event: CommentEvent, batch: Batch, index: int) -> str:
        request = RerunRequest(tuple(str(target) for target in batch.targets), command.repeat, command.tier)
        inputs = {"request": request.to_json()}
        return self._dispatch(RERUN_WORKFLOW, event, index, batch.runner, batch.timeout_minutes, inputs)

    def _rerun_stage(self, command: RerunStage, event: CommentEvent) -> str:
        if command.stage in self.catalogue.cpu_suites and command.runner is None:
            inputs = {"hw": Hardware.CPU.value, "suite": command.stage, "stage": "", "runner_config": ""}
            local, runner = f"python -m ci suite --hw cpu --suite {command.stage}", "cpu"
        elif command.stage in self.catalogue.cuda_stages and command.runner in self.catalogue.runners:
            inputs = {"hw": Hardware.CUDA.value, "suite": "", "stage": command.stage, "runner_config": command.runner}
            local = f"python -m ci suite --hw cuda --stage {command.stage} --runner-config {command.runner}"
            runner = command.runner
        else:
            raise CommandRefusedError(
                f"{quoted(' '.join([command.stage, command.runner or '']))} is no suite and no stage with a runner; "
                f"suites: {', '.join(sorted(self.catalogue.cpu_suites))}; stages: "
                f"{', '.join(sorted(self.catalogue.cuda_stages))}; runners: {', '.join(sorted(self.catalogue.runners))}"
            )
        if command.stage in self.catalogue.own_environments:
            run = self.catalogue.own_environments[command.stage]
            raise CommandRefusedError(f"{quoted(command.stage)} has an environment of its own; run it with `{run}`")
        entries = [entry for file in self.registry.files for entry in file.registrations]
        if not any((entry.group, entry.runner) == (command.stage, runner) for entry in entries):
            raise CommandRefusedError(f"no test is registered for {quoted(command.stage)} on {quoted(runner)}")
        link = self._dispatch(STAGE_WORKFLOW, event, 1, runner, STAGE_TIMEOUT_MINUTES, inputs)
        return answers.staged(command.stage, link, local, self.sha)

    def _explore(self, command: Explore, event: CommentEvent) -> str:
        command = replace(command, scenario=resolve_scenario(command.scenario, self.registry))
        inputs = {"scenario": command.scenario, "minutes": str(command.minutes)}
        timeout = command.minutes + EXPLORE_INSTALL_MINUTES
        return answers.explored(command, self._dispatch(EXPLORE_WORKFLOW, event, 1, "cpu", timeout, inputs), self.sha)

    def _rerun_failed(self) -> str:
        runs = self.github.failed_runs(self.sha)
        for run in runs:
            self.github.rerun_failed_jobs(run)
        return answers.rerun(runs, self.sha)

    def _tag(self, event: CommentEvent) -> str:
        self.github.add_label(event.issue.number, RUN_CI_LABEL)
        return f"The label `{RUN_CI_LABEL}` is on."

    def _folder(self, group: str) -> str:
        check_spelling(group)
        for root in self.catalogue.registered_roots:
            for folder in (group.rstrip("/"), f"{root}/{group.rstrip('/')}"):
                if any(file.path.startswith(f"{folder}/") for file in self.registry.files):
                    return folder
        groups = sorted({file.path.rpartition("/")[0] for file in self.registry.files})[:GROUPS_SHOWN_MAX]
        raise CommandRefusedError(f"{quoted(group)} is no folder of registered tests; there are {', '.join(groups)}")

    def _dispatch(
        self, workflow: str, event: CommentEvent, index: int, runner: str, timeout_minutes: int, inputs: dict[str, str]
    ) -> str:
        """Start a workflow of the default branch on the commit that was read, and return a link to its run."""
        ticket = f"c{event.comment.id}-{index}"
        given = {
            "ticket": ticket,
            "pull_request": str(event.issue.number),
            "sha": self.sha,
            "runner": msgspec.json.encode(self.catalogue.runner_labels(runner)).decode("ascii"),
            "timeout_minutes": str(timeout_minutes),
        }
        run = self.github.dispatch(workflow, event.repository.default_branch, given | inputs, ticket)
        if run is not None:
            return f"[{ticket}]({run.html_url})"
        return f"{ticket}, in the list of `{workflow}` shortly"


def tell_end(github: GitHub, *, ticket: str, pull_request: int, conclusion: str, url: str, results: Path) -> str:
    """Report how a dispatched run ended, from the workflow's environment. `results` may be missing or hostile."""
    conclusion = conclusion if conclusion in CONCLUSIONS else "unknown"
    text = answers.result(ticket, conclusion, url, _read_results(results))
    github.comment(pull_request, text, f"ci:{ticket}:result")
    return text


def handle_comment(root: Path, tree: Path) -> str:
    """Answer the comment in GITHUB_EVENT_PATH about the head that is checked out in `tree`."""
    event = _read_event(Path(_environment("GITHUB_EVENT_PATH")))
    catalogue = Catalogue.load(root)
    with _github(event.repository.full_name) as github:
        bot = Bot(
            github=github,
            catalogue=catalogue,
            permissions=Permissions.load(root),
            times=MeasuredTimes.load(root),
            read_head=lambda: read_registry(tree, catalogue),
            sha=_head_sha(tree),
        )
        return bot.handle(event)


def answer_result(results: Path) -> str:
    """Comment on this run's end in the pull request that the environment names."""
    repository = _environment("GITHUB_REPOSITORY")
    number = _environment("PULL_REQUEST")
    if not number.isdecimal():
        raise CiError(f"PULL_REQUEST must be a number, got {quoted(number)}")
    url = f"{_environment('GITHUB_SERVER_URL')}/{repository}/actions/runs/{_environment('GITHUB_RUN_ID')}"
    with _github(repository) as github:
        return tell_end(
            github,
            ticket=_environment("TICKET"),
            pull_request=int(number),
            conclusion=_environment("RUN_RESULT"),
            url=url,
            results=results,
        )


def _read_event(path: Path) -> CommentEvent:
    try:
        if path.stat().st_size > EVENT_SIZE_MAX_BYTES:
            raise CiError(f"{path}: larger than {EVENT_SIZE_MAX_BYTES} bytes; no issue_comment event is")
        return document(path.read_bytes(), CommentEvent)
    except (OSError, DocumentError) as exc:
        raise CiError(f"{path}: is no issue_comment event ({exc}); run this in a workflow on issue_comment") from exc


def _read_results(path: Path) -> RunResult | None:
    """Read results that a stranger's code may have written; anything odd counts as none."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > RESULTS_SIZE_MAX_BYTES:
            return None
        return document(path.read_bytes(), RunResult)
    except (OSError, DocumentError):
        return None


def _head_sha(tree: Path) -> str:
    """Return the commit of `tree`: the commit that was read is dispatched, not one pushed meanwhile."""
    head = tree / ".git" / "HEAD"
    try:
        sha = head.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise CiError(f"{head}: cannot be read ({exc}); check the pull request's head out into --tree") from exc
    if not COMMIT_SHA.fullmatch(sha):
        raise CiError(f"{head}: must hold a commit, got {quoted(sha)}; check out a detached head")
    return sha


def _github(repository: str) -> GitHub:
    return GitHub(repository, _environment("GITHUB_TOKEN"), url=os.environ.get("GITHUB_API_URL", API_URL))


def _environment(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise CiError(f"{name} is not set; this command runs in a workflow, which sets it")
    return value
