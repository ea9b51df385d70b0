"""The flagship race, and what a network does in it, on stages that joined over TCP.

Goal: the window of the flush race opens and holds on placed stages, with a slow link too; a link that is cut in it can
be healed; a partition and the loss of a node end every stream with an error that names the process, whose cause names
the node. Method: the flagship's prompt of two chunks on four stages whose links go through a relay; ``ray-cpu`` runs
the same scripts on stages that Ray placed. Origin: stages on several machines; G01, G23; A06, B15. Mutants:
flush-ignores-in-flight, death-blames-another-stage.
"""

import re

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import ScriptError, ScriptOptions, scripted

register_cpu_ci(est_time=20, suite="base-cpu")
register_cpu_ci(est_time=160, suite="ray-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "the last chunk is in flight and every queue is empty"
# The names of joined stages' machines in the harness, and of Ray's nodes.
NODE = re.compile(r"on (machine-\d|node [0-9a-f]{12}): ")
SIGNATURE = "This request holds the node from another tree"


@scripted(PP4, placement="join", must_reach=[WINDOW])
def test_flush_in_the_window_on_placed_stages(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    yield from _reach_the_window(t, r)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert "in_flight=" in flush.text
    assert len(r.output_ids) == 2


def flush_in_the_window(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    yield from _reach_the_window(t, r)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400


def test_the_race_is_caught_on_placed_stages(harness):
    """B15, D11: the bug shows over TCP as it does over Unix sockets."""
    mutant = "flush-ignores-in-flight"
    with harness(PP4, mutant=mutant, placement="join") as broken, pytest.raises(ScriptError, match=SIGNATURE):
        broken.run(flush_in_the_window, options=ScriptOptions(check_every_step=False))


@scripted(PP4, tiers=("server",), placement="join", must_reach=[WINDOW])
def test_a_slow_link_changes_no_token(t):
    """The steps are those of a fast link; a cache that is flushed in between makes both requests compute everything."""
    fast = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=4)
    yield from t.run_until_finished(fast)
    flush = t.flush_cache()
    yield
    assert flush.status == 200
    steps = t.state.step
    t.slow_link(2, delay_s=0.05)
    slow = t.start_req(prompt_ids=fast.prompt_ids, max_new_tokens=4)
    yield from _reach_the_window(t, slow)
    refused = t.flush_cache()
    yield from t.run_until_finished(slow)
    assert refused.status == 400
    assert slow.output_ids == fast.output_ids
    assert t.state.step - steps < 2 * steps


@scripted(PP4, tiers=("server",), placement="join", must_reach=[WINDOW])
def test_a_link_that_was_cut_and_healed_loses_nothing(t):
    """The window stays open for as long as the link is cut, and a flush is refused all the while."""
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(r, 1)
    t.cut_link(1)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    flush = t.flush_cache()
    for _ in range(PP4.depth):
        yield
    t.sometimes(WINDOW, r.chunks_done == 2 and not r.output_ids and t.state.in_flight)
    assert flush.status == 400
    t.heal_link(1)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 3


@scripted(PP4, tiers=("server",), placement="join", must_reach=[WINDOW])
def test_a_partition_in_the_window_ends_every_stream(t):
    """A06: connections stay open, so only the heartbeats can tell."""
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=8)
    yield from t.advance_to_nth_chunk(r, 1)
    waits = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=8)
    t.cut_link(2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes(WINDOW, r.chunks_done == 2 and not r.output_ids)
    t.await_loss(2)
    yield from t.run_until_all_finished([r, waits], max_steps=2)
    _check_ends([r, waits], "stage-2")


@scripted(PP4, tiers=("server",), placement="join", must_reach=[WINDOW])
def test_a_lost_node_in_the_window_ends_every_stream(t):
    """A06: stage, agent and connections are gone at once."""
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=8)
    yield from t.advance_to_nth_chunk(r, 1)
    waits = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=8)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes(WINDOW, r.chunks_done == 2 and not r.output_ids)
    t.lose_node(1)
    yield from t.run_until_all_finished([r, waits], max_steps=2)
    _check_ends([r, waits], "stage-1")


@scripted(PP4, placement="join", must_reach=[WINDOW])
def test_a_stage_killed_in_the_window_is_named(t):
    """A06: by its agent, which lives on."""
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=8)
    yield from _reach_the_window(t, r)
    t.kill_stage(0)
    yield from t.run_until_finished(r, max_steps=2)
    said = r.client.error or ""
    assert "stage-0" in said, f"{said!r} does not name the stage that was killed"


def _reach_the_window(t, r):
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes(WINDOW, r.chunks_done == 2 and not r.output_ids)


def _check_ends(requests, process):
    for r in requests:
        said = r.client.error or ""
        assert f"the {process} process died" in said, f"{said!r} does not name the process that was lost, {process}"
        # The cause names the machine, and so do clients' errors; its address is for the operator alone.
        assert NODE.search(r.error), f"{r.error!r} does not name the node"
        assert NODE.search(said), f"{said!r} does not name the node"
        assert "127.0.0." not in said
        assert r.finish_reason == "error"
        assert r.client.terminal_answers == 1
