"""Reads registrations from source text, and reports their faults.

Never imports or runs a test file: a file under review is data. `ci.registration` judges the calls themselves.
Everything else in a run starts here: suites, specs and `python -m ci check` all begin with a `Registry`.
"""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.contents import DefinedTests, defined_tests, engine_key
from ci.registration import Registration, registrations_of
from ci.suites import Catalogue, Hardware

SOURCE_SIZE_MAX_BYTES = 512 * 1024
SOURCE_FILES_MAX = 5_000
PATH_MAX_CHARS = 200
TEST_FILE_NAME = re.compile(r"test_\w+\.py")
REGISTER_REMEDY = "add register_cpu_ci(est_time=..., suite=...) from ci.register at the top"
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True, order=True)
class RegistryFinding:
    """A fault at one place, with its remedy."""

    path: str
    line: int
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}; {self.remedy}"


@dataclass(frozen=True)
class RegisteredFile:
    """One test file: `path` relative to the root, its registrations, its tests and its engine configurations."""

    path: str
    registrations: tuple[Registration, ...]
    tests: DefinedTests
    engine_key: str

    def registration_for(self, hardware: Hardware) -> Registration | None:
        return next((entry for entry in self.registrations if entry.hardware is hardware), None)


@dataclass(frozen=True)
class Registry:
    """Every registered file, sorted by path, and every finding, sorted by place."""

    files: tuple[RegisteredFile, ...]
    findings: tuple[RegistryFinding, ...]

    def file(self, path: str) -> RegisteredFile | None:
        """Return the file at this path, if it is registered."""
        return next((file for file in self.files if file.path == path), None)


def read_registry(root: Path, catalogue: Catalogue) -> Registry:
    """Read all test files below the catalogue's roots. A bad file becomes a finding and raises nothing."""
    files: list[RegisteredFile] = []
    findings: list[RegistryFinding] = []
    for path in _source_files(root, catalogue):
        if len(files) + len(findings) >= SOURCE_FILES_MAX:
            findings.append(
                RegistryFinding(path, 1, f"more than {SOURCE_FILES_MAX} files", "split the registered roots")
            )
            break
        file = _read_file(root, path, catalogue, findings)
        if file is not None:
            files.append(file)
    findings += _shared_names(files)
    return Registry(tuple(files), tuple(sorted(set(findings))))


def _source_files(root: Path, catalogue: Catalogue) -> Iterator[str]:
    for folder in catalogue.registered_roots:
        if (root / folder).resolve() != root.resolve() / folder:
            continue  # a link in a pull request could lead the walk out of the repository
        for parent, folders, names in os.walk(root / folder):  # It does not follow links below.
            folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
            for name in sorted(names):
                if name.endswith(".py") and name not in ("__init__.py", "conftest.py"):
                    yield (Path(parent) / name).relative_to(root).as_posix()


def _read_file(root: Path, path: str, catalogue: Catalogue, findings: list[RegistryFinding]) -> RegisteredFile | None:
    tree = _parse(root, path, findings)
    if tree is None:
        return None
    try:
        return _judge(tree, path, catalogue, findings)
    except (RecursionError, ValueError, OverflowError) as exc:
        # Expressions that are too deep, or numbers that are too long, to write out.
        problem = f"cannot be read ({type(exc).__name__})"
        findings.append(RegistryFinding(path, 1, problem, "make it a plain, small Python file"))
        return None


def _judge(tree: ast.Module, path: str, catalogue: Catalogue, findings: list[RegistryFinding]) -> RegisteredFile | None:
    registrations, complaints = registrations_of(tree, catalogue)
    findings += [RegistryFinding(path, spot.line, spot.problem, spot.remedy) for spot in complaints]
    if not TEST_FILE_NAME.fullmatch(Path(path).name):
        if registrations:
            findings.append(
                RegistryFinding(path, 1, "is registered but pytest does not collect its name", "call it test_*.py")
            )
        return None
    tests = defined_tests(tree)
    if not registrations and not complaints:
        findings.append(RegistryFinding(path, 1, "is not registered", REGISTER_REMEDY))
    if not tests.top_level and not tests.methods:
        findings.append(
            RegistryFinding(path, 1, "runs no test", "define a test_ function or a Test class, or rename the file")
        )
    findings += [
        RegistryFinding(path, line, f"defines {name} twice, so the first never runs", "give each test its own name")
        for name, line in tests.shadowed
    ]
    return RegisteredFile(path, registrations, tests, engine_key(tree)) if registrations else None


def _parse(root: Path, path: str, findings: list[RegistryFinding]) -> ast.Module | None:
    """Parse one file of unknown origin; every failure of the parser is a finding."""
    file = root / path
    problem = ""
    line = 1
    try:
        if file.is_symlink() or not file.is_file():
            problem = "is a link or no plain file"
        elif not PLAIN_PATH.fullmatch(path) or len(path) > PATH_MAX_CHARS:
            problem = f"has a path with characters other than A-Z a-z 0-9 _ . / - or longer than {PATH_MAX_CHARS}"
        elif file.stat().st_size > SOURCE_SIZE_MAX_BYTES:
            problem = f"is larger than {SOURCE_SIZE_MAX_BYTES} bytes"
        else:
            return ast.parse(file.read_bytes(), filename=path)
    except SyntaxError as exc:
        problem, line = f"is not Python ({exc.msg})", exc.lineno or 1
    except (OSError, ValueError, RecursionError, MemoryError) as exc:
        problem = f"cannot be parsed ({type(exc).__name__}: {exc})"
    findings.append(RegistryFinding(path, line, problem, "make it a plain, small Python file"))
    return None


def _shared_names(files: list[RegisteredFile]) -> Iterator[RegistryFinding]:
    first: dict[str, str] = {}
    for file in files:
        name = Path(file.path).name
        if name in first:
            yield RegistryFinding(
                file.path,
                1,
                f"has the same file name as {first[name]}, so a bare name in a command is ambiguous",
                "rename one of them",
            )
        first.setdefault(name, file.path)
