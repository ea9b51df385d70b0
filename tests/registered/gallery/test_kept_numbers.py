"""Incrementally kept numbers equal a fresh count, also in a restored engine.

Goal: a cursor, a heap or a running count that saves a walk never drifts from the state that it stands for. Method: each
mutant lets one drift; its schedule fails with it and passes without. Origin: mutants of the core that the search had
missed.
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
