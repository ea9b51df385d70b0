"""Reads registration calls, and checks their rules.

Takes `register_cpu_ci` and `register_cuda_ci` calls from a syntax tree; never evaluates an expression.
"""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ci.suites import CPU_RUNNER, Catalogue, Hardware

REGISTER_MODULE = "ci.register"
CALLS = {"register_cpu_ci": Hardware.CPU, "register_cuda_ci": Hardware.CUDA}
REQUIRED = {Hardware.CPU: ("est_time", "suite"), Hardware.CUDA: ("est_time", "stage", "runner_config")}
OPTIONAL = ("nightly", "disabled")
EST_TIME_MAX_S = 4 * 3600.0
INTEGER_MAX_BITS = 64
NAME_MAX_PARTS = 4

Constant = str | bytes | bool | int | float | complex | None


@dataclass(frozen=True)
class Registration:
    """One call: a file's place and time. `group` is the suite on a CPU and the stage on CUDA."""

    hardware: Hardware
    group: str
    runner: str
    est_time_s: float
    nightly: bool
    disabled: str | None
    line: int


@dataclass(frozen=True)
class Complaint:
    """A rule that a call breaks, at a line of its file."""

    line: int
    problem: str
    remedy: str


def registrations_of(tree: ast.Module, catalogue: Catalogue) -> tuple[tuple[Registration, ...], tuple[Complaint, ...]]:
    """Return the valid registrations of one file in order, and the complaints about all others."""
    names = _bound_names(tree)
    top_level = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    good: list[Registration] = []
    complaints: list[Complaint] = []
    for call, name in _register_calls(tree, names):
        found = list(_shape_complaints(call, name, names, id(call) in top_level))
        if not found:
            found = list(_value_complaints(call, CALLS[name], catalogue))
        if not found:
            entry = _registration(call, CALLS[name])
            found = list(_duplicate(entry, good))
            good += [] if found else [entry]
        complaints += found
    return tuple(good), tuple(complaints)


def dotted_name(node: ast.expr) -> str:
    """Return the name that is called: `a.b` for `a.b(...)`, only `.b` for the last call of a chain like `f().b(...)`.

    Bounded: writing out a chain of calls for each of its calls would take quadratic time.
    """
    words: list[str] = []
    while isinstance(node, ast.Attribute) and len(words) < NAME_MAX_PARTS:
        words.append(node.attr)
        node = node.value
    words.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(words))


def _bound_names(tree: ast.Module) -> dict[str, str]:
    """Map each name that the file's imports bind to a registration function to that function's own name."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == REGISTER_MODULE:
            bound |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in CALLS}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "ci":
            for alias in (alias for alias in node.names if alias.name == "register"):
                bound |= {f"{alias.asname or alias.name}.{call}": call for call in CALLS}
        elif isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name == REGISTER_MODULE):
                bound |= {f"{alias.asname or alias.name}.{call}": call for call in CALLS}
    return bound


def _register_calls(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[ast.Call, str]]:
    """Yield calls of the two functions in source order, including ones that look right but were never imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            written = dotted_name(node.func)
            name = names.get(written, written.rpartition(".")[2])
            if name in CALLS:
                yield node, name


def _shape_complaints(call: ast.Call, name: str, names: dict[str, str], top_level: bool) -> Iterator[Complaint]:
    if dotted_name(call.func) not in names:
        yield Complaint(
            call.lineno,
            f"{name} is not imported from {REGISTER_MODULE}",
            f"write `from {REGISTER_MODULE} import {name}`",
        )
    if not top_level:
        yield Complaint(
            call.lineno,
            f"{name} is not called at the top level",
            "move the call out of the function, class or condition",
        )
    if call.args:
        yield Complaint(call.lineno, f"{name} has positional arguments", "name every argument")
    known = (*REQUIRED[CALLS[name]], *OPTIONAL)
    for keyword in call.keywords:
        yield from _keyword_complaints(keyword, name, known)
    missing = [field for field in REQUIRED[CALLS[name]] if field not in {keyword.arg for keyword in call.keywords}]
    for field in missing:
        yield Complaint(call.lineno, f"{name} lacks {field}", f"add {field}=...")


