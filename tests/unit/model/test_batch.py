"""Where the keys of a row lie: a run of slots is taken as one only where every page follows the one before."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import Segment
from engine.model.batch import ForwardBatch
from engine.model.kv_pool import KVPool

LIMITS = Limits.of(
    EngineConfig(page_size=2, max_total_tokens=16, context_length=16, max_running_requests=2), EMBEDDED_FACTS
)
TOKENS = 7


@pytest.mark.parametrize("pages", list(itertools.permutations((1, 2, 3, 4))))
def test_keys_are_a_run_only_where_all_pages_follow_each_other(pages: tuple[int, ...]) -> None:
    """B02: ends that are as far apart as they should be say nothing of what is between them."""
    pool = KVPool(LIMITS, layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    segment = Segment("r", 0, 0, (5,) * TOKENS, 0, pages, True)
    pool.adopt(segment)
    (group,) = ForwardBatch([segment], pool, torch.device("cpu")).layers.full.groups
    slots = [2 * page + offset for page in pages for offset in (0, 1)][:TOKENS]
    assert group.slots.tolist() == slots
    expected = slice(2, 2 + TOKENS) if pages == (1, 2, 3, 4) else None
    assert group.run == expected
