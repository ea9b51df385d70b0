"""``t`` belongs to one run of one script."""

from __future__ import annotations

import pytest

from engine import EngineConfig
from scripted import BadCall, ScriptDefinitionError, ScriptedSim, ScriptOptions
from scripted.script.decorator import scripted


def test_t_of_an_earlier_script_takes_no_verbs() -> None:
    kept = []

    def keeps(t):
        kept.append(t)
        t.sometimes("window", True)
        yield

    def uses(t):
        yield
        kept[0].start_req(prompt_len=3)

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(keeps)
        for use in (lambda: kept[0].flush_cache(), lambda: kept[0].state, lambda: kept[0].scheduler):
            with pytest.raises(BadCall, match="a script that has ended"):
                use()
        assert kept[0].reached == {"window": 1}
        with pytest.raises(Exception, match="a script that has ended"):
            sim.run(uses)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "2"])
def test_time_limits_are_numbers_of_seconds(seconds: object) -> None:
    with pytest.raises(ScriptDefinitionError, match="timeout_s must be a number of seconds > 0"):
        ScriptOptions(timeout_s=seconds)
    with pytest.raises(ScriptDefinitionError, match="timeout_s must be"):
        scripted(EngineConfig(), timeout_s=seconds)


@pytest.mark.parametrize("names", ["window", [""], [3]])
def test_must_reach_is_a_list_of_names(names: object) -> None:
    with pytest.raises(ScriptDefinitionError, match="must_reach is a list of non-empty names"):
        scripted(EngineConfig(), must_reach=names)


def test_a_recursion_is_reported_in_a_page() -> None:
    def recurses(t):
        def deeper():
            deeper()

        yield
        deeper()

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(Exception, match="RecursionError") as caught:
        sim.run(recurses)
    assert len(str(caught.value).splitlines()) < 100
    assert "frames like these" in str(caught.value)
