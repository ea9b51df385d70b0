"""One line each shows a bug that search and scripts once passed; healthy engines keep every promise under it."""

from __future__ import annotations

import pytest
from scripted_lockstep.mutants.gallery import switched_on

from scripted.core.schedule import Schedule
from scripted.search.execution import execute

LINES = [
    ("the-first-token-never-stops", "default; 1 start a prompt=1 new=4 stop=118", "rule End: finish_reason"),
    ("an-exact-fit-is-no-fit", "page_size=4 max_total_tokens=16; 1 start a prompt=16 new=1", "rule Launch"),
    (
        "a-deadline-met-exactly-is-missed",
        "default; 1 start a prompt=9 new=3; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds=1.0",
        "rule Calls: CallAnswer",
    ),
]


@pytest.mark.parametrize(("mutant", "line", "what"), LINES)
def test_a_line_shows_the_bug_that_escaped(mutant: str, line: str, what: str) -> None:
    schedule = Schedule.parse(line)
    assert str(schedule).startswith(line.partition(";")[0])
    assert execute(schedule).failure is None
    with switched_on(mutant):
        failure = execute(schedule).failure
    assert failure is not None
    assert what in failure.text, failure


def test_a_death_frees_what_had_ended_in_the_order_of_the_ends() -> None:
    """Found by a search of the healthy engine: two grammars fall out of use at once, and one is forgotten first."""
    line = (
        "pp_size=4 chunked_prefill_size=7 max_total_tokens=128; 1 update; 1 start a prompt=1; "
        "1 start b prompt=49 new=1; 1 start c prompt=1 new=1; 1 start d prompt=17 new=1 regex=[p-z]{3}; "
        "1 start e prompt=1 regex=[a-z]{3}x[0-9]{5}; 19 pause mode=abort; 20 kill"
    )
    assert execute(Schedule.parse(line)).failure is None
