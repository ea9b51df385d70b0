"""Bugs that need two added events are found: exhaustively in pairs, from the workload without them.

Goal: `--events 2` finds what one event cannot show. Method: the search by itself, up to its first failure. Origin:
that of the pairs themselves.
"""

import pytest
from scripted_lockstep.mutants import PAIRS

from ci.register import register_cpu_ci
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.units import SearchPlan

register_cpu_ci(est_time=50, suite="base-cpu", nightly=True)


@pytest.mark.parametrize("mutant", PAIRS, ids=lambda mutant: mutant.name)
def test_two_events_at_a_time_find_it(mutant):
    schedule = Schedule.parse(mutant.schedule)
    workload = str(schedule.of_placed(schedule.placed[:-2]))
    plan = SearchPlan(targets=(workload,), mutant=mutant.name, events=2, schedules=6_000, stop_at_first=True)
    (finding,) = Campaign(plan).run().findings.values()
    assert len(finding.extra) == 2
