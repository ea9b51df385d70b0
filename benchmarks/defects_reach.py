"""Measures who can cause each known defect of an engine, with which settings and how often: its ``reach``.

`python -m benchmarks.defects_reach --adapter vllm` runs in the engine's environment and writes the ``reach`` of each
defect that the installed version has into the adapter's table; `python -m benchmarks.defects_page` writes the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lockstep.interruption import interruptible
from scripted.core.defects import read_defects
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.reach import MeasuredReach, reach_of, server_of

_ROOT: Final = Path(__file__).parents[1]
_WORKLOADS: Final = 200


def line_of(found: MeasuredReach) -> str:
    """Return the line of the table."""
    unusual = ", ".join(f"{name}={value}" for name, value in found.unusual.items())
    command = server_of(found.schedule).command(found.schedule.config)
    words = {"who": found.who, "settings": unusual or "the defaults"}
    words |= {"command": command.line} if command else {}
    fields = [f"{name} = {msgspec.json.encode(text).decode()}" for name, text in words.items()]
    fields += [f"failing = {found.failed}", f"workloads = {found.workloads}"] if found.workloads else []
    return f"reach = {{ {', '.join(fields)} }}"


def with_reach(table: str, name: str, line: str) -> str:
    """Return the table's text with this line in the defect of this id."""
    begin = table.index(f'id = "{name}"')
    end = table.find("[[defect]]", begin)
    part = table[begin : end if end > 0 else len(table)]
    kept = re.sub(r"^reach = .*\n", "", part, flags=re.MULTILINE)
    head, _, rest = kept.partition("\n")
    return table.replace(part, f"{head}\n{line}\n{rest}", 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all of an adapter, or one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defects_reach", description=__doc__)
    parser.add_argument(
        "--adapter",
        choices=("vllm", "sglang", "transformers"),
        required=True,
        help="the adapter whose defects to measure",
    )
    parser.add_argument("--only", default="", help="measure only the defect with this id")
    parser.add_argument("--workloads", type=int, default=_WORKLOADS, help="random workloads for each defect")
    asked = parser.parse_args(arguments)
    file = _ROOT / f"adapters/scripted_{asked.adapter}/defects.toml"
    for defect in read_defects(file).defect:
        if asked.only not in ("", defect.id) or not defect.schedules:
            continue
        try:
            found = reach_of(Schedule.parse(defect.schedules[0]), workloads=asked.workloads)
        except ScriptDefinitionError as exc:
            sys.stdout.write(f"{defect.id}: {exc}\n")
            continue
        line = line_of(found)
        sys.stdout.write(f"{defect.id}: {line}\n")
        sys.stdout.flush()
        file.write_text(with_reach(file.read_text(encoding="utf-8"), defect.id, line), encoding="utf-8")
    return 0


if __name__ == "__main__":
    with interruptible("benchmarks.defects_reach"):
        sys.exit(main())
