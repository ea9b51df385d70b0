"""Finds a script by file and name, in the process that runs it, with pytest's assertion introspection.

A file is compiled once for each of its contents; its module is not registered under a name that the caller's modules
have.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted.decorator import ScriptedTest, spec_of
from scripted.errors import ScriptDefinitionError
from scripted.run import ScriptFunction

__all__ = ["load_script", "load_test"]

_modules: dict[tuple[str, str], types.ModuleType] = {}


def load_script(file: str, name: str, import_paths: Sequence[str] = ()) -> ScriptFunction:
    """The generator function ``name`` of ``file``, decorated or not. Raises whatever importing the file raises."""
    for path in import_paths:
        if path not in sys.path:
            sys.path.append(path)
    module = _module(Path(file))
    found: Any = getattr(module, name, None)
    spec = getattr(found, "scripted", None)
    function = spec.script if isinstance(spec, ScriptedTest) else found
    if not inspect.isgeneratorfunction(function):
        raise ScriptDefinitionError(
            f"{file} has no generator function {name!r} at its top level; a script is found by its name"
        )
    return function


def load_test(file: str, name: str) -> ScriptedTest:
    """The decorated test ``name`` of ``file``, with its configuration. Raises whatever importing the file raises."""
    module = _module(Path(file))
    found: Any = getattr(module, name, None)
    if isinstance(getattr(found, "scripted", None), ScriptedTest):
        spec = spec_of(found)
        # Marks above @scripted are on the test, not on the script; whoever runs the script needs its parameters.
        spec.script.__dict__["pytestmark"] = getattr(found, "pytestmark", [])
        return spec
    there = [key for key, value in vars(module).items() if isinstance(getattr(value, "scripted", None), ScriptedTest)]
    raise ScriptDefinitionError(
        f"{file} has no script {name!r} decorated with @scripted(config); "
        + (f"its scripts are {', '.join(there)}" if there else "it has none at all")
    )


def _module(path: Path) -> types.ModuleType:
    source = path.read_bytes()
    content = hashlib.blake2b(source, digest_size=8).hexdigest()
    key = (str(path), content)
    if key not in _modules:
        module = types.ModuleType(f"scripted_file_{content}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        exec(_compile(source, path), module.__dict__)  # noqa: S102 - a test file of the user's, as pytest would run it
        _modules[key] = module
    return _modules[key]


def _compile(source: bytes, path: Path) -> types.CodeType:
    """The file with its assertions rewritten, so that they say what they compared; as it is without pytest."""
    tree = ast.parse(source, filename=str(path))
    with contextlib.suppress(ImportError):
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, str(path))
    return compile(tree, str(path), "exec", dont_inherit=True)
