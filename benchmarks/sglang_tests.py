"""SGLang's scripted tests on its own runtime and on this engine: `python -m benchmarks.sglang_tests --tests FOLDER`.

FOLDER is ``test`` of a clone of SGLang. In an environment of SGLang, each configuration of the tests gets one server of
SGLang's, on the CPU, with a tiny random model in place of its small one; then the same texts run on this engine in the
sim tier. Each result is kept beside the page at once, so the command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import msgspec
from scripted_sglang import stubs

PAGE: Final = Path("benchmarks/tables/sglang_tests.md")
_HELPERS: Final = "sglang.test.scripted_runtime_chunked_helpers"
# A test that fails is not run again.
os.environ["SGLANG_TEST_MAX_RETRY"] = "0"
# Each process of SGLang's server imports this module first: what its tests import is made there too.
stubs.install("datasets")
_helpers: Any = importlib.import_module(_HELPERS)
# Of 0.5.23 its tests want one name more than its helpers have.
vars(_helpers).setdefault("VERY_LONG_PROMPT_LEN", 8 * _helpers.DEFAULT_CHUNK_SIZE)

# What makes a server that needs no GPU; the pool is larger than any test wants by itself.
_ON_CPU: Final = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "watchdog_timeout": 1e9,
    "random_seed": 0,
    "kv_canary": "none",
    "kv_canary_real_data": "none",
    "kv_canary_sweep_interval": 0,
    "max_total_tokens": 100_000,
    "max_running_requests": 64,
}
# The tiny model has as long a context as the small one in whose place it is, and the tokens of all prompts.
_CONTEXT: Final = 40_960
_VOCABULARY: Final = 1024
# Other work on the machine is nothing that SGLang's own patience knows.
_BOOT_S: Final = 900.0
_SCRIPT_S: Final = 300.0
_NOT_HERE: Final = {
    "speculative_algorithm": "a draft model",
    "enable_lora": "LoRA adapters",
    "enable_pdmux": "a GPU",
    "enable_deterministic_inference": "a GPU",
}
Side = Literal["theirs", "ours"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one test ended. ``why`` is empty if it passed; ``seconds`` is wall time, None if it did not run."""

    side: Side
    file: str
    test: str
    why: str = ""
    seconds: float | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: its class and method; ``engine`` has the arguments of its server, none if it starts its own."""

    file: str
    of: type[unittest.TestCase]
    method: str
    engine: dict[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.of.__name__}.{self.method}"

    @property
    def server(self) -> str:
        """A key that is equal for tests that share a server."""
        return json.dumps(self.engine, sort_keys=True, default=str)


def main() -> None:
    """Run the tests that have no result yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_tests", description=__doc__)
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="SGLang's folder `test`")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the page whose tables are written again; the text above stays"
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="start no server after this many minutes")
    parser.add_argument("--match", default="", help="only tests whose file, class or method has this in its name")
    arguments = parser.parse_args()
    kept = arguments.page.with_suffix(".jsonl")
    lines = kept.read_bytes().splitlines() if kept.exists() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    cases = list(_cases_in(arguments.tests))
    known = {(one.side, one.file, one.test) for one in results}
    end = time.monotonic() + arguments.minutes * 60
    for side, run in (("ours", _ours), ("theirs", _theirs)):
        open_cases = [case for case in cases if (side, case.file, case.name) not in known]
        for result in run([one for one in open_cases if arguments.match in f"{one.file} {one.name}"], end):
            results.append(result)
            with kept.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
    above = arguments.page.read_text(encoding="utf-8").split("## ", maxsplit=1)[0] if arguments.page.exists() else ""
    arguments.page.write_text(above + "\n".join(_page(cases, results)) + "\n", encoding="utf-8")


def _cases_in(folder: Path) -> Iterator[Case]:
    """Return the script tests in the folder's files. SGLang's processes must be able to import them too."""
    files = sorted(path for path in folder.rglob("test_*.py") if "unit" not in path.parts and _has_scripts(path))
    sys.path[:0] = sorted({str(path.parent.resolve()) for path in files})
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    base: Any = importlib.import_module("sglang.test.scripted_runtime.test_case").ScriptedTestCase
    for path in files:
        module = importlib.import_module(path.stem)
        for of in vars(module).values():
            if isinstance(of, type) and issubclass(of, unittest.TestCase) and of.__module__ == module.__name__:
                engine: dict[str, Any] | None = getattr(of, "ENGINE_KWARGS", {}) if issubclass(of, base) else None
                for method in unittest.TestLoader().getTestCaseNames(of):
                    yield Case(file=path.stem, of=of, method=method, engine=engine)


