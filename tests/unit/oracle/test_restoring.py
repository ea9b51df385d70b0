"""The check of checkpoints: an engine that goes on from one is as it was, and what is lost on the way is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scripted_lockstep.oracle.restoring import check_checkpoint

from engine.core.config import EngineConfig
from engine.core.memory import Node, RadixTree, SlidingWindowPool
from engine.core.messages import Generate, SamplingParams
from engine.core.scheduler import Scheduler, admission
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation

PROMPTS = "1 start a prompt=70 new=2; 9 start b prompt=70 shared=40 tail=1 new=2; 18 start c prompt=20 seed=2"
PLAIN = f"page_size=4 chunked_prefill_size=16 max_total_tokens=256; {PROMPTS}"
WINDOWED = f"model=embedded-window chunked_prefill_size=16 max_total_tokens=512; {PROMPTS}"


class Rest:
    """The scheduler when everything has ended and the cache is still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        self.schedulers: list[Scheduler] = []
        gate = Run(Schedule.parse(text))
        monkeypatch.setattr(gate.oracle, "at_rest", self._look)
        gate.adapter.drive(gate)
        self.text = text

    def _look(self, machine: Any) -> None:
        check_checkpoint(machine.scheduler)
        self.schedulers.append(machine.scheduler)


@pytest.mark.parametrize("text", [PLAIN, WINDOWED])
def test_a_healthy_engine_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert len(Rest(monkeypatch, text).schedulers) == 1


def _become_without_offers(tree: RadixTree, root: Node, nodes: Sequence[Node], *, next_id: int, tick: int) -> None:
    tree.generation, tree.next_id, tree.tick, tree.root = root.generation, next_id, tick, root
    tree.node_count = len(nodes)


def _become_nothing(window: SlidingWindowPool, window_pages: Sequence[tuple[int, int]]) -> None:
    del window, window_pages


_become = RadixTree.become


def _become_with_the_newest_first(tree: RadixTree, *args: Any, **more: Any) -> None:
    _become(tree, *args, **more)
    tree._heap.sort(reverse=True)


def _become_of_another_tick(tree: RadixTree, *args: Any, tick: int, **more: Any) -> None:
    _become(tree, *args, tick=tick + 1, **more)


@pytest.mark.parametrize(
    ("owner", "replacement", "text", "said"),
    [
        (RadixTree, _become_without_offers, PLAIN, "but it is not offered for eviction"),
        (RadixTree, _become_with_the_newest_first, PLAIN, "but is not evicted"),
        (RadixTree, _become_of_another_tick, PLAIN, "is restored to what has the checkpoint"),
        (SlidingWindowPool, _become_nothing, WINDOWED, "is restored to what has the checkpoint"),
    ],
)
def test_what_is_lost_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: type, replacement: Any, text: str, said: str
) -> None:
    monkeypatch.setattr(owner, "become", replacement)
    with pytest.raises(Violation, match=said):
        Rest(monkeypatch, text)


def test_a_busy_engine_has_no_checkpoint_and_is_left_alone() -> None:
    scheduler = Scheduler(Schedule.parse("default").adapter.limits_of(EngineConfig()))
    sampling = SamplingParams(max_new_tokens=2)
    scheduler.step([Generate(rid="a", prompt_ids=(1, 2, 3), sampling=sampling)], 0.0)
    before = scheduler.stats()
    check_checkpoint(scheduler, is_due=False)
    assert scheduler.stats() == before


def test_a_prefix_of_a_salt_is_hit_with_that_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(rest: Rest, machine: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(admission, "salt_key", lambda _: 0)
            check_checkpoint(machine.scheduler)

    monkeypatch.setattr(Rest, "_look", look)
    with pytest.raises(Violation, match="40 cached tokens, 40 are found in what was restored, and 0 are hit"):
        Rest(monkeypatch, f"{PLAIN}; 27 start d prompt=40 seed=3 new=2 salt=u")


def test_a_checkpoint_that_is_due_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "is_at_rest", property(lambda _: False))
    with pytest.raises(Violation, match="a checkpoint is due: True, and the engine at rest makes None"):
        Rest(monkeypatch, PLAIN)
