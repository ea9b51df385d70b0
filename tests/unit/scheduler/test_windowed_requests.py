"""Window layers in the scheduler: long requests in small window pools, parked ones, what is in flight, and limits."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, alone, generate, limits_of, prompt

from engine.core.errors import ConfigError, IntegrityError
from engine.core.memory import KVMemory
from engine.core.messages import ContinueGeneration, PauseGeneration, PauseMode
from engine.core.recording.checkpoint import checkpoint_of, restored
from engine.core.scheduler.window_layers import WindowLayers

SMALL = {"page_size": 4, "chunked_prefill_size": 16, "window": 12, "max_total_tokens": 1024}
LONG = generate("long", prompt(300), 60)


def test_request_much_longer_than_the_window_pool_says_what_it_always_says() -> None:
    """B18: 359 tokens of KV through a window pool of 32."""
    engine = SimulatedEngine(**SMALL, max_window_tokens=32)
    assert engine.limits.window_pages == engine.limits.row_window_pages == 8
    assert engine.run(LONG) == [alone(LONG)]
    assert not engine.pipeline.corruptions


@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("after", range(5))
def test_parked_chunked_request_neither_leaks_nor_frees_twice(mode: PauseMode, after: int) -> None:
    """B18, B11: paused with up to six chunks in flight, after some of them are back; audited in every step."""
    engine = SimulatedEngine(**SMALL, pp_size=4, pp_async_depth=2)
    engine.fill_until(LONG, chunked=True)
    for _ in range(after):
        engine.step(completions=1)
    engine.step(PauseGeneration(call_id="pause", mode=mode))
    for _ in range(engine.limits.depth):
        engine.step(completions=1)
    windows = engine.scheduler.memory.sliding_window
    assert windows is not None
    request = engine.scheduler.find_request("long")
    if mode is PauseMode.IN_PLACE:
        assert request is not None
        assert request.lease is not None
        assert request.lease.window_start == windows.first_page(request.planned_tokens) > 0
    else:
        assert windows.available_pages == windows.pages.total
    engine.drain(ContinueGeneration(call_id="go"))
    assert windows.pages.held == 0
    assert windows.available_pages == windows.pages.total
    if mode is not PauseMode.ABORT:
        assert engine.life("long").tokens == alone(LONG)


def test_window_page_that_is_given_back_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B18: giving back what a microbatch in flight still sees breaks the books in that very step."""
    slide = KVMemory.slide
    ahead = SMALL["chunked_prefill_size"]
    monkeypatch.setattr(KVMemory, "slide", lambda memory, lease, position: slide(memory, lease, position + ahead))
    engine = SimulatedEngine(**SMALL, pp_size=4)
    engine.fill_until(LONG, chunked=True)
    with pytest.raises(IntegrityError, match="are released"):
        engine.step(completions=1)


def test_window_page_of_another_changes_what_a_request_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """B18: the simulated pipeline reads through the window table."""
    slide = KVMemory.slide
    monkeypatch.setattr(KVMemory, "slide", lambda memory, lease, position: slide(memory, lease, position + 12))
    monkeypatch.setattr(WindowLayers, "check", lambda *_: None)
    engine = SimulatedEngine(**SMALL, max_window_tokens=32)
    engine.run(LONG, generate("other", prompt(200, 1), 60))
    assert any("window page" in corruption for corruption in engine.pipeline.corruptions)


def test_decodes_retract_each_other_when_only_window_pages_run_out() -> None:
    """A window layer needs and keeps the last tokens alone (B18).

    A request that was retracted goes on as if undisturbed (B06).
    """
    engine = SimulatedEngine(**SMALL, max_window_tokens=32, mixed_chunk=True)
    messages = [generate(f"r{number}", prompt(15, number), 40) for number in range(4)]
    tokens = engine.run(*messages)
    assert tokens == [alone(message) for message in messages]
    assert engine.scheduler.memory.tree.node_count


def test_second_request_shares_a_prefix_and_says_the_same() -> None:
    """B18, B04: also where the window pages of the prefix are gone and it is computed again."""
    engine = SimulatedEngine(**SMALL, max_window_tokens=32)
    stem = prompt(80)
    first, second = generate("a", (*stem, 1, 2, 3)), generate("b", (*stem, 4, 5, 6))
    assert engine.run(first, generate("between", prompt(90, 5)), second)[::2] == [alone(first), alone(second)]
    assert engine.run(generate("again", second.prompt_ids)) == [alone(second)]
    assert engine.scheduler.counters.cached_tokens > 0
    assert not engine.pipeline.corruptions


def test_checkpoint_of_a_window_model_remembers_which_window_pages_are_left() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    engine = SimulatedEngine(**SMALL, max_window_tokens=40)
    engine.run(LONG, generate("other", prompt(50, 3)))
    checkpoint = checkpoint_of(engine.scheduler)
    assert checkpoint is not None
    again = restored(engine.limits, checkpoint)
    windows = engine.scheduler.memory.sliding_window
    assert windows is not None
    assert windows.pages.cached > 0
    assert checkpoint_of(again) == checkpoint


def test_window_pool_is_as_large_as_can_be_of_use_and_never_larger_than_the_page_pool() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    limits = limits_of(window=12, page_size=4, chunked_prefill_size=16, max_running_requests=3, pp_size=2)
    assert limits.window_pages == limits.most_window_pages == 3 * 4 + 2 * 5
    assert limits_of(window=12, page_size=4, max_total_tokens=40).window_pages == 10
    assert limits_of(page_size=4).window_pages == 0


def test_window_pool_that_is_too_small_for_one_request_is_refused_with_numbers() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    with pytest.raises(ConfigError, match=r"max_window_tokens must be >= 32, .* 12 tokens and 16 .* got 28"):
        limits_of(**SMALL, max_window_tokens=28)