def _keyword_complaints(keyword: ast.keyword, name: str, known: tuple[str, ...]) -> Iterator[Complaint]:
    if keyword.arg is None:
        yield Complaint(keyword.lineno, f"{name} takes no ** argument", "write the arguments out")
    elif keyword.arg not in known:
        yield Complaint(keyword.lineno, f"{name} has no argument {keyword.arg!r}", f"use only {', '.join(known)}")
    elif not isinstance(_unsigned(keyword.value), ast.Constant):
        yield Complaint(
            keyword.lineno,
            f"{keyword.arg} of {name} is not a constant ({ast.unparse(keyword.value)[:60]})",
            "write the value itself: registrations are read, not run",
        )


def _value_complaints(call: ast.Call, hardware: Hardware, catalogue: Catalogue) -> Iterator[Complaint]:
    values = _values(call)
    est_time = values["est_time"]
    if isinstance(est_time, bool) or not isinstance(est_time, int | float) or not 0 < est_time <= EST_TIME_MAX_S:
        yield Complaint(
            call.lineno, f"est_time must be seconds in (0, {EST_TIME_MAX_S:g}], got {est_time!r}", "measure it"
        )
    choices = {
        "suite": set(catalogue.cpu_suites),
        "stage": set(catalogue.cuda_stages),
        "runner_config": set(catalogue.runners) - {CPU_RUNNER},
    }
    for field in REQUIRED[hardware][1:]:
        if values[field] not in choices[field]:
            listed = ", ".join(sorted(choices[field])) or "none"
            yield Complaint(call.lineno, f"unknown {field} {values[field]!r}", f"use one of: {listed} (ci/suites.toml)")
    if not isinstance(values.get("nightly", False), bool):
        yield Complaint(call.lineno, f"nightly must be True or False, got {values['nightly']!r}", "write one of them")
    disabled = values.get("disabled")
    if disabled is not None and not (isinstance(disabled, str) and disabled.strip()):
        yield Complaint(call.lineno, f"disabled must be a reason, got {disabled!r}", "say why, or drop it")


def _registration(call: ast.Call, hardware: Hardware) -> Registration:
    values = _values(call)
    est_time = values["est_time"]
    disabled = values.get("disabled")
    assert isinstance(est_time, int | float), est_time
    assert disabled is None or isinstance(disabled, str), disabled
    return Registration(
        hardware=hardware,
        group=str(values["suite" if hardware is Hardware.CPU else "stage"]),
        runner=CPU_RUNNER if hardware is Hardware.CPU else str(values["runner_config"]),
        est_time_s=float(est_time),
        nightly=bool(values.get("nightly", False)),
        disabled=disabled,
        line=call.lineno,
    )


def _duplicate(entry: Registration, earlier: list[Registration]) -> Iterator[Complaint]:
    for other in earlier:
        if (other.hardware, other.group, other.runner) == (entry.hardware, entry.group, entry.runner):
            yield Complaint(
                entry.line, f"repeats the registration of line {other.line} for {entry.group}", "keep one of the two"
            )


def _values(call: ast.Call) -> dict[str, Constant]:
    return {keyword.arg: _constant(keyword.value) for keyword in call.keywords if keyword.arg is not None}


def _unsigned(node: ast.expr) -> ast.expr:
    """Return the operand of a sign, so that a negative estimate is reported as a number, not as an expression."""
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node


def _constant(node: ast.expr) -> Constant:
    inner = _unsigned(node)
    assert isinstance(inner, ast.Constant), ast.dump(node)
    value = inner.value
    if isinstance(value, int) and value.bit_length() > INTEGER_MAX_BITS:
        value = math.inf  # Python refuses to print such a number, in a complaint too.
    if inner is not node and isinstance(value, int | float):
        return -value
    return value if not isinstance(value, type(...)) else repr(value)
