"""GitHub's REST API as far as the commands use it: state in memory, payloads in the shapes that GitHub sends."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx

from ci.github import GitHub

REPOSITORY = "acme/engine"
SHA = "0123456789abcdef0123456789abcdef01234567"
Reply = tuple[int, object, dict[str, str]]


class FakeGitHub:
    """`trouble` holds replies to give, or exceptions to raise, before the next requests whose path matches."""

    def __init__(self) -> None:
        self.roles = {"maintainer": "admin", "writer": "write", "reader": "read"}
        self.author = "author"
        self.head_repository: str | None = REPOSITORY
        self.pushed_at = "2026-01-01T10:00:00Z"
        self.head_sha = SHA
        self.state = "open"
        self.requests: list[tuple[str, str]] = []
        self.reactions: list[str] = []
        self.comments: list[dict[str, object]] = []
        self.chatter: list[dict[str, object]] = []
        self.labels: list[str] = []
        self.dispatches: list[tuple[str, dict[str, object]]] = []
        self.runs: list[dict[str, object]] = []
        self.rerun: list[int] = []
        self.lists_runs = True
        self.trouble: list[tuple[str, Reply | Exception, bool]] = []
        self.slept: list[float] = []
        self.now_s = 1_000_000.0

    # What tests read.

    @property
    def answer(self) -> str:
        assert len(self.comments) == 1, self.comments
        return str(self.comments[0]["body"])

    @property
    def changes(self) -> list[tuple[str, dict[str, object]]]:
        """Everything that was started or changed, apart from reactions and answers."""
        return [
            *self.dispatches,
            *(("label", {"name": name}) for name in self.labels),
            *(("rerun", {}) for _ in self.rerun),
        ]

    def client(self) -> GitHub:
        return GitHub(
            REPOSITORY,
            "token",
            transport=httpx.MockTransport(self._mock),
            sleep=self.slept.append,
            now=lambda: self.now_s,
        )

    def fail(self, path: str, reply: Reply | Exception, *, carried_out: bool = False) -> None:
        """Meet the next request to a path that matches with this; `carried_out`: after doing what it asked for."""
        self.trouble.append((path, reply, carried_out))

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on a loopback port and yield the address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self.handle))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    # The server.

    def _mock(self, request: httpx.Request) -> httpx.Response:
        status, payload, headers = self.handle(request.method, str(request.url), request.content)
        return httpx.Response(status, json=payload, headers=headers) if payload is not None else httpx.Response(status)

    def handle(self, method: str, url: str, content: bytes) -> Reply:
        parts = urlsplit(url)
        path = unquote(parts.path)
        self.requests.append((method, path))
        body = json.loads(content) if content else {}
        for index, (pattern, reply, carried_out) in enumerate(self.trouble):
            if re.search(pattern, f"{method} {path}"):
                del self.trouble[index]
                if carried_out:
                    self._route(method, path, dict(parse_qsl(parts.query)), body)
                if isinstance(reply, Exception):
                    raise reply
                return reply
        return self._route(method, path, dict(parse_qsl(parts.query)), body)

    def _route(self, method: str, path: str, query: dict[str, str], body: dict[str, object]) -> Reply:
        assert path.startswith(f"/repos/{REPOSITORY}/"), path
        rest = path.removeprefix(f"/repos/{REPOSITORY}")
        for pattern, serve in self._routes().items():
            match = re.fullmatch(pattern, f"{method} {rest}")
            if match:
                return serve(match, query, body)
        return 404, {"message": "Not Found", "documentation_url": "https://docs.github.com/rest", "status": "404"}, {}

    def _routes(self) -> dict[str, Callable[[re.Match[str], dict[str, str], dict[str, object]], Reply]]:
        return {
            r"GET /collaborators/([^/]+)/permission": self._permission,
            r"GET /pulls/(\d+)": self._pull,
            r"POST /issues/comments/(\d+)/reactions": self._react,
            r"POST /issues/(\d+)/comments": self._comment,
            r"GET /issues/(\d+)/comments": lambda match, query, body: (200, self._comments_since(query["since"]), {}),
            r"POST /issues/(\d+)/labels": self._label,
            r"POST /actions/workflows/([\w.-]+)/dispatches": self._dispatch,
            r"GET /actions/workflows/([\w.-]+)/runs": self._workflow_runs,
            r"GET /actions/runs": self._head_runs,
            r"GET /actions/runs/(\d+)": self._run,
            r"POST /actions/runs/(\d+)/rerun-failed-jobs": self._rerun,
        }

    def _permission(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        login = match[1]
        role = self.roles.get(login)
        if role is None:
            return 404, {"message": f"{login} is not a user", "status": "404"}, {}
        return 200, {"permission": role, "role_name": role, "user": {"login": login, "id": 1, "type": "User"}}, {}

    def _pull(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        head = (
            None
            if self.head_repository is None
            else {"id": 2, "full_name": self.head_repository, "fork": True, "pushed_at": self.pushed_at}
        )
        return (
            200,
            {
                "number": int(match[1]),
                "state": self.state,
                "title": "Change something",
                "user": {"login": self.author, "id": 7, "type": "User"},
                "head": {"ref": "topic", "sha": self.head_sha, "repo": head},
                "base": {"ref": "main", "sha": "f" * 40, "repo": {"id": 1, "full_name": REPOSITORY, "fork": False}},
            },
            {},
        )

    def _react(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        self.reactions.append(str(body["content"]))
        return 201, {"id": len(self.reactions), "content": body["content"]}, {}

    def _comment(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        assert len(str(body["body"])) <= 65_536
        comment = {
            "user": {"login": "github-actions[bot]", "id": 41898282, "type": "Bot"},
            "id": 900 + len(self.comments),
            "body": body["body"],
            "html_url": "https://github.com/acme/engine/pull/5",
            "updated_at": datetime.fromtimestamp(self.now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.comments.append(comment)
        return 201, comment, {}

    def _comments_since(self, since: str) -> list[dict[str, object]]:
        return [*self.chatter, *(one for one in self.comments if str(one["updated_at"]) >= since)]

    def _label(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        labels = body["labels"]
        assert isinstance(labels, list)
        self.labels += labels
        return 200, [{"id": 1, "name": name, "color": "ededed"} for name in self.labels], {}

    def _dispatch(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        inputs = body["inputs"]
        assert isinstance(inputs, dict)
        assert all(isinstance(value, str) for value in inputs.values()), inputs
        assert sum(map(len, inputs.values())) < 65_535
        assert body["ref"] == "main"
        self.dispatches.append((match[1], inputs))
        name = match[1].removesuffix(".yml")
        self.runs.append(run_payload(7000 + len(self.runs), name, f"{name} {inputs['ticket']}", "queued", None))
        return 204, None, {}

    def _workflow_runs(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        runs = [run for run in self.runs if run["name"] == match[1].removesuffix(".yml")] if self.lists_runs else []
        return 200, {"total_count": len(runs), "workflow_runs": runs}, {}

    def _head_runs(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        assert query["head_sha"] == SHA
        runs = [run for run in self.runs if run["status"] == query["status"]]
        return 200, {"total_count": len(runs), "workflow_runs": runs}, {}

    def _run(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        return 200, next(run for run in self.runs if run["id"] == int(match[1])), {}

    def _rerun(self, match: re.Match[str], query: dict[str, str], body: dict[str, object]) -> Reply:
        self.rerun.append(int(match[1]))
        next(run for run in self.runs if run["id"] == int(match[1]))["status"] = "queued"
        return 201, {}, {}


def run_payload(number: int, name: str, title: str, status: str, conclusion: str | None) -> dict[str, object]:
    return {
        "id": number,
        "name": name,
        "display_title": title,
        "event": "workflow_dispatch",
        "status": status,
        "conclusion": conclusion,
        "html_url": f"https://github.com/acme/engine/actions/runs/{number}",
    }


def _handler_for(handle: Callable[[str, str, bytes], Reply]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            assert self.headers["authorization"] == "Bearer token"
            status, payload, headers = handle(self.command, self.path, content)
            data = b"" if payload is None else json.dumps(payload).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
