"""``scripted shell --web``: what its page posts and gets, who may ask, and how it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.shell import DebugSession, WebPrompt, WebShell

YOURS = str(Path(__file__).parents[3] / "examples/your_scheduler/adapter.py")


class Browser:
    """The page of one session, as a client of its server."""

    def __init__(self, shell: WebShell) -> None:
        self.shell = shell

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection(self.shell.host, timeout=60)
        try:
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, kind | headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def get(self, page: str) -> str:
        status, text = self.ask("GET", urlsplit(self.shell.url).path + page)
        assert status == 200, text
        return text

    def run(self, line: str) -> dict[str, Any]:
        body = json.dumps({"line": line}).encode()
        status, text = self.ask("POST", f"{urlsplit(self.shell.url).path}command", body)
        assert status == 200, text
        return dict(json.loads(text))


def browse(visit: Callable[[Browser], None], adapter: str = DEFAULT_ADAPTER, mutant: str | None = None) -> bool:
    """Run a session in this thread while the visit goes on in another; what the session ended with."""
    known, prompt, errors = adapter_named(adapter), WebPrompt(), list[BaseException]()
    fields = {"pp_size": "4", "pp_async_depth": "2", "chunked_prefill_size": "64"} if adapter == DEFAULT_ADAPTER else {}
    session = DebugSession(known, known.read_config(fields), prompt, prompt.console, mutant=mutant)

    def client(browser: Browser) -> None:
        try:
            visit(browser)
        except BaseException as exc:  # noqa: BLE001 - raised where pytest sees it
            errors.append(exc)
        finally:
            browser.ask("POST", f"{browser.shell.secret}command", b'{"line": "quit"}')

    with WebShell(session, prompt) as shell:
        thread = threading.Thread(target=client, args=(Browser(shell),))
        thread.start()
        passed = session.run()
        prompt.end()
        thread.join()
    if errors:
        raise errors[0]
    return passed


def test_the_race_by_clicks_with_its_timeline_and_state() -> None:
    def visit(browser: Browser) -> None:
        assert browser.get("timeline") == ""
        browser.run("start prompt_len=125 max_new_tokens=2")
        now = browser.run("until state.in_flight and state.queues_clear")
        assert now["exchange"]["prompt"] == "step 2> "
        assert "#1 prefill of r1" in now["state"]["in flight"]
        assert {"flush", "hold", "abort"} <= {word for word, _, _ in now["words"]}
        browser.run("flush")
        said = browser.run("until r1.finished")["exchange"]["said"]
        assert "call_1 /flush_cache -> 400" in said
        page = browser.get("timeline")
        assert "RUNNING" in page.upper()
        assert "FLUSH" in page
        undone = browser.run("undo 2")
        assert "step 2:" in undone["exchange"]["said"]
        assert "FLUSH" not in browser.get("timeline")
        told = json.loads(browser.get("session"))["exchanges"]
        assert [one["line"] for one in told[-2:]] == ["until r1.finished", "undo 2"]
        assert json.loads(browser.get("completions?line=ab"))[0] == "abort"

    assert browse(visit)


def test_a_death_is_shown_and_can_be_undone() -> None:
    def visit(browser: Browser) -> None:
        for line in ("start prompt_len=125 max_new_tokens=2", "step 2", "flush"):
            browser.run(line)
        dead = browser.run("step 9")
        assert "IntegrityError" in dead["exchange"]["said"]
        assert (dead["exchange"]["prompt"], dead["state"]) == ("dead> ", None)
        assert "died in step" in browser.get("timeline")
        assert browser.run("undo 2")["state"]["in flight"].startswith("#0")

    assert browse(visit, mutant="flush-ignores-in-flight")


def test_any_adapter_has_the_page() -> None:
    def visit(browser: Browser) -> None:
        browser.run("start prompt_len=5 max_new_tokens=2")
        assert "blocks_free" in browser.run("step")["state"]["counts"]
        assert "prefill" in browser.get("timeline")

    assert browse(visit, YOURS)


def test_only_its_own_page_may_ask() -> None:
    """A page of another site, another name for this machine, a guess of the address: all are refused, nothing runs."""

    def visit(browser: Browser) -> None:
        secret, step = browser.shell.secret, b'{"line": "step"}'
        refused = [
            browser.ask("GET", "/"),
            browser.ask("GET", f"/{'x' * (len(secret) - 2)}/session"),
            browser.ask("GET", f"{secret}session", Host="evil.example"),
            browser.ask("POST", f"{secret}command", step, Origin="http://evil.example"),
            browser.ask("POST", f"{secret}command", step, Origin="null"),
        ]
        assert [status for status, _ in refused] == [403] * 5
        bad = [
            b"no json",
            b"[1]",
            b'{"line": "step\\nstep"}',
            b'{"other": "step"}',
            b'{"line": "' + b"x" * 70_000 + b'"}',
        ]
        assert [browser.ask("POST", f"{secret}command", body)[0] for body in bad] == [400] * 5
        plain = {"Content-Type": "text/plain"}
        assert browser.ask("POST", f"{secret}command", step, **plain)[0] == 400
        assert browser.ask("GET", f"{secret}nothing")[0] == 404
        assert json.loads(browser.get("session"))["exchanges"][-1]["line"] == ""

    assert browse(visit)
