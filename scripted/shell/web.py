"""``scripted shell --web``: the session as a page in a browser, beside its run's timeline.

The page is another prompt: the session reads the lines that it posts and answers as in a terminal. The page is served
on loopback under a secret address, only to pages from that address, and ends with the session.
"""

from __future__ import annotations

import io
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
from rich.console import Console

from scripted.report.timeline import render_timeline
from scripted.shell.display import state_rows

if TYPE_CHECKING:
    from scripted.shell.debug_session import DebugSession

_PAGE: Final = Path(__file__).with_name("web.html")
_MOST_BODY_BYTES: Final = 64 * 1024
_MOST_SAID_CHARACTERS: Final = 200_000
# How many commands a reloaded page still shows.
_MOST_EXCHANGES: Final = 200
_READ_TIMEOUT_S: Final = 10.0
# How long a command waits at most for reads of the state, which are short.
_LOOK_TIME_S: Final = 1.0
_WIDTH_COLUMNS: Final = 118


class Exchange(msgspec.Struct, frozen=True):
    """A line and the session's answer; ``prompt`` is None at the end of the session."""

    line: str
    said: str
    prompt: str | None


class WebPrompt:
    """Reads lines from a page. The session has its own thread; while it waits for a line, the page may read it."""

    is_interactive = True

    def __init__(self) -> None:
        self._out = io.StringIO()
        self.console = Console(file=self._out, width=_WIDTH_COLUMNS, color_system=None, force_terminal=False)
        self.exchanges: deque[Exchange] = deque(maxlen=_MOST_EXCHANGES)
        # Held while a line is answered and while the session is read.
        self.busy = threading.Lock()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._line = ""
        self.ready = threading.Event()

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        """Do nothing: the page asks the session."""

    def read(self, prompt: str) -> str | None:
        """Answer the last line and wait for the next one; an interrupt ends the session."""
        self._answer(prompt)
        try:
            line = self._lines.get()
        except KeyboardInterrupt:
            line = None
        self._line = line or ""
        return line

    def end(self) -> None:
        """End the session: answer its last line and read no more."""
        self._answer(None)
        # The page gets this answer before the server ends.
        self.busy.acquire(timeout=_READ_TIMEOUT_S)

    def take(self, line: str) -> Exchange:
        """Give the session a line and wait for its answer. The caller holds ``busy``."""
        self._lines.put(line)
        return self._answers.get()

    def _answer(self, prompt: str | None) -> None:
        said = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        if len(said) > _MOST_SAID_CHARACTERS:
            said = f"{said[:_MOST_SAID_CHARACTERS]}\n({len(said) - _MOST_SAID_CHARACTERS} more characters are left out)"
        exchange = Exchange(self._line, said.rstrip(), prompt)
        self.exchanges.append(exchange)
        if self.ready.is_set():
            self._answers.put(exchange)
        self.ready.set()


class WebShell:
    """Serves one session's page at ``url`` while its context is open."""

    def __init__(self, session: DebugSession, prompt: WebPrompt, port: int = 0) -> None:
        self.session, self.prompt = session, prompt
        self.secret = f"/{secrets.token_urlsafe(24)}/"
        handler = type("_Handler", (_Handler,), {"shell": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}{self.secret}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="web-shell", daemon=True)

    def __enter__(self) -> WebShell:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def look(self, page: str, query: Mapping[str, list[str]]) -> tuple[str, str] | None:
        """Return a page's content type and text; None for an unknown page."""
        match page:
            case "":
                return "text/html", _PAGE.read_text(encoding="utf-8")
            case "timeline":
                trace = self.session.trace()
                last = None if trace is None else trace.log.steps[-1].step
                return "text/html", "" if trace is None else render_timeline([trace], step=last)
            case "session":
                return "application/json", _json(self._standing() | {"exchanges": list(self.prompt.exchanges)})
            case "completions":
                return "application/json", _json(self.session.completions("".join(query.get("line", ()))))
        return None

    def command(self, line: str) -> str:
        """Run a line; return the session's answer and its state as JSON."""
        exchange = self.prompt.take(line)
        ended = exchange.prompt is None
        return _json({"exchange": exchange} | ({} if ended else self._standing()))

    def _standing(self) -> dict[str, object]:
        words = [(word.text, word.takes, word.meaning) for word in self.session.words.values()]
        state = self.session.state()
        begin = list(self.session.first_commands())
        return {"state": None if state is None else dict(state_rows(state)), "words": words, "begin": begin}


class _Handler(BaseHTTPRequestHandler):
    shell: WebShell
    timeout = _READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if (page := self._page()) is None:
            return
        self.shell.prompt.ready.wait(_READ_TIMEOUT_S)
        with self.shell.prompt.busy:
            found = self.shell.look(page, parse_qs(urlsplit(self.path).query))
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"there is no page {page!r}")
        else:
            self._send(HTTPStatus.OK, *found)

    def do_POST(self) -> None:
        if self._page() is None:
            return
        line = self._line()
        if line is None:
            why = f'a command is JSON, {{"line": TEXT}}, of one line and at most {_MOST_BODY_BYTES} bytes'
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", why)
        elif not self.shell.prompt.busy.acquire(timeout=_LOOK_TIME_S):
            self._send(
                HTTPStatus.CONFLICT, "text/plain", "the session is busy with the command before; wait for its answer"
            )
        else:
            # Released before the answer is sent: a client that has read the answer may send the next command.
            try:
                answer = self.shell.command(line)
            finally:
                self.shell.prompt.busy.release()
            self._send(HTTPStatus.OK, "application/json", answer)

    def _page(self) -> str | None:
        """Return the page below the secret; None after refusing another address or another site's page."""
        path, shell = urlsplit(self.path).path, self.shell
        origin = self.headers.get("Origin", f"http://{shell.host}")
        known = secrets.compare_digest(path[: len(shell.secret)].encode(), shell.secret.encode())
        if self.headers.get("Host") != shell.host or origin != f"http://{shell.host}" or not known:
            self.close_connection = True
            self._send(
                HTTPStatus.FORBIDDEN, "text/plain", "this is no address of the session; open the one that it printed"
            )
            return None
        return path.removeprefix(shell.secret)

    def _line(self) -> str | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MOST_BODY_BYTES or "json" not in self.headers.get("Content-Type", ""):
            self.close_connection = True
            return None
        with suppress(msgspec.DecodeError):
            line = msgspec.json.decode(self.rfile.read(int(length)), type=dict[str, str]).get("line")
            return None if line is None or "\n" in line or "\r" in line else line
        return None

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: the terminal belongs to the session."""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
