"""Runs schedules on the scheduler of another tree: a checkout, a folder of packages, or a commit, in its own process.

Owns that process and the temporary copy of a commit. Only the scheduler's packages, and an adapter that is a file of
the project, come from the other tree; the harness and installed adapters come from this environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

import msgspec

from lockstep.documents import DocumentError, document
from scripted.core.adapters import adapter_named
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure
from scripted.search.shrinking import way_to_fail

# The folders of a repository that may contain its packages.
_SOURCE_FOLDERS: Final = (".", "src", "python")
# Build products beside the sources, which the scheduler imports; a commit has none of them.
_BUILT: Final = ("*.so", "*_version.py")
_ENDING_S: Final = 10.0


class _Question(msgspec.Struct, frozen=True):
    schedule: str
    signature: str


class _Answer(msgspec.Struct, frozen=True):
    failure: Failure | None = None
    error: str = ""


class OtherTree:
    """A scheduler from another tree. ``name`` is the user's name for it."""

    def __init__(self, folder: Path, adapter: str, name: str) -> None:
        self.name = name
        command = [sys.executable, "-P", "-m", __name__, str(folder), adapter]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        self._ask_first()

    def _ask_first(self) -> None:
        answer = self._answer()
        if answer.error:
            self.close()
            raise ScriptDefinitionError(f"--against {self.name}: {answer.error}")

    def failure_of(self, schedule: Schedule, signature: str) -> Failure | None:
        """Return how a schedule fails there, preferably with this signature; None if it passes or is refused.

        Raises HarnessError.
        """
        assert self._process.stdin is not None, "the process is started with a pipe"
        question = _Question(str(schedule), signature)
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        return self._answer().failure

    def _answer(self) -> _Answer:
        assert self._process.stdout is not None, "the process is started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        try:
            return document(line, _Answer)
        except DocumentError as exc:
            raise HarnessError(f"the process of {self.name} sent an invalid answer: {exc}") from exc

    def _gone(self) -> HarnessError:
        return HarnessError(
            f"the process that runs the scheduler of {self.name} ended with status {self._process.wait()}; its output "
            "above says why"
        )

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def other_tree(where: str, adapter: str) -> Iterator[OtherTree]:
    """Start the scheduler of a folder, or of a commit of this process's repository.

    Raises ScriptDefinitionError for a name that is neither, or if the scheduler is imported from elsewhere.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(where)
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scripted-against-")))
            _unpack(where, folder)
        tree = OtherTree(folder.resolve(), adapter, where)
        stack.callback(tree.close)
        yield tree


def _unpack(commit: str, folder: Path) -> None:
    """Put the files of a commit into a folder, with the working tree's build products."""
    try:
        top = Path(_git("rev-parse", "--show-toplevel").decode().strip())
        archive = _git("archive", "--format=tar", commit, "--", folder=top)
        built = _git("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", *_BUILT, folder=top)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = exc.stderr.decode(errors="replace").strip() if isinstance(exc, subprocess.CalledProcessError) else exc
        raise ScriptDefinitionError(
            f"--against takes a folder, or a commit of the repository of {Path.cwd()}, got {commit!r}: {said}"
        ) from exc
    with tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    for name in filter(None, os.fsdecode(built).split("\0")):
        if (folder / name).parent.is_dir():
            (folder / name).symlink_to(top / name)


def _git(*words: str, folder: Path | None = None) -> bytes:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True).stdout  # noqa: S603, S607


# -- in the other process --


def _main(folder: Path, adapter: str) -> None:
    """Answer questions from standard input. The scheduler's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    answers.write(msgspec.json.encode(_Answer(error=_load(folder, adapter))) + b"\n")
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(_answer_to(document(line, _Question))) + b"\n")


def _load(folder: Path, adapter: str) -> str:
    """Import the adapter with the scheduler from this folder; return an error if it comes from elsewhere."""
    before = set(sys.modules)
    os.chdir(folder)
    sys.path[:0] = [str(folder / name) for name in _SOURCE_FOLDERS if (folder / name).is_dir()]
    try:
        # A relative path would also be found in the directory where this process started.
        packages = adapter_named(str(folder / adapter) if adapter.endswith(".py") else adapter).packages
    except Exception as exc:  # noqa: BLE001 - an import of the scheduler may raise anything
        return f"the adapter {adapter} cannot be loaded with its scheduler: {type(exc).__name__}: {exc}"
    files = [str(getattr(sys.modules[name], "__file__", None) or "") for name in set(sys.modules) - before]
    if any(Path(file).is_relative_to(folder) for file in files if file):
        return ""
    of = ", ".join(packages) or "its scheduler"
    return f"the adapter {adapter} imports {of} from elsewhere, and nothing from {folder}; name the folder above it"


def _answer_to(question: _Question) -> _Answer:
    try:
        schedule = Schedule.parse(question.schedule)
        return _Answer(way_to_fail(schedule, question.signature)[1])
    except (ScriptDefinitionError, ValueError):
        return _Answer()  # the other tree lacks a setting or an event
    except HarnessError as exc:
        return _Answer(error=str(exc))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
