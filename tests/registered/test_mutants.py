"""Every mutant of the gallery is caught by its test.

Goal: a test that no bug can fail is no test: each mutant's registered script passes on the healthy engine and fails,
with the mutant's signature, on the broken one. Method: the gallery's own runner in the sim tier; the flagship on real
processes as well. Origin: D11.
"""

import pytest

from ci.register import register_cpu_ci
from scripted import ScriptError
from scripted.gallery import MUTANTS, mutant_named
from scripted.single import find_test, show_mutant
from scripted.wire import ScriptOptions

register_cpu_ci(est_time=4, suite="base-cpu")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant):
    assert show_mutant(mutant, "sim")


def test_the_flagship_is_caught_in_every_tier(harness):
    flagship = mutant_named("flush-ignores-in-flight")
    test = find_test(flagship.test)
    with harness(test.config) as healthy:
        assert healthy.run(test.script, options=test.options).steps > 0
    with harness(test.config, mutant=flagship.name) as broken, pytest.raises(ScriptError) as caught:
        broken.run(test.script, options=ScriptOptions(check_every_step=False))
    assert flagship.signature in str(caught.value)


def test_names_are_unique():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert len(names) >= 20
