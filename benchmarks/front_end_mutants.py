"""Measures who finds the front end's mutants: ``python -m benchmarks.front_end_mutants [--page FILE] [NAME ...]``.

``front_end_mutants.toml`` has batches of edits that were invented before the search and the tests were read. Each is
searched for in ``lockstep-sessions``; one that the search misses is given to the tests nearest to its file. A first
result is kept for good, and a later one is kept beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.edited_tree import EditedTree
from lockstep.documents import document
from lockstep.interruption import interruptible
from scripted.core.mutant import Mutant, read_mutants
from scripted.search.campaign import Campaign
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

__all__ = ["Result", "main", "page_of", "read_batches", "results_in"]

_BATCHES: Final = Path(__file__).with_suffix(".toml")
_PAGE: Final = Path("benchmarks/tables/front_end_mutants.md")
_ADAPTER: Final = "lockstep-sessions"
_SCHEDULES: Final = 400
_COLUMNS: Final = 100
# Tests wait half a minute for an event; several of them in a row would be a hang.
_TESTS_LIMIT_S: Final = 400.0
_NOBODY: Final = "nobody"
# The unit tests of each part of the front end.
_NEAREST: Final[Mapping[str, tuple[str, ...]]] = {
    "text.answer": ("test_detokenizer", "test_stop_strings", "test_marker_decoder", "test_input_logprobs"),
    "text.dialect": ("test_dialect", "test_reasoning", "tools/test_call_parsers", "tools/test_damaged_calls"),
    "text.reasoning": ("test_reasoning", "test_dialect"),
    "text.tools": (
        "tools/test_every_family",
        "tools/test_calls_drawn",
        "tools/test_call_parsers",
        "tools/test_damaged_calls",
        "tools/test_named_arguments",
        "tools/test_json_of_models",
        "tools/test_forms_of_models",
        "tools/test_nested_calls",
        "tools/test_fenced_calls",
        "tools/test_argument_rules",
        "tools/test_call_grammar",
        "tools/test_kimi_calls",
        "tools/test_gpt_oss_messages",
    ),
    "sessions.sessions": ("test_sessions", "test_choices", "test_input_logprobs"),
    "sessions.requests": ("test_orders", "test_short_bodies", "test_protocol", "test_fields_drawn"),
    "schema.native": ("test_protocol", "test_fields_drawn", "test_invalid_body", "test_orders"),
    "openai.shapes": ("test_choices", "test_input_logprobs", "test_openai_client", "test_large_answers"),
    "openai.chat_blocks": (
        "test_openai_tools",
        "test_openai_client",
        "test_required_calls",
        "tools/test_damaged_calls",
    ),
    "openai.bodies": (
        "test_protocol",
        "test_protocols_agree",
        "test_tool_bodies",
        "test_openai_client",
        "test_fields_drawn",
    ),
    "openai.requests": (
        "test_orders",
        "test_fields_drawn",
        "test_protocols_agree",
        "test_openai_client",
        "test_required_calls",
    ),
    "openai.response": ("test_other_protocols", "test_protocols_agree"),
    "anthropic": ("test_other_protocols", "test_protocols_agree"),
    "http.connection": ("test_connection_bounds", "test_leaving_clients"),
    "http.body_reader": ("test_disconnect", "test_body_room", "test_routes", "test_orders"),
    "http.routes.generation": ("test_event_stream", "test_disconnect"),
    "http.engine_client": ("test_engine_client", "test_draining"),
    "http.grammar_check": ("test_grammar_check",),
    "http.metrics": ("test_metrics",),
    "http.request_log": ("test_request_log",),
    "http.responses": ("test_routes", "test_http_semantics"),
    "engine.grammar": (
        "../grammar/test_schemas_together",
        "../grammar/test_expressions_drawn",
        "../grammar/test_values_of_schemas",
        "../grammar/test_expressions",
        "../grammar/test_integer_bounds",
        "../grammar/test_grammar_source",
        "../grammar/test_matcher",
        "../grammar/test_distinct",
        "../grammar/test_wild_schemas",
    ),
}


class Result(msgspec.Struct, frozen=True):
    """Who noticed a mutant ``first``, and at the last measurement: schedules of the search, a test, or nobody."""

    mutant: str
    first: str
    now: str


def read_batches() -> tuple[Mutant, ...]:
    """Read the mutants, whose ``origin`` is the batch."""
    return read_mutants(_BATCHES)


def results_in(file: Path) -> dict[str, Result]:
    """Read the results by mutant; none if there is no file. Raises DocumentError for a malformed line."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return {result.mutant: result for result in (document(line, Result) for line in lines)}


