"""The few calls to GitHub's REST API that the commands need, over httpx, with typed arguments and answers.

Waits out rate limits and short outages within bounds. A POST whose fate is unknown is looked up before it is resent.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from ci.errors import GitHubError
from ci.quoting import quoted
from lockstep.documents import DocumentError, document

API_URL = "https://api.github.com"
API_VERSION = "2022-11-28"
REQUEST_TIMEOUT_S = 20.0
ATTEMPTS_MAX = 4
RETRY_PAUSE_S = 1.0  # Doubled at each attempt: 1, 2, 4.
RATE_LIMIT_WAIT_MAX_S = 120.0
FIND_RUN_ATTEMPTS_MAX = 5
FIND_RUN_PAUSE_S = 2.0
COMMENTS_LOOK_BACK_S = 3600.0
PAGE_SIZE = 100
BODY_MAX_CHARS = 60_000  # GitHub refuses comments of more than 65,536.
FAILED_CONCLUSIONS = frozenset({"failure", "timed_out", "cancelled", "startup_failure"})

T = TypeVar("T")


class Account(msgspec.Struct, frozen=True):
    """A GitHub account. `type` is Bot for the account of workflows."""

    login: str
    type: str = "User"


class RepositoryRef(msgspec.Struct, frozen=True):
    """A repository, by owner and name."""

    full_name: str
    pushed_at: str = ""


class Commit(msgspec.Struct, frozen=True):
    """One end of a pull request. `repo` is None if the fork was deleted."""

    sha: str
    repo: RepositoryRef | None


class PullRequest(msgspec.Struct, frozen=True):
    """The parts of a pull request that decide about a command."""

    number: int
    state: str
    user: Account
    head: Commit
    base: Commit

    @property
    def is_fork(self) -> bool:
        """Whether the head is in a fork; a deleted fork counts as one."""
        return self.head.repo is None or self.base.repo is None or self.head.repo.full_name != self.base.repo.full_name

    def was_pushed_after(self, moment: str) -> bool:
        """Whether a fork was pushed to after a moment on GitHub's clock; a commit's own dates can be forged."""
        return self.is_fork and self.head.repo is not None and self.head.repo.pushed_at > moment


class WorkflowRun(msgspec.Struct, frozen=True):
    id: int
    html_url: str
    name: str | None = None
    display_title: str = ""
    status: str | None = None
    conclusion: str | None = None


class CommentRef(msgspec.Struct, frozen=True):
    """A comment on a pull request."""

    id: int
    user: Account
    body: str | None = None


class _Permission(msgspec.Struct, frozen=True):
    permission: str


class _Runs(msgspec.Struct, frozen=True):
    workflow_runs: list[WorkflowRun]


class GitHub:
    """A repository's API. Tests pass in `sleep` and `now` (seconds since the epoch)."""

    def __init__(
        self,
        repository: str,
        token: str,
        *,
        url: str = API_URL,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._client = httpx.Client(
            base_url=f"{url}/repos/{repository}",
            headers={
                "accept": "application/vnd.github+json",
                "authorization": f"Bearer {token}",
                "x-github-api-version": API_VERSION,
            },
            timeout=timeout_s,
            transport=transport,
        )
        self._sleep = sleep
        self._now = now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._client.close()

    def role(self, login: str) -> str:
        """Return the account's permission in the repository: admin, write, read or none."""
        path = f"/collaborators/{quote(login, safe='')}/permission"
        try:
            return self._get(path, _Permission).permission
        except GitHubError as exc:
            if exc.status == httpx.codes.NOT_FOUND:
                return "none"
            raise

    def pull_request(self, number: int) -> PullRequest:
        return self._get(f"/pulls/{number}", PullRequest)

    def react(self, comment: int, content: str) -> None:
        """React to a comment; GitHub keeps one reaction of each kind, so this may be sent twice."""
        self._again("POST", f"/issues/comments/{comment}/reactions", {"content": content})

    def comment(self, number: int, text: str, marker: str) -> CommentRef:
        """Comment once: after a failure, the marker, invisible in the text, shows whether the comment exists."""
        body = f"{text[:BODY_MAX_CHARS]}\n\n<!-- {marker} -->"
        return self._once(
            lambda: self._decode(self._send("POST", f"/issues/{number}/comments", {"body": body}), CommentRef),
            lambda: self.find_comment(number, marker),
        )

    def find_comment(self, number: int, marker: str, since: str = "") -> CommentRef | None:
        """Return our comment with the marker, among those since a time or the last hour; people may write markers."""
        hour_ago = datetime.fromtimestamp(self._now() - COMMENTS_LOOK_BACK_S, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        params = {"per_page": str(PAGE_SIZE), "since": since or hour_ago}
        comments = self._get(f"/issues/{number}/comments", list[CommentRef], params)
        ours = [comment for comment in comments if comment.user.type == "Bot"]
        return next((comment for comment in ours if f"<!-- {marker} -->" in (comment.body or "")), None)

    def add_label(self, number: int, label: str) -> None:
        """Put a label on a pull request, which may already have it."""
        self._again("POST", f"/issues/{number}/labels", {"labels": [label]})

    def failed_runs(self, sha: str) -> list[WorkflowRun]:
        """Return the finished, unsuccessful workflow runs of a commit."""
        params = {"head_sha": sha, "status": "completed", "per_page": str(PAGE_SIZE)}
        runs = self._get("/actions/runs", _Runs, params).workflow_runs
        return [run for run in runs if run.conclusion in FAILED_CONCLUSIONS]

    def rerun_failed_jobs(self, run: WorkflowRun) -> None:
        """Run the failed jobs of a run again."""

        def under_way() -> bool | None:
            return None if self._get(f"/actions/runs/{run.id}", WorkflowRun).status == "completed" else True

        self._once(lambda: bool(self._send("POST", f"/actions/runs/{run.id}/rerun-failed-jobs", {})), under_way)

    def dispatch(self, workflow: str, ref: str, inputs: Mapping[str, str], ticket: str) -> WorkflowRun | None:
        """Start a workflow once and return its run, or None if GitHub does not list it in time."""
        path = f"/actions/workflows/{workflow}/dispatches"

        def send() -> WorkflowRun | None:
            self._send("POST", path, {"ref": ref, "inputs": dict(inputs)})
            return None

        # An event may come twice, and a job may be run again: the ticket shows whether this was done before.
        run = self.find_run(workflow, ticket) or self._once(send, lambda: self.find_run(workflow, ticket))
        return run or self._await_run(workflow, ticket)

    def find_run(self, workflow: str, ticket: str) -> WorkflowRun | None:
        """Return the dispatched run whose title ends with the ticket."""
        params = {"event": "workflow_dispatch", "per_page": str(PAGE_SIZE)}
        runs = self._get(f"/actions/workflows/{workflow}/runs", _Runs, params).workflow_runs
        return next((run for run in runs if run.display_title.split(" ")[-1] == ticket), None)

    def _await_run(self, workflow: str, ticket: str) -> WorkflowRun | None:
        for _ in range(FIND_RUN_ATTEMPTS_MAX):
            run = self.find_run(workflow, ticket)
            if run is not None:
                return run
            self._sleep(FIND_RUN_PAUSE_S)
        return None

    def _get(self, path: str, shape: type[T], params: Mapping[str, str] | None = None) -> T:
        return self._decode(self._again("GET", path, params=params), shape)

    def _again(
        self, method: str, path: str, body: object = None, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send a request that does no harm if it arrives twice."""
        return self._once(lambda: self._send(method, path, body, params), lambda: None)

    def _once(self, send: Callable[[], T], find: Callable[[], T | None]) -> T:
        """Send a request that must not take effect twice: after an outage, check before sending again."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                return send()
            except GitHubError as exc:
                if not _is_outage(exc) or attempt == ATTEMPTS_MAX - 1:
                    raise
            self._sleep(RETRY_PAUSE_S * 2**attempt)
            found = find()
            if found is not None:
                return found
        raise AssertionError(f"{ATTEMPTS_MAX} attempts end in a return or a raise")

    def _send(
        self, method: str, path: str, body: object = None, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send one request, waiting out rate limits: a request that met one was not carried out."""
        for _ in range(ATTEMPTS_MAX):
            try:
                response = self._client.request(method, path, json=body, params=params)
            except httpx.RequestError as exc:
                raise GitHubError(f"GitHub did not answer {method} {path} ({type(exc).__name__})") from exc
            wait_s = self._rate_limit_wait_s(response)
            if wait_s is None:
                return _checked(response, method, path)
            if wait_s > RATE_LIMIT_WAIT_MAX_S:
                raise GitHubError(
                    f"GitHub's rate limit asks to wait {wait_s:.0f} s at {method} {path}; try again after that",
                    status=response.status_code,
                )
            self._sleep(wait_s)
        raise GitHubError(
            f"GitHub's rate limit refused {method} {path} {ATTEMPTS_MAX} times; try again later", status=429
        )

    def _rate_limit_wait_s(self, response: httpx.Response) -> float | None:
        """Return how long to wait before sending the request again, or None if it met no limit."""
        if response.status_code not in (httpx.codes.FORBIDDEN, httpx.codes.TOO_MANY_REQUESTS):
            return None
        retry_after = response.headers.get("retry-after", "")
        if retry_after.isdecimal():
            return float(retry_after)
        reset = response.headers.get("x-ratelimit-reset", "")
        if response.headers.get("x-ratelimit-remaining") == "0" and reset.isdecimal():
            return max(1.0, float(reset) - self._now())
        return RETRY_PAUSE_S if response.status_code == httpx.codes.TOO_MANY_REQUESTS else None

    def _decode(self, response: httpx.Response, shape: type[T]) -> T:
        try:
            return document(response.content, shape)
        except DocumentError as exc:
            raise GitHubError(f"GitHub's answer to {response.request.url.path} has another shape: {exc}") from exc


def _checked(response: httpx.Response, method: str, path: str) -> httpx.Response:
    if response.is_success:
        return response
    said = quoted(response.text)
    raise GitHubError(
        f"GitHub answered {method} {path} with {response.status_code}: {said}", status=response.status_code
    )


def _is_outage(exc: GitHubError) -> bool:
    """Whether it is unknown if the request was carried out, so that another try may succeed."""
    return exc.status == 0 or exc.status >= httpx.codes.INTERNAL_SERVER_ERROR
