"""Numbers that are kept instead of being counted are as they would be counted, also in an engine that was restored.

Goal: what is kept to save a walk, such as a cursor, a heap or a count of what is under way, never drifts from what it
stands for. Method: each mutant lets one drift; its schedule fails with it and passes without. Origin: mutants of the
core that the search had missed.
"""

import pytest
from scripted_lockstep.mutants import KEPT_NUMBERS

from ci.register import register_cpu_ci
from scripted.core.schedule import Schedule
from scripted.search.execution import execute_recorded

register_cpu_ci(est_time=2, suite="base-cpu")


@pytest.mark.parametrize("mutant", KEPT_NUMBERS, ids=lambda mutant: mutant.name)
def test_a_number_that_drifts_is_noticed(mutant):
    schedule = Schedule.parse(mutant.schedule)
    assert execute_recorded(schedule).failure is None
    with mutant.switched_on():
        failure = execute_recorded(schedule).failure
    assert failure is not None
    assert mutant.signature in failure.text
