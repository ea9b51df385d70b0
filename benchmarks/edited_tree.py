"""A copy of the repository and an interpreter that imports it, for mutants of code that tests run in processes."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import site
import subprocess
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path

from scripted.core.cuts import Cut, places_of
from scripted.core.mutant import Mutant

__all__ = ["EditedTree"]

ROOT = Path(__file__).resolve().parents[1]
# What tests read; virtual environments, results and compiled files stay behind.
PARTS = ("adapters", "benchmarks", "ci", "docs", "engine", "examples", "lockstep", "scripted", "tests")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "node_modules")


class EditedTree:
    """The copy in ``folder``; one mutant at a time is written into its files."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "tree"
        for part in PARTS:
            shutil.copytree(ROOT / part, self._root / part, ignore=NOT_COPIED)
        for file in [*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.txt"), ROOT / "Makefile"]:
            shutil.copy2(file, self._root)
        home = folder / "venv"
        venv.create(home, symlinks=True)
        self._python = home / "bin" / "python"
        (packages,) = home.glob("lib/python*/site-packages")
        # Paths of a .pth file come before the hook of an editable installation, which lies in the last of them.
        paths = [self._root, self._root / "adapters", *map(Path, site.getsitepackages())]
        (packages / "copied_tree.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """Write the mutant into its file while the context is open. Raises EditDoesNotFit."""
        with mutant.switched_on():
            pass  # refused here, if the code has no such place
        file, text = edited_source(mutant)
        copied = self._root / file.relative_to(ROOT)
        before = copied.read_text(encoding="utf-8")
        copied.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            copied.write_text(before, encoding="utf-8")

    def pytest(self, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run pytest in the copy, without what a run of pytest around this one has set."""
        left_out = ("PYTEST_", "PYTHON", "COV_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return subprocess.run(  # noqa: S603 - this repository's own tests
            [self._python, "-m", "pytest", "-q", "--vet", "off", "-p", "no:cacheprovider", *arguments],
            cwd=self._root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def edited_source(mutant: Mutant) -> tuple[Path, str]:
    """Return the file of a mutant that fits, and its text with the mutant."""
    function = mutant.function
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    (place,) = places_of(source, mutant.cut, mutant.becomes)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    file = Path(inspect.getsourcefile(function) or "").resolve()
    whole = file.read_text(encoding="utf-8").splitlines(keepends=True)
    edited = textwrap.indent(_first_that_compiles(source, place), indent)
    return file, "".join([*whole[: first - 1], edited, *whole[first - 1 + len(lines) :]])


def _first_that_compiles(source: str, place: Cut) -> str:
    texts = [source[: place.start] + becomes + source[place.end :] for becomes in place.becomes]
    for text in texts:
        with contextlib.suppress(SyntaxError):
            compile(text, "", "exec", dont_inherit=True)
            return text
    return texts[0]
