"""Resolves test specs (a path, a folder, a bare file name, a node id) to registered files and node ids.

A spec is only ever compared with the registry's own paths; it never reaches the file system or a shell.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from ci.errors import SpecError
from ci.quoting import quoted
from ci.registry import RegisteredFile, Registry

SPECS_MAX = 50
SPEC_MAX_CHARS = 300
NEAR_MATCHES_MAX = 3
NEAR_ENOUGH = 0.7
TARGETS_MAX = 500
SPEC = re.compile(r"[A-Za-z0-9_./-]+(::[A-Za-z_]\w*){0,2}(\[[A-Za-z0-9_.,=+-]+\])?", re.ASCII)


@dataclass(frozen=True)
class SpecTarget:
    """One registered file, and the node id inside it (`test_x`, `Class::test_x[1]`), or an empty string for all."""

    file: RegisteredFile
    node: str = ""

    def __str__(self) -> str:
        return f"{self.file.path}::{self.node}" if self.node else self.file.path


def resolve_specs(specs: tuple[str, ...], registry: Registry) -> tuple[SpecTarget, ...]:
    """Return the targets in order, without duplicates. Raises `SpecError` with the nearest matches."""
    if not specs:
        raise SpecError("no test was named; name a file, a folder or a node id below the registered tests")
    if len(specs) > SPECS_MAX:
        raise SpecError(f"{len(specs)} specs are more than {SPECS_MAX}; name a folder instead")
    targets = dict.fromkeys(target for spec in specs for target in _resolve(spec, registry))
    if len(targets) > TARGETS_MAX:
        raise SpecError(f"the specs name {len(targets)} files, more than {TARGETS_MAX}; use /rerun-stage for a suite")
    whole = {target.file.path for target in targets if not target.node}
    return tuple(target for target in targets if not target.node or target.file.path not in whole)


def resolve_scenario(spec: str, registry: Registry) -> str:
    """Return `path::name` for a scenario: a script or a schedule in a registered file. Raises `SpecError`."""
    check_spelling(spec)
    path, _, name = spec.partition("::")
    if not path.endswith(".py") or not name:
        raise SpecError(f"{quoted(spec)} is no scenario; write tests/.../file.py::scenario")
    file = next(iter(_files(path.removeprefix("./"), registry)), None)
    if file is None:
        raise SpecError(f"{quoted(path)} is no registered test file{_near(path, registry)}")
    if not file.tests.defines(name) and name not in file.tests.others:
        raise SpecError(f"{file.path} defines no {quoted(name)}{_near_nodes(name, file)}")
    return f"{file.path}::{name}"


def _resolve(spec: str, registry: Registry) -> list[SpecTarget]:
    check_spelling(spec)
    path, _, node = spec.partition("::")
    path = path.removeprefix("./").rstrip("/")
    files = _files(path, registry)
    if not files:
        raise SpecError(f"{quoted(spec)} names no registered test{_near(path, registry)}")
    if not node:
        return [SpecTarget(file) for file in files]
    if len(files) > 1 or not files[0].tests.defines(node):
        raise SpecError(f"{quoted(spec)}: {files[0].path} defines no {quoted(node)}{_near_nodes(node, files[0])}")
    return [SpecTarget(files[0], node)]


def check_spelling(spec: str) -> None:
    """Raise `SpecError`, with a reason, for a spec with unusual characters: hostile text stops here."""
    if len(spec) > SPEC_MAX_CHARS:
        raise SpecError(f"a spec of {len(spec)} characters is longer than {SPEC_MAX_CHARS}: {quoted(spec)}")
    if not SPEC.fullmatch(spec):
        raise SpecError(
            f"{quoted(spec)} is not a test spec: letters, digits and _ . / - make a path, then ::test or ::Class::test"
        )
    path = spec.partition("::")[0]
    if path.startswith(("/", "-")) or ".." in path.split("/") or "//" in path:
        raise SpecError(f"{quoted(spec)} must be a path inside the repository, without .. and not absolute")


def _files(path: str, registry: Registry) -> list[RegisteredFile]:
    exact = [file for file in registry.files if file.path == path]
    if exact:
        return exact
    if path.endswith(".py") and "/" not in path:
        named = [file for file in registry.files if PurePosixPath(file.path).name == path]
        if len(named) > 1:
            listed = ", ".join(file.path for file in named)
            raise SpecError(f"{quoted(path)} names {len(named)} files ({listed}); write the path")
        return named
    return [file for file in registry.files if file.path.startswith(f"{path}/")]


def _near(path: str, registry: Registry) -> str:
    names = {PurePosixPath(file.path).name: file.path for file in registry.files}
    paths = [file.path for file in registry.files]
    close = difflib.get_close_matches(path, paths, NEAR_MATCHES_MAX, NEAR_ENOUGH)
    close += [
        names[name]
        for name in difflib.get_close_matches(PurePosixPath(path).name, names, NEAR_MATCHES_MAX, NEAR_ENOUGH)
    ]
    return _did_you_mean(close)


def _near_nodes(node: str, file: RegisteredFile) -> str:
    names = [*file.tests.top_level, *file.tests.methods, *file.tests.classes, *file.tests.others]
    return _did_you_mean(difflib.get_close_matches(node.partition("[")[0], names, NEAR_MATCHES_MAX, NEAR_ENOUGH))


def _did_you_mean(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))[:NEAR_MATCHES_MAX]
    return f"; did you mean {' or '.join(f'`{name}`' for name in unique)}?" if unique else ""
