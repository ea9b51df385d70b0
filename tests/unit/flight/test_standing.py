"""Stuck requests and their causes: each kind of wait, its holders, and the chain to its root."""

from __future__ import annotations

from scripted.sdk.capabilities import Limits
from scripted.sdk.flight.standing import Hint, Stand, Watch, report_of
from scripted.sdk.messages import Add, Batch, Pause, Share, Stepped

LIMITS = Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=2, context_tokens=32, depth=2)


def watch(*adds: tuple[str, int]) -> Watch:
    seen = Watch(LIMITS)
    events = [Add(rid=rid, prompt_ids=(1,) * prompt, max_new_tokens=8) for rid, prompt in adds]
    seen.follow(events, Stepped(), 1)
    return seen


def launch(seen: Watch, step: int, batch: int, **counts: int) -> None:
    shares = [Share(rid=rid, start=0, count=count, block_ids=(0, 1, 2)) for rid, count in counts.items()]
    seen.follow((), Stepped(microbatch=Batch(id=batch, shares=tuple(shares))), step)


def stand(seen: Watch, rid: str, free: int = 0, **hints: Hint) -> Stand:
    return next(one for one in seen.stands(99, 16, hints, free) if one.rid == rid)


def test_each_kind_of_wait_is_said() -> None:
    seen = watch(("a", 8), ("b", 8), ("c", 8))
    launch(seen, 2, 1, a=8)
    assert stand(seen, "a").text == "the result of batch 1, launched in step 2"
    assert stand(seen, "b", free=1).text == "2 blocks: 1 free, 3 held by a"
    assert stand(seen, "c", free=8).text == "its turn behind b"
    assert stand(seen, "b", free=8).kind == "nothing"
    launch(seen, 3, 2, b=8)
    assert stand(seen, "c", free=8).text == "a seat, of 2 held by a, b"
    seen.land(1)
    seen.land(2)
    assert stand(seen, "a").kind == "nothing"
    seen.follow([Pause(call_id="1", mode="keep")], Stepped(), 4)
    assert stand(seen, "a").text == "the end of the pause 'keep'"
    assert stand(seen, "a", a=Hint("grammar", "its grammar")).kind == "grammar"


def test_who_is_left_out_of_a_full_batch_waits_for_the_budget() -> None:
    seen = watch(("a", 24), ("b", 24))
    launch(seen, 2, 1, a=8, b=8)
    seen.land(1)
    launch(seen, 3, 2, a=16)
    waits = stand(seen, "b")
    assert (waits.kind, waits.text, waits.holders) == ("budget", "the budget, used by a", ("a",))


def test_a_chain_ends_at_its_root() -> None:
    """c waits for a seat that a has, and a for a load that does not come."""
    seen = watch(("a", 8), ("b", 8), ("c", 8))
    launch(seen, 2, 1, a=8, b=8)
    seen.land(1)
    waits = stand(seen, "c", free=4, a=Hint("load", "a load from outside"))
    assert waits.holders == ("a", "b")
    assert waits.chain == ("a: running since step 2, waits for a load from outside",)
    assert waits.root == "a waits for a load from outside"


def test_a_circle_is_said() -> None:
    seen = watch(("a", 8), ("b", 8))
    launch(seen, 2, 1, a=8, b=8)
    seen.land(1)
    hints = {"a": Hint("blocks", "a block of b", ("b",)), "b": Hint("blocks", "a block of a", ("a",))}
    assert stand(seen, "a", **hints).root == "b waits for a block of a, in a circle"


def test_a_report_begins_with_what_most_requests_wait_for() -> None:
    seen = watch(("a", 8), ("b", 8), ("c", 8))
    launch(seen, 2, 1, a=8)
    first, *_ = report_of(seen.stands(99, 16, {}, 0))
    assert first == "3 requests stand still (b, c, a): a waits for the result of batch 1, launched in step 2"
    assert list(report_of(())) == ["no request is stuck: each one has moved in the last steps"]


def test_who_has_moved_in_the_last_steps_does_not_stand() -> None:
    seen = watch(("a", 8), ("b", 8))
    launch(seen, 90, 1, a=8)
    assert [one.rid for one in seen.stands(99, 16, {}, 0)] == ["b"]
    assert [one.rid for one in seen.stands(106, 16, {}, 0)] == ["b", "a"]