def _has_scripts(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "scripted_runtime.test_case import" in text and "execute_script(" in text


def _theirs(cases: Sequence[Case], end: float) -> Iterator[Result]:
    """Run tests on SGLang's runtime, the most common configurations first."""
    test_case = importlib.import_module("sglang.test.scripted_runtime.test_case")
    http_server: Any = importlib.import_module("sglang.test.scripted_runtime.http_server")
    http_server.LISTENER_ACCEPT_TIMEOUT_S = http_server.HTTP_READY_TIMEOUT_S = _BOOT_S
    servers: dict[str, list[Case]] = {}
    for case in cases:
        servers.setdefault(case.server, []).append(case)
    with tempfile.TemporaryDirectory(prefix="scripted-model-") as model:
        start = _start(http_server.ScriptedHttpServer.start, Path(model))
        for group in sorted(servers.values(), key=len, reverse=True):
            if time.monotonic() > end:
                return
            yield from _on_one_server(group, start, test_case)


def _start(start: Callable[..., Any], model: Path) -> Callable[..., Any]:
    importlib.import_module("scripted.sdk.live.model").write_model(model, 0, _VOCABULARY, _CONTEXT)

    def on_cpu(**asked: Any) -> Any:
        no_card = {name: _ON_CPU[name] for name in ("attention_backend", "disable_cuda_graph")}
        server = start(**_ON_CPU | asked | no_card | {"model_path": str(model)})
        server._run_timeout_s = _SCRIPT_S  # noqa: SLF001 - it has no other way
        return server

    return on_cpu


def _on_one_server(group: Sequence[Case], start: Callable[..., Any], test_case: Any) -> Iterator[Result]:
    engine = group[0].engine
    why = "" if engine is None else _not_here(engine)
    server: Any = None
    for case in group:
        if why:
            yield Result(side="theirs", file=case.file, test=case.name, why=why)
            continue
        if engine is not None and (server is None or server._dirty):  # noqa: SLF001 - as its own words name it
            _end(server)
            try:
                server = start(**engine)
            except Exception as error:  # noqa: BLE001 - whatever it is, there is no server
                traceback.print_exc()
                why = f"no server: {type(error).__name__}"
                yield Result(side="theirs", file=case.file, test=case.name, why=why)
                continue
        with mock.patch.object(test_case.ScriptedHttpServer, "start", start):
            yield _result("theirs", case, server)
    _end(server)


def _end(server: Any) -> None:
    if server is not None:
        # Its output at the end does not belong to one test.
        with suppress(AssertionError):
            server.shutdown()


def _not_here(engine: dict[str, Any]) -> str:
    """Name the missing requirements of a server with these arguments; empty if it can run here."""
    model = engine.get("model_path", _helpers.SMALL_MODEL)
    needs = [_NOT_HERE[name] for name in engine if name in _NOT_HERE]
    if model != _helpers.SMALL_MODEL and not engine.get("pp_size"):
        needs.append(f"the model {model}")
    return f"needs {' and '.join(dict.fromkeys(needs))}" if needs else ""


def _ours(cases: Sequence[Case], end: float) -> Iterator[Result]:
    """Run tests on this engine, in the sim tier."""
    verbs = importlib.import_module("benchmarks.sglang_verbs")
    for case in cases:
        if time.monotonic() > end:
            return
        if case.engine is None:
            yield Result(side="ours", file=case.file, test=case.name, why="is about SGLang's own server")
            continue
        try:
            server = verbs.Server(case.engine)
        except verbs.Untranslated as error:
            yield Result(side="ours", file=case.file, test=case.name, why=str(error))
            continue
        yield _result("ours", case, server)


def _result(side: Side, case: Case, server: Any) -> Result:
    result = unittest.TestResult()
    begun = time.monotonic()
    with mock.patch.object(case.of, "server", server, create=True):
        case.of(case.method).run(result)
    seconds = round(time.monotonic() - begun, 2)
    problems = [*result.failures, *result.errors]
    why = _reason(problems[0][1]) if problems else "skipped by the test" if result.skipped else ""
    for _, text in problems:
        sys.stderr.write(f"--- {side} {case.file} {case.name}\n{text}\n")
    return Result(side=side, file=case.file, test=case.name, why=why, seconds=seconds)


def _reason(text: str) -> str:
    """Summarize a traceback in a few words, without the test's own frames."""
    verbs = importlib.import_module("benchmarks.sglang_verbs")
    said = [line.partition(verbs.MARK)[2] for line in text.splitlines() if verbs.MARK in line]
    if said:
        return said[-1].strip()
    kinds = [line.partition(":")[0].rpartition(".")[2] for line in text.splitlines() if _ends_a_traceback(line)]
    # An error within the script is reported inside one of the test's own.
    inner = next((kind for kind in kinds if kind not in ("AssertionError", "ScriptFailed", "Exception")), "")
    return inner or "an assertion does not hold"


def _ends_a_traceback(line: str) -> bool:
    name = line.partition(":")[0]
    return name.replace(".", "").replace("_", "").isalnum() and name.endswith(("Error", "Exception", "Failed"))


def _page(cases: Sequence[Case], results: Sequence[Result]) -> list[str]:
    found: dict[tuple[str, str, str], Result] = {(one.side, one.file, one.test): one for one in results}
    sides: tuple[Side, Side] = ("theirs", "ours")
    rows = [
        f"## On SGLang {version('sglang')} and here",
        "",
        "| file | tests | pass on SGLang | do not | not run | seconds | pass here | do not | not run | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    files = sorted({case.file for case in cases})
    for name, some in [*((one, [case for case in cases if case.file == one]) for one in files), ("all", cases)]:
        counts = [count for side in sides for count in _counts(side, some, found)]
        rows.append(" | ".join(["| " + (name if name == "all" else f"`{name}`"), str(len(some)), *counts]) + " |")
    rows += ["", "## Those that do not pass on both", "", "| test | on SGLang | here |", "| --- | --- | --- |"]
    for case in cases:
        words = [_word(found.get((side, case.file, case.name))) for side in sides]
        if words != ["passes", "passes"]:
            rows.append(f"| `{case.name}` | {words[0]} | {words[1]} |")
    return rows


def _counts(side: Side, cases: Sequence[Case], found: dict[tuple[str, str, str], Result]) -> Iterator[str]:
    ran = [
        one
        for case in cases
        if (one := found.get((side, case.file, case.name))) is not None and one.seconds is not None
    ]
    passed = sum(not one.why for one in ran)
    yield from (str(passed), str(len(ran) - passed), str(len(cases) - len(ran)))
    yield f"{sum(one.seconds or 0 for one in ran):.1f}"


def _word(result: Result | None) -> str:
    if result is None:
        return "not run: the time was over"
    return result.why if result.seconds is None else result.why or "passes"


if __name__ == "__main__":
    main()
