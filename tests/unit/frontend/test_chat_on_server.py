"""``engine chat`` against real servers, as a user runs it with a pipe for a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_servers import RealServer

START_AND_TALK_BOUND_S = 60.0


def _chat(arguments: list[str], typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", "chat", "--max-tokens", "6", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_AND_TALK_BOUND_S,
        env=os.environ | variables,
    )


def test_chat_with_a_url(server: RealServer) -> None:
    """C01"""
    before = server.http.get("/server_info").json()["stats"]["requests_finished"]
    done = _chat(["--url", server.url, "--temperature", "0"], "hello\nagain\n/exit\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("embedded: ")
    assert done.stdout.count("6 tokens, ") == 2
    assert server.http.get("/server_info").json()["stats"]["requests_finished"] == before + 2


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for sockets: pytest's own is too long for them on an xdist worker."""
    with tempfile.TemporaryDirectory(prefix="tmp-") as path:
        yield Path(path)


def test_chat_with_a_server_of_its_own_leaves_nothing(short_folder: Path) -> None:
    """A07"""
    done = _chat([], "hello\n", TMPDIR=str(short_folder), ENGINE_API_KEY="a-key")
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 tokens, " in done.stdout
    assert list(short_folder.glob("engine-*")) == []


def test_chat_without_a_server_is_a_sentence() -> None:
    done = _chat(["--url", "http://127.0.0.1:1"], "hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("error: url must be of a server of the OpenAI protocol")
    assert "Traceback" not in done.stderr
