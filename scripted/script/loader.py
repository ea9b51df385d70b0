"""Finds a script by file and name in the process that runs it, with pytest's assertion introspection.

Each version of a file's contents is imported under a module name that cannot clash with the caller's modules: once for
the tests in it, and again for each script that a server runs.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import marshal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripted.core.refusals import ScriptDefinitionError
from scripted.script.compiled_source import Compiled, kept
from scripted.script.decorator import method_of, test_of
from scripted.script.importing import importing_to_run
from scripted.script.refused_scripts import REFUSED, GuardedScripts, RefusedScript, refused
from scripted.script.scripted_test import ScriptedTest
from scripted.script.source import ScriptFunction

_PACKAGE_ROOT = Path(__file__).parents[2]
_modules: dict[tuple[str, str], types.ModuleType] = {}


def load_script(file: str, name: str, import_paths: Sequence[str] = ()) -> ScriptFunction:
    """Return the generator function ``name`` of ``file``, decorated or not. Importing the file may raise anything.

    The file is imported again, so that no script finds globals as another one left them. Raises what the function's own
    decorators raised, if they did.
    """
    for path in import_paths:
        if path not in sys.path:
            sys.path.append(path)
    with importing_to_run(file):
        module = _imported(Path(file))
    owner, found = _found(module, name)
    spec = test_of(found)
    function: Any = _bound(owner, found if spec is None else spec.script)
    if not inspect.isgeneratorfunction(function):
        raise ScriptDefinitionError(
            f"{file} has no generator function {name!r} at its top level or in a class there; "
            "a script is found by its name"
        )
    script: ScriptFunction = function
    return script


def load_test(file: str, name: str) -> ScriptedTest:
    """Return the decorated test ``name`` of ``file``. Importing the file may raise anything.

    Raises what the function's own decorators raised, if they did.
    """
    module = _module(Path(file))
    owner, found = _found(module, name)
    spec = test_of(found)
    if spec is not None:
        spec = msgspec.structs.replace(spec, script=_bound(owner, spec.script))
        # Marks above @scripted are on the test; copy them to the script, whose parameters they define.
        getattr(spec.script, "__func__", spec.script).__dict__["pytestmark"] = getattr(found, "pytestmark", [])
        return spec
    there = [key for key, value in vars(module).items() if test_of(value) is not None]
    raise ScriptDefinitionError(
        f"{file} has no script {name!r} decorated with @scripted(config); "
        + (f"its scripts are {', '.join(there)}" if there else "it has none at all")
    )


def find_test(spec: str) -> ScriptedTest:
    """Find the script ``FILE::NAME``. Raises ScriptDefinitionError."""
    file, separator, name = spec.partition("::")
    name = name.replace("::", ".")
    if not separator or not all(part.isidentifier() for part in name.split(".")):
        raise ScriptDefinitionError(
            f"a script is given as FILE::NAME, got {spec!r}; give its parameters with --arg NAME=VALUE"
        )
    path = next((path for path in (Path(file), _PACKAGE_ROOT / file) if path.is_file()), None)
    if path is None:
        raise ScriptDefinitionError(f"there is no file {file!r} in {Path.cwd()}; give the path of a Python file")
    with _importing(path):
        return load_test(str(path.resolve()), name)


def specs_in(spec: str) -> list[str]:
    """Return ``FILE::NAME`` of each script of ``FILE``, including refused ones and methods of classes.

    A single ``FILE::NAME`` is returned as it is.
    """
    if "::" in spec:
        return [spec]
    path = Path(spec)
    if not path.is_file():
        raise ScriptDefinitionError(f"there is no file {spec!r} in {Path.cwd()}; give the path of a Python file")
    with _importing(path):
        names = scripts_in(path)
    if not names:
        raise ScriptDefinitionError(f"{spec} has no script; decorate one with @scripted(config)")
    return [f"{path}::{name}" for name in names]


def scripts_in(path: Path) -> list[str]:
    """Return the names of a file's decorated tests, as pytest finds them; methods, also inherited, as ``Class.name``.

    A decorated function that its decorators refused counts too. Importing the file may raise anything.
    """
    return list(_names_in(_module(path.resolve())))


@contextlib.contextmanager
def _importing(path: Path) -> Iterator[None]:
    """Extend the import path with the script's folder, those above it that have a ``conftest.py``, and the working
    folder, as pytest does.

    Raises ScriptDefinitionError for any exception during the import.
    """
    above = [folder for folder in path.resolve().parents if (folder / "conftest.py").is_file()]
    for folder in map(str, (path.resolve().parent, *above, Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        yield
    except ScriptDefinitionError:
        raise
    except Exception as exc:
        raise ScriptDefinitionError(f"{path} cannot be imported: {type(exc).__name__}: {exc}") from exc


def _names_in(owner: types.ModuleType | type, prefix: str = "") -> Iterator[str]:
    classes = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    for name, value in {name: value for one in classes for name, value in vars(one).items()}.items():
        function = getattr(value, "__func__", value)
        if test_of(function) is not None or isinstance(value, RefusedScript):
            yield f"{prefix}{name}"
        elif isinstance(value, type) and value.__module__ == getattr(owner, "__module__", owner.__name__):
            yield from _names_in(value, f"{prefix}{name}.")


def _found(module: types.ModuleType, name: str) -> tuple[object, object]:
    """Look up a dotted name in a module: the object's owner and the object; None if there is none.

    Raises what its decorators raised, if they did.
    """
    owner: object = None
    found: object = module
    for part in name.split("."):
        owner, found = found, getattr(found, part, None)
    if isinstance(found, RefusedScript):
        raise found.error
    return owner, found


def _bound(owner: object, function: object) -> object:
    """Bind a method to a new object of its class; return any other function unchanged."""
    if not isinstance(owner, type) or not inspect.isfunction(function):
        return function
    static = isinstance(inspect.getattr_static(owner, function.__name__, None), staticmethod)
    return function if static else method_of(owner, function)


def _module(path: Path) -> types.ModuleType:
    """Import a file, unless this version of its contents was imported before."""
    key = (str(path), _digest_of(path.read_bytes()))
    if key not in _modules:
        _modules[key] = _imported(path)
    return _modules[key]


def _imported(path: Path) -> types.ModuleType:
    """Import a file as a new module."""
    source = path.read_bytes()
    module = types.ModuleType(f"scripted_file_{_digest_of(source)}")
    module.__file__ = str(path)
    module.__dict__[REFUSED] = refused
    sys.modules[module.__name__] = module
    compiled = kept(source, str(path), "scripted", Compiled, lambda: _compiled(source, path))
    exec(compiled.code, module.__dict__)  # noqa: S102 - the user's test file, imported as pytest does
    return module


def _digest_of(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=8).hexdigest()


def _compiled(source: bytes, path: Path) -> Compiled:
    """Compile a file with pytest's assertion rewriting, or without it if pytest is not installed."""
    tree = ast.parse(source, filename=str(path))
    with contextlib.suppress(ImportError):
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, str(path))
    tree = GuardedScripts().visit(tree)
    return Compiled(marshal.dumps(compile(tree, str(path), "exec", dont_inherit=True)))
