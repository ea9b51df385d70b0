"""Dynamic chunk sizes by themselves: the largest part that a microbatch can bear, in pages, and nothing left over."""

from __future__ import annotations

import random

import pytest
from simulated_engine import limits_of

from engine import EngineConfig
from engine.core.errors import ConfigError
from engine.core.scheduler.chunk_sizes import ChunkSizes

ENDLESS = 1 << 40


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_part_that_does_not_cost_more(seed: int) -> None:
    """In full pages: one page more would cost more than the first part of a prompt does."""
    draw = random.Random(seed)
    page = draw.choice([1, 4, 16])
    base = page * draw.randint(1, 500)
    sizes = ChunkSizes(base, draw.choice([1, 100, 20_000]), page)
    assert sizes.part(0, ENDLESS, room=base) == base
    assert sizes.budget == sizes.cost(0, base)
    before = base
    for _ in range(30):
        prefix = page * draw.randint(0, 5000)
        part = sizes.part(prefix, ENDLESS, room=base)
        assert 0 < part <= base
        assert part % page == 0
        assert part == page or sizes.cost(prefix, part) <= sizes.budget
        assert part == base or sizes.cost(prefix, part + page) > sizes.budget
    for prefix in range(0, 100 * page, page):
        part = sizes.part(prefix, ENDLESS, room=base)
        assert part <= before
        before = part


def test_a_part_ends_at_a_page_and_takes_a_small_rest_along() -> None:
    sizes = ChunkSizes(64, 32, 16)
    assert sizes.part(8, ENDLESS, room=64) % 16 == 8
    assert sizes.part(1_000_000, ENDLESS, room=64) == 16
    assert sizes.part(1_000_000, 31, room=64) == 31
    assert sizes.part(1_000_000, 32, room=64) == 16
    assert sizes.part(0, 70, room=64) == 64
    assert sizes.part(0, 40, room=24) == 24


def test_what_others_cost_is_not_there_any_more() -> None:
    sizes = ChunkSizes(64, 32, 16)
    assert sizes.part(64, ENDLESS, room=64) > sizes.part(64, ENDLESS, room=64, spent=sizes.cost(0, 32)) > 0
    assert sizes.part(64, ENDLESS, room=64, spent=sizes.budget) == 16


@pytest.mark.parametrize("config", [{"pp_size": 1}, {"pp_size": 2, "chunked_prefill_size": -1}])
def test_even_stages_need_stages_and_parts(config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="dynamic_chunking needs several stages and chunked prefill, got pp_size="):
        EngineConfig(dynamic_chunking=True, **config)
    with pytest.raises(ConfigError, match="chunk_parity_tokens must be >= 1"):
        EngineConfig(chunk_parity_tokens=0)


def test_a_microbatch_without_a_request_is_refused() -> None:
    """A bound of 0 would start nothing, forever."""
    with pytest.raises(ConfigError, match="pp_max_micro_batch_size must be >= 1, got 0"):
        EngineConfig(pp_max_micro_batch_size=0)
    assert limits_of(max_running_requests=5).most_requests == 6
    assert limits_of(max_running_requests=5, pp_max_micro_batch_size=2).most_requests == 2
