"""Scripts of fleets on real engines: the same numbers as in sim, the same every time, and nothing that is left of them.

What a model says is forced by a bias, so that every number follows from the schedulers and the links alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import BadCall, ScriptedSim, ScriptFailed
from tests.unit.server.fleets import until
from tests.unit.server.test_tiers_agree import differences, numbers_of

SMALL = EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=256)
NAMES = ("p0", "p1", "d0", "d1")
SEEDS = (1, 10)


def scenario(t: Any, seed: int, file: str) -> Any:
    """Requests, aborts, pauses, links and deaths of chance between steps; each step's numbers are noted."""
    chance, fleet, lines = random.Random(seed), t.engines(*NAMES), list[str]()
    handles: dict[str, list[Any]] = {name: [] for name in NAMES}
    for number in range(chance.randint(25, 45)):
        _do_something(t, fleet, chance, number, handles)
        yield
        lines.append(json.dumps(_numbers(fleet, handles)))
    for name in NAMES:
        fleet[name].continue_generation()
        for other in set(NAMES) - {name}:
            fleet.release(name, other)
    # What a cut has lost is waited for.
    t.clock.advance(30)
    for name in NAMES:
        yield from fleet[name].run_until_idle()
    t.smoke()
    lines.append(json.dumps(_numbers(fleet, handles)))
    Path(file).write_text("\n".join(lines))


def _do_something(t: Any, fleet: Any, chance: random.Random, number: int, handles: dict[str, list[Any]]) -> None:
    what = chance.choices(
        ["start", "abort", "pause", "go on", "hold", "release", "slow", "cut", "time", "kill", "leave", "nothing"],
        [9, 2, 1, 2, 3, 4, 1, 1, 1, 0.6, 1, 9],
    )[0]
    decode, prefill = chance.choice(("d0", "d1")), chance.choice(("p0", "p1"))
    ends = (decode, prefill) if chance.random() < 0.5 else (prefill, decode)
    live = [one for one in handles[decode] if not one.finished and not one.client.dropped]
    if number == 0 or what == "start":
        asked = {"prompt_len": chance.randint(1, 60), "prompt_seed": chance.randrange(3)}
        forced = {"logit_bias": {65 + chance.randrange(9): 100.0}, "max_new_tokens": chance.randint(1, 9)}
        handles[decode].append(fleet[decode].start_req(**asked, **forced))
    elif what == "abort" and live:
        fleet[decode].abort(chance.choice(live))
    elif what == "leave" and live:
        fleet[decode].disconnect(chance.choice(live))
    elif what == "pause":
        fleet[chance.choice(NAMES)].pause_generation(chance.choice(["in_place", "retract", "abort"]))
    elif what == "go on":
        fleet[chance.choice(NAMES)].continue_generation()
    elif what == "hold":
        (fleet.hold if chance.random() < 0.5 else fleet.hold_pages)(*ends)
    elif what == "release":
        fleet.release(*ends)
    elif what == "slow":
        fleet.slow(*ends, chance.randrange(4))
    elif what == "cut":
        fleet.cut(*ends)
        fleet.heal(*ends)
    elif what == "time":
        t.clock.advance(chance.choice([1, 30]))
    elif what == "kill":
        name = chance.choice(NAMES)
        fleet.kill(name)
        fleet.restart(name)
        handles[name] = []


def _numbers(fleet: Any, handles: dict[str, list[Any]]) -> dict[str, Any]:
    """Read the numbers of all engines and their links that a script can see.

    Real stages write pages as they come, simulated ones all of a transfer at its end.
    """
    read: dict[str, Any] = {name: numbers_of(fleet[name], handles[name]) for name in NAMES}
    for numbers in read.values():
        for stage in numbers["stages"]:
            del stage["slots_written"]
    ways = [(one, other) for one in NAMES for other in NAMES if one != other]
    read["links"] = {
        f"{one} {other}": [type(said).__name__ for said in fleet.on_its_way(one, other)] for one, other in ways
    }
    return read


def fails_in_the_middle(t: Any) -> Any:
    fleet = t.engines("p0", "d0")
    fleet.hold("d0", "p0")
    fleet["d0"].start_req(prompt_len=50)
    yield from fleet["d0"].run_until(lambda: len(fleet.on_its_way("d0", "p0")) == 1)
    assert t.state.step == -1


