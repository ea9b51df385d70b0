"""Stubs for modules that SGLang imports and its scheduler never calls.

These are large libraries for kernels, images and shells; most cannot be installed without a GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

STUBBED: Final = ("IPython", "sgl_kernel", "torchvision", "triton")
# The statements that make SGLang's imports possible where this project cannot be imported.
PREPARE: Final = f"import runpy; runpy.run_path({__file__!r})['install']()"


class _Names(type):
    """Gives a class every attribute: its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Base(metaclass=_Names):
    """A base class that takes any arguments and can be called."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None: ...


class _Module(types.ModuleType):
    """Has every attribute: a class for a capitalized name, otherwise a module; as a decorator it changes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        # Newer than every required version.
        self.__version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name[0].isupper():
            made = _Names(name, (_Base,), {"__module__": self.__name__})
        else:
            made = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **__: Any) -> Any:
        if len(args) == 1 and callable(args[0]):
            return args[0]
        return _unchanged


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Finder(importlib.abc.Loader):
    """Finds the stubs and every module inside them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        del path, target
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def install(*more: str) -> tuple[str, ...]:
    absent = tuple(name for name in (*STUBBED, *more) if importlib.util.find_spec(name) is None)
    if absent:
        sys.meta_path.append(_Finder(absent))
    return absent
