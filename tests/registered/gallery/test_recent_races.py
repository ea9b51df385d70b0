"""Races that other engines' trackers reported in 2026: each is shown by its schedule, and by nothing without its bug.

Goal: a race that is new to the gallery is found by the checks of a search. Method: each mutant's own schedule,
with all checks and, but for those that break a rule of order alone, without the executable specification, which no
other scheduler has. Origin: the trackers of vLLM, SGLang, TensorRT-LLM, tt-xla, omlx, llama.cpp, Dynamo and others.
"""

import pytest
from scripted_lockstep.mutants import RECENT

from ci.register import register_cpu_ci
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

register_cpu_ci(est_time=2, suite="base-cpu")

# These bugs cost work, time or weights, which the simulation lacks, but no token and no page is wrong.
RULES_OF_ORDER = {
    "who-is-behind-a-victim-is-skipped",
    "result-of-the-retracted-is-dropped",
    "gap-bound-measures-what-it-made-small",
    "equals-preempt-each-other",
    "a-hit-on-its-way-puts-all-of-it-back",
    "the-last-sleep-counts",
    "guesses-that-nobody-made",
}


@pytest.mark.parametrize("mutant", RECENT, ids=lambda mutant: mutant.name)
def test_a_recent_race_is_shown(mutant):
    schedule = Schedule.parse(mutant.schedule)
    assert execute(schedule).failure is None
    with mutant.switched_on():
        failure, general = execute(schedule).failure, execute(schedule, leave_out=True).failure
    assert failure is not None
    assert mutant.signature in failure.text
    assert (general is None) == (mutant.name in RULES_OF_ORDER), "whether the specification alone shows it"
