"""The attack in its short form: seconds of everything that ``python tests/load/attack.py`` does for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
import victim
from attack import VICTIMS, AttackPlan, run_attack, run_deaths
from bad_bodies import nearly_right
from thinned import thinned

from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import parse_body
from engine.frontend.schema.operator_routes import PauseBody
from engine.server.launch.preload import PreloadedParent

SHORT = AttackPlan(
    bodies=100,
    large_bytes=2**19,
    prompt_tokens=800,
    choices=4,
    slow_clients=60,
    leaving_clients=10,
    leaves=2,
    soak_requests=120,
    judges_pace=False,
)


@pytest.mark.nightly
def test_a_server_holds_under_attack(parent: PreloadedParent, tmp_path: Path) -> None:
    """C01, C05, C07, A05: no 500, no long answer, no silence for the others, a short log, an end in order."""
    result = run_attack(parent, tmp_path, SHORT)
    assert result.complaints == []
    assert result.statuses[400] > SHORT.bodies // 3
    assert {answer.status for answer in result.large_answers.values()} == {200, 400}
    # Each kind of refusal was met, so its part of the attack reached its place.
    assert {400, 403, 405, 413} <= set(result.statuses), result.statuses
    # How many are too many at once, and how many too slow, is a matter of pace; none of them stays.
    assert sum(result.slow_ends.values()) == SHORT.slow_clients
    assert set(result.slow_ends) <= {0, 408, 503}, result.slow_ends
    assert result.slow_ends[408] + result.slow_ends[503]


@pytest.mark.parametrize(
    ("stages", "name"), thinned([(stages, name) for stages, names in VICTIMS.items() for name in names], one_in=4)
)
def test_every_death_is_told_to_its_clients(parent: PreloadedParent, tmp_path: Path, stages: int, name: str) -> None:
    """A06: also that of the process that forks the readers of long bodies."""
    result = run_deaths(parent, tmp_path, {stages: [name]})
    assert result.complaints == []


def test_no_damaged_body_pauses_the_engine() -> None:
    """Later requests would wait forever: the attack would be on itself."""
    pauses = [body for seed in range(20) for path, body in nearly_right(seed, 500) if path == "/pause_generation"]
    assert len(pauses) > 500
    for body in pauses:
        with pytest.raises(ApiError):
            parse_body(PauseBody, body)


def test_an_attack_is_the_same_for_the_same_seed() -> None:
    assert list(nearly_right(3, 40)) == list(nearly_right(3, 40))
    assert list(nearly_right(3, 40)) != list(nearly_right(4, 40))


def test_a_wait_between_two_readings_is_taken_from_its_own_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim that loses its core between clock and account had this wait, 172 ms, count as the server's next gap."""
    clock, account = iter((1.0, 1.2)), iter((5.0, 5.17, 5.17))
    monkeypatch.setattr(victim.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(victim, "_busy_s", lambda: next(account))
    assert victim._moment() == (1.2, 5.17)
