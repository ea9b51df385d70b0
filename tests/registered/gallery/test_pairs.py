"""Bugs that no single event shows: each is red with its pair, and green with every single event.

Goal: a bug that needs two added events is shown by two and not by one. Method: each mutant's own schedule; the schedule
without either of its last two events; and every single event of every kind at every step of its workload. Origin: the
search's own measurement, in which no bug of the gallery needs two.
"""

import pytest
from scripted_lockstep.mutants import PAIRS
from thinned import thinned

from ci.register import register_cpu_ci
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import execute
from scripted.search.units import SearchPlan

register_cpu_ci(est_time=14, suite="base-cpu")


@pytest.mark.parametrize("mutant", thinned(PAIRS, one_in=3), ids=lambda mutant: mutant.name)
def test_a_pair_shows_what_no_single_event_does(mutant):
    schedule = Schedule.parse(mutant.schedule)
    *workload, one, other = schedule.placed
    assert execute(schedule).failure is None
    with mutant.switched_on():
        failure = execute(schedule).failure
        assert failure is not None
        assert mutant.signature in failure.text
        for single in (one, other):
            assert execute(schedule.of_placed((*workload, single))).failure is None
    plan = SearchPlan(targets=(str(schedule.of_placed(workload)),), mutant=mutant.name)
    report = Campaign(plan).run()
    assert report.complete
    assert not report.findings


def test_there_are_twenty_of_them():
    assert len(PAIRS) >= 20
