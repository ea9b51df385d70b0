"""``python -m tools.mutation``: the score of each suite over a seeded sample, or over all mutants.

Results lie in a folder of the sources' fingerprint: a run that was stopped goes on, and never with other sources.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.measurement import output_folder
from tools.mutation.areas import AREAS, Area
from tools.mutation.campaign import Result, Verdict, pursue, read_results
from tools.mutation.healthy import Healthy, fingerprint, measure
from tools.mutation.operators import Mutant, mutants_of
from tools.mutation.score import score_of, survivors_of, table_of
from tools.mutation.suites import Suite, Unit, with_units

__all__ = ["main"]

RESULTS: Final = Path("out/mutation")
PLAIN_WIDTH_COLUMNS: Final = 160


def main() -> None:
    """Measure, show, write. A low score is no error."""
    arguments = _parser().parse_args()
    # A test that starts a process of its own must not share the core with its threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS, highlight=False)
    # Thinner sweeps notice less, so that their results are others.
    area = AREAS[arguments.area]
    thinned = "" if arguments.most is None else f"-{arguments.most}"
    folder = arguments.out / f"{fingerprint()}-{area.name}{thinned}"
    folder.mkdir(parents=True, exist_ok=True)
    mutants = _chosen(arguments, area)
    results = folder / "results.jsonl"
    suites = [Suite(name) for name in arguments.suites if name in area.suites]
    with_units(
        suites,
        lambda units: _run(mutants, units, area, results, arguments.jobs, console),
        unit_tests=area.unit_tests,
        most=arguments.most,
    )
    found = read_results(results)
    score = score_of(mutants, found)
    console.print(table_of(score))
    for suite in [*suites, None]:
        left = survivors_of(mutants, found, suite)
        file = folder / f"survivors-{suite or 'any'}.txt"
        file.write_text("".join(f"{'guard ' if one.guard else ''}{one.id}  [{one.function}]\n" for one in left))
        console.print(f"{len(left)} not noticed by {suite or 'any suite'}: {file}")
    (folder / "score.json").write_bytes(msgspec.json.format(msgspec.json.encode(score)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--area", choices=list(AREAS), default="core", help="which sources, against which tests")
    parser.add_argument("--suites", nargs="+", choices=[suite.value for suite in Suite], default=list(Suite))
    parser.add_argument("--sample", type=int, metavar="N", help="sample N mutants; default: all")
    parser.add_argument("--seed", type=int, default=0, help="which ones; a larger sample of one seed has the smaller")
    parser.add_argument("--kind", choices=("behaviour", "guard", "all"), default="all", help="guards only object")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this in their id")
    parser.add_argument("--most", type=int, metavar="N", help="schedules of one sweep, evenly chosen; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=output_folder, default=RESULTS, help="where results go")
    return parser


def _chosen(arguments: argparse.Namespace, area: Area) -> list[Mutant]:
    mutants: list[Mutant] = []
    for file in area.files():
        mutants += mutants_of(file, Path(file).read_text(encoding="utf-8"))
    random.Random(arguments.seed).shuffle(mutants)  # noqa: S311 - the same from the same seed
    kinds = {"behaviour": (False,), "guard": (True,), "all": (False, True)}[arguments.kind]
    mutants = [mutant for mutant in mutants if arguments.only in mutant.id and mutant.guard in kinds]
    return mutants[: arguments.sample]


def _run(mutants: Sequence[Mutant], units: Sequence[Unit], area: Area, file: Path, jobs: int, console: Console) -> None:
    healthy = _healthy(units, area, file.with_name("healthy.json"), jobs)
    for one in healthy:
        if one.failure is not None:
            console.print(f"left out, it fails without a mutant: {one.unit}: {one.failure}")
    wanted = {mutant.id for mutant in mutants}
    done = [result for result in read_results(file) if result.mutant in wanted]
    console.print(f"{len(mutants)} mutants, {len(units)} units, {len(done)} results already there")
    count = len(done)
    with file.open("ab") as stream:

        def found(result: Result) -> None:
            nonlocal count
            count += 1
            stream.write(msgspec.json.encode(result) + b"\n")
            stream.flush()
            if result.verdict is not Verdict.UNREACHED:
                console.print(
                    f"{count}: {result.mutant}: {result.suite} {result.verdict} {result.cpu_s:.1f} s {result.by}"
                )

        pursue(mutants, units, healthy, done=done, jobs=jobs, found=found)


def _healthy(units: Sequence[Unit], area: Area, file: Path, jobs: int) -> list[Healthy]:
    """Measured once for all suites and files of this fingerprint."""
    known: dict[str, Healthy] = {}
    if file.exists():
        known = {one.unit: one for one in msgspec.json.decode(file.read_bytes(), type=list[Healthy])}
    missing = [unit for unit in units if unit.name not in known]
    if missing:
        known |= {one.unit: one for one in measure(missing, area.files(), jobs)}
        file.write_bytes(msgspec.json.encode(list(known.values())))
    return [known[unit.name] for unit in units]