def _noticed_by(mutant: Mutant, tree: EditedTree) -> str:
    # The search runs nothing of HTTP, and compiles no grammar.
    is_searched = ".http." not in mutant.target and "engine.grammar." not in mutant.target
    number = _schedule_that_fails(mutant) if is_searched else None
    return _test_that_fails(mutant, tree) if number is None else f"search, schedule {number}"


def _schedule_that_fails(mutant: Mutant) -> int | None:
    plan = SearchPlan(
        adapter=_ADAPTER, generated_from=0, strategy=StrategyName.RANDOM, schedules=_SCHEDULES, stop_at_first=True
    )
    with mutant.switched_on():
        report = Campaign(plan).run()
    return report.schedules if report.findings else None


def _test_that_fails(mutant: Mutant, tree: EditedTree) -> str:
    """Run the nearest tests in the copy with the mutant in it; return the first that fails."""
    try:
        with tree.with_mutant(mutant):
            done = tree.pytest("-x", "-rfE", *_nearest_tests(mutant), timeout_s=_TESTS_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "tests, which hang"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        raise RuntimeError(f"the tests of {mutant.name} did not run: {done.stdout}{done.stderr}")
    return (
        failed[0].split()[1].partition("[")[0].removeprefix("tests/unit/").removeprefix("frontend/")
        if failed
        else _NOBODY
    )


def _nearest_tests(mutant: Mutant) -> list[str]:
    files = next(files for module, files in _NEAREST.items() if module in mutant.target)
    return [f"tests/unit/frontend/{file}.py" for file in files]


def page_of(mutants: Sequence[Mutant], results: dict[str, Result]) -> str:
    """Format the page."""
    about = (
        "Batches of edits of `engine/frontend` and `engine/grammar`, each invented before the search and the tests "
        "were read; batch 5 and the first ten of batch 6 were written from the code too, but after the tests were "
        "read. "
        f"`python -m benchmarks.front_end_mutants` searches for each with {_SCHEDULES} schedules of `{_ADAPTER}`, "
        "gives what it misses to the unit tests nearest to the edited file, and writes this page from "
        "`benchmarks/front_end_mutants.toml`. The first result is of the code of the day on which a batch was "
        "measured; the classes of what nobody noticed then became properties of the search, or tests, and it was "
        "measured again."
    )
    lines = ["# Mutants of the front end", "", *textwrap.wrap(about, _COLUMNS, break_on_hyphens=False), ""]
    lines += ["| batch | at first | by the search | now | by the search |", "| --- " * 5 + "|"]
    for batch in dict.fromkeys(mutant.origin for mutant in mutants):
        of_batch = [results[mutant.name] for mutant in mutants if mutant.origin == batch and mutant.name in results]
        first, now = [one.first for one in of_batch], [one.now for one in of_batch]
        lines.append(f"| {batch} | {_share(first)} | {_by_search(first)} | {_share(now)} | {_by_search(now)} |")
    lines += ["", "| batch | mutant | bug | noticed at first by | now by |", "| --- " * 5 + "|"]
    for mutant in mutants:
        result = results.get(mutant.name, Result(mutant.name, "", ""))
        lines.append(f"| {mutant.origin} | {mutant.name} | {mutant.bug} | {result.first} | {result.now} |")
    return "\n".join([*lines, ""])


def _share(noticed: Sequence[str]) -> str:
    count = sum(one != _NOBODY for one in noticed)
    return f"{count} of {len(noticed)} ({count / max(1, len(noticed)):.0%})"


def _by_search(noticed: Sequence[str]) -> int:
    return sum(one.startswith("search") for one in noticed)


def _measured(mutants: Sequence[Mutant], results: dict[str, Result]) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        tree = EditedTree(Path(folder))
        for mutant in mutants:
            now = _noticed_by(mutant, tree)
            before = results.get(mutant.name)
            print(f"{mutant.origin}: {mutant.name}: {now}", flush=True)  # noqa: T201
            yield Result(mutant.name, now if before is None else before.first, now)


def main() -> None:
    """Measure the batches, or the named batches and mutants, and write the page and the results beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="only these mutants and batches")
    parser.add_argument("--page", type=Path, default=_PAGE)
    options = parser.parse_args()
    mutants = read_batches()
    file = options.page.with_suffix(".jsonl")
    results = results_in(file)
    wanted = [one for one in mutants if not options.name or {one.name, one.origin}.intersection(options.name)]
    for result in _measured(wanted, results):
        results[result.mutant] = result
        rows = [results[one.name] for one in mutants if one.name in results]
        file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        options.page.write_text(page_of(mutants, results), encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks"):
        main()