def kills_one_by_hand(t: Any) -> Any:
    fleet = t.engines("p0", "d0")
    r = fleet["d0"].start_req(prompt_len=50)
    yield
    os.kill(fleet["p0"].run.world.pid, signal.SIGKILL)
    yield from fleet["d0"].run_until_finished(r)


def kills_one(t: Any) -> Any:
    fleet = t.engines("p0", "d0")
    r = fleet["d0"].start_req(prompt_len=50)
    yield
    fleet.kill("d0")
    yield
    assert r.client.closed
    assert "the connection broke" in r.client.error


def passes(t: Any) -> Any:
    fleet = t.engines("p0", "d0")
    r = fleet["d0"].start_req(prompt_len=50)
    yield from fleet["d0"].run_until_finished(r)
    assert r.finish_reason == "length"
    assert fleet["p0"].engine_stats().requests_finished == 1


def says_what_it_cannot(t: Any) -> Any:
    fleet = t.engines("p0", "d0")
    yield
    for wrong in (
        fleet["d0"].kill_scheduler,
        lambda: fleet["d0"].cut_link(0),
        lambda: fleet["p0"].prefill(prompt_len=9),
    ):
        try:
            wrong()
        except BadCall as exc:
            print(f"REFUSED {exc}")  # noqa: T201 - what the test looks for
    t.smoke()


@pytest.fixture(scope="module")
def server(parent: PreloadedParent) -> Any:
    with EngineServer.start(SMALL, parent=parent) as started:
        yield started


@pytest.mark.parametrize("seed", thinned(SEEDS, one_in=2))
def test_every_number_is_the_same_in_both_tiers_and_every_time(seed: int, server: Any, tmp_path: Path) -> None:
    told = []
    with ScriptedSim.start(SMALL) as simulated:
        for number, engine in enumerate((simulated, server, server)):
            file = tmp_path / str(number)
            engine.run(scenario, seed, str(file))
            told.append([json.loads(line) for line in file.read_text().splitlines()])
    for other in told[1:]:
        for step, (numbers, found) in enumerate(zip_longest(told[0], other)):
            different = "\n".join(differences(numbers, found))
            assert not different, f"step {step}: simulated, and on real engines:\n{different}"


@pytest.mark.parametrize(
    ("hurts", "says"),
    [(fails_in_the_middle, "assert t.state.step == -1"), (kills_one_by_hand, "engine p0 died"), (kills_one, None)],
)
def test_the_next_script_has_a_clean_fleet(hurts: Any, says: str | None, server: Any, parent: PreloadedParent) -> None:
    server.run(passes)
    before = _engines_of(parent).keys()
    if says is None:
        server.run(hurts)
    else:
        with pytest.raises(ScriptFailed) as failed:
            server.run(hurts)
        assert says in failed.value.report.render()
        # Killed processes are gone in a moment.
        until(lambda: len(_engines_of(parent)) == 1, "an engine that was hurt lives on")
    assert server.run(passes).compared == 1
    until(lambda: len(_engines_of(parent)) == 3, "a server for the script, and one for each engine of its fleet")
    after = _engines_of(parent).keys()
    assert len(after & before) == (1 if says else 2), "an engine was hurt and used again"


def test_nothing_is_left_of_a_fleet(parent: PreloadedParent) -> None:
    before = _engines_of(parent)
    with EngineServer.start(SMALL, parent=parent) as started:
        started.run(passes)
        there = _engines_of(parent)
        folders = {folder for pid, folder in there.items() if pid not in before}
        assert len(folders) == 3
    until(lambda: _engines_of(parent) == before, "processes are left")
    assert not [folder for folder in folders if Path(folder).exists()]


def test_what_real_engines_cannot_do_is_refused_by_name(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.run(says_what_it_cannot)
    said = capsys.readouterr().out
    assert said.count("REFUSED") == 3
    for words in ("fleet.kill('d0') kills an engine", "fleet.hold, slow, cut and heal", "not for one of t.engines"):
        assert words in said


def _engines_of(parent: PreloadedParent) -> dict[int, str]:
    """The folders of the servers that run, by their supervisors."""
    found = {}
    for process in psutil.Process(parent.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends in this moment
            if process.status() != psutil.STATUS_ZOMBIE:
                names = [file.path for file in process.open_files() if file.path.endswith("server.log")]
                found[process.pid] = str(Path(names[0]).parent) if names else ""
    return found
