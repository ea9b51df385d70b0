"""A short load on real servers with every invariant on, a death in the middle of one, and the judges themselves.

The long one is ``python tests/load/load.py --clients 64 --seconds 60``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from auditing_gate import AuditingGate
from load import ENOUGH_ANSWERS, Load, run_death, run_load
from load_server import LoadedServer
from outcome import Outcome, Window, complaint_about, complaint_after_death
from stalls import KINDS, stalled_s
from workload import Ask, Behaviour, Workload

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError, StartupError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Generate, SamplingParams
from engine.core.scheduler.scheduler import Scheduler
from engine.server.launch.preload import PreloadedParent

CLIENTS = 24
LOAD_S = 2.0
DEATH_S = 1.0
# Tests judge no pace: `make soak` and the tables of benchmarks have it.
PATIENCE_S = 30.0
SEED = 1


def _load(parent: PreloadedParent, folder: Path, stages: int, seconds: float) -> Load:
    return Load(
        parent=parent,
        folder=folder,
        stages=stages,
        clients=CLIENTS,
        seconds=seconds,
        seed=SEED,
        death_bound_s=PATIENCE_S,
    )


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_nothing_is_lost_and_nothing_leaks_under_load(parent: PreloadedParent, tmp_path: Path, stages: int) -> None:
    """B05, B06, B11, C05, C07, A07: one right end for each request, a server at rest, nothing left of it."""
    result = run_load(_load(parent, tmp_path, stages, LOAD_S))
    assert result.complaints == []
    answered = [outcome for outcome in result.outcomes if outcome.finish_reasons]
    assert len(answered) > ENOUGH_ANSWERS
    assert {Behaviour.ABORT, Behaviour.DISCONNECT, Behaviour.BAD} <= {outcome.ask.behaviour for outcome in answered} | {
        outcome.ask.behaviour for outcome in result.outcomes if outcome.left or outcome.status == 400
    }
    assert result.stats["retractions"] > 0
    assert result.compared > 0


@pytest.mark.parametrize("stages", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_death_under_load_ends_every_stream_with_an_error(parent: PreloadedParent, tmp_path: Path, stages: int) -> None:
    """A06: with the name of the dead process, and with nothing left."""
    result = run_death(_load(parent, tmp_path, stages, DEATH_S))
    assert result.complaints == []
    assert any("process died" in outcome.error for outcome in result.outcomes)


def test_a_server_that_does_not_start_leaves_nothing(parent: PreloadedParent, tmp_path: Path) -> None:
    """What stays open is collected in the middle of a later test, which then fails for it."""
    with pytest.raises(StartupError, match="nowhere") as caught:
        LoadedServer(parent, tmp_path, model=str(tmp_path / "nowhere"))
    (server,) = {
        entry.locals["self"] for entry in caught.traceback if isinstance(entry.locals.get("self"), LoadedServer)
    }
    assert server.process.fileno() == -1
    assert "nowhere" in caught.value.__notes__[0], "it has the end of the server's log"


def test_the_gate_finds_a_leak() -> None:
    """The audits would be worth nothing if they passed over a page without an owner."""
    scheduler = Scheduler(Limits.of(EngineConfig(), EMBEDDED_FACTS))
    pipeline = SimpleNamespace(wake_sources=lambda: ())
    context = SimpleNamespace(
        scheduler=scheduler,
        inbox=None,
        pipeline=pipeline,
        control=None,
        clock=None,
        limits=scheduler.limits,
        settings=None,
        stuck_stage=None,
    )
    gate = AuditingGate(context)  # type: ignore[arg-type] - a gate that fails before it waits reads no more than this
    result = scheduler.step([Generate(rid="a", prompt_ids=(1, 2), sampling=SamplingParams())], 0.0)
    scheduler.memory.pages.allocate(1)
    with pytest.raises(IntegrityError, match="page"):
        gate.next_step(result)


def test_waits_for_a_core_and_for_a_disk_are_added_up(tmp_path: Path) -> None:
    """A death under load was judged by the wall, on a machine where every process waited for a core."""
    assert stalled_s(tmp_path) == 0
    for number, kind in enumerate(KINDS):
        lines = [f"{how} avg10=1.00 avg60=2.00 avg300=3.00 total={total}" for how, total in (("some", 5), ("full", 9))]
        (tmp_path / kind).write_text("\n".join(lines).replace("total=5", f"total={(number + 1) * 1_500_000}"))
    assert stalled_s(tmp_path) == 4.5


def test_a_workload_is_the_same_for_the_same_seed() -> None:
    def asks(seed: int, client: int) -> list[Ask]:
        workload = Workload(seed, client)
        return [workload.next_ask() for _ in range(50)]

    assert asks(3, 1) == asks(3, 1)
    assert asks(3, 1) != asks(4, 1)
    assert asks(3, 1) != asks(3, 2)
    assert {ask.behaviour for client in range(8) for ask in asks(3, client)} == set(Behaviour)


def ended(behaviour: Behaviour = Behaviour.STREAM, **seen: object) -> Outcome:
    """A stream of three tokens that ended as it should, but for what is given."""
    ask = Ask("r", behaviour, "/generate", b"", new_tokens=3, stop="z", fields={"stream": True})
    usual = {"started": 1.0, "first_event": 1.5, "ended": 2.0, "status": 200, "events": 3, "closed_in_order": True}
    usual |= {"texts": {0: "abc"}, "output_ids": [1, 2, 3], "completion_tokens": 3, "finish_reasons": ["length"]}
    return Outcome(ask, **(usual | seen))


def test_the_judge_is_content_with_what_is_right() -> None:
    window = Window(1.9, 2.1)
    assert complaint_about(ended(), []) is None
    assert complaint_about(ended(finish_reasons=["abort"], completion_tokens=1, output_ids=[1]), [window]) is None
    assert complaint_about(ended(Behaviour.BAD, events=0, status=400, error="no"), []) is None
    assert complaint_about(ended(status=429, error="max_queued_requests is 1", finish_reasons=[]), []) is None
    assert complaint_after_death(ended(error="the stage-1 process died: x"), "stage-1", died=1.0) is None


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (ended(finish_reasons=[]), "once a choice"),
        (ended(finish_reasons=["length", "length"]), "once a choice"),
        (ended(closed_in_order=False), "not closed"),
        (ended(finish_reasons=["abort"]), "without a cause"),
        (ended(cut="ReadError"), "cut off"),
        (ended(status=500, error="boom"), "only error"),
        (ended(output_ids=[1, 2]), "its ids are 2"),
        (ended(output_ids=[1, 2], completion_tokens=2), "must have 3 tokens"),
        (ended(texts={0: "xyz"}), "stop string"),
        (ended(finish_reasons=["stop"]), "not by what"),
        (ended(twin_ended=0.9, twin_status=200), "twin must get 409"),
        (ended(Behaviour.BAD), "must get 400"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_judge_complains(outcome: Outcome, complaint: str) -> None:
    assert complaint in str(complaint_about(outcome, [Window(5.0, 6.0)]))


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (ended(ended=9.0), "lived on"),
        (ended(finish_reasons=[], closed_in_order=False), "in silence"),
        (ended(cut="ReadError"), "without an error"),
        (ended(error="something else"), "does not name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_judge_of_a_death_complains(outcome: Outcome, complaint: str) -> None:
    assert complaint in str(complaint_after_death(outcome, "stage-1", died=1.0))
