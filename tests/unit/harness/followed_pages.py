"""Follows a page of the documentation word for word: its commands, the lines it quotes of them, and its files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("engine", "lockstep", "scripted", "ci", "tests/registered")
# Done before a page is followed, on the machine that follows it.
INSTALLATION = ("make install", ". .venv/bin/activate")
COMMAND_TIMEOUT_S = 120


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each indented block of the page with the name of its file, or with no name if it is a session."""
    for match in re.finditer(r"(?:^    .*\n(?:\n(?=(?:\n)*    ))*)+", text, re.MULTILINE):
        named = re.search(r"[Pp]ut\s+this\s+into\s+`([^`]+)`:\n\n$", text[: match.start()])
        yield (named.group(1) if named else ""), re.sub(r"^    ", "", match.group(), flags=re.MULTILINE)


def commands_of(session: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a session with the lines quoted from its output."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, *quoted = part.rstrip("\n").split("\n")
        yield command, [line for line in quoted if line.strip()]


def squeezed(text: str) -> str:
    return re.sub(r"[ \t]+", " ", text)


def check_quotes(command: str, quoted: list[str], output: str) -> None:
    """Every quoted line is in the output, in this order."""
    rest = squeezed(output)
    for line in quoted:
        before, found, rest = rest.partition(squeezed(line).strip())
        assert found, f"{command}: the page quotes {line!r}; after the quotes before it the output is:\n{before}"


def in_a_shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command; its exit status and what it said."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    return done.returncode, done.stdout


def follow(page: Path, tree: Path, run: Callable[[str, Path, dict[str, str]], tuple[int, str]] = in_a_shell) -> int:
    """Run each command of the page in this folder; the number that was run.

    Fails where a quoted line is missing, or where a command fails and the page does not say so.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PYTEST_ADDOPTS"] = "-p no:schemathesis -p no:hypothesispytest"
    status, claimed, ran = 0, True, 0
    for file, block in blocks(page.read_text()):
        if file:
            (tree / file).write_text(block)
            continue
        for command, quoted in commands_of(block):
            if command in INSTALLATION:
                continue
            if command == "echo $?":
                assert quoted == [str(status)]
                claimed = True
                continue
            assert claimed, f"a command before {command!r} failed with {status}, and the page does not say so"
            status, said = run(command, tree, environment)
            claimed, ran = status == 0, ran + 1
            check_quotes(command, quoted, said)
    assert claimed, f"the last command failed with {status}, and the page does not say so"
    return ran
